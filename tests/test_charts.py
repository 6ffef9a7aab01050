"""From a history to figures of one size, with every spike in them."""

from typing import Any

import numpy as np
import pytest

from mnist_trainer.charts import (
    MAX_BUCKETS,
    MAX_COMPARED,
    X_AXES,
    accuracy_figure,
    comparison_figures,
    copy_figure,
    extremes,
    layer_figure,
    loss_figure,
    machine_figure,
    product_figure,
    smoothed,
    step_times_figure,
)
from mnist_trainer.config import TrainConfig
from mnist_trainer.history import EpochEnd, Floats, History, RateChange, Snapshot
from mnist_trainer.machine import GpuUse, Use
from mnist_trainer.rates import COPY_SIZES, PRODUCT_SIZES, Rate
from mnist_trainer.vgg import LAYER_NAMES, LayerTime

CONFIG = TrainConfig(device="cpu", epochs=5)  # 391 steps an epoch


def noise(count: int) -> Floats:
    return np.random.default_rng(0).random(count, np.float32)


def history(steps: int) -> Snapshot:
    """Steps of 10 ms, and the epochs that end among them."""
    recorded, values = History(), noise(steps)
    recorded.add_steps((values + 1).tolist(), values.tolist(), (np.arange(1, steps + 1) / 100).tolist())
    for epoch in range(1, steps // CONFIG.steps_per_epoch + 1):
        recorded.add_epoch(
            EpochEnd(epoch, epoch * CONFIG.steps_per_epoch, 1.5, 0.5, 1 / epoch, 1 - 0.5 / epoch, 3.91 * epoch + 0.1)
        )
    return recorded.snapshot()


def traces(steps: int, x_axis: str = "step", smoothing: float = 0.6) -> list[dict[str, Any]]:
    data: list[dict[str, Any]] = loss_figure(history(steps), CONFIG, x_axis, smoothing, is_log=False)["data"]
    return data


@pytest.mark.parametrize("count", [0, 1, 2, 100, 400, 401, 1_000, 100_000, 1_000_000])
def test_a_line_has_few_points_in_order_and_keeps_its_spikes(count: int) -> None:
    values = noise(count)
    spikes = np.random.default_rng(1).choice(count, min(count, 3), replace=False)
    values[spikes] = [9, -9, 8][: len(spikes)]
    indices = extremes(values)
    bucket = max(1, 2 * count // MAX_BUCKETS)  # no bucket is wider
    assert len(indices) <= 2 * MAX_BUCKETS + bucket
    assert (np.diff(indices) > 0).all()
    assert set(spikes) <= set(indices)
    assert count == 0 or (indices[0] >= 0 and indices[-1] < count)
    if count <= MAX_BUCKETS:
        assert np.array_equal(indices, np.arange(count))


def test_a_point_once_drawn_stays_while_the_run_grows() -> None:
    values, width = noise(12_800), 32
    drawn = set[int]()
    for count in range(6_401, 12_801, 77):  # all drawn in buckets of 32
        indices = {int(i) for i in extremes(values[:count]) if i < count // width * width}
        assert drawn <= indices
        drawn = indices
    assert len(drawn) > MAX_BUCKETS


@pytest.mark.parametrize("smoothing", [0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("count", [1, 399, 1_000, 100_001])
def test_a_constant_stays_itself_however_much_it_is_smoothed(count: int, smoothing: float) -> None:
    ends, line = smoothed(np.full(count, 2.5, np.float32), smoothing)
    assert len(ends) == len(line) <= MAX_BUCKETS
    np.testing.assert_allclose(line, 2.5, rtol=1e-6)
    assert ends[-1] == count - 1
    assert (np.diff(ends) > 0).all()


def test_without_smoothing_the_line_is_the_mean_of_each_bucket() -> None:
    values = noise(1_001)
    ends, line = smoothed(values, 0)
    starts = np.concatenate([[0], ends[:-1] + 1])
    expected = [values[start : end + 1].mean() for start, end in zip(starts, ends, strict=True)]
    np.testing.assert_allclose(line, expected, rtol=1e-5)


def test_smoothing_is_a_weighed_mean_of_what_came_before() -> None:
    _, line = smoothed(np.array([1, 0, 0], np.float32), 0.5)
    np.testing.assert_allclose(line, [1, 1 / 3, 1 / 7], rtol=1e-6)
    rough, smooth = (np.abs(np.diff(smoothed(noise(10_000), smoothing)[1])).mean() for smoothing in (0, 0.9))
    assert smooth < rough / 5


def test_a_figure_is_no_larger_for_a_long_run() -> None:
    (short, short_line, _), (long, long_line, _) = traces(1_000), traces(1_000_000)
    assert len(short["x"]) == len(short["y"]) >= 200
    # What does not fill a bucket yet is drawn as it is.
    assert len(long["x"]) == len(long["y"]) <= 2 * MAX_BUCKETS + 2 * 1_000_000 // MAX_BUCKETS
    assert 100 <= len(short_line["x"]) == len(short_line["y"]) <= MAX_BUCKETS
    assert 100 <= len(long_line["x"]) == len(long_line["y"]) <= MAX_BUCKETS


@pytest.mark.parametrize(("x_axis", "per_step"), [("step", 1), ("epoch", 1 / 391), ("seconds", 0.01)])
@pytest.mark.parametrize("steps", [100, 1_000, 100_000])
def test_lines_end_and_epochs_stand_where_they_should(steps: int, x_axis: str, per_step: float) -> None:
    training, smooth, validation = traces(steps, x_axis)
    assert training["x"][-1] == pytest.approx(steps * per_step, rel=1e-5)
    assert smooth["x"][-1] == pytest.approx(steps * per_step, rel=1e-5)
    assert (np.diff(training["x"]) > 0).all()
    expected = [epoch * 391 * per_step for epoch in range(1, steps // 391 + 1)]
    np.testing.assert_allclose(validation["x"], expected, rtol=1e-5)
    np.testing.assert_allclose(validation["y"], [1 / epoch for epoch in range(1, steps // 391 + 1)], rtol=1e-6)


def test_each_point_has_the_value_of_its_step() -> None:
    recorded = history(5_000)
    for figure, values in (
        (loss_figure(recorded, CONFIG, "step", 0, is_log=False), recorded.losses),
        (accuracy_figure(recorded, CONFIG, "step", 0), recorded.accuracies),
    ):
        training = figure["data"][0]
        assert np.array_equal(training["y"], values[training["x"].astype(int) - 1])


@pytest.mark.parametrize("x_axis", X_AXES)
@pytest.mark.parametrize("steps", [0, 1, 1_000])
def test_every_line_says_which_set_it_is_from(x_axis: str, steps: int) -> None:
    recorded = history(steps)
    for figure in (
        loss_figure(recorded, CONFIG, x_axis, 0.9, is_log=True),
        accuracy_figure(recorded, CONFIG, x_axis, 0),
    ):
        assert [trace["name"] for trace in figure["data"]] == ["training", "smoothed", "validation"]
        assert [len(trace["x"]) == len(trace["y"]) for trace in figure["data"]] == [True] * 3
        assert [bool(len(trace["x"])) for trace in figure["data"]] == [steps > 0, steps > 0, steps > 391]
        assert figure["layout"]["xaxis"]["title"]["text"] == x_axis


def test_only_the_loss_may_have_a_logarithmic_axis() -> None:
    recorded = history(500)
    assert loss_figure(recorded, CONFIG, "step", 0, is_log=True)["layout"]["yaxis"]["type"] == "log"
    assert "type" not in loss_figure(recorded, CONFIG, "step", 0, is_log=False)["layout"]["yaxis"]
    accuracy_axis = accuracy_figure(recorded, CONFIG, "step", 0)["layout"]["yaxis"]
    assert "type" not in accuracy_axis
    assert accuracy_axis["range"][0] == 0
    assert accuracy_axis["range"][1] >= 1


@pytest.mark.parametrize(("x_axis", "places"), [("step", [0, 100]), ("epoch", [0, 100 / 391]), ("seconds", [0, 1])])
def test_a_moved_learning_rate_is_marked_where_it_was_moved(x_axis: str, places: list[float]) -> None:
    recorded = History()
    recorded.add_steps(*np.tile(np.arange(1, 201, dtype=np.float32) / 100, (3, 1)).tolist())
    recorded.set_rates([RateChange(0, 0.25), RateChange(100, 0.001)])
    for figure in (
        loss_figure(recorded.snapshot(), CONFIG, x_axis, 0.9, is_log=True),
        accuracy_figure(recorded.snapshot(), CONFIG, x_axis, 0.9),
    ):
        assert [shape["x0"] for shape in figure["layout"]["shapes"]] == pytest.approx(places)
        assert [note["text"] for note in figure["layout"]["annotations"]] == ["lr 0.25", "lr 0.001"]


@pytest.mark.parametrize("x_axis", X_AXES)
def test_compared_runs_are_drawn_each_in_its_own_colour_and_mark(x_axis: str) -> None:
    runs = [(f"run {number}", history(391 * (number + 1)), CONFIG) for number in range(MAX_COMPARED + 2)]
    runs.append(("empty", history(0), CONFIG))
    for figure, value in zip(comparison_figures(runs, x_axis, 0.9, is_log=False), (1.0, 0.5), strict=True):
        lines, marks = figure["data"][::2], figure["data"][1::2]
        assert [line["name"] for line in lines] == [f"run {number}" for number in range(MAX_COMPARED)]
        assert [mark["name"] for mark in marks] == [f"run {number}, validation" for number in range(MAX_COMPARED)]
        assert (
            len({mark["marker"]["symbol"] for mark in marks}) == len({line["color"] for line in lines}) == MAX_COMPARED
        )
        assert [len(mark["y"]) for mark in marks] == list(range(1, MAX_COMPARED + 1))
        assert all(mark["y"][0] == pytest.approx(value) for mark in marks)  # after the first epoch
        assert figure["layout"]["xaxis"]["title"]["text"] == x_axis
    loss, right = comparison_figures(runs[-1:], x_axis, 0.9, is_log=True)
    assert [len(trace["x"]) for trace in (*loss["data"], *right["data"])] == [0, 0, 0, 0]


def test_the_parts_of_a_step_are_stacked_in_milliseconds_the_first_lane_on_top() -> None:
    slow, fast = (
        {"data": 0.0105, "copying": 0.0, "forward": 0.0004},
        {"data": 0.0001, "copying": 0.0, "forward": 0.0002},
    )
    figure = step_times_figure([("DataLoader", slow), ("On-device", fast)])
    assert [trace["name"] for trace in figure["data"]] == ["data", "copying", "forward"]
    assert all(trace["y"] == ["On-device", "DataLoader"] for trace in figure["data"])  # from below
    assert figure["data"][0]["x"] == pytest.approx([0.1, 10.5])
    assert figure["data"][0]["text"] == ["data 0.10", "data 10.50"]
    assert figure["layout"]["barmode"] == "stack"


def test_each_device_has_one_colour_and_mark_in_both_figures_and_its_own() -> None:
    devices = ["cuda:0", "xpu", "cpu"]
    products = [Rate(device, "", size, size * 1e9) for device in ("cuda:0", "cpu") for size in PRODUCT_SIZES]
    copies = [Rate("cuda:0", kind, size, 2e9) for kind in ("pageable", "pinned") for size in COPY_SIZES]
    gpu, cpu = product_figure(products, devices)["data"]
    pageable, pinned = copy_figure(copies, devices)["data"]
    assert (gpu["name"], cpu["name"]) == ("cuda:0", "cpu")
    assert (gpu["x"], gpu["y"]) == (list(PRODUCT_SIZES), [float(size) for size in PRODUCT_SIZES])  # in GFLOP/s
    assert gpu["color"] == pageable["color"] == pinned["color"] != cpu["color"]
    assert gpu["marker"]["symbol"] == pinned["marker"]["symbol"] != cpu["marker"]["symbol"]
    assert (pageable["name"], pinned["name"]) == ("cuda:0, pageable memory", "cuda:0, pinned memory")
    assert pageable["line"]["dash"] != pinned["line"]["dash"]
    assert pageable["marker"]["symbol"] != pinned["marker"]["symbol"]
    assert set(pinned["y"]) == {2.0}  # in GB/s


def test_all_sizes_are_on_the_axis_before_they_are_measured() -> None:
    for figure, sizes in ((product_figure([], ["cpu"]), PRODUCT_SIZES), (copy_figure([], ["cpu"]), COPY_SIZES)):
        axis = figure["layout"]["xaxis"]
        assert figure["data"] == []
        assert axis["tickvals"] == list(sizes)
        assert axis["range"][0] < np.log10(sizes[0]) < np.log10(sizes[-1]) < axis["range"][1]


def test_the_layers_times_are_bars_in_the_networks_order() -> None:
    times = [LayerTime(name, False, 0.5) for name in LAYER_NAMES] + [LayerTime("fc8", True, 0.25)]
    figure = layer_figure(times)
    forward, backward = figure["data"]
    assert (forward["name"], backward["name"]) == ("forward", "backward")
    assert forward["x"] == list(LAYER_NAMES)
    assert (backward["x"], backward["y"]) == (["fc8"], [0.25])
    assert forward["marker"]["pattern"] != backward["marker"]["pattern"]
    assert figure["layout"]["xaxis"]["range"] == [-0.5, 15.5]


def test_the_machines_use_is_drawn_in_seconds_ago_with_gaps_where_nobody_asked() -> None:
    samples = [Use(at, busy, 3, 4) for at, busy in ((100.0, None), (101.0, 0.5), (140.0, 0.25), (141.0, 1.0))]
    cpu, memory = machine_figure(samples, "cpu")["data"]
    assert (cpu["name"], memory["name"]) == ("CPU", "memory")
    np.testing.assert_array_equal(cpu["x"], [-41, -40, -1, -1, 0])
    np.testing.assert_array_equal(cpu["y"], [np.nan, 0.5, np.nan, 0.25, 1])
    np.testing.assert_array_equal(memory["y"], [0.75, 0.75, np.nan, 0.75, 0.75])
    assert cpu["line"]["dash"] != memory["line"]["dash"]


def test_of_the_gpus_the_runs_own_is_drawn_as_far_as_it_is_known() -> None:
    gpus = (GpuUse("cuda:0", 0.1, 1, 10), GpuUse("cuda:1", 0.75, None, None))
    samples = [Use(100.0, 0.5, 3, 4, gpus)]
    assert [trace["name"] for trace in machine_figure(samples, "cuda:1")["data"]] == ["CPU", "memory", "GPU"]
    lines = machine_figure(samples, "cpu")["data"]
    assert [trace["name"] for trace in lines] == ["CPU", "memory", "GPU", "GPU memory"]
    np.testing.assert_allclose([trace["y"][0] for trace in lines], [0.5, 0.75, 0.1, 0.1], rtol=1e-6)
    assert len({trace["line"]["dash"] for trace in lines}) == len({trace["color"] for trace in lines}) == 4
    assert machine_figure([], "cpu")["data"] == []
