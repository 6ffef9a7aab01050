"""The drawing canvas, with the network's answer beside it, as one component.

It shows the answer itself rather than leaving it to `st.metric` and `st.image`: that takes a third off
the time from the pointer's lift to the answer, and Clear empties everything at once.
"""

import base64
from dataclasses import dataclass
from pathlib import Path

import streamlit as st
from torch import Tensor

from mnist_trainer.drawing import Point, check_strokes
from mnist_trainer.errors import ImageError
from mnist_trainer.prediction import Prediction

_HERE = Path(__file__)
_component = st.components.v2.component(
    "canvas",
    html=_HERE.with_suffix(".html").read_text(encoding="utf-8"),
    css=_HERE.with_suffix(".css").read_text(encoding="utf-8"),
    js=_HERE.with_suffix(".js").read_text(encoding="utf-8"),
)


@dataclass(frozen=True, slots=True)
class Drawing:
    """What the user left on the canvas.

    Attributes:
        seq: counts the drawings the browser sent; an answer carries the number of its drawing.
        strokes: lists of points (x, y, width); empty for an empty canvas.
    """

    seq: int
    strokes: list[list[Point]]


def read_canvas(key: str) -> Drawing:
    """The newest drawing on the canvas called `key`; read before the canvas is shown, so that one rerun answers.

    Raises:
        ImageError: the browser sent something else.
    """
    sent = (st.session_state.get(key) or {}).get("drawing") or {"seq": 0, "strokes": []}
    if not isinstance(sent, dict) or not isinstance(sent.get("seq"), int):
        raise ImageError("The canvas sent something that is not a drawing. Clear it and draw again.")
    return Drawing(sent["seq"], check_strokes(sent.get("strokes")))


def canvas(key: str, seq: int, prediction: Prediction | None, image: Tensor | None) -> None:
    """Show the canvas, and what became of drawing number `seq`.

    Args:
        key: of the canvas on the page.
        seq: of the drawing that is answered.
        prediction: None for an empty canvas.
        image: what the network saw, shape (1, 28, 28), ink 1 on 0; None for an empty canvas.
    """
    grey = None if image is None else base64.b64encode((image * 255).round().byte().numpy().tobytes()).decode()
    _component(
        key=key,
        data={"seq": seq, "probabilities": prediction and prediction.probabilities, "image": grey},
        default={"drawing": None},
        on_drawing_change=lambda: None,  # a state with a default needs one
        height="content",
    )
