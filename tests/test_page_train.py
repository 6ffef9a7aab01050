"""The Train page, as a user reads it."""

import dataclasses

import pytest
from streamlit.testing.v1 import AppTest

from mnist_trainer import devices, trainer
from mnist_trainer.config import TrainConfig
from mnist_trainer.devices import Device
from mnist_trainer.run import Run
from mnist_trainer.runs import RunManager
from mnist_trainer.ui import frame
from tests.pages import button, click, component_data, open_page, rerun, text
from tests.running import until

PAGE = "pages/train.py"
LONG = TrainConfig(epochs=1000)


def ended(app: RunManager) -> Run:
    run = app.latest()
    assert run is not None
    assert run.ended.wait(60)
    return run


def set_number(page: AppTest, key: str, value: float | None) -> None:
    page.number_input(key=key).set_value(value)


def test_without_a_run_it_says_what_to_do(app: RunManager) -> None:
    page = open_page(PAGE)
    assert "press **Start training**" in page.info[0].value
    assert button(page, "Stop").disabled


def test_a_run_goes_from_start_to_test_accuracy(app: RunManager) -> None:
    page = open_page(PAGE)
    set_number(page, "epochs", 2)
    set_number(page, "hidden", 16)
    click(page, "Start training")
    run = ended(app)
    assert (run.config.epochs, run.config.hidden_size) == (2, 16)
    rerun(page)
    assert f"Test accuracy: {run.state.test_accuracy:.2%}" in text(page)
    assert not button(page, "Start training").disabled
    for chart in component_data(page)["charts"]:
        assert [trace["name"] for trace in chart["traces"]] == ["training", "smoothed", "validation"]
    click(page, "Draw a digit")
    assert page.header[0].value == "Draw a digit"


def test_while_it_trains_it_can_be_stopped(app: RunManager) -> None:
    run = app.start(LONG)
    page = open_page(PAGE)
    assert "Test accuracy: –" in text(page)
    click(page, "Stop")
    assert run.ended.wait(10)
    assert run.state.status == "stopped"
    rerun(page)
    assert [button(page, label).disabled for label in ("Start training", "Pause", "Step", "Stop")] == [
        False,
        *3 * [True],
    ]


def test_while_it_trains_the_machines_use_is_shown_below_the_charts(app: RunManager) -> None:
    run = app.start(LONG)
    page = open_page(PAGE)
    *_, machine = component_data(page)["charts"]
    assert machine["isWide"]
    assert "memory" in [trace["name"] for trace in machine["traces"]]
    click(page, "Stop")
    assert run.ended.wait(10)
    rerun(page)
    assert [chart["isWide"] for chart in component_data(page)["charts"]] == [False, False]


def test_a_run_can_be_paused_taken_step_by_step_and_let_go_on(app: RunManager) -> None:
    run = app.start(LONG)
    until(lambda: run.snapshot().steps)  # loading MNIST may take longer than the page waits for a pause
    page = click(open_page(PAGE), "Pause")
    assert run.state.status == "paused"
    assert "· paused" in progress(page)
    steps = run.snapshot().steps
    for more in (1, 2, 3):
        click(page, "Step")
        assert run.snapshot().steps == steps + more
    click(page, "Go on")
    assert run.state.status == "running"
    click(page, "Step")  # pauses, and takes one
    assert run.state.status == "paused"
    click(page, "Stop")
    assert ended(app).state.status == "stopped"


