"""The Race page, as a user reads it."""

import pytest
from streamlit.testing.v1 import AppTest

from mnist_trainer import devices, step_times
from mnist_trainer.config import TrainConfig
from mnist_trainer.devices import Device
from mnist_trainer.runs import RunManager
from tests.pages import button, click, component_data, open_page, rerun, text
from tests.running import ended, has_steps, until

PAGE = "pages/race.py"
SHORT = {"both_epochs": "1", "batch1": "1000", "batch2": "1000"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "MAX_STEPS", 2)
    monkeypatch.setattr(step_times, "WARM_UP_STEPS", 1)


def panels(page: AppTest) -> list[dict[str, object]]:
    found: list[dict[str, object]] = component_data(page)["panels"]
    return found


def progress(page: AppTest) -> list[str]:
    return [panel["progress"][1] for panel in component_data(page)["panels"]]


def test_without_a_race_it_says_what_to_do(app: RunManager) -> None:
    page = open_page(PAGE)
    assert "Press **Start race**" in page.info[0].value
    assert button(page, "Stop").disabled
    assert page.expander[0].proto.expanded


def test_a_race_goes_from_start_to_verdict_and_breakdown(app: RunManager) -> None:
    page = click(open_page(PAGE, **SHORT), "Start race")
    second, first = app.all()
    assert (first.config.pipeline, second.config.pipeline) == ("DataLoader", "on-device")
    assert (first.config.epochs, first.config.batch_size, first.config.seed) == (1, 1000, second.config.seed)
    assert [panel["title"] for panel in panels(page)] == ["DataLoader", "On-device"]
    assert progress(page)[1] in ("Begins when DataLoader has finished", "Waiting until the runs before it have ended")
    assert ended(first).state.status == ended(second).state.status == "finished"
    until(lambda: rerun(page).subheader)  # the steps are measured
    ratio = max(first.seconds, second.seconds) / min(first.seconds, second.seconds)
    if ratio >= 1.05:
        winner = "On-device" if second.seconds < first.seconds else "DataLoader"
        assert page.title[0].value.endswith(f"{winner} is {ratio:.1f} × faster")
    said = text(page)
    assert "1 epoch from seed 0" in said
    assert f"both read {first.best_val_accuracy:.2%} of the validation images" in said
    assert "ms a step" in said
    assert progress(page) == ["Finished", "Finished"]
    (table,) = page.dataframe
    parts = ["data", "copying", "forward", "backward", "optimizer"]
    assert list(table.value) == ["lane", *parts, "together"]
    assert table.value["copying"][1] == "0.00 ms · 0%"
    bars = component_data(page, 1)["charts"][0]["traces"]
    assert [trace["name"] for trace in bars] == parts
    assert [trace["y"] for trace in bars] == 5 * [["On-device", "DataLoader"]]
    assert len(component_data(page, 2)["charts"]) == 2
    assert not page.warning
    assert button(page, "Stop").disabled
    assert "faster" in open_page(PAGE).title[0].value  # any tab shows it
    click(page, "Compare them on the Runs page")
    assert page.header[0].value == "Runs"


def test_at_once_it_says_so_and_a_stop_keeps_both_lanes_without_a_verdict(app: RunManager) -> None:
    page = open_page(PAGE, both_epochs="1000", pipeline1="on-device", hidden1="16", mode="At once")
    assert "less fair" in text(page)
    click(page, "Start race")
    assert not page.expander[0].proto.expanded
    lanes = app.all()
    until(lambda: all(has_steps(lane, 1) for lane in lanes))
    assert [lane.state.status for lane in lanes] == ["running", "running"]
    assert button(rerun(page), "Start race").disabled
    other = open_page(PAGE)  # another tab sees the same race
    until(lambda: all("Epoch" in each for each in progress(rerun(other))))
    click(other, "Stop")
    until(lambda: not any(lane.is_live for lane in lanes))
    assert "it has no result" in rerun(page).warning[0].value
    assert not page.title
    assert [panel["title"] for panel in panels(page)] == ["Hidden size 16", "Hidden size 32"]


