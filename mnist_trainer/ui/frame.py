"""What every page shares: its frame, the run manager, and how errors are shown."""

import gc
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import streamlit as st

from mnist_trainer.errors import MnistTrainerError

if TYPE_CHECKING:
    from mnist_trainer.measurements import Measurements
    from mnist_trainer.run import Run
    from mnist_trainer.runs import RunManager

PAGES = (
    ("app.py", "Home", ":material/home:"),
    ("pages/train.py", "Train", ":material/model_training:"),
    ("pages/race.py", "Race", ":material/sports_score:"),
    ("pages/draw.py", "Draw", ":material/draw:"),
    ("pages/runs.py", "Runs", ":material/folder_open:"),
    ("pages/devices.py", "Devices", ":material/memory:"),
)
# Less room at the top, so that charts fit a projector; no keyboard shortcut on what has no keyboard.
STYLE = """<style>
.stMainBlockContainer { padding: 4rem 3rem 2rem }
@media (max-width: 640px) { .stMainBlockContainer { padding: 4rem 1rem 2rem } }
@media (hover: none) { [data-testid="stMain"] kbd { display: none } }
</style>"""
SWITCH_SECONDS = 0.02  # Python's own is 0.005
STATUS_COLORS = {
    "queued": "gray",
    "paused": "violet",
    "running": "blue",
    "finished": "green",
    "stopped": "orange",
    "diverged": "red",
    "failed": "red",
    "interrupted": "orange",
}


@contextmanager
def page(title: str) -> Iterator["RunManager"]:
    """The frame of a page: its title, the sidebar, and a sentence for an error instead of a traceback.

    Every page's script runs inside it, and nothing else of Streamlit is called before.
    """
    st.set_page_config(page_title=f"{title} · MNIST Trainer", page_icon="🔢", layout="wide")
    st.html(STYLE)
    with st.sidebar:
        st.markdown("**MNIST Trainer**")
        for path, label, icon in PAGES:
            st.page_link(path, label=label, icon=icon)
    runs = None
    with errors_shown():
        runs = manager()
    if runs is None:  # the sentence says why
        st.stop()
    with errors_shown():
        yield runs
    if training := runs.training:  # looked at last, so that no page which follows a run shows it older
        with st.sidebar:
            st.badge(f"A run is {training.state.status}", icon=":material/bolt:", color="blue")
            waiting = len(runs.waiting)
            st.caption(plain(training.name) + f" · {waiting} waiting" * bool(waiting))


@contextmanager
def errors_shown() -> Iterator[None]:
    """Show a `MnistTrainerError` as its sentence. A fragment needs its own: it reruns without its page."""
    try:
        yield
    except MnistTrainerError as error:
        st.error(plain(error), icon=":material/error:")


def plain(text: object) -> str:
    """`text` as it stands: what came with an address may hold Markdown, which would fetch a picture from anywhere."""
    # An underscore inside a word is one. Streamlit makes icons and links even of what is escaped: a space of no
    # width keeps it from finding them.
    text = re.sub(r"(:(?=//|[\w/+-]+:)|\bwww(?=\.)|(?<=\w)@(?=\w))", "\\1\u200b", str(text))
    return re.sub(r"([\\`*\[\]<>$~#|]|(?<![a-zA-Z0-9])_|_(?![a-zA-Z0-9]))", r"\\\1", text)


@st.cache_resource(show_spinner="Starting PyTorch …", on_release=lambda runs: runs.shutdown())
def manager() -> "RunManager":
    """The one run manager of this process: runs outlive tabs and reloads."""
    from mnist_trainer.runs import RunManager  # imports PyTorch: under the spinner

    runs = RunManager()
    # PyTorch's 400,000 objects need no looking through at each later garbage collection.
    gc.collect()
    gc.freeze()
    # A page that refreshes is made in one go, rather than taking turns with the training thread at every step:
    # with thirty pages open, a run keeps some five points more of its speed. (Shorter intervals halve it.)
    sys.setswitchinterval(SWITCH_SECONDS)
    return runs


@st.cache_resource(show_spinner=False, on_release=lambda measured: measured.stop(wait_seconds=3.0))
def measurements() -> "Measurements":
    """The measurements of this process: a reload, or another phone, finds them again."""
    from mnist_trainer.measurements import Measurements

    return Measurements(manager())


def status_badge(run: "Run") -> None:
    """The run's status, in words and colour."""
    st.badge(run.state.status, color=STATUS_COLORS.get(run.state.status, "gray"))  # type: ignore[arg-type]


def settings_line(run: "Run") -> str:
    """The settings of a run, and what it trains on, in one line."""
    config, state = run.config, run.state
    place = state.device_label or config.device
    if config.device == "cpu" and state.threads:
        place += f", {state.threads:,} thread{'s' * (state.threads != 1)}"
    if state.processes > 1:
        place = f"{state.processes:,} processes, each on {place}"
    return (
        f"{place} · hidden size {config.hidden_size:,} · learning rate {run.rates_text} · "
        f"{config.epochs:,} epoch{'s' * (config.epochs != 1)} · batch {config.batch_size:,}"
    )
