"""Runs from start to every end they may have, on real threads and in real processes."""

import dataclasses
import gc
import json
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock

from mnist_trainer import data, devices, trainer
from mnist_trainer.advice import STALL_STEPS
from mnist_trainer.config import PIPELINES, TrainConfig
from mnist_trainer.errors import ConfigError, DeviceUnavailableError, RunBusyError, RunNotFoundError
from mnist_trainer.model import MnistModel
from mnist_trainer.prediction import model_of
from mnist_trainer.runs import KEPT_IN_MEMORY, Run, RunManager
from mnist_trainer.store import Checkpoint, RunFolder, RunState

SHORT = TrainConfig(device="cpu", epochs=1, batch_size=1000)
LONG = TrainConfig(device="cpu", epochs=1000)


def until(condition: Callable[[], object], seconds: float = 120) -> None:
    """Wait for `condition`, which no event tells of."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        threading.Event().wait(0.02)


def ended(run: Run) -> Run:
    assert run.ended.wait(timeout=240)
    return run


def weights(run: Run) -> Checkpoint:
    checkpoint = run.checkpoint()
    assert checkpoint is not None
    return checkpoint


def accuracy_on_test_images(checkpoint: Checkpoint, mnist: data.Mnist) -> float:
    outputs = model_of(checkpoint)(mnist.test_images.float() / 255)
    return int((outputs.argmax(dim=1) == mnist.test_labels).sum()) / 10_000


def are_equal(first: Checkpoint, second: Checkpoint) -> bool:
    return all(torch.equal(tensor, second.weights[name]) for name, tensor in first.weights.items())


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
def module_home(tmp_path_factory: pytest.TempPathFactory, mnist_root: Path) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "data").symlink_to(mnist_root, target_is_directory=True)
    return folder


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
    run.stop.set()
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
    run.stop.set()
    is_asked.set()
    assert ended(run).state.status == "stopped"
    assert (run.snapshot().steps, weights(run).step, weights(run).trust) == (0, 0, "untrained: guessing")
    assert run.state.test_accuracy == pytest.approx(0.1, abs=0.1)
    assert RunManager(runs.home).get("latest").state == run.state


def test_a_second_start_is_refused_and_names_the_run_that_trains(runs: RunManager) -> None:
    run = runs.start(LONG)
    with pytest.raises(RunBusyError, match=run.id):
        runs.start(SHORT)
    assert runs.training is run
    assert RunFolder.all_ids(runs.home) == [run.id]


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


def test_old_runs_do_not_stay_in_memory(runs: RunManager) -> None:
    for _ in range(KEPT_IN_MEMORY + 8):
        folder = RunFolder.create(runs.home, SHORT)
        folder.save_checkpoint(Checkpoint(MnistModel().state_dict(), 1, 50, 0.9))
        folder.write_state(RunState("finished"))
        folder.lock.release()
    seen = [weakref.ref(run) for run in runs.all()]
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
    assert RunFolder(run.folder.path).read_state() == RunState(device_label="CPU")


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