def test_a_second_click_makes_no_second_race(app: RunManager) -> None:
    page, other = (open_page(PAGE, both_epochs="1000") for _ in range(2))
    click(page, "Start race")
    click(other, "Start race")  # opened before: its button was not disabled
    assert not other.error
    assert len(app.all()) == 2
    assert button(other, "Start race").disabled
    click(page, "Stop")


def test_another_race_is_refused_while_one_is_on(app: RunManager) -> None:
    page, other = open_page(PAGE, both_epochs="1000"), open_page(PAGE, both_epochs="3")
    click(page, "Start race")
    click(other, "Start race")
    assert "Another race is on. Stop it, or wait until it ends." in other.error[0].value
    assert len(app.all()) == 2
    click(page, "Stop")


def test_while_a_run_trains_the_race_waits_its_turn_and_says_so(app: RunManager) -> None:
    run = app.start(TrainConfig(device="cpu", epochs=1000))
    page = click(open_page(PAGE, both_epochs="1000", hidden1="16"), "Queue the race")
    assert progress(page) == 2 * ["Waiting until the runs before it have ended"]
    run.request_stop()
    first = app.waiting[0]
    until(lambda: has_steps(first, 1))
    assert "Begins when DataLoader, hidden size 16 has finished" in progress(rerun(page))
    app.stop(first)  # on another page
    until(lambda: "DataLoader, hidden size 16 was stopped" in "".join(w.value for w in rerun(page).warning))
    assert not page.title


def test_with_a_gpu_the_cpu_races_against_it(app: RunManager, monkeypatch: pytest.MonkeyPatch) -> None:
    found = (Device("cuda:0", "NVIDIA H200, 139 GiB"), Device("cpu", "CPU"))
    monkeypatch.setattr(devices, "all_devices", lambda: found)
    page = open_page(PAGE)
    assert [page.selectbox(key=key).value for key in ("device1", "device2")] == ["cpu", "cuda:0"]
    assert [page.selectbox(key=key).value for key in ("pipeline1", "pipeline2")] == 2 * ["on-device"]
    assert [page.number_input(key=key).value for key in ("hidden1", "hidden2")] == [512, 512]


def test_the_address_sets_both_lanes(app: RunManager) -> None:
    page = open_page(
        PAGE, pipeline1="on-device", pipeline2="dataloader", hidden2="64", batch1="256", both_lr="0.1", mode="At once"
    )
    assert [page.selectbox(key=key).value for key in ("pipeline1", "pipeline2")] == ["on-device", "DataLoader"]
    assert [page.number_input(key=key).value for key in ("hidden2", "batch1", "both_lr")] == [64, 256, 0.1]
    assert "less fair" in text(page)
    assert not page.warning


def test_an_address_with_an_empty_mode_races_fairly(app: RunManager) -> None:
    page = click(open_page(PAGE, mode="", both_epochs="1", pipeline1="on-device"), "Start race")
    assert not page.error
    assert app.waiting  # one after the other


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ({"hidden2": "none"}, "Hidden size must be a whole number; 'none' is not. (The address has hidden2=none.)"),
        ({"device1": "tpu"}, "There is no device 'tpu' here."),
        ({"pipeline1": "fast"}, "Pipeline must be one of on-device, DataLoader; 'fast' is not."),
        ({"mode": "sideways"}, "Lanes run 'One after the other' or 'At once'; 'sideways' is neither."),
    ],
)
def test_a_wrong_address_gets_a_sentence(app: RunManager, query: dict[str, str], sentence: str) -> None:
    page = open_page(PAGE, **query)
    assert sentence in page.warning[0].value.replace("\\", "")
    assert not button(page, "Start race").disabled


@pytest.mark.parametrize(
    ("key", "value"), [("both_epochs", 0.0), ("hidden2", 1.5), ("batch1", 100_000.0), ("both_lr", -1.0)]
)
def test_a_wrong_value_gets_a_sentence_and_no_lane_begins(app: RunManager, key: str, value: float) -> None:
    page = open_page(PAGE)
    page.number_input(key=key).set_value(value)
    click(page, "Start race")
    assert "must be a" in page.error[0].value
    assert app.all() == []
