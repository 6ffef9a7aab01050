"""The training thread: from a run's settings to its end, whatever that is."""

import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from . import data
from .advice import SHORT_STALL_STEPS, STALL_STEPS, better_learning_rate, stall_warning
from .config import TrainConfig
from .devices import first_sentence
from .errors import MnistTrainerError
from .history import EpochEnd
from .model import Batch, MnistModel
from .store import Checkpoint
from .training import OPTIMIZER_FACTORIES, Batches, evaluate, fit

if TYPE_CHECKING:
    from .runs import Run

log = logging.getLogger(__name__)

FETCH_SECONDS = 0.2  # how often losses are read off the device, written down and shown
# Below this hidden size a second thread costs more than it brings; on a machine that also runs the
# server and a browser, threads that wait for each other cost most of the speed.
ONE_THREAD_BELOW = 256
# What PyTorch says of full memory, by device and system.
OUT_OF_MEMORY = ("out of memory", "allocate memory", "not enough memory")

_init_lock = threading.Lock()
_all_threads = torch.get_num_threads()


class _StoppedError(Exception):
    """Raised on the training thread, between two batches, once a stop was asked for."""


class _DivergedError(Exception):
    """Raised on the training thread when the loss is not a finite number any more."""


class _Stoppable:
    """Batches that end with `_StoppedError` once a stop is asked for: before the next step, or mid-validation."""

    def __init__(self, batches: Batches, stop: threading.Event) -> None:
        self.batches = batches
        self.stop = stop

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            if self.stop.is_set():
                raise _StoppedError
            yield batch

    def __len__(self) -> int:
        return len(self.batches)


class _Recorder:
    """Takes down what `fit` measures. Lives on the training thread.

    A step costs two list appends and a look at the clock: its loss and accuracy stay on the device,
    and are read a few times a second, all at once, so that a GPU never waits for a number.
    """

    def __init__(self, run: "Run", model: MnistModel) -> None:
        self.run = run
        self.model = model
        self.started = time.perf_counter()
        self.copy_due = 0.0
        self.epochs = 0
        self.val_accuracy: float | None = None
        self._forget()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def on_step(self, loss: Tensor) -> None:
        self.losses.append(loss)
        self.accuracies.append(self.model.train_acc)
        now = self.seconds
        self.times.append(now)
        if now - self.fetched >= FETCH_SECONDS:
            self.fetch()

    def on_epoch(self, epoch: int, result: dict[str, float]) -> None:
        self.fetch()
        steps = self.run.snapshot()
        if not math.isfinite(result["val_loss"]):
            raise _DivergedError(f"after epoch {epoch}")
        first = steps.last_epoch.step if steps.last_epoch else 0
        row = EpochEnd(
            epoch=epoch,
            step=steps.steps,
            train_loss=float(np.mean(steps.losses[first:])),
            train_accuracy=float(np.mean(steps.accuracies[first:])),
            val_loss=result["val_loss"],
            val_accuracy=result["val_acc"],
            seconds=self.seconds,
        )
        self.epochs, self.val_accuracy = epoch, row.val_accuracy
        self.publish()
        self.run.folder.save_checkpoint(self.checkpoint())  # before the row that says the epoch is done
        self.run.folder.append_epoch(row)
        self.run.history.add_epoch(row)

    def fetch(self) -> None:
        """Read the pending numbers off the device, write them down, and judge how it goes."""
        if not self.losses:
            return
        losses, accuracies = torch.stack(self.losses).tolist(), torch.stack(self.accuracies).tolist()
        rows = list(zip(losses, accuracies, self.times, strict=True))
        # Up to the first loss that is not a number: what follows tells nothing.
        bad = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), len(rows))
        first = self.run.snapshot().steps + 1
        self.run.folder.append_steps(first, rows[:bad])
        self.run.history.add_steps(losses[:bad], accuracies[:bad], self.times[:bad])
        self._forget()
        if bad < len(rows):
            raise _DivergedError(f"at step {first + bad:,}")
        if self.seconds >= self.copy_due:
            self.publish()
        self.warn_if_stalled(STALL_STEPS)

    def publish(self) -> None:
        """Let others see the weights as they are now, if they are still numbers."""
        begun = self.seconds
        weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.model.state_dict().items()}
        if all(bool(tensor.isfinite().all()) for tensor in weights.values()):
            self.run.publish(Checkpoint(weights, self.epochs, self.run.snapshot().steps, self.val_accuracy))
        # A large network's copy takes long: no more than one part in fifty of the time.
        self.copy_due = self.seconds + 50 * (self.seconds - begun)

    def checkpoint(self) -> Checkpoint:
        """The newest weights that are all finite."""
        checkpoint = self.run.checkpoint()
        assert checkpoint is not None  # published before the first step
        return checkpoint

    def _forget(self) -> None:
        self.losses: list[Tensor] = []
        self.accuracies: list[Tensor] = []
        self.times: list[float] = []
        self.fetched = self.seconds

    def warn_if_stalled(self, window: int) -> None:
        """Say so in the run's state, or take it back, as the last `window` steps tell."""
        state = self.run.state
        message, suggestion = stall_warning(self.run.snapshot(), self.run.config, window)
        # The figure in it changes all the time; it is shown and written down when there is news.
        if bool(message) != bool(state.message):
            self.run.set_state(dataclasses.replace(state, message=message, suggested_learning_rate=suggestion))