def test_a_run_that_changes_while_its_page_is_made_has_the_buttons_of_its_new_state(
    app: RunManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = app.start(LONG)
    until(lambda: run.snapshot().steps)
    page = click(open_page(PAGE), "Pause")
    badge = frame.status_badge

    def after_the_buttons(run: Run) -> None:
        assert run.control
        run.control.go_on()
        until(lambda: run.state.status == "running")
        badge(run)

    monkeypatch.setattr(frame, "status_badge", after_the_buttons)
    assert not button(rerun(page), "Pause").disabled


def test_the_learning_rate_can_be_moved_while_it_trains(app: RunManager) -> None:
    run = app.start(LONG)
    page = open_page(PAGE)
    (slider,) = page.select_slider
    assert slider.value == 0.5
    slider.set_value(0.02)
    rerun(page)
    assert run.learning_rate == 0.02
    (change,) = run.snapshot().rates
    until(lambda: component_data(rerun(page))["charts"][0]["layout"]["annotations"])  # made once a tick for all pages
    layout = component_data(page)["charts"][0]["layout"]
    assert (layout["annotations"][0]["text"], layout["shapes"][0]["x0"]) == ("lr 0.02", change.step)
    assert open_page(PAGE).select_slider[0].value == 0.02  # another tab shows what is in force
    page.select_slider[0].set_value(1.0)
    rerun(page)
    assert [rate.learning_rate for rate in run.snapshot().rates] == [0.02, 1.0]


def test_a_second_run_waits_in_the_queue_shows_its_place_and_can_be_withdrawn(app: RunManager) -> None:
    first = app.start(LONG)
    page = open_page(PAGE, epochs="2")
    click(page, "Queue it")
    second = app.waiting[0]
    assert second.config.epochs == 2
    assert second.id in text(page)
    assert "place 1 of 1 in the queue" in progress(page)
    third = app.start(LONG)
    assert "place 2 of 2 in the queue" in progress(open_page(PAGE, run=third.id))
    click(page, "Withdraw")
    assert second.state.status == "stopped"
    assert "withdrawn" in page.warning[0].value
    assert "place 1 of 1 in the queue" in progress(open_page(PAGE, run=third.id))
    app.stop(first)
    assert first.ended.wait(20)
    until(lambda: third.state.status == "running")
    assert third.id in text(open_page(PAGE))  # a page that was not told which run shows the one that trains


def test_the_same_run_can_be_started_again_right_after_a_stop(app: RunManager) -> None:
    page = click(open_page(PAGE, epochs="1000"), "Start training")
    click(page, "Stop")
    click(page, "Start training")
    assert app.training is not None
    assert len(app.all()) == 2


def test_a_double_click_queues_one_run(app: RunManager) -> None:
    app.start(LONG)
    page = click(open_page(PAGE), "Queue it")
    click(page, "Queue it")
    assert len(app.waiting) == 1


def test_a_stopped_run_resumes_where_it_was(app: RunManager) -> None:
    stopped = app.start(TrainConfig(epochs=3))
    until(lambda: stopped.snapshot().steps)
    stopped.request_stop()
    steps = ended(app).snapshot().steps
    page = click(open_page(PAGE), "Resume")
    run = ended(app)
    assert (run.id, run.state.status, run.snapshot().steps) == (stopped.id, "finished", 3 * 391)
    assert [change.step for change in run.state.changes if change.status == "running"] == [0, steps]
    assert "Resume" not in [each.label for each in rerun(page).button]


def test_a_finished_run_is_continued_as_a_new_one(app: RunManager) -> None:
    parent = app.start(TrainConfig(epochs=1))
    assert parent.ended.wait(60)
    page = open_page(PAGE)
    set_number(page, f"more epochs {parent.id}", 2)
    set_number(page, f"more rate {parent.id}", 0.1)
    click(page, "Continue training")
    run = ended(app)
    assert (run.origin.parent, run.config.epochs, run.learning_rate) == (parent.id, 3, 0.1)
    assert run.snapshot().epochs[0] == parent.snapshot().epochs[0]
    assert run.id in text(rerun(page))
    set_number(page, f"more epochs {run.id}", 0)
    click(page, "Continue training")
    assert "Epochs must be a whole number from 1 to 1,000; 0 is not." in page.error[0].value


def test_it_says_with_how_many_threads_of_the_cpu_a_run_trains(app: RunManager) -> None:
    app.start(TrainConfig(epochs=1, batch_size=5_000))
    run = ended(app)
    assert "CPU, 1 thread · hidden size 32" in text(open_page(PAGE, run=run.id))


def progress(page: AppTest) -> str:
    """The text of the progress bar."""
    return str(component_data(page)["panels"][0]["progress"][1])


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("epochs", 0, "Epochs must be a whole number from 1 to 1,000; 0 is not."),
        ("epochs", -3, "-3 is not"),
        ("epochs", 10**9, "1,000,000,000 is not"),
        ("lr", 0.0, "Learning rate must be a number above 0"),
        ("lr", -1.0, "-1.0 is not"),
        ("lr", 1e30, "1e+30 is not"),
        ("hidden", 0, "Hidden size must be a whole number"),
        ("hidden", 10**11, "Its weights alone would take 318 TB."),
        ("batch", 0, "Batch size must be a whole number"),
        ("batch", 50_001, "There are 50,000 training images"),
        ("seed", -1, "Seed must be a whole number"),
    ],
)
def test_a_bad_value_gets_one_sentence_and_starts_nothing(
    app: RunManager, key: str, value: float | None, said: str
) -> None:
    page = open_page(PAGE)
    set_number(page, key, value)
    click(page, "Start training")
    assert len(page.error) == 1
    assert said in page.error[0].value
    assert app.latest() is None
    set_number(page, key, {"epochs": 1, "lr": 0.5, "hidden": 32, "batch": 1000, "seed": 0}[key])
    click(page, "Start training")
    assert not page.error
    assert app.latest() is not None


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({"epochs": "abc"}, "Epochs must be a whole number; 'abc' is not. (The address has epochs=abc.)"),
        ({"lr": "nan"}, "nan is not"),
        ({"optimizer": "foo"}, "Optimizer must be one of SGD"),
        ({"pipeline": "foo"}, "Pipeline must be one of on-device, DataLoader"),
        ({"device": "tpu"}, "There is no device 'tpu' here. Choose 'cpu'"),
        ({"run": "../../etc/passwd"}, "There is no run '../../etc/passwd'"),
    ],
)
def test_a_bad_address_gets_one_sentence(app: RunManager, query: dict[str, str], said: str) -> None:
    page = open_page(PAGE, **query)
    assert len(page.warning) == 1
    assert said in page.warning[0].value


