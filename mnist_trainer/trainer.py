"""The training thread: from a run's settings to its end, whatever that is."""

import contextlib
import dataclasses
import functools
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from . import data
from .advice import SHORT_STALL_STEPS, STALL_STEPS, better_learning_rate, stall_warning
from .config import TRAIN_SIZE
from .control import Control
from .devices import first_sentence, is_out_of_memory, threads_for, to_device
from .errors import MnistTrainerError
from .graph import GraphedStep
from .history import EpochEnd, RateChange
from .model import Batch, MnistModel, seeded_model
from .state import Checkpoint, RunState, TrainingState
from .training import OPTIMIZER_FACTORIES, Batches, Step, evaluate, fit, load_optimizer, train_step

if TYPE_CHECKING:
    from .group import Group
    from .run import Run

log = logging.getLogger(__name__)

FETCH_SECONDS = 0.2  # how often losses are read off the device, written down and shown
SYNC_SECONDS = 0.6  # how often what is written goes to the disk itself: a power cut takes less than a second of it
STRETCH_SECONDS = 0.1  # how often the other processes of a run hear from the one that leads
GRACE_SECONDS = 5.0  # once a process is lost, for the training thread to notice by itself
RETRY_SECONDS = 1.0  # how often a full disk is tried again


class _StoppedError(Exception):
    """Raised on the training thread, between two batches, once a stop was asked for."""


class _DivergedError(Exception):
    """Raised on the training thread when the loss is not a finite number any more."""


class _Heeding:
    """Batches before each of which `heed` is called: it may wait, or raise."""

    def __init__(self, batches: Batches, heed: Callable[[], None]) -> None:
        self.batches = batches
        self.heed = heed

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            self.heed()
            yield batch

    def __len__(self) -> int:
        return len(self.batches)


