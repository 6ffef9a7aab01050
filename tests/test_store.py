"""A run's folder: written so that a kill leaves it whole, read with suspicion."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from mnist_trainer.config import HOME_VARIABLE, TrainConfig
from mnist_trainer.errors import MnistTrainerError, RunFolderError, RunNotFoundError
from mnist_trainer.history import EpochEnd, History
from mnist_trainer.model import MnistModel
from mnist_trainer.state import Checkpoint, RunState
from mnist_trainer.store import RunFolder, home_folder

CONFIG = TrainConfig(device="cpu", epochs=3, learning_rate=0.25, optimizer="AdamW", seed=7, pipeline="DataLoader")
ROWS = [(2.3, 0.125, 0.01), (1.75, 0.5, 0.02), (0.5, 0.875, 0.0301)]
EPOCH = EpochEnd(1, 3, 1.1 / 3, 0.9, 0.2, 0.9123, 1.5)
HOLD_LOCK = """
import sys, filelock
with filelock.FileLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder(home: Path) -> RunFolder:
    """A new run with a little history; its lock is free."""
    folder = RunFolder.create(home, CONFIG)
    folder.append_steps(1, ROWS)
    folder.append_epoch(EPOCH)
    folder.lock.release()
    return folder


def checkpoint(hidden_size: int = 8) -> Checkpoint:
    return Checkpoint(MnistModel(hidden_size=hidden_size).state_dict(), epoch=2, step=782, val_accuracy=0.95)


