"""From a run's history to Plotly figures, as plain values: {"data": [...], "layout": {...}}.

A figure has the same size however long the run is, and names its colours by role; the page's theme
gives them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .config import TrainConfig
from .history import Floats, Snapshot

MAX_BUCKETS = 400  # a bucket gives two points: about one a pixel on a wide screen
X_AXES = ("step", "epoch", "seconds")
# Indices into the theme's chartCategoricalColors.
TRAINING_COLOR, VALIDATION_COLOR = 0, 1

Figure = dict[str, Any]
Indices = NDArray[np.int64]


def loss_figure(history: Snapshot, config: TrainConfig, x_axis: str, smoothing: float, is_log: bool) -> Figure:
    """Training loss of each step, its smoothed line, and the validation loss of each epoch.

    Args:
        history: what was measured.
        config: of the same run.
        x_axis: one of `X_AXES`.
        smoothing: 0 (none) to below 1 (most).
        is_log: whether the loss axis is logarithmic.
    """
    y_axis: dict[str, Any] = {"title": {"text": "loss (nats per image)", "standoff": 12}}
    y_axis |= {"type": "log", "dtick": 1, "minor": {"showgrid": True}} if is_log else {"rangemode": "tozero"}
    epochs = [epoch.val_loss for epoch in history.epochs]
    return _figure(history, config, x_axis, smoothing, history.losses, epochs, y_axis)


def accuracy_figure(history: Snapshot, config: TrainConfig, x_axis: str, smoothing: float) -> Figure:
    """Training accuracy of each step, its smoothed line, and the validation accuracy of each epoch.

    Arguments as for `loss_figure`.
    """
    y_axis = {"title": {"text": "accuracy", "standoff": 12}, "tickformat": ".0%", "range": [0, 1.02]}
    epochs = [epoch.val_accuracy for epoch in history.epochs]
    figure = _figure(history, config, x_axis, smoothing, history.accuracies, epochs, y_axis)
    for trace in figure["data"]:
        trace["hovertemplate"] = "%{y:.2%}"
    return figure


def extremes(values: Floats) -> Indices:
    """Where the smallest and the largest value of each bucket stand, in order: spikes survive.

    Buckets are a power of two wide and begin at multiples of it, so that a point once drawn stays
    where it is while the run grows.
    """
    width = _bucket_width(len(values))
    if width == 1:
        return np.arange(len(values))
    whole = len(values) // width * width
    buckets = values[:whole].reshape(-1, width)
    starts = np.arange(len(buckets)) * width
    found = [starts + buckets.argmin(axis=1), starts + buckets.argmax(axis=1), np.arange(whole, len(values))]
    return np.unique(np.concatenate(found))


def smoothed(values: Floats, smoothing: float) -> tuple[Indices, Floats]:
    """An exponential moving average over the means of buckets, as (index of each bucket's end, value).

    The first values are weighed so that the line does not start from zero.
    """
    width = _bucket_width(len(values))
    starts = np.arange(0, len(values), width)
    ends = np.minimum(starts + width, len(values))
    means = np.add.reduceat(values, starts, dtype=np.float64) / (ends - starts) if len(values) else np.empty(0)
    line, average, weight = np.empty(len(means), np.float32), 0.0, 0.0
    for i, mean in enumerate(means):
        average = smoothing * average + (1 - smoothing) * mean
        weight = smoothing * weight + (1 - smoothing)
        line[i] = average / weight
    return ends - 1, line


def _bucket_width(count: int) -> int:
    width = 1
    while count > MAX_BUCKETS * width:
        width *= 2
    return width


def _figure(
    history: Snapshot,
    config: TrainConfig,
    x_axis: str,
    smoothing: float,
    values: Floats,
    epoch_values: Sequence[float],
    y_axis: dict[str, Any],
) -> Figure:
    position = _positions(history, config, x_axis)
    each = extremes(values)
    ends, line = smoothed(values, smoothing)
    epoch_ends = np.array([epoch.step - 1 for epoch in history.epochs], np.int64)
    return {
        "data": [
            {
                "name": "training",
                "x": position(each),
                "y": values[each],
                "color": TRAINING_COLOR,
                "opacity": 0.4,
                "line": {"width": 1},
                "hoverinfo": "skip",
            },
            {
                "name": "training, smoothed",
                "x": position(ends),
                "y": line,
                "color": TRAINING_COLOR,
                "line": {"width": 3},
            },
            {
                "name": "validation",
                "x": position(epoch_ends),
                "y": np.array(epoch_values, np.float32),
                "color": VALIDATION_COLOR,
                "mode": "lines+markers",
                "line": {"width": 3, "dash": "dot"},
                "marker": {"size": 10, "symbol": "diamond"},
            },
        ],
        "layout": {
            "xaxis": {"title": {"text": x_axis}, "rangemode": "tozero", "tickformat": ",~f"},
            "yaxis": y_axis,
        },
    }


def _positions(history: Snapshot, config: TrainConfig, x_axis: str) -> Callable[[Indices], Floats]:
    """Where a step, counted from 0, stands on the x axis: at the end of that step."""
    if x_axis == "seconds":
        return lambda index: history.seconds[index]
    per_unit = config.steps_per_epoch if x_axis == "epoch" else 1
    return lambda index: ((index + 1) / per_unit).astype(np.float32)
