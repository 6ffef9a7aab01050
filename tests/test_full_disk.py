"""A disk that is full, or turned read-only: the run waits, says so, and goes on when it can."""

import errno
import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from mnist_trainer import trainer
from mnist_trainer.config import TrainConfig
from mnist_trainer.errors import RunFolderError
from mnist_trainer.run import Run
from mnist_trainer.runs import RunManager
from mnist_trainer.store import RunFolder
from tests.running import assert_the_same, ended, has_epochs, has_steps, until

CONFIG = TrainConfig(device="cpu", epochs=15, batch_size=500, hidden_size=64, optimizer="Adam", learning_rate=0.002)


@pytest.fixture
def small_disk(tmp_path: Path, mnist_root: Path) -> Iterator[Path]:
    """A data folder on a disk of 2 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("a small disk takes `mount`, which is not here")
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    (disk / "data").symlink_to(mnist_root, target_is_directory=True)
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """Leave no room; remove the file to have it again."""
    path = disk / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return path


def paused_for_room(run: Run) -> bool:
    return run.state.status == "paused" and "cannot be written (No space left on device)" in run.state.message


def test_a_full_disk_pauses_the_run_and_with_room_it_goes_on_as_if_nothing_had_been(
    small_disk: Path, runs: RunManager
) -> None:
    expected = ended(runs.start(CONFIG))
    manager = RunManager(small_disk)
    run = manager.start(CONFIG)
    for epochs in (1, 5):
        until(partial(has_epochs, run, epochs))
        filler = fill(small_disk)
        until(lambda: paused_for_room(run))
        assert "the run then goes on by itself" in run.state.message
        steps, seconds = run.snapshot().steps, run.seconds
        kept = RunFolder(run.folder.path).load_checkpoint()
        assert kept
        assert kept.epoch >= len(run.folder.read_epochs()) >= epochs  # whole, and none is lost
        filler.unlink()
        until(partial(has_steps, run, steps + 1))
        assert (run.state.status, run.state.message) == ("running", "")
        assert run.seconds < seconds + 1  # waiting is not training
    assert_the_same(ended(run), expected)
    statuses = [change.status for change in run.state.changes]
    assert statuses == ["queued", "running", "paused", "running", "paused", "running", "finished"]
    manager.shutdown()


def test_a_run_that_waits_for_room_can_be_stopped_and_resumed_later(small_disk: Path, runs: RunManager) -> None:
    manager = RunManager(small_disk)
    run = manager.start(CONFIG)
    until(lambda: run.snapshot().epochs)
    filler = fill(small_disk)
    until(lambda: paused_for_room(run))
    run.request_stop()
    assert ended(run).state.status == "stopped"
    assert "It was stopped while it could not be kept" in run.state.message
    with pytest.raises(RunFolderError):
        manager.start(CONFIG)  # nor is there room for another
    filler.unlink()
    assert_the_same(ended(manager.resume(run.id)), ended(runs.start(CONFIG)))
    manager.shutdown()


@pytest.mark.parametrize("name", ["append_steps", "append_epoch", "save_checkpoint", "write_state", "write_rates"])
def test_whatever_cannot_be_written_is_waited_for(runs: RunManager, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    # What a small disk shows by chance, one after the other, wherever tests may run.
    config = TrainConfig(device="cpu", epochs=3, batch_size=500)
    expected = ended(runs.start(config))
    write = getattr(RunFolder, name)
    failures = [OSError(number, os.strerror(number)) for number in (errno.ENOSPC, errno.EROFS, errno.EACCES)]

    def fails_at_first(*args: object, **options: object) -> None:
        if failures:
            raise failures.pop()
        write(*args, **options)

    monkeypatch.setattr(trainer, "RETRY_SECONDS", 0.01)
    run = runs.start(config)
    assert run.control
    run.control.pause()
    until(lambda: run.state.status == "paused")
    monkeypatch.setattr(RunFolder, name, fails_at_first)
    if name == "write_rates":
        run.control.set_learning_rate(0.25)
        until(lambda: not failures)
        run.control.set_learning_rate(0.5)
    run.control.go_on()
    assert ended(run).state.status == "finished"
    assert failures == []
    if name != "write_rates":
        assert_the_same(run, expected)


def test_a_folder_that_is_gone_fails_the_run(runs: RunManager) -> None:
    run = runs.start(TrainConfig(device="cpu", epochs=1000))
    until(lambda: run.snapshot().steps)
    run.folder.path.rename(run.folder.path.with_name("elsewhere"))
    assert ended(run).state.status == "failed"
    assert "Is the folder there" in run.state.message
