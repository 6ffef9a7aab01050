"""A run as it learns: progress, figures and charts in one component, made once for all pages that show it.

`st.plotly_chart` mounts anew whenever its figure changes; a component that calls `Plotly.react` on a
stable element keeps zoom, legend and hover, and nothing flickers. And each element of a page costs the
server, and with it the training thread, at every refresh: with thirty pages open, one component instead
of a dozen elements decides whether the run keeps its speed.
"""

import base64
import functools
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import plotly
import streamlit as st

from mnist_trainer.charts import X_AXES, Figure

log = logging.getLogger(__name__)

CHART_HEIGHT = 380  # pixels
DEFAULT_SMOOTHING = 0.9
TICK_SECONDS = 0.4  # what a page shows may have been made so long ago, for another one
KEPT_PAYLOADS = 32
# Of more pages than these, each refreshes as seldom. Every two seconds is what a class still takes for live.
REFRESH_SECONDS = {0: 0.5, 4: 1.0, 10: 1.8}
SEEN_SECONDS = 6.0  # a page that has not refreshed for so long is closed
VIEWER = "viewer"  # in the session: the page's name among the viewers

_HERE = Path(__file__)
_STATIC = _HERE.parents[2] / "static"  # beside app.py, where Streamlit serves it from
_HTML = '<div class="live"><div class="panels"></div><div class="charts"></div></div>'
_component = st.components.v2.component(
    "live",
    html=_HTML,
    css=_HERE.with_suffix(".css").read_text(encoding="utf-8"),
    js=_HERE.with_suffix(".js").read_text(encoding="utf-8"),
    isolate_styles=False,  # Plotly puts its style sheet into the document
)

_lock, _seen_lock = threading.Lock(), threading.Lock()
_payloads: dict[Hashable, tuple[float, Hashable, dict[str, Any]]] = {}
_seen: dict[str, float] = {}  # viewer → when it last refreshed


class Tile(NamedTuple):
    """A figure with its name, and a second line."""

    label: str
    value: str
    below: str = ""


class Panel(NamedTuple):
    """Progress and figures of one thing; several stand side by side.

    Attributes:
        tiles: figures in large type.
        progress: share in [0, 1], and a text.
        title: what it is about.
        color: of its bar, an index into the theme's colours; by default the theme's primary colour.
    """

    tiles: Sequence[Tile] = ()
    progress: tuple[float, str] | None = None
    title: str = ""
    color: int | None = None


def live(key: str, data: dict[str, Any]) -> None:
    """Show what `live_data` gave; called again with the same key, update it in place."""
    if plotly_url() is not None:
        _component(key=key, data=data, height="content")
        return
    _component(key=key, data={**data, "charts": []}, height="content")
    for number, chart in enumerate(data["charts"]):
        traces = [{name: value for name, value in trace.items() if name != "color"} for trace in chart["traces"]]
        st.plotly_chart({"data": traces, "layout": {"height": CHART_HEIGHT, **chart["layout"]}}, key=f"{key} {number}")


def live_data(
    charts: Sequence[tuple[Figure, str]],
    revision: str,
    panels: Sequence[Panel] = (),
    *,
    is_large: bool = False,
) -> dict[str, Any]:
    """Make what `live` shows, for any number of pages.

    Args:
        charts: figures of `mnist_trainer.charts`, and what screen readers say of each; a trace's "color" is an
            index into the theme's colours, a layout's "height" is in pixels, and a figure that "is_wide" has a row
            to itself.
        revision: while it stays the same, so do zoom and legend.
        panels: what stands above the charts.
        is_large: whether the panels are to be read from the last row of a room.
    """
    return {
        "plotlyUrl": plotly_url(),
        "revision": revision,
        "height": CHART_HEIGHT,
        "panels": [panel._asdict() for panel in panels],
        "isLarge": is_large,
        "charts": [
            {
                "traces": [{**trace, "x": _typed(trace["x"]), "y": _typed(trace["y"])} for trace in figure["data"]],
                "layout": figure["layout"],
                "isWide": figure.get("is_wide", False),
                "description": description,
            }
            for figure, description in charts
        ],
    }


def chart_options() -> None:
    """The controls of all charts, on each page that has some; they keep their values from page to page."""
    with st.container(horizontal=True, gap="large"):
        st.segmented_control("X axis", X_AXES, default=X_AXES[0], required=True, key="x_axis", persist_state="session")
        st.slider("Smoothing", 0.0, 0.99, DEFAULT_SMOOTHING, key="smoothing", width=240, persist_state="session")
        st.toggle("Log scale for loss", key="log_scale", persist_state="session")


def chart_looks() -> tuple[str, float, bool]:
    """What `chart_options` are set to: x axis, smoothing, and whether the loss axis is logarithmic."""
    options = st.session_state
    is_log = bool(options.get("log_scale"))
    return options.get("x_axis", X_AXES[0]), options.get("smoothing", DEFAULT_SMOOTHING), is_log


def shared(key: Hashable, version: Hashable, make: Callable[[], dict[str, Any]], *, is_moving: bool) -> dict[str, Any]:
    """What `make` gives, made once a tick for all pages.

    Args:
        key: of what is shown, with its options and all that has to be seen at once.
        version: changes when something about it does.
        make: is called if nobody has called it for this version, or within a tick.
        is_moving: whether an older version will do, if it is a tick old at most.
    """
    now = time.monotonic()
    with _lock:  # thirty pages at once: one makes it, the others wait for that
        made_at, made_of, payload = _payloads.get(key, (0.0, None, {}))
        if payload and (made_of == version or (is_moving and now - made_at < TICK_SECONDS)):
            return payload
        payload = make()
        _payloads.pop(key, None)
        _payloads[key] = (now, version, payload)
        while len(_payloads) > KEPT_PAYLOADS:
            del _payloads[next(iter(_payloads))]
        return payload


def refresh_seconds(viewer: str, now: float | None = None) -> float:
    """How often a page may refresh, which looks at a run just now: the more there are, the more seldom.

    Args:
        viewer: names the page.
        now: by default the time, in seconds, of `time.monotonic`.
    """
    now = time.monotonic() if now is None else now
    with _seen_lock:
        _seen[viewer] = now
        for gone in [name for name, seen in _seen.items() if now - seen > SEEN_SECONDS]:
            del _seen[gone]
        return max(seconds for pages, seconds in REFRESH_SECONDS.items() if len(_seen) > pages)


def page_interval() -> float:
    """How often this page may refresh."""
    return refresh_seconds(st.session_state.setdefault(VIEWER, uuid.uuid4().hex))


def has_wrong_interval(interval: float) -> bool:
    """Whether this page, which refreshes every `interval` seconds, is to do so otherwise from now on.

    To go faster by one stage can wait until the page is made anew for another reason.
    """
    wanted = page_interval()
    return wanted > interval or wanted < interval / 2


def number(value: float | None, form: str) -> str:
    """`value` in this format; a dash for one that is not known yet."""
    return "–" if value is None else format(value, form)


def duration(seconds: float) -> str:
    """12.3 s, 4 min 05 s, 2 h 10 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds) // 60
    return f"{minutes} min {int(seconds) % 60:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


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


def _typed(values: Any) -> Any:
    """Plotly's form of a typed array, a third of the size of numbers as text; names stay as they are."""
    if len(values) and isinstance(values[0], str):
        return list(values)
    return {"dtype": "f4", "bdata": base64.b64encode(np.asarray(values, np.float32).tobytes()).decode()}
