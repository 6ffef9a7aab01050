"""A run that was stopped, killed or continued ends as one that never stopped: bit for bit."""

import dataclasses
import json
import multiprocessing
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from mnist_trainer import devices, trainer
from mnist_trainer.config import OPTIMIZERS, TrainConfig
from mnist_trainer.errors import ConfigError, MnistTrainerError, RunBusyError, RunFolderError, RunNotFoundError
from mnist_trainer.history import RateChange
from mnist_trainer.model import MnistModel
from mnist_trainer.run import Run
from mnist_trainer.runs import RunManager
from mnist_trainer.store import RunFolder
from tests.running import assert_the_same, ended, has_epochs, has_steps, stopped_after, until, weights, without_times

KILLS = 20
CONFIG = TrainConfig(device="cpu", epochs=4, batch_size=250, optimizer="Adam", learning_rate=0.002)
LONG = TrainConfig(device="cpu", epochs=1000)
# A process that has PyTorch already, where the system can give one: twenty kills take a minute, not four.
processes: Any = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
processes.set_forkserver_preload(["mnist_trainer.runs", "torchvision.datasets"])


def train(home: Path, resumed: str, config: TrainConfig) -> None:
    """What a process does that may be killed."""
    torch.set_num_threads(1)
    trainer.FETCH_SECONDS = 0.01  # so that kills come at many lengths of the history, however fast the machine
    manager = RunManager(home)
    run = manager.resume(resumed) if resumed else manager.start(config)
    run.ended.wait()


def started(home: Path, resumed: str = "", config: TrainConfig = CONFIG) -> BaseProcess:
    process: BaseProcess = processes.Process(target=train, args=(home, resumed, config))
    process.start()
    return process


def has_runs(home: Path, count: int) -> bool:
    return len(RunFolder.all_ids(home)) == count


def killed_when(condition: Callable[[], object], home: Path, config: TrainConfig = CONFIG) -> Run:
    """A run whose process was killed once `condition` held."""
    process = started(home, config=config)
    until(condition)
    process.kill()
    process.join(60)
    return RunManager(home).get("latest")


@pytest.fixture(scope="module")
def uninterrupted(module_home: Path) -> Run:
    return ended(RunManager(module_home).start(CONFIG))


def test_twenty_kills_at_random_moments_change_nothing(home: Path, uninterrupted: Run) -> None:
    chance = random.Random(os.urandom(8))
    duration = uninterrupted.seconds
    lengths = set[int]()
    for number in range(KILLS):
        process = started(home)
        until(partial(has_runs, home, number + 1))
        if number % 4:  # while it trains; otherwise, most likely, before
            until(lambda: RunManager(home).get("latest").snapshot().steps)
        process.join(chance.uniform(0, duration))
        process.kill()
        process.join(60)
        manager = RunManager(home)
        run = manager.get("latest")
        kept = run.folder.load_checkpoint()
        assert (kept.epoch if kept else 0) >= len(run.epochs)
        assert not run.problem
        if run.state.status != "finished":  # the kill came too late
            assert run.state.status == "interrupted"
            lengths.add(run.snapshot().steps)
            run = ended(manager.resume(run.id))
        assert run.state.status == "finished"
        assert not list(run.folder.path.glob("*.part"))
        assert_the_same(run, uninterrupted)
    assert len(lengths) > KILLS / 4  # at moments that differ


def test_a_run_killed_again_and_again_comes_to_its_end(home: Path, uninterrupted: Run) -> None:
    run = killed_when(lambda: any(home.glob("runs/*/checkpoint.pt")), home)
    for epoch in (2, 3):
        process = started(home, run.id)
        until(partial(has_epochs, run, epoch))
        process.kill()
        process.join(60)
    assert_the_same(ended(RunManager(home).resume(run.id)), uninterrupted)
    changes = RunManager(home).get(run.id).state.changes
    assert [change.status for change in changes] == [
        *3 * ["queued", "running", "interrupted"],
        "queued",
        "running",
        "finished",
    ]
    assert [change.at for change in changes] == sorted(change.at for change in changes)


