"""`runs …` and `train --resume | --from` on the command line: what they print, and their exit status."""

import dataclasses
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from mnist_trainer.cli import main
from mnist_trainer.config import HOME_VARIABLE, TrainConfig
from mnist_trainer.run import Run
from mnist_trainer.runs import RunManager
from tests.running import are_equal, assert_the_same, ended, stopped_after, until, weights

Captured = pytest.CaptureFixture[str]
SHORT = TrainConfig(device="cpu", epochs=1, batch_size=1000)


@pytest.fixture
def run(runs: RunManager) -> Run:
    return ended(runs.start(SHORT))


def rows(capsys: Captured) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def is_one_line(text: str) -> bool:
    return text.count("\n") == 1 and text.endswith(".\n") and "Traceback" not in text


def test_list_shows_every_run_with_its_name_and_damaged_ones_with_what_is_wrong(
    run: Run, runs: RunManager, capsys: Captured
) -> None:
    run.set_about("The fast one")
    broken = ended(runs.start(SHORT))
    (broken.folder.path / "state.json").write_text("{")
    for arguments in (["runs"], ["runs", "list"]):
        assert main(arguments) == 0
        good, bad = capsys.readouterr().out.splitlines()
        assert good.startswith(run.id)
        assert "“The fast one”" in good
        assert bad.startswith(broken.id)
        assert "damaged" in bad
    for arguments in (["runs", "--json"], ["runs", "list", "--json"], ["runs", "--json", "list"]):
        assert main(arguments) == 0
        row, damaged = rows(capsys)
        assert (row["id"], row["name"], row["status"]) == (run.id, "The fast one", "finished")
        assert row["best_val_accuracy"] == run.best_val_accuracy
        assert row["images_per_second"] > 0
        assert set(damaged) == {"id", "error"}


def test_show_tells_everything_about_one_run(run: Run, runs: RunManager, capsys: Captured) -> None:
    run.set_about("A name", "A note")
    child = ended(runs.continue_run(run.id, 1, 0.25))
    assert main(["runs", "show", child.id]) == 0
    said = capsys.readouterr().out
    for text in (
        child.id,
        run.id,
        "after step 50",
        "learning rate 0.25",
        "Epoch [2]",
        "finished at step 100",
        "test ac",
    ):
        assert text in said
    assert main(["runs", "show", run.id, "--json"]) == 0
    (row,) = rows(capsys)
    assert (row["name"], row["note"], row["parent"]) == ("A name", "A note", None)
    assert [change["status"] for change in row["changes"]] == ["queued", "running", "finished"]
    assert row["epochs"] == [dataclasses.asdict(epoch) for epoch in run.epochs]
    assert row["learning_rates"] == []


def test_rename_gives_a_name_and_a_note_and_takes_them_away(run: Run, capsys: Captured) -> None:
    assert main(["runs", "rename", run.id, "Größer", "--note", "Zwei Zeilen"]) == 0
    assert "“Größer”" in capsys.readouterr().out
    assert main(["runs", "rename", "latest", "", "--json"]) == 0
    (row,) = rows(capsys)
    assert (row["name"], row["note"]) == ("", "Zwei Zeilen")
    assert main(["runs", "rename", run.id]) == 2
    assert is_one_line(capsys.readouterr().err)


def test_delete_asks_first_and_deletes_for_good(
    run: Run, runs: RunManager, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["runs", "delete", run.id]) == 2  # nobody is there to answer
    assert "Add --yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "n")
    assert main(["runs", "delete", run.id]) == 1
    assert run.folder.path.exists()
    monkeypatch.setattr("builtins.input", lambda question: "y")
    assert main(["runs", "delete", run.id]) == 0
    assert not run.folder.path.exists()
    assert not (runs.home / "deleted").exists()
    second = ended(runs.start(SHORT))
    capsys.readouterr()
    assert main(["runs", "delete", "nonsense", second.id, "--yes", "--json"]) == 2
    output = capsys.readouterr()
    assert json.loads(output.out) == {"deleted": second.id}
    assert "There is no run 'nonsense'" in output.err