class _Recorder:
    """Takes down what `fit` measures, and heeds what people ask. Lives on the training thread.

    A step costs two list appends and a look at the clock: its loss and accuracy stay on the device,
    and are read a few times a second, all at once, so that a GPU never waits for a number.
    """

    def __init__(self, run: "Run", control: Control, model: MnistModel, start: Checkpoint | None) -> None:
        self.run = run
        self.control = control
        self.model = model
        self.order = data.ShuffledOrder(TRAIN_SIZE, run.config.seed)
        self.step: Step = GraphedStep() if run.config.device.startswith("cuda") else train_step
        self.optimizer: torch.optim.Optimizer | None = None
        self.optimizer_state: dict[str, Any] | None = None  # to begin with
        self.epochs = self.steps = 0
        self.last_epoch: EpochEnd | None = None
        self.saved: Checkpoint | None = None  # what is on the disk, without what resuming needs
        self.copy_due = 0.0
        if start:
            self._begin_at(start)
        self.start_clock()
        self.synced = time.monotonic()
        self.is_synced = True
        # A run that was resumed comes to what was asked before its program ended.
        self.rates = list(run.folder.read_rates())
        self._forget()

    def _begin_at(self, start: Checkpoint) -> None:
        self.model.load_state_dict(start.weights)
        self.epochs, self.steps, self.saved = start.epoch, start.step, dataclasses.replace(start, training=None)
        self.last_epoch = self.run.snapshot().last_epoch
        in_epoch = self.steps - self.epochs * self.run.config.steps_per_epoch
        order = start.training.order if start.training else self.order.state
        self.order.resume(order, in_epoch * self.run.config.batch_size)
        if start.training:
            self.optimizer_state = start.training.optimizer

    def start_clock(self) -> None:
        """Go on from the time of the last step, as if none had passed since."""
        history = self.run.snapshot()
        self.started = time.perf_counter() - (float(history.seconds[-1]) if history.steps else 0.0)

    @property
    def seconds(self) -> float:
        """Since the first step, pauses left out."""
        return time.perf_counter() - self.started

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        rates = [rate.learning_rate for rate in self.rates if rate.step <= self.steps]
        return rates[-1] if rates else self.run.config.learning_rate

    def build_optimizer(self, parameters: Any, learning_rate: float) -> torch.optim.Optimizer:
        """The optimizer of the settings, as the run left it: what `fit` calls as `opt_func`."""
        self.optimizer = OPTIMIZER_FACTORIES[self.run.config.optimizer](parameters, learning_rate)
        state = self.optimizer_state or self.optimizer.state_dict()
        load_optimizer(self.optimizer, state, for_graph=isinstance(self.step, GraphedStep))
        self.optimizer_state = None
        self._turn_to_rate()
        return self.optimizer

    def on_step(self, loss: Tensor) -> None:
        self.steps += 1
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
        self.epochs, self.last_epoch = epoch, row
        self.order.end_epoch()
        self.publish()
        self.save()  # before the row that says the epoch is done
        self.write(lambda: self.run.folder.append_epoch(row))
        self.run.history.add_epoch(row)

    def heed(self) -> None:
        """Before a step: do what was asked, or is due."""
        if self.due == self.steps:
            self._turn_to_rate()
        if self.control.news.is_set():
            self.control.news.clear()
            self.heed_stop()
            self._heed_rate()
            if self.control.is_paused:
                self._pause()

    def heed_stop(self) -> None:
        if self.control.stop.is_set():
            raise _StoppedError

    def heed_in_validation(self) -> None:
        """Before a batch of validation: as `heed`; a single step waits for the next batch of training."""
        self.heed_stop()
        if self.control.is_paused and not self.control.has_step:
            self._pause(is_validating=True)
        if time.perf_counter() - self.started - self.fetched >= FETCH_SECONDS:
            self.fetch()  # of a large network it takes long, too
        self._sync_if_due()

    def heed_skip(self) -> None:
        """Before a batch of the test."""
        if self.control.skip_test.is_set():
            raise _StoppedError

    def fetch(self) -> None:
        """Read the pending numbers off the device, write them down, and judge how it goes."""
        if not self.losses:
            return
        losses, accuracies = torch.stack(self.losses).tolist(), torch.stack(self.accuracies).tolist()
        rows = list(zip(losses, accuracies, self.times, strict=True))
        # Up to the first loss that is not a number: what follows tells nothing.
        bad = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), len(rows))
        first = self.run.snapshot().steps + 1
        self.write(lambda: self.run.folder.append_steps(first, rows[:bad]))
        self.is_synced = False
        self._sync_if_due()
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
            accuracy = self.last_epoch.val_accuracy if self.last_epoch else None
            self.run.publish(Checkpoint(weights, self.epochs, self.steps, accuracy))
        # A large network's copy takes long: no more than one part in fifty of the time.
        self.copy_due = self.seconds + 50 * (self.seconds - begun)

    def save(self) -> None:
        """Keep what was just published, with all that going on exactly from it needs."""
        assert self.optimizer is not None
        training = TrainingState(to_device(self.optimizer.state_dict(), "cpu"), self.order.state, self.last_epoch)
        self.save_weights(training)

    def save_weights(self, training: TrainingState | None = None) -> None:
        """Keep what was last published, if its numbers are sound; the history up to there is on the disk before it."""
        checkpoint = self.published()
        if checkpoint.step != self.steps:  # the newest are not sound
            if self.saved:
                return  # what is kept already is as good, and can be resumed
            training = None
        self._sync()
        self.write(lambda: self.run.folder.save_checkpoint(dataclasses.replace(checkpoint, training=training)))
        self.saved = checkpoint

    def published(self) -> Checkpoint:
        """The newest weights that are all finite."""
        checkpoint = self.run.checkpoint()
        assert checkpoint is not None  # published before the first step
        return checkpoint

    def write(self, write: Callable[[], None]) -> None:
        """Call `write`, which writes to the run's folder. While there is no room, pause, and try again.

        Raises:
            FileNotFoundError: the folder is gone.
            _StoppedError: a stop was asked for while it waited.
        """
        waited_from = None
        state = self.run.state
        while True:
            try:
                write()
                break
            except FileNotFoundError:
                raise
            except OSError as error:
                if self.control.stop.is_set():
                    self.run.state = state
                    raise _StoppedError(_no_room(self.run, error)) from error
                if waited_from is None:
                    waited_from = self.seconds
                    log.warning("Run %s waits: %s", self.run.id, error)
                    # Shown; written down once that works again.
                    self.run.state = state.turned("paused", self.steps, _no_room(self.run, error))
                self.control.news.wait(RETRY_SECONDS)
                self.control.news.clear()
        if waited_from is not None:
            self.started += self.seconds - waited_from
            self.control.news.set()  # what else was asked meanwhile is heeded before the next step
            changes = self.run.state.turned(state.status, self.steps).changes
            self.run.set_state(dataclasses.replace(state, changes=changes))

    def warn_if_stalled(self, window: int) -> None:
        """Say so in the run's state, or take it back, as the last `window` steps tell."""
        state = self.run.state
        config = dataclasses.replace(self.run.config, learning_rate=self.learning_rate)
        message, suggestion = stall_warning(self.run.snapshot(), config, window)
        # The figure in it changes all the time; it is shown and written down when there is news.
        if bool(message) != bool(state.message):
            self.write(lambda: self.run.folder.write_state(state))  # waits for room
            state = dataclasses.replace(self.run.state, message=message, suggested_learning_rate=suggestion)
            self.run.set_state(state)

    def turn(self, status: str) -> None:
        """Write down, and show, that the run is now `status`; its warning stays."""
        state = self.run.state
        self.write(lambda: self.run.folder.write_state(state))  # waits for room
        state = self.run.state
        self.run.set_state(state.turned(status, self.steps, state.message))

    def _sync_if_due(self) -> None:
        # By the clock on the wall: a pause is no training time, but a power cut may come in it.
        if not self.is_synced and time.monotonic() - self.synced >= SYNC_SECONDS:
            self._sync()

    def _sync(self) -> None:
        self.write(self.run.folder.sync_steps)
        self.synced, self.is_synced = time.monotonic(), True

    def _pause(self, *, is_validating: bool = False) -> None:
        """Wait until the pause ends, or one more step is asked for."""
        self.fetch()
        self._sync()
        self.publish()
        if self.run.state.status != "paused":
            self.save()
            self.turn("paused")
        begun = self.seconds
        try:
            while self.control.is_paused:
                if self.control.has_step if is_validating else self.control.take_step():
                    self.control.news.set()  # to come back here after it
                    break
                self.control.news.wait()
                self.control.news.clear()
                self.heed_stop()
                self._heed_rate()
        finally:
            self.started += self.seconds - begun
        self._forget()
        if not self.control.is_paused:
            self.turn("running")

    def _heed_rate(self) -> None:
        learning_rate = self.control.take_learning_rate()
        if learning_rate is None or learning_rate == self.learning_rate:
            return
        # What a run before this one had still to come to is overtaken.
        self.rates = [rate for rate in self.rates if rate.step < self.steps] + [RateChange(self.steps, learning_rate)]
        self.write(lambda: self.run.folder.write_rates(self.rates))
        self._turn_to_rate()

    def _turn_to_rate(self) -> None:
        """Have the optimizer use the learning rate of the next step, and find when that will change."""
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        self.due = next((rate.step for rate in self.rates if rate.step > self.steps), None)
        self.run.history.set_rates([rate for rate in self.rates if rate.step <= self.steps])

    def _forget(self) -> None:
        self.losses: list[Tensor] = []
        self.accuracies: list[Tensor] = []
        self.times: list[float] = []
        self.fetched = self.seconds


