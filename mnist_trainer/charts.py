"""From a run's history to Plotly figures, as plain values: {"data": [...], "layout": {...}}.

A figure has the same size however long the run is, and names its colours by role; the page's theme
gives them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .config import TrainConfig
from .history import Floats, Snapshot
from .machine import KEPT_SECONDS, LOST_SECONDS, Use
from .rates import COPY_SIZES, PRODUCT_SIZES, Rate, binary_size
from .vgg import LAYER_NAMES, LayerTime

MAX_BUCKETS = 400  # a bucket gives two points: about one a pixel on a wide screen
MAX_RATES = 20  # the newest changes of the learning rate; more would hide the lines
X_AXES = ("step", "epoch", "seconds")
MAX_COMPARED = 8  # as many as the theme has colours; each has a mark of its own, too
SYMBOLS = ("diamond", "circle", "square", "triangle-up", "cross", "star", "x", "hexagon")
DASHES = ("solid", "dot", "dash", "dashdot")
MACHINE_HEIGHT = 190  # pixels: it stands below the charts of a run
# Indices into the theme's chartCategoricalColors.
TRAINING_COLOR, VALIDATION_COLOR = 0, 1
FIRST_PART_COLOR = 2  # of a step; those before are of the two lanes

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
    epochs = [epoch.val_loss for epoch in history.epochs]
    return _figure(history, config, x_axis, smoothing, history.losses, epochs, _loss_axis(is_log))


def accuracy_figure(history: Snapshot, config: TrainConfig, x_axis: str, smoothing: float) -> Figure:
    """Training accuracy of each step, its smoothed line, and the validation accuracy of each epoch.

    Arguments as for `loss_figure`.
    """
    epochs = [epoch.val_accuracy for epoch in history.epochs]
    figure = _figure(history, config, x_axis, smoothing, history.accuracies, epochs, _ACCURACY_AXIS)
    for trace in figure["data"]:
        trace["hovertemplate"] = "%{y:.2%}"
    return figure


def comparison_figures(
    runs: Sequence[tuple[str, Snapshot, TrainConfig]], x_axis: str, smoothing: float, is_log: bool
) -> tuple[Figure, Figure]:
    """Loss and accuracy of several runs, one over the other: training smoothed, validation as marks.

    Args:
        runs: name, history and settings of each; the first `MAX_COMPARED` are drawn.
        x_axis: one of `X_AXES`.
        smoothing: 0 (none) to below 1 (most).
        is_log: whether the loss axis is logarithmic.
    """
    loss: Figure = {"data": [], "layout": {"xaxis": _x_axis(x_axis), "yaxis": _loss_axis(is_log)}}
    right: Figure = {"data": [], "layout": {"xaxis": _x_axis(x_axis), "yaxis": _ACCURACY_AXIS}}
    for color, (name, history, config) in enumerate(runs[:MAX_COMPARED]):
        val_losses = [epoch.val_loss for epoch in history.epochs]
        val_accuracies = [epoch.val_accuracy for epoch in history.epochs]
        position = _positions(history, config, x_axis)
        loss["data"] += _compared(color, name, position, smoothing, history, history.losses, val_losses)
        right["data"] += _compared(color, name, position, smoothing, history, history.accuracies, val_accuracies)
    for trace in right["data"]:
        trace["hovertemplate"] = "%{y:.2%}"
    return loss, right


def step_times_figure(lanes: Sequence[tuple[str, Mapping[str, float]]]) -> Figure:
    """What a training step takes, part by part: stacked bars, in milliseconds.

    Args:
        lanes: name of each bar, the upper one first, and part → seconds.
    """
    upwards = lanes[::-1]
    names = [name for name, _ in upwards]
    traces = []
    for color, part in enumerate(lanes[0][1], FIRST_PART_COLOR):
        milliseconds = [1000 * times[part] for _, times in upwards]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": part,
                "x": milliseconds,
                "y": names,
                "color": color,
                "text": [f"{part} {value:.2f}" for value in milliseconds],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "textangle": 0,
                "hovertemplate": "%{y}: %{x:.3f} ms",
            }
        )
    return {
        "data": traces,
        "layout": {
            "barmode": "stack",
            "height": 130 + 55 * len(lanes),
            "hovermode": "closest",
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
            "uniformtext": {"mode": "hide", "minsize": 13},  # what does not fit stands in a table
            "xaxis": {"title": {"text": "milliseconds a step"}, "rangemode": "tozero", "tickformat": ",~f"},
            "yaxis": {"fixedrange": True},
        },
    }


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
    rates = history.rates[-MAX_RATES:]
    moved = [(float(position(np.array([rate.step - 1]))[0]) if rate.step else 0.0, rate) for rate in rates]
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
                "name": "smoothed",
                "x": position(ends),
                "y": line,
                "color": TRAINING_COLOR,
                "line": {"width": 3},
            },
            {
                "name": "validation",
                "x": position(_epoch_ends(history)),
                "y": np.array(epoch_values, np.float32),
                "color": VALIDATION_COLOR,
                "mode": "lines+markers",
                "line": {"width": 3, "dash": "dot"},
                "marker": {"size": 10, "symbol": "diamond"},
            },
        ],
        "layout": {
            "xaxis": _x_axis(x_axis),
            "yaxis": y_axis,
            # Where the learning rate was moved.
            "shapes": [{"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1} for x, _ in moved],
            "annotations": [
                {"x": x, "yref": "paper", "y": 0.5, "text": f"lr {rate.learning_rate:g}", "showarrow": False}
                for x, rate in moved
            ],
        },
    }


def _compared(
    color: int,
    name: str,
    position: Callable[[Indices], Floats],
    smoothing: float,
    history: Snapshot,
    values: Floats,
    epoch_values: Sequence[float],
) -> list[dict[str, Any]]:
    """The two traces of one run among others."""
    ends, line = smoothed(values, smoothing)
    shared = {"color": color, "legendgroup": str(color)}
    return [
        {**shared, "name": name, "x": position(ends), "y": line, "line": {"width": 3}},
        {
            **shared,
            "name": f"{name}, validation",
            "x": position(_epoch_ends(history)),
            "y": np.array(epoch_values, np.float32),
            "mode": "lines+markers",
            "line": {"width": 2, "dash": "dot"},
            "marker": {"size": 9, "symbol": SYMBOLS[color]},
            "showlegend": False,
        },
    ]


def _epoch_ends(history: Snapshot) -> Indices:
    return np.array([epoch.step - 1 for epoch in history.epochs], np.int64)


def _x_axis(title: str) -> dict[str, Any]:
    return {"title": {"text": title}, "rangemode": "tozero", "tickformat": ",~f"}


def _loss_axis(is_log: bool) -> dict[str, Any]:
    axis: dict[str, Any] = {"title": {"text": "loss (nats per image)", "standoff": 12}}
    return axis | ({"type": "log", "dtick": 1, "minor": {"showgrid": True}} if is_log else {"rangemode": "tozero"})


_ACCURACY_AXIS = {"title": {"text": "accuracy", "standoff": 12}, "tickformat": ".0%", "range": [0, 1.02]}


def _positions(history: Snapshot, config: TrainConfig, x_axis: str) -> Callable[[Indices], Floats]:
    """Where a step, counted from 0, stands on the x axis: at the end of that step."""
    if x_axis == "seconds":
        return lambda index: history.seconds[index]
    per_unit = config.steps_per_epoch if x_axis == "epoch" else 1
    return lambda index: ((index + 1) / per_unit).astype(np.float32)


def product_figure(rates: Sequence[Rate], devices: Sequence[str]) -> Figure:
    """How fast each device multiplies matrices of each size.

    Args:
        rates: of `product_rates`.
        devices: names of all that there are, in the order that gives each its colour and its mark.
    """
    x_axis = _size_axis("rows and columns", PRODUCT_SIZES, [f"{size:,}" for size in PRODUCT_SIZES])
    # From a CPU to a GPU it may be a factor of a thousand.
    y_axis = {"title": {"text": "GFLOP/s", "standoff": 12}, "type": "log", "dtick": 1, "minor": {"showgrid": True}}
    return {"data": _rate_traces(rates, devices, "%{y:,.3~r} GFLOP/s"), "layout": {"xaxis": x_axis, "yaxis": y_axis}}


def copy_figure(rates: Sequence[Rate], devices: Sequence[str]) -> Figure:
    """How fast bytes are copied to each device, by how many at a time; arguments as for `product_figure`."""
    x_axis = _size_axis("size of the copy", COPY_SIZES, [binary_size(size) for size in COPY_SIZES])
    y_axis = {"title": {"text": "GB/s", "standoff": 12}, "rangemode": "tozero"}
    return {"data": _rate_traces(rates, devices, "%{y:,.3~r} GB/s"), "layout": {"xaxis": x_axis, "yaxis": y_axis}}


def layer_figure(times: Sequence[LayerTime]) -> Figure:
    """What each layer of VGG16 took, forward and backward, as far as it has come."""
    bars = []
    for color, is_backward in enumerate((False, True)):
        shown = [time for time in times if time.is_backward is is_backward]
        bars.append(
            {
                "type": "bar",
                "name": "backward" if is_backward else "forward",
                "x": [time.layer for time in shown],
                "y": [time.seconds for time in shown],
                "color": color,
                "marker": {"pattern": {"shape": "/" if is_backward else ""}},
                "hovertemplate": "%{y:.3~s}s",
            }
        )
    x_axis = {
        "type": "category",
        "categoryarray": LAYER_NAMES,
        "range": [-0.5, len(LAYER_NAMES) - 0.5],  # all places are there from the start
        "tickangle": -45,
    }
    y_axis = {"title": {"text": "seconds", "standoff": 12}, "rangemode": "tozero"}
    return {"data": bars, "layout": {"xaxis": x_axis, "yaxis": y_axis, "barmode": "group", "height": 320}}


def machine_figure(samples: Sequence[Use], device: str) -> Figure:
    """How busy the machine was over the last two minutes.

    Args:
        samples: of `recent_use`, the newest last.
        device: of its GPUs the one of this name is shown, or else the first.
    """
    gpus = [next((gpu for gpu in use.gpus if gpu.device == device), next(iter(use.gpus), None)) for use in samples]
    lines: dict[str, list[float | None]] = {
        "CPU": [use.busy for use in samples],
        "memory": [use.memory_share for use in samples],
        "GPU": [gpu.busy if gpu else None for gpu in gpus],
        "GPU memory": [gpu.memory_share if gpu else None for gpu in gpus],
    }
    now = samples[-1].at if samples else 0.0
    ago = [use.at - now for use in samples]
    # A gap in a line is a point without a value.
    lost = [i for i in range(1, len(ago)) if ago[i] - ago[i - 1] > LOST_SECONDS]
    return {
        "data": [
            {
                "name": name,
                "x": np.insert(np.array(ago, np.float32), lost, [ago[i] for i in lost]),
                "y": np.insert(np.array(values, np.float32), lost, np.nan),
                "color": color,
                "line": {"width": 2, "dash": DASHES[color]},
                "hovertemplate": "%{y:.0%}",
            }
            for color, (name, values) in enumerate(lines.items())
            if any(value is not None for value in values)
        ],
        "layout": {
            "xaxis": {
                "title": {"text": "seconds ago", "standoff": 4},
                "range": [-KEPT_SECONDS, 0],
                "tickvals": [-120, -90, -60, -30, 0],
                "ticktext": ["120", "90", "60", "30", "now"],
            },
            "yaxis": {"title": {"text": "this machine", "standoff": 12}, "tickformat": ".0%", "range": [0, 1.02]},
            "height": MACHINE_HEIGHT,
        },
        "is_wide": True,
    }


def _rate_traces(rates: Sequence[Rate], devices: Sequence[str], hover: str) -> list[dict[str, Any]]:
    """A line for each device and kind of memory."""
    traces = []
    for device, kind in dict.fromkeys((rate.device, rate.kind) for rate in rates):
        shown = [rate for rate in rates if (rate.device, rate.kind) == (device, kind)]
        color = devices.index(device) % MAX_COMPARED
        is_second = kind == "pageable"  # of two lines of one device
        traces.append(
            {
                "name": f"{device}, {kind} memory" if kind else device,
                "x": [rate.size for rate in shown],
                "y": [rate.per_second / 1e9 for rate in shown],
                "color": color,
                "mode": "lines+markers",
                "line": {"width": 3, "dash": "dot" if is_second else "solid"},
                "marker": {"size": 9, "symbol": SYMBOLS[color] + "-open" * is_second},
                "hovertemplate": hover,
            }
        )
    return traces


def _size_axis(title: str, sizes: Sequence[int], texts: Sequence[str]) -> dict[str, Any]:
    low, high = (float(np.log2(size) * np.log10(2)) for size in (sizes[0], sizes[-1]))
    return {
        "title": {"text": title},
        "type": "log",
        "range": [low - 0.1, high + 0.1],
        "tickvals": list(sizes),
        "ticktext": list(texts),
    }