def test_a_run_exported_here_is_imported_there(
    run: Run, tmp_path: Path, mnist_root: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["runs", "export", "latest"]) == 0
    assert capsys.readouterr().out == f"Wrote {run.id}.zip.\n"
    assert main(["runs", "export", run.id]) == 2  # nothing is overwritten
    assert is_one_line(capsys.readouterr().err)
    assert main(["runs", "export", run.id, "no/such/folder.zip"]) == 1
    assert is_one_line(capsys.readouterr().err)
    there = tmp_path / "there"
    monkeypatch.setenv(HOME_VARIABLE, str(there))
    (tmp_path / "bad.zip").write_bytes(b"no zip")
    assert main(["runs", "import", "bad.zip", f"{run.id}.zip", "missing.zip", "--json"]) == 1
    output = capsys.readouterr()
    assert json.loads(output.out) == {"imported": run.id, "file": f"{run.id}.zip"}
    assert len(output.err.splitlines()) == 2
    assert "Traceback" not in output.err
    imported = RunManager(there).get(run.id)
    assert imported.state == run.state
    assert are_equal(weights(imported), weights(run))
    assert zipfile.ZipFile(f"{run.id}.zip").testzip() is None


@pytest.mark.parametrize("action", [["show"], ["rename", "x"], ["export"]])
def test_a_run_that_is_not_there_is_one_sentence(home: Path, capsys: Captured, action: list[str]) -> None:
    assert main(["runs", action[0], "../../etc", *action[1:]]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert is_one_line(output.err)


def test_train_resume_goes_on_exactly(runs: RunManager, capsys: Captured) -> None:
    config = TrainConfig(device="cpu", epochs=3, optimizer="Adam", learning_rate=0.001)
    expected, run = ended(runs.start(config)), stopped_after(runs.start(config), 100)
    assert run.state.status == "stopped"
    assert main(["train", "--resume", "latest", "--json"]) == 0
    (row,) = rows(capsys)
    assert (row["id"], row["status"], row["epochs"]) == (run.id, "finished", 3)
    assert_the_same(RunManager(runs.home).get(run.id), expected)
    assert main(["train", "--resume", run.id]) == 2
    assert "is finished. Continue it for more epochs instead." in capsys.readouterr().err


def test_train_from_continues_as_a_new_run(run: Run, capsys: Captured) -> None:
    assert main(["train", "--from", run.id, "--epochs", "2", "--lr", "0.125", "--json"]) == 0
    (row,) = rows(capsys)
    assert (row["parent"], row["epochs"], row["settings"]["epochs"]) == (run.id, 3, 3)
    assert row["id"] != run.id


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from", "latest"], "--from needs --epochs"),
        (["--from", "latest", "--epochs", "0"], "Epochs must be a whole number from 1"),
        (["--from", "latest", "--epochs", "1", "--hidden", "64"], "leave out hidden size"),
        (["--resume", "latest", "--epochs", "3"], "leave out epochs"),
        (["--resume", "nonsense"], "There is no run 'nonsense'"),
        (["--resume", "latest", "--device", "tpu"], "is finished"),
    ],
)
def test_train_with_what_an_earlier_run_has_decided_is_refused(
    run: Run, runs: RunManager, capsys: Captured, arguments: list[str], said: str
) -> None:
    assert main(["train", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert is_one_line(error)
    assert [each.id for each in RunManager(runs.home).all()] == [run.id]


@pytest.fixture
def killed(home: Path) -> str:
    """The id of a run whose command line was killed."""
    command = [sys.executable, "-m", "mnist_trainer", "train", "--device", "cpu", "--epochs", "900"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        until(lambda: any(home.glob("runs/*/checkpoint.pt")))
        process.kill()
    return RunManager(home).all()[0].id


def test_a_killed_run_is_listed_as_interrupted_and_can_be_exported(killed: str, home: Path, capsys: Captured) -> None:
    assert main(["runs", "list", "--json"]) == 0
    (row,) = rows(capsys)
    assert (row["status"], row["message"]) == ("interrupted", "The program that trained it ended before the run did.")
    assert row["steps"] >= 391
    assert main(["runs", "show", killed]) == 0
    assert "interrupted" in capsys.readouterr().out
    assert main(["runs", "export", killed, str(home / "out.zip")]) == 0
    capsys.readouterr()
    assert main(["runs", "import", str(home / "out.zip"), "--json"]) == 0
    copied = rows(capsys)[-1]["imported"]
    assert copied == f"{killed}-2"
    assert RunManager(home).get(copied).state.status == "interrupted"