class _Leader(_Recorder):
    """The recorder of a run that several processes train: has the others take every step with it.

    They are told of a few steps at a time, then they listen again. All that may wait, or end training, is done
    while they listen, so that none is left alone in the middle of a step.
    """

    def __init__(
        self, run: "Run", control: Control, model: MnistModel, start: Checkpoint | None, group: "Group", threads: int
    ) -> None:
        from .distributed import SharedModel, Start

        super().__init__(run, control, model, start)
        self.step = train_step  # the processes speak with each other in the middle of it
        self.group = group
        self.stretch_end = self.steps
        order = self.order
        group.tell(Start(run.config, self.epochs + 1, order.state, order.skipped, self.optimizer_state, threads))
        self.model = self.shared = SharedModel(model, group)

    def heed(self) -> None:
        if self.steps == self.stretch_end:
            super().heed()
            self._begin_stretch()

    def on_step(self, loss: Tensor) -> None:
        self.group.are_listening = self.steps + 1 == self.stretch_end
        super().on_step(self.shared.train_loss)

    def fetch(self) -> None:
        if self.group.are_listening or self.group.lost.is_set():
            super().fetch()

    def confirm(self) -> None:
        """Make sure that all processes are there still.

        Raises:
            RuntimeError: they are not.
        """
        from .distributed import Stretch

        self.group.tell(Stretch(0, self.learning_rate))

    def _begin_stretch(self) -> None:
        from .distributed import Stretch

        per_epoch = self.run.config.steps_per_epoch
        # To the end of the epoch at most, when this process validates, and to the next learning rate.
        ends = (per_epoch - self.steps % per_epoch, (self.due or math.inf) - self.steps)
        speed = self.run.snapshot().steps_per_second() or 0.0
        steps = int(min(max(1.0, speed * STRETCH_SECONDS), *ends))
        self.group.tell(Stretch(steps, self.learning_rate))
        self.group.are_listening = False
        self.stretch_end += steps


