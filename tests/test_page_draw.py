"""The Draw page, as a user reads it."""

from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from mnist_trainer.config import TrainConfig
from mnist_trainer.runs import RunManager
from tests.pages import click, component_data, open_page, rerun, text

PAGE = "pages/draw.py"
SEVEN = [[[90, 60, 20], [190, 60, 20], [130, 220, 20]]]


@pytest.fixture
def trained(app: RunManager) -> RunManager:
    assert app.start(TrainConfig(epochs=2)).ended.wait(60)
    return app


def draw(page: AppTest, strokes: object, seq: int = 1) -> AppTest:
    """Leave strokes on the canvas, as its JavaScript would."""
    page.session_state["pad"] = {"drawing": {"seq": seq, "strokes": strokes}}
    return rerun(page)


def test_with_no_run_one_button_trains_a_quick_one_and_the_canvas_appears(app: RunManager) -> None:
    page = open_page(PAGE)
    assert "No network has been trained yet" in page.info[0].value
    assert not page.get("bidi_component")
    click(page, "Train a quick one here")
    run = app.latest()
    assert run is not None
    assert run.ended.wait(60)
    assert component_data(draw(page, SEVEN))["probabilities"][7] > 0.5


def test_a_drawing_is_read_and_the_page_says_whose_weights_answer(trained: RunManager) -> None:
    page = draw(open_page(PAGE), SEVEN, seq=4)
    data = component_data(page)
    assert data["seq"] == 4
    assert max(range(10), key=data["probabilities"].__getitem__) == 7
    assert sum(data["probabilities"]) == pytest.approx(1)
    assert len(data["image"]) == 4 * ((28 * 28 + 2) // 3)  # base64
    run = trained.latest()
    assert run is not None
    assert f"run {run.id}: epoch 2, {run.snapshot().epochs[-1].val_accuracy:.1%}" in text(page)


def test_an_empty_canvas_gives_no_prediction(trained: RunManager) -> None:
    page = open_page(PAGE)
    assert component_data(page) == {"seq": 0, "probabilities": None, "image": None}
    draw(page, SEVEN)
    assert component_data(draw(page, [], seq=2)) == {"seq": 2, "probabilities": None, "image": None}


@pytest.mark.parametrize(
    "strokes", ["x", [[["a", 1, 2]]], [[[1, 2]]], [[[1, 2, float("nan")]]], [[[1, 1, 9]] * 30_000]]
)
def test_nonsense_from_a_browser_gets_a_sentence(trained: RunManager, strokes: object) -> None:
    page = draw(open_page(PAGE), strokes)
    assert "Clear it and draw again" in page.error[0].value
    assert component_data(page)["probabilities"] is None  # the canvas is still there, to be cleared


@pytest.mark.parametrize("sent", ["text", ["seq"], {"seq": "1", "strokes": []}])
def test_nonsense_in_place_of_a_drawing_gets_a_sentence_too(trained: RunManager, sent: object) -> None:
    page = open_page(PAGE)
    page.session_state["pad"] = {"drawing": sent}
    rerun(page)
    assert "Clear it and draw again" in page.error[0].value
    assert page.get("bidi_component")


def test_any_run_can_be_chosen_and_the_newest_is_at_first(trained: RunManager) -> None:
    old = trained.latest()
    new = trained.start(TrainConfig(epochs=1))
    assert new.ended.wait(60)
    assert old is not None
    page = open_page(PAGE)
    assert page.selectbox(key="network").value == new.id
    page.selectbox(key="network").set_value(old.id)
    assert f"run {old.id}" in text(rerun(page))
    assert page.query_params["run"] == old.id  # a reload finds it again
    assert f"run {old.id}" in text(open_page(PAGE, run=old.id))
    assert "There is no run 'nonsense'" in open_page(PAGE, run="nonsense").warning[0].value


def test_a_run_that_is_training_answers_too(app: RunManager) -> None:
    run = app.start(TrainConfig(epochs=1000))
    while not run.snapshot().epochs:
        assert not run.ended.wait(0.05)
    page = draw(open_page(PAGE), SEVEN)
    assert component_data(page)["probabilities"] is not None
    assert "This network is training now" in page.get("progress")[0].proto.text


def test_weights_that_never_learnt_are_called_so(app: RunManager) -> None:
    assert app.start(TrainConfig(learning_rate=1e8)).ended.wait(60)
    assert "untrained: guessing" in text(open_page(PAGE))


def test_a_damaged_checkpoint_gets_a_sentence_and_another_run_can_be_chosen(trained: RunManager) -> None:
    run = trained.latest()
    assert run is not None
    Path(run.folder.path, "checkpoint.pt").write_bytes(b"not a checkpoint")
    page = open_page(PAGE)
    assert "checkpoint.pt is damaged" in page.error[0].value
    assert page.selectbox(key="network")