@pytest.mark.parametrize(
    "damage", ["no row for the epoch", "half a line", "zeros after a power cut", "parts left", "lines"]
)
def test_what_a_kill_may_leave_behind_is_mended(home: Path, uninterrupted: Run, damage: str) -> None:
    run = killed_when(lambda: any(home.glob("runs/*/checkpoint.pt")), home)
    checkpoint = run.folder.load_checkpoint(with_training=True)
    assert checkpoint
    steps, epochs = run.folder.path / "steps.csv", run.folder.path / "epochs.csv"
    if damage == "no row for the epoch":
        epochs.write_bytes(b"".join(epochs.read_bytes().splitlines(keepends=True)[: checkpoint.epoch]))
    elif damage == "half a line":
        steps.write_bytes(steps.read_bytes() + b"9999,0.1")
    elif damage == "zeros after a power cut":
        steps.write_bytes(steps.read_bytes() + 4096 * b"\0")
    elif damage == "lines":
        steps.write_bytes(steps.read_bytes() + b"\0\0\0\n12,0.5,0.5,3.0\n")
        epochs.write_bytes(epochs.read_bytes() + b"torn\n")
        (run.folder.path / "about.json").write_bytes(b"")
    else:
        (run.folder.path / "checkpoint.pt.123.part").write_bytes(b"half")
    manager = RunManager(home)
    manager.get(run.id).snapshot()  # as somebody who looked at it first
    resumed = ended(manager.resume(run.id))
    resumed.set_about("")
    assert_the_same(resumed, uninterrupted)
    assert not list(run.folder.path.glob("*.part"))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("steps", [1, 130, 200, 207])
def test_a_stop_in_mid_epoch_changes_nothing(runs: RunManager, optimizer: str, steps: int) -> None:
    config = dataclasses.replace(CONFIG, epochs=2, optimizer=optimizer, learning_rate=0.01)
    run = runs.start(config)
    assert run.control
    run.control.pause()
    until(lambda: run.state.status == "paused" or run.ended.is_set())
    while run.snapshot().steps < steps:
        before = run.snapshot().steps
        run.control.step()
        until(partial(has_steps, run, before + 1))
    run.request_stop()
    assert ended(run).snapshot().steps == weights(run).step >= steps
    assert_the_same(ended(runs.resume(run.id)), ended(runs.start(config)))