def train_run(run: "Run", home: Path, group: "Group | None" = None) -> None:
    """Train `run` to whatever end it has. The target of its thread; nothing it raises is lost."""
    config, control = run.config, run.control
    assert control is not None
    recorder: _Recorder | None = None
    try:
        # A run that goes on does so with as many as before, or the last digits would differ.
        # Several processes share the cores, and their sums differ in the last digits anyway.
        threads = (None if group else run.state.threads) or threads_for(config.hidden_size)
        torch.set_num_threads(threads)
        state = run.state.turned("running", run.snapshot().steps)  # written down once there is room, below
        run.state = RunState(
            state.status,
            device_label=state.device_label,
            threads=threads,
            changes=state.changes,
            processes=group.size if group else 1,
        )
        mnist = data.load_mnist(home / "data")
        if config.device.startswith("cuda"):
            torch.cuda.set_device(config.device)  # of this thread
        model = seeded_model(config).to(config.device)
        start = run.folder.load_checkpoint(with_training=True)
        if group:
            group.on_loss = functools.partial(_give_up, run)
            group.on_stop = functools.partial(control.request_stop, skip_test=True)
            recorder = _Leader(run, control, model, start, group, threads)
        else:
            recorder = _Recorder(run, control, model, start)
        share = group.share if group else None
        train_loader, val_loader = data.train_and_val_loaders(mnist, config, config.device, recorder.order, share)
        recorder.publish()
        status, message, suggestion = _fit(recorder, train_loader, val_loader)
        if status == "stopped" and isinstance(recorder, _Leader):
            recorder.confirm()  # the launcher stops all processes once one has died: then it failed
        _end(recorder, mnist, status, message, suggestion)
    except Exception as error:  # the thread's last stop: what is not shown from here nobody sees
        _fail(run, recorder, group.explained(error) if group else error)
    finally:
        run.end()


