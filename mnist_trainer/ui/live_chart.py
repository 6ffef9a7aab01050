"""A Plotly chart that takes new data in place: zoom, legend and hover survive, and nothing flickers.

`st.plotly_chart` mounts anew whenever its figure changes; a component that calls `Plotly.react` on a
stable element does not.
"""

import base64
import functools
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import plotly
import streamlit as st

from mnist_trainer.charts import Figure

log = logging.getLogger(__name__)

_STATIC = Path(__file__).parents[2] / "static"  # beside app.py, where Streamlit serves it from
_component = st.components.v2.component(
    "live_chart",
    html='<div class="live-chart"></div>',
    js=Path(__file__).with_suffix(".js").read_text(encoding="utf-8"),
    isolate_styles=False,  # Plotly puts its style sheet into the document
)


def live_chart(key: str, figure: Figure, *, revision: str, description: str, height: int = 380) -> None:
    """Show `figure`; called again with the same key, update it.

    Args:
        key: of the chart on the page.
        figure: from `mnist_trainer.charts`; a trace's "color" is an index into the theme's colours.
        revision: while it stays the same, so do zoom and legend.
        description: for screen readers.
        height: in pixels.
    """
    url = plotly_url()
    if url is None:
        traces = [{name: value for name, value in trace.items() if name != "color"} for trace in figure["data"]]
        st.plotly_chart({"data": traces, "layout": {**figure["layout"], "height": height}}, key=key)
        return
    traces = [{**trace, "x": _typed(trace["x"]), "y": _typed(trace["y"])} for trace in figure["data"]]
    _component(
        key=key,
        data={
            "plotlyUrl": url,
            "revision": revision,
            "traces": traces,
            "layout": figure["layout"],
            "height": height,
            "description": description,
        },
        height="content",
    )


@functools.cache
def plotly_url() -> str | None:
    """Where the browser gets plotly.js: the file of the installed plotly package, copied to be served.

    None if the folder cannot be written: charts then are `st.plotly_chart`'s, which forget their zoom.
    """
    target = _STATIC / f"plotly-{plotly.__version__}.min.js"
    try:
        if not target.exists():
            _STATIC.mkdir(exist_ok=True)
            aside = target.with_suffix(f".{os.getpid()}.part")
            shutil.copyfile(Path(plotly.__file__).parent / "package_data" / "plotly.min.js", aside)
            aside.replace(target)
    except OSError as error:
        log.warning("Plotly cannot be copied to %s (%s): charts will forget their zoom as they update.", _STATIC, error)
        return None
    return f"app/static/{target.name}"


def _typed(values: Any) -> dict[str, str]:
    """Plotly's form of a typed array: a third of the size of numbers as text."""
    return {"dtype": "f4", "bdata": base64.b64encode(np.asarray(values, np.float32).tobytes()).decode()}
