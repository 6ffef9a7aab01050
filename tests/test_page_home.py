"""The home page, as a user reads it."""

import pytest
from streamlit.testing.v1 import AppTest

from mnist_trainer import devices
from mnist_trainer.config import AT_ONCE_VARIABLE, TrainConfig
from mnist_trainer.devices import Device
from mnist_trainer.runs import RunManager
from mnist_trainer.ui import frame
from tests.pages import PAGE_TIMEOUT_SECONDS, rerun, text
from tests.running import until


def home_page() -> AppTest:
    return rerun(AppTest.from_file("../app.py", default_timeout=PAGE_TIMEOUT_SECONDS))


def test_it_says_what_it_is_and_that_there_is_no_run_yet(app: RunManager) -> None:
    page = home_page()
    assert page.title[0].value == "MNIST Trainer"
    assert "None yet" in text(page)
    assert [button.label for button in page.button] == ["Train a network", "Draw a digit"]


def test_it_shows_the_device_found_and_why_others_are_not_used(
    app: RunManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = (
        Device("cuda:0", "NVIDIA H200, 139 GiB"),
        Device("xpu", "Intel GPU", "PyTorch sees none."),
        Device("cpu", "CPU"),
    )
    monkeypatch.setattr(devices, "all_devices", lambda: found)
    said = text(home_page())
    assert "NVIDIA H200, 139 GiB" in said
    assert "Intel GPU: not available, PyTorch sees none." in said


def test_the_latest_run_is_shown_with_its_test_accuracy(app: RunManager) -> None:
    run = app.start(TrainConfig(epochs=1))
    assert run.ended.wait(60)
    said = text(home_page())
    assert run.id in said
    assert f"Test accuracy: {run.state.test_accuracy:.2%}" in said


def test_a_run_that_cannot_be_read_is_named_and_the_others_are_shown(app: RunManager) -> None:
    run = app.start(TrainConfig(epochs=1))
    assert run.ended.wait(60)
    broken = app.home / "runs" / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    page = home_page()
    assert "Run broken cannot be read" in page.warning[0].value
    assert run.id in text(page)


def test_what_keeps_the_server_from_runs_is_said_in_a_sentence(
    app: RunManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame.manager.clear()
    monkeypatch.setenv(AT_ONCE_VARIABLE, "abc")
    page = home_page()
    assert [error.value for error in page.error] == [
        f"{frame.plain(AT_ONCE_VARIABLE)} must be a whole number from 1 to 16; 'abc' is not."
    ]


def test_the_sidebar_tells_of_a_run_that_trains(app: RunManager) -> None:
    run = app.start(TrainConfig(epochs=1000))
    until(lambda: run.state.status == "running")
    said = [str(element.value) for element in home_page().sidebar.markdown]
    assert any("A run is running" in text for text in said), said


@pytest.mark.parametrize(("label", "title"), [("Train a network", "Train"), ("Draw a digit", "Draw a digit")])
def test_both_next_steps_lead_to_their_pages(app: RunManager, label: str, title: str) -> None:
    page = home_page()
    next(button for button in page.button if button.label == label).click()
    assert rerun(page).header[0].value == title
