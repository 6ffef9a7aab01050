"""The Draw page: a canvas, and what a network reads in it while it is drawn."""

import streamlit as st

from mnist_trainer.config import TrainConfig
from mnist_trainer.drawing import render, to_mnist
from mnist_trainer.errors import MnistTrainerError
from mnist_trainer.prediction import model_of, predict
from mnist_trainer.run import Run
from mnist_trainer.runs import RunManager
from mnist_trainer.state import Checkpoint
from mnist_trainer.ui.canvas import canvas, read_canvas
from mnist_trainer.ui.frame import errors_shown, page, plain

QUICK_EPOCHS = 3  # two seconds on a laptop's CPU, 95 % right
REFRESH_SECONDS = 1.0  # while the network that reads is still training


def main(runs: RunManager) -> None:
    st.header("Draw a digit")
    choices = {run.id: run for run in runs.all() if run.has_weights or run.is_live}
    if not choices:
        st.info("No network has been trained yet, so nobody can read your digit.")
        st.button(
            "Train a quick one here", type="primary", icon=":material/bolt:", on_click=train_quickly, args=(runs,)
        )
        return
    run = choices[choose(choices)]
    is_live = run.is_live  # looked at once: it may end while this page is made
    st.fragment(pad, run_every=REFRESH_SECONDS if is_live else None)(run, is_live)


def train_quickly(runs: RunManager) -> None:
    try:
        runs.start(TrainConfig(epochs=QUICK_EPOCHS))
    except MnistTrainerError as error:
        st.toast(plain(error), icon=":material/error:", duration="infinite")


def choose(choices: dict[str, Run]) -> str:
    """Let the user choose a run; the newest, or the one in the URL, is chosen at first."""
    ids = list(choices)
    wanted = st.query_params.get("run", ids[0])
    if wanted not in ids:
        st.warning(plain(f"There is no run '{wanted[:60]}' with weights. The newest is used instead."))
        wanted = ids[0]
    chosen: str = st.selectbox(
        "Network",
        ids,
        ids.index(wanted),
        format_func=lambda run_id: label(choices[run_id]),
        key="network",
        on_change=lambda: st.query_params.update(run=st.session_state["network"]),  # a reload finds it again
    )
    return chosen


def label(run: Run) -> str:
    # Nothing that changes while it trains: the browser remembers its choice by this text.
    config = run.config
    return f"{run.name} · hidden size {config.hidden_size:,} · learning rate {config.learning_rate:g}"


def pad(run: Run, was_live: bool) -> None:
    """The canvas and the answer: a stroke reruns only this."""
    with errors_shown():
        run.refresh()
        if was_live and not run.is_live:
            st.rerun()  # its label changes, and nothing needs refreshing any more
        checkpoint = run.checkpoint()
        if checkpoint is None:
            st.info("This network has only just begun. A moment …")
            return
        if run.is_live:
            done = run.snapshot().steps / run.config.total_steps
            st.progress(done, text="This network is training now; its answers change as it learns.")
        answer(checkpoint)
        st.caption(f"The answer comes from run {run.id}: {checkpoint.trust}.")


def answer(checkpoint: Checkpoint) -> None:
    """Show the canvas, whatever it sent: where it cannot be read, it can still be cleared."""
    seq, prediction, image = 0, None, None
    with errors_shown():
        drawing = read_canvas("pad")
        seq = drawing.seq
        if drawing.strokes:
            image = to_mnist(render(drawing.strokes))
            prediction = predict(model_of(checkpoint), image)
    canvas("pad", seq, prediction, image)


with page("Draw") as runs:
    main(runs)