def _fit(recorder: _Recorder, train_loader: Batches, val_loader: Batches) -> tuple[str, str, float | None]:
    """Run `fit`; return the status it ends with, what to say of it, and a better learning rate."""
    run, config = recorder.run, recorder.run.config
    try:
        recorder.write(lambda: run.folder.write_state(run.state))
        recorder.start_clock()
        fit(
            config.epochs,
            recorder.learning_rate,
            recorder.model,
            _Heeding(train_loader, recorder.heed),
            _Heeding(val_loader, recorder.heed_in_validation),
            recorder.build_optimizer,
            step=recorder.step,
            on_step=recorder.on_step,
            on_epoch=recorder.on_epoch,
            first_epoch=recorder.epochs + 1,
        )
        # A short run is judged by the steps that it had.
        recorder.warn_if_stalled(max(SHORT_STALL_STEPS, min(STALL_STEPS, run.snapshot().steps // 2)))
        return "finished", run.state.message, run.state.suggested_learning_rate
    except _StoppedError:
        return _stopped(recorder)
    except _DivergedError as error:
        return _diverged(recorder, error)


def _stopped(recorder: _Recorder) -> tuple[str, str, float | None]:
    state = recorder.run.state
    try:
        recorder.fetch()
        recorder.publish()  # the very last step's weights
        recorder.save()
    except _DivergedError as error:
        return _diverged(recorder, error)
    except _StoppedError as error:  # there is still no room
        return "stopped", f"It was stopped while it could not be kept. {error}", None
    return "stopped", state.message, state.suggested_learning_rate


def _diverged(recorder: _Recorder, error: _DivergedError) -> tuple[str, str, float | None]:
    config = recorder.run.config
    rate = recorder.run.learning_rate
    suggestion = better_learning_rate(dataclasses.replace(config, learning_rate=rate), has_jumped=True)
    kept = recorder.saved or recorder.published()
    return (
        "diverged",
        f"The loss stopped being a finite number {error}: the learning rate {rate:g} is too large. "
        f"Try {suggestion:g}. The last sound weights, of step {kept.step:,}, are kept.",
        suggestion,
    )


def _end(recorder: _Recorder, mnist: data.Mnist, status: str, message: str, suggestion: float | None) -> None:
    """Keep the last good weights, and measure them, once, on the test set."""
    run, seconds = recorder.run, recorder.seconds
    if recorder.saved is None:
        with contextlib.suppress(_StoppedError):  # no room, and nobody wants to wait: the state says so, below
            recorder.save_weights()
    kept = recorder.saved or recorder.published()
    recorder.model.load_state_dict(kept.weights)
    run.is_testing = True
    test: dict[str, float] = {}
    with contextlib.suppress(_StoppedError):
        test = evaluate(recorder.model, _Heeding(data.test_loader(mnist, run.config.device), recorder.heed_skip))
        recorder.write(lambda: run.folder.write_state(run.state))  # waits for room
    state = dataclasses.replace(
        run.state.turned(status, run.snapshot().steps, message),
        suggested_learning_rate=suggestion,
        seconds=seconds,
        steps=run.snapshot().steps,
        test_loss=test.get("val_loss"),
        test_accuracy=test.get("val_acc"),
    )
    run.set_state(state)


def _fail(run: "Run", recorder: _Recorder | None, error: Exception) -> None:
    is_told = isinstance(error, MnistTrainerError | OSError)  # the user reads all that is to be known
    log.error("Run %s failed: %s", run.id, error, exc_info=None if is_told else error)
    if recorder:
        _salvage(recorder)
    if is_out_of_memory(error):
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
    steps = run.snapshot().steps
    state = run.state.turned("failed", steps, message)
    run.set_state(dataclasses.replace(state, seconds=recorder.seconds if recorder else run.seconds, steps=steps))


def _give_up(run: "Run", problem: str) -> None:
    """Fail a run that lost a process, should its thread wait for that one. Called on a thread of the group."""
    if run.ended.wait(GRACE_SECONDS):
        return
    log.error("Run %s failed: %s", run.id, problem)
    steps = run.snapshot().steps
    run.set_state(dataclasses.replace(run.state.turned("failed", steps, problem), seconds=run.seconds, steps=steps))
    os._exit(1)  # nothing less ends a thread that waits in a call to the network or to a GPU


def _salvage(recorder: _Recorder) -> None:
    """Keep what a failed run had measured and learnt, as far as that still works."""
    recorder.control.request_stop(skip_test=True)  # no waiting for room any more
    for keep in (recorder.fetch, *([] if recorder.saved else [recorder.publish, recorder.save_weights])):
        try:
            keep()
        except Exception as error:  # whatever broke the run may break this too; the run's own error is what is shown
            log.warning("Something of run %s could not be kept: %s", recorder.run.id, error)


def _no_room(run: "Run", error: OSError) -> str:
    return (
        f"{run.folder.path} cannot be written ({error.strerror or error}). "
        "Make room or make it writable: the run then goes on by itself."
    )