def test_settings_come_from_the_address(app: RunManager) -> None:
    page = open_page(
        PAGE, epochs="7", lr="0.01", hidden="64", batch="256", optimizer="adam", seed="3", pipeline="dataloader"
    )
    assert [page.number_input(key=key).value for key in ("epochs", "lr", "hidden", "batch", "seed")] == [
        7,
        0.01,
        64,
        256,
        3,
    ]
    assert [page.selectbox(key=key).value for key in ("optimizer", "pipeline")] == ["Adam", "DataLoader"]
    assert not page.warning


def test_the_address_of_a_page_come_back_to_is_no_mistake(app: RunManager) -> None:
    page = open_page(PAGE, epochs="7.0", lr="1.0")  # as Streamlit writes them then
    assert (page.number_input(key="epochs").value, page.number_input(key="lr").value) == (7, 1)
    assert not page.warning
    assert "'7.5' is not" in open_page(PAGE, epochs="7.5").warning[0].value


def test_only_devices_that_work_are_offered_and_the_fastest_comes_first(
    app: RunManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = (
        Device("cuda:0", "NVIDIA H200, 139 GiB"),
        Device("xpu:0", "Intel Arc, 16 GiB", "its arithmetic is off."),
        Device("cpu", "CPU"),
    )
    monkeypatch.setattr(devices, "all_devices", lambda: found)
    page = open_page(PAGE, device="xpu")
    assert page.selectbox(key="device").options == ["cuda:0 · NVIDIA H200, 139 GiB", "cpu"]
    assert page.selectbox(key="device").value == "cuda:0"
    assert "its arithmetic is off" in page.selectbox(key="device").help
    assert "Device 'xpu' is not available: its arithmetic is off." in page.warning[0].value


@pytest.mark.parametrize("written", ["cuda:1", "CUDA:1", "cuda:1 · NVIDIA A100, 80 GiB", "cuda:1 · Another GPU"])
def test_a_device_in_the_address_is_chosen_by_its_name(
    app: RunManager, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    found = (Device("cuda:0", "NVIDIA H200, 139 GiB"), Device("cuda:1", "NVIDIA A100, 80 GiB"), Device("cpu", "CPU"))
    monkeypatch.setattr(devices, "all_devices", lambda: found)
    page = open_page(PAGE, device=written)
    assert page.selectbox(key="device").value == "cuda:1"
    assert not page.warning


def test_a_run_that_diverges_says_at_which_step_and_offers_a_smaller_learning_rate(app: RunManager) -> None:
    page = open_page(PAGE)
    set_number(page, "lr", 1e8)
    click(page, "Start training")
    ended(app)
    rerun(page)
    assert "stopped being a finite number at step" in page.error[0].value
    assert len(component_data(page)["charts"]) == 2  # its charts are kept
    click(page, "Try learning rate 0.5")
    again = app.training or ended(app)
    assert again.config.learning_rate == 0.5
    assert page.number_input(key="lr").value == 0.5


def test_trying_again_a_run_of_another_machine_says_that_its_device_is_not_here(app: RunManager) -> None:
    run = app.start(TrainConfig(learning_rate=1e8))
    assert run.ended.wait(60)
    run.config = dataclasses.replace(run.config, device="cuda:5")
    page = click(open_page(PAGE), "Try learning rate 0.5")
    assert "Device 'cuda:5' is not available" in page.error[0].value
    assert app.latest() is run


def test_of_two_starts_at_once_one_waits(app: RunManager) -> None:
    page = open_page(PAGE)
    app.start(LONG)  # between the page's last run and its click
    click(page, "Start training")
    assert "place 1 of 1 in the queue" in progress(page)
    assert not page.error


def test_a_run_that_stopped_learning_says_so_and_offers_a_smaller_learning_rate(app: RunManager) -> None:
    page = open_page(PAGE)
    set_number(page, "lr", 10.0)
    set_number(page, "epochs", 2)
    click(page, "Start training")
    ended(app)
    rerun(page)
    assert "It is not learning" in page.warning[0].value
    assert button(page, "Try learning rate 0.5")


def test_a_run_that_fails_says_why_and_the_page_goes_on(app: RunManager, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the fan fell off")

    monkeypatch.setattr(trainer, "fit", broken)
    page = click(open_page(PAGE), "Start training")
    ended(app)
    rerun(page)
    assert "the fan fell off" in page.error[0].value
    assert not button(page, "Start training").disabled


def test_a_second_tab_and_a_reload_find_the_same_run(app: RunManager) -> None:
    first = click(open_page(PAGE, epochs="1000"), "Start training")
    run = app.training
    assert run is not None
    for page in (open_page(PAGE), open_page(PAGE, run=run.id)):
        assert run.id in text(page)
        assert page.number_input(key="epochs").value == 5  # another tab's controls are its own
    assert first.number_input(key="epochs").value == 1000
    assert not run.ended.is_set()


def test_an_older_run_can_be_looked_at_while_another_trains(app: RunManager) -> None:
    old = app.start(TrainConfig(epochs=1))
    assert old.ended.wait(60)
    new = app.start(LONG)
    page = open_page(PAGE, run=old.id)
    assert old.id in text(page)
    click(page, "Show the run that is training")
    assert new.id in text(page)


def test_a_damaged_run_is_passed_over(app: RunManager) -> None:
    run = app.start(TrainConfig(epochs=1))
    assert run.ended.wait(60)
    broken = app.home / "runs" / "9999-01-01_00-00-00"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    assert run.id in text(open_page(PAGE))


def test_chart_options_change_the_charts(app: RunManager) -> None:
    assert app.start(TrainConfig(epochs=1)).ended.wait(60)
    page = open_page(PAGE)
    assert component_data(page)["charts"][0]["layout"]["xaxis"]["title"]["text"] == "step"
    page.segmented_control(key="x_axis").set_value("epoch")
    page.toggle(key="log_scale").set_value(True)
    layout = component_data(rerun(page))["charts"][0]["layout"]
    assert layout["xaxis"]["title"]["text"] == "epoch"
    assert layout["yaxis"]["type"] == "log"


def test_an_address_cannot_make_the_page_fetch_a_picture(app: RunManager) -> None:
    picture = "![x](http://example.com/p.png)"
    page = open_page(PAGE, run=picture, device=picture)
    assert len(page.warning) == 2
    for warning in page.warning:
        assert "!\\[x\\](" in warning.value


def test_stopping_a_second_time_forgoes_the_test(app: RunManager) -> None:
    run = app.start(LONG)
    run.request_stop()
    run.request_stop()
    assert run.ended.wait(10)
    assert run.state.test_accuracy is None
    assert "Test accuracy: –" in text(open_page(PAGE))
