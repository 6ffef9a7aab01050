"""The Runs page, as a user reads it."""

import io
import shutil
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from mnist_trainer.config import TrainConfig
from mnist_trainer.run import Run
from mnist_trainer.runs import RunManager
from tests.pages import button, click, component_data, open_page, rerun, text
from tests.running import ended

PAGE = "pages/runs.py"
SHORT = TrainConfig(device="cpu", epochs=1, batch_size=1000)


@pytest.fixture(scope="module")
def trained(module_home: Path) -> list[Run]:
    """Two runs with different settings, the newer one first."""
    manager = RunManager(module_home)
    ended(manager.start(SHORT))
    ended(manager.start(TrainConfig(device="cpu", epochs=2, batch_size=1000, optimizer="Adam", learning_rate=0.001)))
    return manager.all()


@pytest.fixture
def two(app: RunManager, trained: list[Run]) -> list[str]:
    """Their ids, once they are among the page's runs."""
    for run in trained:
        shutil.copytree(run.folder.path, app.home / "runs" / run.id)
    app._forget_list()
    return [run.id for run in trained]


def open_runs(*ticked: str) -> AppTest:
    page = AppTest.from_file("../app.py", default_timeout=60).run()
    page.switch_page(PAGE)
    page.query_params["run"] = list(ticked)
    return rerun(page)


def table(page: AppTest) -> dict[str, list[object]]:
    return {name: list(column) for name, column in page.dataframe[0].value.items()}


def test_without_a_run_it_says_what_to_do(app: RunManager) -> None:
    assert "No run yet" in open_page(PAGE).info[0].value


def test_all_runs_are_listed_newest_first_with_settings_and_results(app: RunManager, two: list[str]) -> None:
    app.get(two[1]).set_about("The first one", "a note")
    shown = table(open_page(PAGE))
    assert shown["name"] == [two[0], "The first one"]
    assert shown["state"] == ["finished", "finished"]
    assert shown["note"] == ["", "a note"]
    assert (shown["optimizer"], shown["epochs"]) == (["Adam", "SGD"], [2, 1])
    for place, run_id in enumerate(two):
        run = app.get(run_id)
        assert run.state.test_accuracy
        assert run.best_val_accuracy
        assert shown["test"][place] == pytest.approx(100 * run.state.test_accuracy)
        assert shown["val"][place] == pytest.approx(100 * run.best_val_accuracy)
        assert shown["seconds"][place] == pytest.approx(run.seconds)
        assert shown["speed"][place] == round(run.images_per_second or 0)


@pytest.mark.parametrize(
    ("words", "found"), [("adam", [0]), ("SGD finished", [1]), ("first", [1]), ("finished", [0, 1])]
)
def test_the_filter_looks_in_everything(app: RunManager, two: list[str], words: str, found: list[int]) -> None:
    app.get(two[1]).set_about("The first one")
    page = open_page(PAGE)
    page.text_input(key="filter").set_value(words)
    assert table(rerun(page))["optimizer"] == [["Adam", "SGD"][place] for place in found]
    page.text_input(key="filter").set_value("nothing has *this*")
    assert "No run has" in rerun(page).info[0].value


def test_ticked_runs_are_compared_by_the_settings_in_which_they_differ(app: RunManager, two: list[str]) -> None:
    page = open_runs(*two)
    shown = page.dataframe[1].value
    results = ["best validation", "test", "time"]
    assert list(shown) == ["run", "epochs", "optimizer", "learning rate", *results]
    assert list(shown["optimizer"]) == ["Adam", "SGD"]
    for chart in component_data(page)["charts"]:
        assert [trace["name"] for trace in chart["traces"]] == [
            name for run_id in two for name in (run_id, f"{run_id}, validation")
        ]
    for x_axis in ("epoch", "seconds"):
        page.segmented_control(key="x_axis").set_value(x_axis)
        assert component_data(rerun(page))["charts"][0]["layout"]["xaxis"]["title"]["text"] == x_axis


def test_a_moved_learning_rate_is_a_difference(app: RunManager, two: list[str]) -> None:
    moved = Path(shutil.copytree(app.home / "runs" / two[1], app.home / "runs" / "moved"))
    (moved / "learning_rates.csv").write_text("step,learning_rate\n10,0.25\n20,0.125\n")
    app._forget_list()
    shown = open_runs(two[1], "moved").dataframe[1].value
    assert list(shown["learning rate"]) == ["0.5", "0.5 → 0.25 → 0.125"] or list(shown["learning rate"])[::-1] == [
        "0.5",
        "0.5 → 0.25 → 0.125",
    ]