def test_a_stop_during_validation_changes_nothing(
    runs: RunManager, uninterrupted: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(recorder: trainer._Recorder) -> None:
        recorder.run.request_stop()
        raise trainer._StoppedError

    with monkeypatch.context() as patch:
        patch.setattr(trainer._Recorder, "heed_stop", stopped)
        run = ended(runs.start(CONFIG))
    assert (run.snapshot().steps, run.epochs, weights(run).epoch) == (200, (), 0)
    assert_the_same(ended(runs.resume(run.id)), uninterrupted)


def test_the_articles_pipeline_resumes_as_exactly(runs: RunManager) -> None:
    config = TrainConfig(device="cpu", epochs=1, batch_size=1000, pipeline="DataLoader")
    run = stopped_after(runs.start(config), 5)
    assert run.snapshot().steps < config.total_steps
    on_device = dataclasses.replace(config, pipeline="on-device")
    assert_the_same(ended(runs.resume(run.id)), ended(runs.start(on_device)))


def test_a_learning_rate_moved_before_a_kill_is_moved_again(home: Path, runs: RunManager) -> None:
    rates = [RateChange(130, 0.02), RateChange(430, 0.0005)]  # epochs 1 and 3

    def with_rates() -> Run:
        """A run that has yet to come to these changes, as one has that was resumed."""
        busy = runs.start(LONG)
        run = runs.start(CONFIG)
        run.folder.write_rates(rates)
        runs.stop(busy)
        return run

    expected = ended(with_rates())
    assert expected.snapshot().rates == tuple(rates)
    run = with_rates()
    until(lambda: run.snapshot().steps > 430 or run.ended.is_set())
    run.request_stop()
    assert_the_same(ended(runs.resume(ended(run).id)), expected)
    # Killed after the second change, before the checkpoint that knows of it: copied, as a kill leaves it.
    folder = shutil.copytree(expected.folder.path, home / "runs" / "killed")
    half = runs.get("killed")
    (folder / "checkpoint.pt").unlink()
    (folder / "state.json").write_text(json.dumps(dataclasses.asdict(half.state) | {"status": "running"}))
    assert runs.get("killed").state.status == "interrupted"
    assert_the_same(ended(runs.resume("killed")), expected)


def test_a_learning_rate_moved_by_hand_is_part_of_the_history(runs: RunManager) -> None:
    run = runs.start(dataclasses.replace(CONFIG, epochs=100))
    assert run.control
    until(lambda: run.snapshot().steps)
    run.control.set_learning_rate(0.01)
    until(lambda: run.learning_rate == 0.01)
    run.control.pause()
    until(lambda: run.state.status == "paused")
    run.control.set_learning_rate(0.005)
    run.control.set_learning_rate(0.004)  # only the last one counts
    until(lambda: run.learning_rate == 0.004)
    first, second = run.snapshot().rates
    assert 0 < first.step < second.step == run.snapshot().steps
    assert run.folder.read_rates() == (first, second)
    run.request_stop()
    kept = ended(run).folder.load_checkpoint(with_training=True)
    assert kept
    assert kept.training
    assert kept.training.optimizer["param_groups"][0]["lr"] == 0.004
    with pytest.raises(ConfigError, match="Learning rate must be a number above 0"):
        run.control.set_learning_rate(-1)


def test_a_change_after_a_resume_takes_the_place_of_those_to_come(runs: RunManager) -> None:
    busy, run = runs.start(LONG), runs.start(CONFIG)
    run.folder.write_rates([RateChange(700, 0.9)])
    assert run.control
    run.control.pause()
    runs.stop(busy)
    until(lambda: run.state.status == "paused")
    run.control.set_learning_rate(0.003)
    run.control.go_on()
    assert ended(run).snapshot().rates == (RateChange(0, 0.003),)


@pytest.mark.parametrize("learning_rate", [None, 0.0005])
def test_to_continue_gives_a_new_run_and_what_a_longer_one_gives(
    runs: RunManager, uninterrupted: Run, learning_rate: float | None
) -> None:
    parent = ended(runs.start(dataclasses.replace(CONFIG, epochs=2)))
    before = {path.name: path.read_bytes() for path in parent.folder.path.iterdir()}
    run = ended(runs.continue_run(parent.id, 2, learning_rate))
    assert (run.origin.parent, run.origin.parent_step, run.config.epochs) == (parent.id, 400, 4)
    assert before == {path.name: path.read_bytes() for path in parent.folder.path.iterdir()}
    if learning_rate is None:
        assert_the_same(run, uninterrupted)
    else:
        assert run.snapshot().rates == (RateChange(400, learning_rate),)
        assert without_times(run) != without_times(uninterrupted)
        again = ended(runs.continue_run(run.id, 1))  # its last learning rate goes on
        assert (again.config.epochs, again.learning_rate) == (5, learning_rate)


def test_what_cannot_be_resumed_is_refused_in_a_sentence(runs: RunManager, uninterrupted: Run) -> None:
    live = runs.start(LONG)
    until(lambda: live.state.status == "running")
    with pytest.raises(RunBusyError, match="is running already"):
        runs.resume(live.id)
    with pytest.raises(RunBusyError, match="Stop it first, or wait"):
        runs.continue_run(live.id, 1)
    with pytest.raises(RunBusyError, match="hands of another program"):
        RunManager(runs.home).delete(live.id)
    stopped_after(live, 1)
    diverged = ended(runs.start(dataclasses.replace(LONG, learning_rate=1e8)))
    with pytest.raises(ConfigError, match="Continue it with a smaller learning rate"):
        runs.resume(diverged.id)
    finished = ended(runs.continue_run(diverged.id, 1, 0.1))
    assert finished.state.status == "finished"
    with pytest.raises(ConfigError, match="is finished\\. Continue it for more epochs"):
        runs.resume(finished.id)
    for epochs in (0, -1, 1.5, True, 10**6):
        with pytest.raises(ConfigError):
            runs.continue_run(finished.id, epochs)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Learning rate"):
        runs.continue_run(finished.id, 1, float("nan"))
    with pytest.raises(RunNotFoundError):
        runs.resume("../" + finished.id)
    assert len(runs.all()) == 3


def test_a_run_with_a_hole_before_its_checkpoint_is_refused_and_left_as_it_is(runs: RunManager) -> None:
    run = stopped_after(runs.start(LONG), 500)
    steps = run.folder.path / "steps.csv"
    lines = steps.read_bytes().splitlines(keepends=True)
    steps.write_bytes(b"".join(lines[:100] + lines[101:]))
    before = {path.name: path.read_bytes() for path in run.folder.path.iterdir() if path.name != "state.json"}
    for attempt in (runs.resume, lambda run_id: runs.continue_run(run_id, 1)):
        with pytest.raises(MnistTrainerError, match=r"damaged"):
            attempt(run.id)
    assert before == {path.name: path.read_bytes() for path in run.folder.path.iterdir() if path.name != "state.json"}
    assert not runs.get(run.id).is_live


def test_a_run_of_another_machines_gpu_goes_on_on_the_cpu(runs: RunManager, uninterrupted: Run) -> None:
    run = stopped_after(runs.start(CONFIG), 100)
    config = json.loads((run.folder.path / "config.json").read_text())
    config["settings"]["device"] = "cuda:0"
    (run.folder.path / "config.json").write_text(json.dumps(config))
    state = json.loads((run.folder.path / "state.json").read_text()) | {"device_label": "NVIDIA H200, 139 GiB"}
    (run.folder.path / "state.json").write_text(json.dumps(state))
    other = RunManager(runs.home)
    assert other.get(run.id).config.device == "cuda:0"  # it opens as it is
    resumed = ended(other.resume(run.id))
    assert (resumed.config.device, resumed.state.device_label) == ("cpu", "CPU")
    assert_the_same(resumed, uninterrupted)
    other.shutdown()


def test_one_who_follows_a_run_sees_it_rolled_back(home: Path, runs: RunManager) -> None:
    run = killed_when(lambda: any(home.glob("runs/*/checkpoint.pt")), home)
    follower = RunManager(home).get(run.id)
    seen = follower.snapshot().steps
    assert seen >= 200
    resumed = ended(runs.resume(run.id))
    follower.refresh()
    assert without_times(follower) == without_times(resumed)


def test_a_run_of_the_first_format_opens_and_can_be_continued(home: Path, runs: RunManager) -> None:
    folder = home / "runs" / "2026-11-01_10-00-00"
    folder.mkdir(parents=True)
    settings = TrainConfig(device="cpu", epochs=1, batch_size=25_000).to_json()
    (folder / "config.json").write_text(json.dumps({"format": 1, "created_at": "2026-11-01", "settings": settings}))
    (folder / "state.json").write_text(json.dumps({"status": "stopped", "message": "", "seconds": 1.5}))
    (folder / "steps.csv").write_text("step,loss,accuracy,seconds\n1,2.30259,0.125,0.5000\n2,2.25,0.25,1.0\n")
    (folder / "epochs.csv").write_text(
        "epoch,step,train_loss,train_accuracy,val_loss,val_accuracy,seconds\n1,2,2.2,0.1,2.1,0.2,1.5\n"
    )
    kept = {"weights": MnistModel().state_dict(), "epoch": 1, "step": 2, "val_accuracy": 0.2}
    torch.save({"format": 1, **kept}, folder / "checkpoint.pt")
    run = runs.get(folder.name)
    assert (run.state.status, run.snapshot().steps, run.best_val_accuracy) == ("stopped", 2, 0.2)
    with pytest.raises(ConfigError, match="Continue it instead"):
        runs.resume(run.id)
    assert runs.get(run.id).state.status == "stopped"
    continued = ended(runs.continue_run(run.id, 1))
    assert (continued.state.status, continued.snapshot().steps) == ("finished", 4)


def test_what_a_run_had_come_to_stays_until_it_trains_again(runs: RunManager, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stopped_after(runs.start(LONG), 400)
    figures = ("seconds", "steps", "test_loss", "test_accuracy")
    before = {name: getattr(run.state, name) for name in figures}
    assert all(value is not None for value in before.values())
    with monkeypatch.context() as patch:  # the disk is full just now
        patch.setattr(RunFolder, "write_config", lambda *_: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
        with pytest.raises(RunFolderError, match="cannot be written"):
            runs.resume(run.id)
    assert runs.get(run.id).state == run.state
    (run.folder.path / "learning_rates.csv").write_text("garbage")
    with pytest.raises(RunFolderError, match=r"learning_rates\.csv"):
        runs.resume(run.id)
    assert runs.get(run.id).state == run.state
    (run.folder.path / "learning_rates.csv").unlink()
    busy = runs.start(LONG)
    resumed = runs.resume(run.id)
    runs.stop(resumed)  # withdrawn
    assert {name: getattr(runs.get(run.id).state, name) for name in figures} == before
    assert runs.get(run.id).state.status == "stopped"
    runs.stop(busy)


def test_a_run_goes_on_with_as_many_threads_as_it_had(runs: RunManager, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(CONFIG, hidden_size=512, epochs=1)
    monkeypatch.setattr(devices, "_all_threads", 2)
    expected, run = ended(runs.start(config)), stopped_after(runs.start(config), 5)
    assert run.state.threads == 2
    monkeypatch.setattr(devices, "_all_threads", 1)
    assert_the_same(ended(runs.resume(run.id)), expected)
    torch.set_num_threads(1)


def test_a_pause_during_validation_waits_there_and_changes_nothing(
    runs: RunManager, uninterrupted: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    heed = trainer._Recorder.heed_in_validation
    paused = list[int]()

    def pause_once(recorder: trainer._Recorder) -> None:
        if not paused:
            paused.append(recorder.steps)
            recorder.control.pause()
        heed(recorder)

    monkeypatch.setattr(trainer._Recorder, "heed_in_validation", pause_once)
    run = runs.start(CONFIG)
    until(lambda: run.state.status == "paused")
    assert (run.snapshot().steps, run.epochs) == (200, ())
    assert run.control
    run.control.step()  # the whole validation, and one step of training
    until(lambda: run.snapshot().steps == 201)
    assert len(run.epochs) == 1
    assert run.state.status == "paused"
    run.control.go_on()
    assert_the_same(ended(run), uninterrupted)


def test_each_single_step_is_on_the_disk_itself(runs: RunManager, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runs.start(LONG)
    assert run.control
    run.control.pause()
    until(lambda: run.state.status == "paused")
    synced = list[int]()
    sync = RunFolder.sync_steps

    def note(folder: RunFolder) -> None:
        sync(folder)
        synced.append(len((folder.path / "steps.csv").read_bytes().splitlines()) - 1)

    monkeypatch.setattr(RunFolder, "sync_steps", note)
    for steps in range(run.snapshot().steps + 1, run.snapshot().steps + 4):
        run.control.step()
        until(partial(has_steps, run, steps))
        until(lambda: synced and synced[-1] == run.snapshot().steps)


def test_less_than_a_second_of_history_is_ever_off_the_disk() -> None:
    assert trainer.FETCH_SECONDS + trainer.SYNC_SECONDS < 1


def test_a_checkpoint_that_cannot_be_read_is_a_sentence(runs: RunManager) -> None:
    run = stopped_after(runs.start(LONG), 400)
    (run.folder.path / "checkpoint.pt").write_bytes(b"garbage")
    for attempt in (runs.resume, lambda run_id: runs.continue_run(run_id, 1)):
        with pytest.raises(RunFolderError, match=r"checkpoint\.pt is damaged"):
            attempt(run.id)
    assert runs.get(run.id).state.status == "stopped"
