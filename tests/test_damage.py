"""Each file of a run's folder damaged: the list still works, and the damaged run says what is wrong."""

import io
import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from mnist_trainer.config import TrainConfig
from mnist_trainer.errors import MnistTrainerError, RunFolderError
from mnist_trainer.run import Run
from mnist_trainer.runs import RunManager
from mnist_trainer.store import RunFolder
from tests.running import ended

DAMAGES = ("truncated", "empty", "garbage", "missing")


@pytest.fixture(scope="module")
def finished(module_home: Path) -> Run:
    run = ended(RunManager(module_home).start(TrainConfig(device="cpu", epochs=4, batch_size=1000)))
    run.set_about("A name", "A note")
    return run


@pytest.fixture
def copy(home: Path, finished: Run) -> Path:
    """The folder of a run that is to be damaged; beside it is one that is not."""
    for name in ("good", "damaged"):
        folder = Path(shutil.copytree(finished.folder.path, home / "runs" / name))
        (folder / "learning_rates.csv").write_text("step,learning_rate\n100,0.25\n")
    return folder


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes({"truncated": content[: len(content) // 2], "empty": b"", "garbage": b"\x00\xff,{]\n"}[how])


def listed(home: Path) -> tuple[dict[str, Run], dict[str, str]]:
    """The runs, without the good one, and what is wrong with those that are none."""
    manager = RunManager(home)
    runs = {run.id: run for run in manager.all()}
    good = runs.pop("good")
    assert (good.name, good.state.status, good.snapshot().steps, good.problem) == ("A name", "finished", 200, "")
    return runs, manager.damaged()


def is_sentence(text: str) -> bool:
    return "damaged" in text and text.endswith(".") and "\n" not in text and "Traceback" not in text


@pytest.mark.parametrize("name", ["config.json", "state.json"])
@pytest.mark.parametrize("how", DAMAGES)
def test_a_run_without_settings_or_state_is_named_with_what_is_wrong(
    home: Path, copy: Path, name: str, how: str
) -> None:
    damage(copy / name, how)
    runs, damaged = listed(home)
    assert runs == {}
    assert is_sentence(damaged["damaged"])
    assert name in damaged["damaged"]


@pytest.mark.parametrize("name", ["about.json", "steps.csv", "epochs.csv", "learning_rates.csv"])
@pytest.mark.parametrize("how", DAMAGES)
def test_a_run_with_a_damaged_history_or_name_opens_and_says_so(home: Path, copy: Path, name: str, how: str) -> None:
    damage(copy / name, how)
    runs, damaged = listed(home)
    run = runs["damaged"]
    history = run.snapshot()
    assert damaged == {}
    assert run.state.status == "finished"
    if how == "missing" and name in ("about.json", "learning_rates.csv"):
        assert run.problem == ""  # most runs have neither
    else:
        assert is_sentence(run.problem)
        assert name in run.problem
    assert run.has_weights
    assert run.checkpoint()
    if (name, how) == ("steps.csv", "truncated"):
        assert 50 < history.steps < 200  # what is whole is kept
    if name in ("about.json", "learning_rates.csv"):
        assert (history.steps, len(history.epochs)) == (200, 4)


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_weights_are_a_sentence_where_they_are_asked_for(home: Path, copy: Path, how: str) -> None:
    damage(copy / "checkpoint.pt", how)
    run = listed(home)[0]["damaged"]
    assert run.snapshot().steps == 200
    if how == "missing":
        assert not run.has_weights
        assert run.checkpoint() is None
        return
    with pytest.raises(RunFolderError) as caught:
        run.checkpoint()
    assert is_sentence(str(caught.value))


def test_a_newer_version_is_refused_with_what_to_do(home: Path, copy: Path) -> None:
    torch.save({"format": 99}, copy / "checkpoint.pt")
    with pytest.raises(RunFolderError, match="or of a newer format"):
        listed(home)[0]["damaged"].checkpoint()
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"format": 99}))
    runs, damaged = listed(home)
    assert runs == {}
    assert "is of format 99" in damaged["damaged"]
    assert "Update MNIST Trainer" in damaged["damaged"]


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("state.json", '"step": 0', '"step": 1e999'),
        ("state.json", '"step": 0', '"step": -1'),
        ("state.json", '"steps": 200', '"steps": 1e999'),
        ("state.json", '"seconds": ', '"seconds": NaN, "x": '),
        ("state.json", '"seconds": ', '"seconds": 1e999, "x": '),
        ("state.json", '"test_accuracy": ', '"test_accuracy": 7, "x": '),
        ("state.json", '"threads": 1', '"threads": 10000000'),
        ("state.json", '"threads": 1', '"threads": true'),
        ("state.json", '"processes": 1', '"processes": 0'),
        ("state.json", '"processes": 1', '"processes": null'),
        ("state.json", '"processes": 1', '"processes": 1.5'),
        ("config.json", '"seed": 0', '"seed": 1e999'),
        ("config.json", '"learning_rate": 0.5', '"learning_rate": NaN'),
        ("epochs.csv", "\n1,50,", "\n1,50,nan"),
        ("steps.csv", "\n7,", "\n7,inf"),
        ("learning_rates.csv", "0.25", "nan"),
        ("learning_rates.csv", "0.25", "-1.0"),
    ],
)
def test_values_that_cannot_be_are_damage_here_and_in_an_import(
    home: Path, copy: Path, name: str, old: str, new: str
) -> None:
    content = (copy / name).read_text()
    assert old in content
    (copy / name).write_text(content.replace(old, new, 1))
    runs, damaged = listed(home)
    if "damaged" in runs:
        runs["damaged"].snapshot()
        assert "damaged" in runs["damaged"].problem
    else:
        assert "damaged" in damaged["damaged"]
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        for path in copy.iterdir():
            archive.write(path, path.name)
    with pytest.raises(MnistTrainerError):
        RunManager(home).import_run(zipped, "hostile.zip")
    assert len(RunFolder.all_ids(home)) == 2


def test_a_lock_that_is_damaged_or_gone_changes_nothing(home: Path, copy: Path) -> None:
    (copy / "lock").write_bytes(b"garbage")
    assert listed(home)[0]["damaged"].state.status == "finished"
    (copy / "lock").unlink()
    assert listed(home)[0]["damaged"].state.status == "finished"


def test_a_damaged_run_can_be_named_anew_and_deleted(home: Path, copy: Path) -> None:
    damage(copy / "about.json", "garbage")
    manager = RunManager(home)
    manager.get("damaged").set_about("Mended")
    assert RunManager(home).get("damaged").name == "Mended"
    damage(copy / "config.json", "missing")
    manager = RunManager(home)
    manager.delete("damaged")
    assert manager.damaged() == {}
    manager.undelete("damaged")
    assert list(manager.damaged()) == ["damaged"]
