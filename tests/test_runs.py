"""Runs from start to every end they may have, on real threads and in real processes."""

import dataclasses
import gc
import io
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock

from mnist_trainer import data, devices, trainer
from mnist_trainer.advice import STALL_STEPS
from mnist_trainer.archive import export_run
from mnist_trainer.config import AT_ONCE_VARIABLE, PIPELINES, TrainConfig
from mnist_trainer.errors import (
    ConfigError,
    DeviceUnavailableError,
    RunBusyError,
    RunFolderError,
    RunNotFoundError,
)
from mnist_trainer.model import MnistModel
from mnist_trainer.prediction import model_of
from mnist_trainer.run import Run
from mnist_trainer.runs import KEPT_IN_MEMORY, RunManager
from mnist_trainer.state import Checkpoint, RunState
from mnist_trainer.store import RunFolder, is_held
from tests.running import are_equal, ended, has_steps, stopped_after, until, weights

if os.name != "nt":
    import fcntl

SHORT = TrainConfig(device="cpu", epochs=1, batch_size=1000)
LONG = TrainConfig(device="cpu", epochs=1000)


def accuracy_on_test_images(checkpoint: Checkpoint, mnist: data.Mnist) -> float:
    outputs = model_of(checkpoint)(mnist.test_images.float() / 255)
    return int((outputs.argmax(dim=1) == mnist.test_labels).sum()) / 10_000