def test_a_run_compared_with_a_copy_of_itself_says_that_nothing_differs(app: RunManager, two: list[str]) -> None:
    shutil.copytree(app.home / "runs" / two[0], app.home / "runs" / "a copy, by hand")
    app._forget_list()
    page = open_runs(two[0], "a copy, by hand")
    assert "These runs have the same settings." in text(page)


def test_a_run_can_be_named_and_described(app: RunManager, two: list[str]) -> None:
    page = open_runs(two[0])
    next(each for each in page.text_input if each.label == "Name").set_value("  *Our*  best ")
    page.text_area[0].set_value("Wow <script>alert(1)</script>")
    click(page, "Save")
    assert (app.get(two[0]).name, app.get(two[0]).about.note) == ("*Our* best", "Wow <script>alert(1)</script>")
    assert table(page)["name"][0] == "*Our* best"
    assert "\\*Our\\* best" in text(page)  # as it stands, not as Markdown


def test_a_run_can_be_deleted_and_put_back(app: RunManager, two: list[str]) -> None:
    page = click(open_runs(two[0]), "Delete")
    assert app.get(two[0])  # it asks first
    page.button(key="really").click()
    rerun(page)
    assert [run.id for run in app.all()] == [two[1]]
    assert table(page)["name"] == [two[1]]
    click(page, "Undo delete")
    assert [run.id for run in app.all()] == two
    assert table(page)["name"] == two


def test_a_live_run_is_not_deleted(app: RunManager, two: list[str]) -> None:
    run = app.start(TrainConfig(device="cpu", epochs=1000))
    page = click(open_runs(run.id), "Delete")
    page.button(key="really").click()
    rerun(page)
    assert "Stop it first" in page.error[0].value
    assert run.is_live


def test_a_damaged_run_is_named_and_can_be_deleted(app: RunManager, two: list[str]) -> None:
    (app.home / "runs" / two[0] / "config.json").write_text("{")
    app._forget_list()
    page = open_page(PAGE)
    assert f"Run {two[0]} cannot be read: config.json is missing or damaged." in page.warning[0].value
    page.button(key=f"delete {two[0]}").click()
    rerun(page)
    page.button(key="really").click()
    rerun(page)
    assert not page.warning
    assert app.deleted == [two[0]]


def test_a_damaged_history_is_told_and_the_page_goes_on(app: RunManager, two: list[str]) -> None:
    steps = app.home / "runs" / two[0] / "steps.csv"
    steps.write_bytes(steps.read_bytes()[:300] + b"garbage\n")
    page = open_runs(two[0])
    assert "has a damaged history (steps.csv" in page.warning[0].value
    assert "damaged history" in table(rerun(page))["state"]


def test_ticks_in_the_address_that_are_no_runs_are_passed_over(app: RunManager, two: list[str]) -> None:
    page = open_runs("../../etc/passwd", two[1], "![x](http://example.com/p.png)")
    assert "There is no run '../../etc/passwd' any more" in page.warning[0].value
    assert button(page, "Delete")
    assert two[1] in text(page)


def test_a_zip_of_a_run_is_imported_and_a_bad_one_gets_a_sentence(app: RunManager, two: list[str]) -> None:
    from mnist_trainer.archive import export_run

    content = io.BytesIO()
    export_run(app.get(two[0]).folder, content)
    app.delete(two[0])
    page = open_page(PAGE)
    page.file_uploader[0].set_value(
        [("run.zip", content.getvalue(), "application/zip"), ("bad.zip", b"garbage", "application/zip")]
    )
    rerun(page)
    assert [run.id for run in app.all()] == two
    assert "'bad.zip' cannot be imported" in page.error[0].value


def test_what_can_be_taken_along_is_offered(app: RunManager, two: list[str]) -> None:
    page = open_runs(two[0])
    labels = [getattr(each, "label", "") for each in page.get("download_button")]
    assert labels == ["History (CSV)", "Epochs (CSV)", "Folder (zip)", "Model", "ONNX", "Take it home"]
    model, home = (each.value for each in page.code)
    assert "model.pt" in model
    assert "def get_default_device" in home
    assert "torch.optim.Adam" in home