def is_sentence(error: MnistTrainerError) -> bool:
    text = str(error)
    return text.endswith(".") and "\n" not in text and "Traceback" not in text and len(text) > 20


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("/srv/class", Path("/srv/class")),
        ("~/class", Path.home() / "class"),
        ("class", Path.cwd() / "class"),
        ("  ", Path.home() / "mnist-trainer"),
        (None, Path.home() / "mnist-trainer"),
    ],
)
def test_the_environment_says_where_home_is(value: str | None, expected: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOME_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(HOME_VARIABLE, value)
    assert home_folder() == expected


def test_runs_of_one_second_get_different_ids_and_are_listed_newest_first(home: Path) -> None:
    assert RunFolder.all_ids(home) == []
    (home / "runs" / "2001-01-01_00-00-00").mkdir(parents=True)  # without config.json it is no run yet
    ids = [RunFolder.create(home, CONFIG).id for _ in range(4)]
    assert len(set(ids)) == 4
    assert RunFolder.all_ids(home) == ids[::-1]
    assert [RunFolder.find(home, run_id).path for run_id in ids] == [home / "runs" / run_id for run_id in ids]


def test_settings_and_state_come_back_as_they_were(home: Path, folder: RunFolder) -> None:
    state = RunState("diverged", "Größer als ½ – zu groß.", 0.05, "CPU", 12.5, 321, 2, 2.25, 0.1234, processes=3)
    folder.write_state(state)
    again = RunFolder.find(home, folder.id)
    assert again.read_config() == CONFIG
    assert again.read_state() == state
    assert not again.read_state().is_live


@pytest.mark.parametrize("run_id", ["../../etc/passwd", "..", ".", "", "a/b", "/etc", "a\\b", "a\0b", "a\n", "unknown"])
def test_an_id_that_names_no_run_is_refused(home: Path, folder: RunFolder, run_id: str) -> None:
    with pytest.raises(RunNotFoundError, match="There is no run"):
        RunFolder.find(home, run_id)


def test_no_id_leads_out_of_the_runs(home: Path, folder: RunFolder) -> None:
    outside = folder.path.rename(home / "elsewhere")
    (home / "runs" / "inside").mkdir()
    for run_id in ("../elsewhere", "inside/../../elsewhere", str(outside)):
        with pytest.raises(RunNotFoundError):
            RunFolder.find(home, run_id)


def test_an_id_longer_than_a_file_name_is_refused(home: Path, folder: RunFolder) -> None:
    with pytest.raises(RunNotFoundError) as caught:
        RunFolder.find(home, "a" * 300)
    assert len(str(caught.value)) < 200


def test_a_newer_format_is_refused_with_what_to_do(folder: RunFolder) -> None:
    values = json.loads((folder.path / "config.json").read_text())
    (folder.path / "config.json").write_text(json.dumps(values | {"format": 3}))
    with pytest.raises(RunFolderError, match=r"is of format 3; this version reads up to 2\. Update MNIST Trainer"):
        folder.read_config()


@pytest.mark.parametrize("damage", [b"garbage", b"\x00\xff\xfe", b"", b"{", b"[1, 2]", b'"text"', b"null", None])
@pytest.mark.parametrize("name", ["config.json", "state.json"])
def test_a_damaged_settings_or_state_file_is_a_sentence(folder: RunFolder, name: str, damage: bytes | None) -> None:
    path, read = folder.path / name, folder.read_config if name == "config.json" else folder.read_state
    path.write_bytes(path.read_bytes()[:-9] if damage is None else damage)
    with pytest.raises(RunFolderError, match=folder.id) as caught:
        read()
    assert is_sentence(caught.value)
    path.unlink()
    with pytest.raises(RunFolderError, match=f"{name} is missing"):
        read()


@pytest.mark.parametrize(
    "settings", [None, [], {"epochs": "five"}, {"epochs": 0}, {"learning_rate": -1.0}, {"momentum": 0.9}]
)
def test_settings_that_cannot_be_are_a_sentence(folder: RunFolder, settings: object) -> None:
    (folder.path / "config.json").write_text(json.dumps({"format": 1, "settings": settings}))
    with pytest.raises(RunFolderError, match="damaged settings") as caught:
        folder.read_config()
    assert is_sentence(caught.value)


def test_history_comes_back_as_it_was_written(home: Path, folder: RunFolder) -> None:
    history = History()
    RunFolder.find(home, folder.id).read_history(history)
    snapshot = history.snapshot()
    columns = [snapshot.losses, snapshot.accuracies, snapshot.seconds]
    np.testing.assert_allclose(columns, np.transpose(ROWS), rtol=1e-5)
    assert snapshot.epochs == (EPOCH,)


def test_only_what_is_new_is_read_and_a_half_written_line_waits(folder: RunFolder) -> None:
    reader, history = RunFolder(folder.path), History()
    reader.read_history(history)
    steps_file = (folder.path / "steps.csv").open("a")
    with steps_file:
        steps_file.write("4,0.25,0.9")
        steps_file.flush()
        reader.read_history(history)
        assert history.snapshot().steps == 3
        steps_file.write("5,0.04\n5,0.125,")
        steps_file.flush()
        reader.read_history(history)
        assert history.snapshot().steps == 4
        steps_file.write("1,0.05\n")
    reader.read_history(history)
    reader.read_history(history)
    np.testing.assert_allclose(history.snapshot().losses, [2.3, 1.75, 0.5, 0.25, 0.125])
    np.testing.assert_allclose(history.snapshot().accuracies, [0.125, 0.5, 0.875, 0.95, 1])
    assert history.snapshot().epochs == (EPOCH,)


@pytest.mark.parametrize("name", ["steps.csv", "epochs.csv"])
@pytest.mark.parametrize("line", ["garbage\n", "4,0.25\n", "4,x,0.9,0.1\n", ",,,\n", "\x00\x00\x00\n"])
def test_a_damaged_line_of_history_is_a_sentence(folder: RunFolder, name: str, line: str) -> None:
    with (folder.path / name).open("a") as file:
        file.write(line)
    with pytest.raises(RunFolderError, match="damaged history") as caught:
        folder.read_history(History())
    assert is_sentence(caught.value)


def test_a_damaged_history_is_told_each_time_it_is_read(folder: RunFolder) -> None:
    with (folder.path / "steps.csv").open("a") as file:
        file.write("garbage\n")
    history = History()
    for _ in range(2):
        with pytest.raises(RunFolderError, match="damaged history"):
            folder.read_history(history)


def test_an_epoch_is_never_read_before_its_steps(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    # As if the run, in another process, finished its next epoch between the reading of the two files.
    reader, read, history = RunFolder(folder.path), RunFolder._new_lines, History()
    names = list[str]()

    def read_and_let_it_train_on(self: RunFolder, name: str, columns: Sequence[str]) -> list[bytes]:
        lines = read(self, name, columns)
        if not names:
            folder.append_steps(4, ROWS)
            folder.append_epoch(EpochEnd(2, 6, 0.3, 0.9, 0.2, 0.92, 3.0))
        names.append(name)
        return lines

    monkeypatch.setattr(RunFolder, "_new_lines", read_and_let_it_train_on)
    reader.read_history(history)
    assert len(names) == 2
    assert all(epoch.step <= history.snapshot().steps for epoch in history.snapshot().epochs)


def test_weights_come_back_bit_for_bit_on_the_cpu(home: Path, folder: RunFolder) -> None:
    assert folder.load_checkpoint() is None
    assert not folder.has_checkpoint
    saved = checkpoint()
    folder.save_checkpoint(saved)
    loaded = RunFolder.find(home, folder.id).load_checkpoint()
    assert loaded is not None
    assert (loaded.epoch, loaded.step, loaded.val_accuracy) == (2, 782, 0.95)
    assert all(torch.equal(loaded.weights[name], tensor) for name, tensor in saved.weights.items())
    assert {str(tensor.device) for tensor in loaded.weights.values()} == {"cpu"}
    newer = checkpoint()
    folder.save_checkpoint(newer)
    again = folder.load_checkpoint()
    assert again is not None
    assert torch.equal(again.weights["linear1.weight"], newer.weights["linear1.weight"])
    assert not list(folder.path.glob("*.part"))


class _Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["bare pickle", "torch file", "among the weights"])
def test_code_in_a_checkpoint_is_refused_and_does_not_run(folder: RunFolder, kind: str, tmp_path: Path) -> None:
    payload, path = _Payload(tmp_path / "owned"), folder.path / "checkpoint.pt"
    if kind == "bare pickle":
        path.write_bytes(pickle.dumps(payload, protocol=2))
    else:
        weights = {"linear1.weight": payload}
        torch.save(payload if kind == "torch file" else {"format": 1, "weights": weights, "epoch": 1}, path)
    with pytest.raises(RunFolderError, match=r"checkpoint\.pt") as caught:
        folder.load_checkpoint()
    assert is_sentence(caught.value)
    assert not payload.path.exists()


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_checkpoint_is_refused(folder: RunFolder, kept: float) -> None:
    folder.save_checkpoint(checkpoint())
    content = (folder.path / "checkpoint.pt").read_bytes()
    (folder.path / "checkpoint.pt").write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(RunFolderError, match="cannot be read") as caught:
        folder.load_checkpoint()
    assert is_sentence(caught.value)


@pytest.mark.parametrize(
    "values", [{}, [], {"format": 3}, {"weights": None}, {"weights": {"linear1.weight": 3}}, {"format": "new"}]
)
def test_a_file_of_another_kind_is_no_checkpoint(folder: RunFolder, values: object) -> None:
    if isinstance(values, dict) and values:
        values = {"format": 1, "weights": checkpoint().weights, "epoch": 1, "step": 1, "val_accuracy": None} | values
    torch.save(values, folder.path / "checkpoint.pt")
    with pytest.raises(RunFolderError, match=r"damaged, or of a newer format") as caught:
        folder.load_checkpoint()
    assert is_sentence(caught.value)


def test_a_run_is_live_only_while_a_process_holds_its_lock(home: Path, folder: RunFolder) -> None:
    assert folder.read_state().status == "interrupted"
    command = [sys.executable, "-c", HOLD_LOCK, str(folder.path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert folder.read_state().status == "queued"
        assert RunFolder.find(home, folder.id).read_state().is_live
        holder.kill()
        holder.wait(timeout=30)
    state = folder.read_state()
    assert state.status == "interrupted"
    assert state.message == "The program ended before this run's turn came."
    assert not state.is_live


def test_a_home_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.write_text("a file")
    with pytest.raises(RunFolderError, match=HOME_VARIABLE) as caught:
        RunFolder.create(home, CONFIG)
    assert str(home) in str(caught.value)
    assert is_sentence(caught.value)


def test_a_home_that_is_a_file_is_not_a_traceback_when_runs_are_listed(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    with pytest.raises(RunFolderError, match="MNIST_TRAINER_HOME"):
        RunFolder.all_ids(tmp_path / "home")


@pytest.mark.parametrize("values", [{"status": 3}, {"test_accuracy": "high"}, {"message": None}])
def test_a_state_with_values_of_the_wrong_kind_is_damaged(folder: RunFolder, values: dict[str, object]) -> None:
    state = json.loads((folder.path / "state.json").read_text()) | values
    (folder.path / "state.json").write_text(json.dumps(state))
    with pytest.raises(RunFolderError, match=r"state\.json is damaged"):
        folder.read_state()


def test_a_folder_copied_by_hand_may_have_any_name_and_keeps_its_place(home: Path, folder: RunFolder) -> None:
    newer = RunFolder.create(home, TrainConfig())
    copied = home / "runs" / "zz, my run (2)"
    shutil.copytree(folder.path, copied)
    values = json.loads((copied / "config.json").read_text()) | {"created_at": "2020-01-01T00:00:00+00:00"}
    (copied / "config.json").write_text(json.dumps(values))
    assert RunFolder.all_ids(home) == [newer.id, folder.id, copied.name]
    assert RunFolder.find(home, copied.name).read_config() == folder.read_config()