@contextmanager
def command_line(home: Path, epochs: int) -> Iterator[subprocess.Popen[bytes]]:
    """`train` in a process of its own, once its run can be found."""
    command = [sys.executable, "-m", "mnist_trainer", "train", "--device", "cpu", "--epochs", str(epochs)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            until(lambda: RunFolder.all_ids(home))
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def finished(module_home: Path) -> Run:
    return ended(RunManager(module_home).start(TrainConfig(device="cpu", epochs=2)))


@pytest.fixture(scope="module")
def article_run(module_home: Path) -> tuple[Run, bool]:
    """A run of the article's pipeline, and whether the process's random state is as it was before."""
    torch.rand(1)  # not where another run may have left it
    before = torch.get_rng_state()
    run = ended(RunManager(module_home).start(dataclasses.replace(SHORT, pipeline="DataLoader")))
    return run, torch.equal(before, torch.get_rng_state())


def test_a_run_to_its_end_keeps_what_it_learnt(finished: Run) -> None:
    state, history, checkpoint = finished.state, finished.snapshot(), weights(finished)
    assert (state.status, state.message, state.suggested_learning_rate) == ("finished", "", None)
    assert not finished.is_live
    assert state.test_accuracy is not None
    assert state.test_accuracy > 0.9
    assert state.test_accuracy * 10_000 == pytest.approx(round(state.test_accuracy * 10_000), abs=1e-6)
    assert history.steps == finished.config.total_steps
    assert [(epoch.epoch, epoch.step) for epoch in history.epochs] == [(1, 391), (2, 782)]
    assert history.epochs[0].train_loss == pytest.approx(float(history.losses[:391].mean()), rel=1e-4)
    assert (checkpoint.epoch, checkpoint.step) == (2, 782)
    assert checkpoint.val_accuracy == history.epochs[-1].val_accuracy
    assert state.seconds is not None
    assert state.seconds >= history.epochs[-1].seconds >= history.seconds[-1] > 0


def test_another_manager_reads_the_same_run_from_its_folder(finished: Run) -> None:
    other = RunManager(finished.folder.path.parents[1]).get(finished.id)
    assert other is not finished
    assert (other.config, other.state) == (finished.config, finished.state)
    for values in ("losses", "accuracies", "seconds"):
        mine, theirs = getattr(finished.snapshot(), values), getattr(other.snapshot(), values)
        np.testing.assert_allclose(theirs, mine, rtol=1e-5, atol=1e-4)
    assert other.snapshot().epochs == finished.snapshot().epochs
    assert are_equal(weights(other), weights(finished))


def test_the_test_accuracy_is_that_of_the_weights_kept(finished: Run, mnist: data.Mnist) -> None:
    assert finished.state.test_accuracy == accuracy_on_test_images(weights(finished), mnist)


def test_one_seed_gives_equal_weights_and_another_does_not(runs: RunManager) -> None:
    first, second = (ended(runs.start(SHORT)) for _ in range(2))
    other = ended(runs.start(dataclasses.replace(SHORT, seed=1)))
    assert first.id != second.id
    assert are_equal(weights(first), weights(second))
    assert np.array_equal(first.snapshot().losses, second.snapshot().losses)
    assert not are_equal(weights(first), weights(other))


def test_both_pipelines_give_equal_weights(runs: RunManager, article_run: tuple[Run, bool]) -> None:
    assert article_run[0].state.status == "finished"
    assert are_equal(weights(ended(runs.start(SHORT))), weights(article_run[0]))


def test_a_run_leaves_the_random_state_of_the_process_alone(runs: RunManager) -> None:
    torch.rand(1)  # not where another run may have left it
    before = torch.get_rng_state()
    ended(runs.start(SHORT))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_articles_pipeline_leaves_the_random_state_alone_too(article_run: tuple[Run, bool]) -> None:
    assert article_run[1]


@pytest.mark.parametrize("fetch_seconds", [0, 0.2])  # measurements and weights are due together, or are not
def test_a_stop_keeps_what_was_learnt(runs: RunManager, monkeypatch: pytest.MonkeyPatch, fetch_seconds: float) -> None:
    monkeypatch.setattr(trainer, "FETCH_SECONDS", fetch_seconds)
    run = runs.start(LONG)
    until(lambda: run.snapshot().epochs)
    run.request_stop()
    assert ended(run).state.status == "stopped"
    assert run.snapshot().steps == weights(run).step < LONG.total_steps
    assert run.state.test_accuracy is not None
    assert run.state.test_accuracy > 0.8
    other = RunManager(runs.home).get(run.id)
    assert other.state == run.state
    assert other.snapshot().steps == weights(other).step == run.snapshot().steps


def test_a_stop_before_the_first_step_keeps_a_run_too(runs: RunManager, monkeypatch: pytest.MonkeyPatch) -> None:
    load, is_asked = data.load_mnist, threading.Event()

    def load_once_asked(root: Path) -> data.Mnist:
        assert is_asked.wait(timeout=30)
        return load(root)

    monkeypatch.setattr(data, "load_mnist", load_once_asked)
    run = runs.start(LONG)
    run.request_stop()
    is_asked.set()
    assert ended(run).state.status == "stopped"
    assert (run.snapshot().steps, weights(run).step, weights(run).trust) == (0, 0, "untrained: guessing")
    assert run.state.test_accuracy == pytest.approx(0.1, abs=0.1)
    assert RunManager(runs.home).get("latest").state == run.state


def test_of_several_runs_one_trains_and_the_others_wait_in_order(runs: RunManager) -> None:
    first, *others = (runs.start(config) for config in (LONG, SHORT, SHORT, SHORT))
    assert runs.training is first
    assert list(runs.waiting) == others
    assert all(run.state.status == "queued" for run in others)
    runs.stop(others[1])  # withdrawn
    assert list(runs.waiting) == [others[0], others[2]]
    assert (others[1].state.status, others[1].snapshot().steps) == ("stopped", 0)
    stopped_after(first, 1)
    for run in (others[0], others[2]):
        assert ended(run).state.status == "finished"
    starts = [run.state.changes[1].at for run in (first, others[0], others[2])]
    assert starts == sorted(starts)
    assert [change.status for change in others[2].state.changes] == ["queued", "running", "finished"]
    assert ended(runs.resume(others[1].id)).state.status == "finished"  # a run that was withdrawn is not lost


def test_as_many_train_at_once_as_was_set(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AT_ONCE_VARIABLE, "2")
    manager = RunManager(home)
    first, second, third = (manager.start(LONG) for _ in range(3))
    until(lambda: first.snapshot().steps and second.snapshot().steps)
    assert manager.waiting == (third,)
    manager.shutdown(timeout_seconds=60)
    assert [run.state.status for run in (first, second)] == ["stopped", "stopped"]


def test_the_second_of_a_pair_trains_beside_the_first_without_a_place_of_its_own(runs: RunManager) -> None:
    earlier = runs.start(LONG)
    first, second = runs.start_pair((LONG, LONG), ("One", "Two"), at_once=True)
    later = runs.start(SHORT)
    assert runs.waiting == (first, second, later)
    stopped_after(earlier, 1)
    until(lambda: has_steps(first, 1) and has_steps(second, 1))
    assert (first.state.status, second.state.status, later.state.status) == ("running", "running", "queued")
    stopped_after(first, 1)
    assert (second.state.status, later.state.status) == ("running", "queued")  # the place is now the second's
    stopped_after(second, 1)
    assert ended(later).state.status == "finished"
    assert [run.name for run in (first, second)] == ["One", "Two"]


@pytest.mark.parametrize("places", [1, 2])
def test_the_second_of_a_pair_follows_the_first_and_nobody_comes_between(home: Path, places: int) -> None:
    manager = RunManager(home, places)
    first, second = manager.start_pair((LONG, SHORT), ("One", "Two"), at_once=False)
    later = manager.start(SHORT)
    until(lambda: has_steps(first, 1))
    assert manager.waiting == (second, later)
    stopped_after(first, 1)
    assert ended(second).state.status == ended(later).state.status == "finished"
    (_, done), (next_begun, _) = ([change.at for change in run.state.changes[1:]] for run in (second, later))
    assert next_begun >= done
    manager.shutdown()


def test_a_pair_waits_until_it_has_the_machine_to_itself(home: Path) -> None:
    manager = RunManager(home, at_once=3)
    earlier = manager.start(LONG)
    first, second = manager.start_pair((SHORT, SHORT), ("One", "Two"), at_once=True)
    later = manager.start(SHORT)
    assert manager.waiting == (first, second, later)
    stopped_after(earlier, 1)
    for run in (first, second, later):
        assert ended(run).state.status == "finished"
    assert later.state.changes[1].at >= max(run.state.changes[-1].at for run in (first, second))
    manager.shutdown()


def test_what_measures_alone_is_refused_while_anything_trains_or_is_measured(runs: RunManager) -> None:
    with runs.quiet(), pytest.raises(RunBusyError, match="A race is being measured"), runs.quiet(alone=True):
        pass
    run = runs.start(LONG)
    until(lambda: has_steps(run, 1))
    with pytest.raises(RunBusyError, match=f"Run {run.id} is running: it would be measured, too"):
        runs.quiet(alone=True).__enter__()
    elsewhere = RunManager(runs.home)  # as another program sees it
    with pytest.raises(RunBusyError, match=f"Run {run.id} is running"):
        elsewhere.quiet(alone=True).__enter__()
    stopped_after(run, 1)
    with runs.quiet(alone=True):
        later = runs.start(SHORT)
        assert later.state.status == "queued"
    assert ended(later).state.status == "finished"


def test_the_second_of_a_pair_begins_though_the_first_was_withdrawn(runs: RunManager) -> None:
    earlier = runs.start(LONG)
    first, second = runs.start_pair((LONG, SHORT), ("One", "Two"), at_once=False)
    runs.stop(first)
    stopped_after(earlier, 1)
    assert ended(second).state.status == "finished"


def test_while_something_is_measured_no_run_begins(runs: RunManager) -> None:
    first, second = runs.start_pair((SHORT, SHORT), ("One", "Two"), at_once=True)
    with runs.quiet():
        later = runs.start(SHORT)
        ended(first), ended(second)
        assert (later.state.status, runs.training) == ("queued", None)
    assert ended(later).state.status == "finished"


def test_a_pair_is_refused_whole(runs: RunManager, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(second: TrainConfig, error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            runs.start_pair((SHORT, second), ("One", "Two"), at_once=True)
        assert RunFolder.all_ids(runs.home) == []
        assert not runs.waiting

    refused(dataclasses.replace(SHORT, device="cuda:99"), DeviceUnavailableError, "cuda:99")
    monkeypatch.setattr(devices, "free_memory", lambda device: 1.5 * SHORT.memory_bytes / devices.USABLE_MEMORY)
    refused(SHORT, ConfigError, "Hidden size 32 needs about")  # one of them would fit
    monkeypatch.setattr("mnist_trainer.runs.MAX_WAITING", 1)
    monkeypatch.setattr(devices, "free_memory", lambda device: 1e12)
    refused(SHORT, RunBusyError, "0 runs are waiting already")
    monkeypatch.setattr("mnist_trainer.runs.MAX_WAITING", 50)
    create = RunFolder.create
    made = list[RunFolder]()

    def create_one(*arguments: Any) -> RunFolder:
        if made:
            raise RunFolderError("no room")
        made.append(create(*arguments))
        return made[0]

    monkeypatch.setattr(RunFolder, "create", create_one)
    refused(SHORT, RunFolderError, "no room")
    assert not made[0].path.exists()


@pytest.mark.parametrize("value", ["0", "many", "-1", "17", "1.5", ""])
def test_a_wrong_number_of_runs_at_once_is_a_sentence(home: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(AT_ONCE_VARIABLE, value)
    with pytest.raises(ConfigError, match="MNIST_TRAINER_RUNS_AT_ONCE must be a whole number from 1 to 16"):
        RunManager(home)


def test_a_queue_has_an_end(runs: RunManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mnist_trainer.runs.MAX_WAITING", 2)
    for _ in range(3):
        runs.start(LONG)
    with pytest.raises(RunBusyError, match="2 runs are waiting already"):
        runs.start(LONG)
    assert len(RunFolder.all_ids(runs.home)) == 3


def test_what_waited_when_the_program_ended_is_found_and_can_be_started(home: Path) -> None:
    manager = RunManager(home)
    first, second = manager.start(LONG), manager.start(SHORT)
    manager.shutdown(timeout_seconds=60)
    assert ended(first).state.status == "stopped"
    later = RunManager(home)
    run = later.get(second.id)
    assert (run.state.status, run.state.message) == ("interrupted", "The program ended before this run's turn came.")
    assert ended(later.resume(run.id)).state.status == "finished"


def test_a_paused_run_takes_single_steps_and_goes_on(runs: RunManager) -> None:
    run = runs.start(LONG)
    assert run.control
    until(lambda: run.snapshot().steps)
    run.control.pause()
    until(lambda: run.state.status == "paused")
    steps, seconds, kept = run.snapshot().steps, run.seconds, weights(run)
    assert kept.step == steps
    loaded = run.folder.load_checkpoint()
    assert loaded
    assert are_equal(loaded, kept)  # a kill now loses nothing
    run.ended.wait(0.3)
    assert run.snapshot().steps == steps
    run.control.step()
    until(lambda: run.snapshot().steps > steps)
    run.ended.wait(0.1)
    assert run.snapshot().steps == weights(run).step == steps + 1
    assert run.seconds < seconds + 0.3  # the pause is not training time
    run.control.go_on()
    until(lambda: run.snapshot().steps > steps + 10)
    run.request_stop()
    statuses = [change.status for change in ended(run).state.changes]
    assert statuses == ["queued", "running", "paused", "running", "stopped"]


def test_a_pause_takes_effect_within_a_step(runs: RunManager, monkeypatch: pytest.MonkeyPatch) -> None:
    on_step = trainer._Recorder.on_step

    def pause_in_the_step(recorder: trainer._Recorder, loss: torch.Tensor) -> None:
        on_step(recorder, loss)
        recorder.control.pause()

    monkeypatch.setattr(trainer._Recorder, "on_step", pause_in_the_step)
    run = runs.start(LONG)
    until(lambda: run.state.status == "paused")
    assert run.snapshot().steps == weights(run).step == 1


def test_a_deleted_run_can_be_put_back_until_the_program_ends(runs: RunManager) -> None:
    run, other = (ended(runs.start(SHORT)) for _ in range(2))
    runs.delete(run.id)
    assert [each.id for each in runs.all()] == [other.id]
    with pytest.raises(RunNotFoundError):
        runs.get(run.id)
    assert runs.deleted == [run.id]
    assert RunManager(runs.home).deleted == []  # another program neither sees nor removes what we may put back
    runs.undelete(run.id)
    assert [each.id for each in runs.all()] == [other.id, run.id]
    assert runs.get(run.id).state == run.state
    assert are_equal(weights(runs.get(run.id)), weights(run))
    runs.delete(run.id)
    runs.shutdown()
    assert sorted(path.name for path in runs.home.iterdir()) == ["data", "runs"]
    assert [path.name for path in (runs.home / "runs").iterdir()] == [other.id]


def test_a_run_deleted_and_imported_can_be_deleted_again(runs: RunManager) -> None:
    run, zipped = ended(runs.start(SHORT)), io.BytesIO()
    export_run(run.folder, zipped)
    runs.delete(run.id)
    assert runs.import_run(zipped, "run.zip").id == run.id
    with pytest.raises(RunFolderError, match="there is another of its name"):
        runs.undelete(run.id)
    runs.delete(run.id)
    assert runs.deleted == [run.id, run.id]
    runs.undelete(run.id)
    assert [each.id for each in runs.all()] == [run.id]


def test_a_folder_that_cannot_be_made_leaves_nothing(runs: RunManager, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("write_config", "write_state"):
        with monkeypatch.context() as patch:
            patch.setattr(RunFolder, name, full)
            with pytest.raises(RunFolderError, match="No space left"):
                runs.start(SHORT)
    assert list((runs.home / "runs").iterdir()) == []
    assert (runs.all(), runs.damaged(), runs.training) == ([], {}, None)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_folder_that_cannot_be_read_any_more_holds_nobody_up(
    runs: RunManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    first, second = runs.start(LONG), runs.start(SHORT)
    until(lambda: first.snapshot().steps)
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "read_about", unreadable)
        first.request_stop()
        ended(first)
    assert ended(second).state.status == "finished"
    assert not first.folder.is_locked()


def test_a_run_whose_thread_cannot_begin_fails_and_the_next_one_trains(
    runs: RunManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more)
        run = runs.start(SHORT)
    assert (ended(run).state.status, runs.training) == ("failed", None)
    assert "can't start new thread" in run.state.message
    assert ended(runs.start(SHORT)).state.status == "finished"
    assert ended(runs.resume(run.id)).state.status == "finished"


def test_to_look_whether_a_run_is_held_takes_nothing_and_makes_nothing(runs: RunManager) -> None:
    run = ended(runs.start(SHORT))
    lock = run.folder.path / "lock"
    with lock.open("rb") as other:
        if os.name != "nt":
            fcntl.flock(other, fcntl.LOCK_SH)  # as somebody who looks at the same moment
        assert not is_held(lock)
    with FileLock(lock):
        assert is_held(lock)
    assert not is_held(runs.home / "runs" / "gone" / "lock")
    assert not (runs.home / "runs" / "gone").exists()


def test_what_a_killed_program_had_deleted_is_gone_when_the_next_one_starts(home: Path) -> None:
    code = (
        "import os, signal, mnist_trainer as m\nfrom pathlib import Path\n"
        "runs = m.RunManager(); [runs.delete(run.id) for run in runs.all()]\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    run = ended(RunManager(home).start(SHORT))
    subprocess.run([sys.executable, "-c", code], check=False, timeout=120)
    assert list((home / "deleted").glob(f"*/*/{run.id}/config.json"))
    assert RunManager(home).all() == []
    assert not list((home / "deleted").glob("*"))


def test_a_run_that_is_live_anywhere_cannot_be_deleted(runs: RunManager) -> None:
    run = runs.start(LONG)
    for manager in (runs, RunManager(runs.home)):
        with pytest.raises(RunBusyError, match=run.id):
            manager.delete(run.id)
    waiting = runs.start(SHORT)
    with pytest.raises(RunBusyError, match=r"is queued\. Stop it first"):
        runs.delete(waiting.id)
    assert run.is_live


def test_two_programs_train_different_runs_and_each_sees_the_others(runs: RunManager) -> None:
    with command_line(runs.home, epochs=1000) as process:
        theirs = runs.get("latest")
        ours = runs.start(LONG)  # the other program's run is not in its way
        until(lambda: ours.snapshot().steps)
        steps = theirs.snapshot().steps
        until(lambda: runs.get(theirs.id).snapshot().steps > steps)
        assert {run.id for run in runs.all() if run.is_live} == {ours.id, theirs.id}
        with pytest.raises(RunBusyError, match="is running already"):
            runs.resume(theirs.id)
        other = RunManager(runs.home)  # as the other program sees ours
        assert other.get(ours.id).state.status == "running"
        with pytest.raises(RunBusyError, match="is running already"):
            other.resume(ours.id)
        process.kill()
        process.wait(timeout=30)
        assert runs.get(theirs.id).state.status == "interrupted"
        resumed = runs.resume(theirs.id)
        assert runs.waiting == (resumed,)


def test_of_two_programs_that_resume_a_run_at_once_one_gets_it(runs: RunManager) -> None:
    run = stopped_after(runs.start(LONG), 1)
    managers = [RunManager(runs.home) for _ in range(4)]
    got, refused = list[Run](), list[str]()

    def resume(manager: RunManager) -> None:
        try:
            got.append(manager.resume(run.id))
        except RunBusyError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=resume, args=(manager,)) for manager in managers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (len(got), len(refused)) == (1, 3)
    got[0].request_stop()
    ended(got[0])


def test_a_run_that_went_on_elsewhere_since_it_was_looked_at_is_not_rolled_back(
    runs: RunManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stopped_after(runs.start(TrainConfig(device="cpu", epochs=3)), 100)
    hold = RunFolder.hold

    def hold_too_late(folder: RunFolder) -> None:
        monkeypatch.setattr(RunFolder, "hold", hold)
        assert ended(RunManager(runs.home).resume(run.id)).state.status == "finished"
        hold(folder)

    monkeypatch.setattr(RunFolder, "hold", hold_too_late)
    with pytest.raises(RunBusyError, match="changed by another program just now"):
        runs.resume(run.id)
    assert runs.get(run.id).state.status == "finished"
    assert runs.get(run.id).snapshot().steps == 3 * 391


def test_a_name_and_a_note_are_seen_by_all_also_while_it_trains(runs: RunManager) -> None:
    run = runs.start(LONG)
    other = RunManager(runs.home).get(run.id)
    other.set_about("  The   fast one ", "Größer als gestern.\n")
    run.request_stop()
    ended(run).refresh()
    assert (run.name, run.about.note) == ("The fast one", "Größer als gestern.")
    run.set_about(name="")
    other.refresh()
    assert (other.name, other.about.note) == (run.id, "Größer als gestern.")


def test_shutdown_stops_what_trains_and_keeps_it(runs: RunManager) -> None:
    run = runs.start(LONG)
    until(lambda: run.snapshot().steps)
    runs.shutdown(timeout_seconds=60)
    assert run.ended.is_set()
    assert runs.training is None
    assert RunManager(runs.home).get(run.id).state.status == "stopped"


def test_a_loss_that_is_no_number_ends_the_run_and_keeps_sound_weights(runs: RunManager, mnist: data.Mnist) -> None:
    run = ended(runs.start(dataclasses.replace(LONG, learning_rate=1e8)))
    history = run.snapshot()
    assert run.state.status == "diverged"
    assert f"at step {history.steps + 1}: the learning rate 1e+08 is too large. Try 0.5." in run.state.message
    assert run.state.suggested_learning_rate == 0.5
    assert history.steps > 0
    assert np.isfinite(history.losses).all()
    loaded = weights(RunManager(runs.home).get(run.id))
    assert all(tensor.isfinite().all() for tensor in loaded.weights.values())
    assert run.state.test_accuracy == accuracy_on_test_images(loaded, mnist)


@pytest.mark.parametrize(("learning_rate", "direction"), [(10, "smaller"), (1e-6, "larger")])
def test_a_run_that_does_not_learn_says_so_and_offers_another_rate(
    runs: RunManager, learning_rate: float, direction: str
) -> None:
    run = ended(runs.start(TrainConfig(device="cpu", epochs=2, learning_rate=learning_rate)))
    assert run.state.status == "finished"
    assert "It is not learning" in run.state.message
    assert f"A {direction} learning rate such as 0.5" in run.state.message
    assert run.state.suggested_learning_rate == 0.5
    assert RunManager(runs.home).get(run.id).state == run.state


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("boom. At line 3\nand more"), "The run failed: boom. The details are in the server's log."),
        (torch.OutOfMemoryError("CUDA out of memory"), "CPU is out of memory at batch size 1,000. Try batch size 500"),
        (MemoryError(), "CPU is out of memory at batch size 1,000. Try batch size 500"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "CPU is out of memory at batch size 1,000."),
    ],
)
def test_an_error_on_the_training_thread_becomes_the_runs_state(
    runs: RunManager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, message: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "fit", fail)
        run = ended(runs.start(SHORT))
    assert run.state.status == "failed"
    assert run.state.message.startswith(message)
    assert any(record.exc_info and record.exc_info[1] is error for record in caplog.records)
    with FileLock(run.folder.path / "lock", timeout=5):  # freed a moment after the end
        assert RunFolder.find(runs.home, run.id).read_state() == run.state
    assert ended(runs.start(SHORT)).state.status == "finished"


def test_a_run_of_another_process_is_seen_live_until_it_finishes(runs: RunManager) -> None:
    with command_line(runs.home, epochs=8) as process:
        run = runs.get("latest")
        assert run.is_live
        assert not run.is_trained_here
        assert runs.training is None
        steps = list[int]()

        def has_ended() -> bool:
            assert runs.get(run.id) is run
            steps.append(run.snapshot().steps)
            return not run.is_live

        until(has_ended)
        assert process.wait(timeout=60) == 0
    assert len(set(steps)) >= 3  # it grew while we looked
    assert steps == sorted(steps)
    assert run.state.status == "finished"
    assert run.snapshot().steps == run.config.total_steps
    assert weights(run).epoch == len(run.snapshot().epochs) == 8


def test_a_killed_process_leaves_an_interrupted_run_that_can_be_read(runs: RunManager) -> None:
    with command_line(runs.home, epochs=1000) as process:
        run = runs.get("latest")
        until(lambda: runs.get(run.id).snapshot().epochs)
        process.kill()
        process.wait(timeout=30)
    for found in (runs.get(run.id), RunManager(runs.home).get(run.id)):
        assert found.state.status == "interrupted"
        history, checkpoint = found.snapshot(), weights(found)
        assert history.steps >= history.epochs[-1].step >= 391
        assert np.isfinite(history.losses).all()
        assert checkpoint.epoch >= len(history.epochs) >= 1
        assert model_of(checkpoint)(torch.zeros(1, 28, 28)).isfinite().all()


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "xpu:99"])
def test_a_device_that_is_not_there_is_refused_before_anything_is_made(runs: RunManager, device: str) -> None:
    with pytest.raises(DeviceUnavailableError, match=device):
        runs.start(dataclasses.replace(SHORT, device=device))
    assert not (runs.home / "runs").exists()


def test_a_network_too_large_for_the_memory_is_refused_before_anything_is_made(
    runs: RunManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "free_memory", lambda device: 1_000_000_000)
    with pytest.raises(ConfigError, match="Hidden size 100,000 needs about") as caught:
        runs.start(dataclasses.replace(SHORT, hidden_size=100_000))
    assert "cpu has 900 MB to spare. Choose at most" in str(caught.value)
    assert not (runs.home / "runs").exists()


def test_a_run_can_be_read_from_many_threads_while_it_trains(runs: RunManager) -> None:
    run, wrong, looked = runs.start(TrainConfig(device="cpu", epochs=4)), list[object](), set[int]()

    def read() -> None:
        steps = 0
        try:
            while True:
                has_ended = run.ended.wait(0.01)
                history, checkpoint = runs.get(run.id).snapshot(), run.checkpoint()
                assert len(history.losses) == len(history.accuracies) == len(history.seconds) >= steps
                assert np.isfinite(history.losses).all()
                assert not checkpoint or all(tensor.isfinite().all() for tensor in checkpoint.weights.values())
                steps = history.steps
                looked.add(steps)
                if has_ended:
                    return
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=read, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    ended(run)
    for thread in threads:
        thread.join(timeout=60)
    assert wrong == []
    assert len(looked) >= 3
    assert max(looked) == run.config.total_steps


def test_histories_of_old_runs_do_not_stay_in_memory(runs: RunManager) -> None:
    for _ in range(KEPT_IN_MEMORY + 8):
        folder = RunFolder.create(runs.home, SHORT)
        folder.save_checkpoint(Checkpoint(MnistModel().state_dict(), 1, 50, 0.9))
        folder.write_state(RunState("finished"))
        folder.lock.release()
    seen = []
    for run in runs.all():
        runs.get(run.id)
        seen.append(weakref.ref(run.snapshot().losses.base))
    del run
    trained = [
        ended(runs.start(dataclasses.replace(SHORT, batch_size=50_000))) for _ in range(3)
    ]  # nobody looks at them
    runs._forget_list()
    runs.all()
    assert all(run._is_stale for run in trained)
    gc.collect()
    assert len(seen) == KEPT_IN_MEMORY + 8
    assert sum(ref() is not None for ref in seen) <= KEPT_IN_MEMORY + 1


def test_a_run_that_cannot_be_read_does_not_hide_the_others(runs: RunManager, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RunNotFoundError, match="There is no run yet"):
        runs.get("latest")
    good, bad = (ended(runs.start(SHORT)) for _ in range(2))
    values = json.loads((bad.folder.path / "config.json").read_text())
    (bad.folder.path / "config.json").write_text(json.dumps(values | {"format": 99}))
    other = RunManager(runs.home)
    assert [run.id for run in other.all()] == [good.id]
    assert other.get("latest").id == good.id
    assert f"Run {bad.id} is of format 99" in caplog.text


def test_a_short_run_that_learnt_nothing_says_so_at_its_end(runs: RunManager) -> None:
    run = ended(runs.start(TrainConfig(device="cpu", epochs=1, learning_rate=1e4)))
    assert run.snapshot().steps < 2 * STALL_STEPS
    assert "It is not learning" in run.state.message
    assert run.state.suggested_learning_rate == 0.5


def test_how_a_run_stands_is_on_disk_from_the_start(runs: RunManager) -> None:
    run = runs.start(LONG)
    state = RunFolder(run.folder.path).read_state()
    assert (state.device_label, state.status) in (("CPU", "queued"), ("CPU", "running"))


def test_a_warning_is_on_disk_while_the_run_goes_on(runs: RunManager) -> None:
    run = runs.start(dataclasses.replace(LONG, learning_rate=10.0))
    until(lambda: run.state.message)
    assert RunFolder(run.folder.path).read_state() == run.state
    assert run.is_live


def test_a_script_may_end_while_a_run_trains(home: Path) -> None:
    script = (
        "import mnist_trainer as m; r = m.RunManager().start(m.TrainConfig(epochs=900, device='cpu'))\n"
        "while not r.snapshot().steps: r.ended.wait(0.05)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    run = RunManager(home).latest()
    assert run is not None
    assert run.state.status == "stopped"


def test_a_failed_run_keeps_what_it_had_measured_and_learnt(runs: RunManager, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> dict[str, float]:
        raise RuntimeError("the fan fell off")

    monkeypatch.setattr(trainer, "FETCH_SECONDS", 1e9)  # nothing is fetched before the end of the epoch
    monkeypatch.setattr("mnist_trainer.training.evaluate", broken)
    run = ended(runs.start(SHORT))
    assert run.state.status == "failed"
    assert run.snapshot().steps == SHORT.steps_per_epoch
    assert weights(run).step == SHORT.steps_per_epoch


def test_a_batch_of_all_images_counts_whole_in_the_estimate_of_memory() -> None:
    config = TrainConfig(batch_size=50_000, hidden_size=1500)
    # Adding it up by hand: images, hidden units before and after the ReLU, and their gradients.
    assert config.memory_bytes > 50_000 * 4 * (784 + 3 * 1500)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_run_on_a_gpu_learns_as_on_the_cpu_and_its_weights_open_there(
    runs: RunManager, mnist: data.Mnist, pipeline: str
) -> None:
    config = TrainConfig(device="cuda", epochs=2, pipeline=pipeline)
    on_gpu, on_cpu = ended(runs.start(config)), ended(runs.start(dataclasses.replace(config, device="cpu")))
    assert on_gpu.state.status == "finished"
    assert on_gpu.config.device.startswith("cuda:")
    assert on_gpu.state.test_accuracy == pytest.approx(on_cpu.state.test_accuracy, abs=0.01)
    assert accuracy_on_test_images(weights(on_gpu), mnist) == pytest.approx(on_gpu.state.test_accuracy, abs=0.001)