def train_run(run: "Run", home: Path) -> None:
    """Train `run` to whatever end it has. The target of its thread; nothing it raises is lost."""
    config = run.config
    recorder: _Recorder | None = None
    try:
        torch.set_num_threads(1 if config.hidden_size < ONE_THREAD_BELOW else _all_threads)
        mnist = data.load_mnist(home / "data")
        train_loader, val_loader = data.train_and_val_loaders(mnist, config, config.device)
        recorder = _Recorder(run, _seeded_model(config).to(config.device))
        recorder.publish()
        status, message, suggestion = _fit(recorder, train_loader, val_loader)
        _end(recorder, mnist, status, message, suggestion)
    except Exception as error:  # the thread's last stop: what is not shown from here nobody sees
        _fail(run, recorder, error)
    finally:
        run.publish(None)
        run.folder.lock.release()
        run.ended.set()


def _fit(recorder: _Recorder, train_loader: Batches, val_loader: Batches) -> tuple[str, str, float | None]:
    """Run `fit`; return the status it ends with, what to say of it, and a better learning rate."""
    run, config = recorder.run, recorder.run.config
    try:
        fit(
            config.epochs,
            config.learning_rate,
            recorder.model,
            _Stoppable(train_loader, run.stop),
            _Stoppable(val_loader, run.stop),
            OPTIMIZER_FACTORIES[config.optimizer],
            on_step=recorder.on_step,
            on_epoch=recorder.on_epoch,
        )
        # A short run is judged by the steps that it had.
        recorder.warn_if_stalled(max(SHORT_STALL_STEPS, min(STALL_STEPS, run.snapshot().steps // 2)))
        return "finished", run.state.message, run.state.suggested_learning_rate
    except _StoppedError:
        return _stopped(recorder)
    except _DivergedError as error:
        return _diverged(recorder, error)


def _stopped(recorder: _Recorder) -> tuple[str, str, float | None]:
    try:
        recorder.fetch()
    except _DivergedError as error:
        return _diverged(recorder, error)
    recorder.publish()  # the very last step's weights
    return "stopped", recorder.run.state.message, recorder.run.state.suggested_learning_rate


def _diverged(recorder: _Recorder, error: _DivergedError) -> tuple[str, str, float | None]:
    config = recorder.run.config
    suggestion = better_learning_rate(config, has_jumped=True)
    kept = recorder.checkpoint()
    return (
        "diverged",
        f"The loss stopped being a finite number {error}: the learning rate {config.learning_rate:g} is too large. "
        f"Try {suggestion:g}. The last sound weights, of step {kept.step:,}, are kept.",
        suggestion,
    )


def _end(recorder: _Recorder, mnist: data.Mnist, status: str, message: str, suggestion: float | None) -> None:
    """Keep the last good weights, and measure them, once, on the test set."""
    run, seconds = recorder.run, recorder.seconds
    kept = recorder.checkpoint()
    run.folder.save_checkpoint(kept)
    recorder.model.load_state_dict(kept.weights)
    run.is_testing = True
    test: dict[str, float] = {}
    with contextlib.suppress(_StoppedError):
        test = evaluate(recorder.model, _Stoppable(data.test_loader(mnist, run.config.device), run.skip_test))
    run.set_state(
        dataclasses.replace(
            run.state,
            status=status,
            message=message,
            suggested_learning_rate=suggestion,
            seconds=seconds,
            test_loss=test.get("val_loss"),
            test_accuracy=test.get("val_acc"),
        ),
    )


def _fail(run: "Run", recorder: _Recorder | None, error: Exception) -> None:
    log.error("Run %s failed.", run.id, exc_info=None if isinstance(error, MnistTrainerError) else error)
    if recorder:
        _salvage(recorder)
    text = str(error).lower()
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(part in text for part in OUT_OF_MEMORY):
        half = max(1, run.config.batch_size // 2)
        message = (
            f"{run.state.device_label} is out of memory at batch size {run.config.batch_size:,}. "
            f"Try batch size {half:,}, a smaller hidden size, or the CPU."
        )
    elif isinstance(error, MnistTrainerError):
        message = str(error)
    elif isinstance(error, OSError):
        message = (
            f"It could not be written to {run.folder.path} ({error.strerror}). Is the folder there, and is there room?"
        )
    else:
        message = f"The run failed: {first_sentence(error)}. The details are in the server's log."
    seconds = recorder.seconds if recorder else 0.0
    run.set_state(dataclasses.replace(run.state, status="failed", message=message, seconds=seconds))


def _salvage(recorder: _Recorder) -> None:
    """Keep what a failed run had measured and learnt, as far as that still works."""
    for keep in (recorder.fetch, lambda: recorder.run.folder.save_checkpoint(recorder.checkpoint())):
        try:
            keep()
        except Exception:  # whatever broke the run may break this too; the run's own error is what is shown
            log.warning("Something of run %s could not be kept.", recorder.run.id, exc_info=True)


def _seeded_model(config: TrainConfig) -> MnistModel:
    # nn.Linear draws its weights from the process's one random state: put back as it was.
    with _init_lock, torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return MnistModel(hidden_size=config.hidden_size)
