"""Runs: started here and trained on a background thread, or found in their folders."""

import atexit
import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from . import data
from .config import TRAIN_SIZE, TrainConfig
from .devices import check_fits, find_device, first_sentence
from .errors import MnistTrainerError, RunBusyError, RunNotFoundError
from .history import EpochEnd, History, Snapshot
from .model import Batch, MnistModel
from .store import Checkpoint, RunFolder, RunState, home_folder
from .training import OPTIMIZER_FACTORIES, Batches, evaluate, fit

log = logging.getLogger(__name__)

FETCH_SECONDS = 0.2  # how often losses are read off the device, written down and shown
STALL_STEPS, SHORT_STALL_STEPS = 200, 50  # judged by so many, twice in a row; a run that ends sooner by fewer
STALL_ACCURACY = 0.25  # guessing has 0.1
GOOD_LEARNING_RATES = {"SGD": 0.5, "SGD-momentum": 0.1, "Adam": 0.001, "AdamW": 0.001}
# Below this hidden size a second thread costs more than it brings; on a machine that also runs the
# server and a browser, threads that wait for each other cost most of the speed.
ONE_THREAD_BELOW = 256
# What PyTorch says of full memory, by device and system.
OUT_OF_MEMORY = ("out of memory", "allocate memory", "not enough memory")
KEPT_IN_MEMORY = 16  # ended runs; older ones are read from their folders again

_init_lock = threading.Lock()
_all_threads = torch.get_num_threads()


class Run:
    """One run: its settings, its state and what it measured.

    Made by a `RunManager`. A run that this process trains is kept up to date by the training thread;
    any other is brought up to date from its folder by `refresh`. All values handed out are frozen.
    """

    def __init__(self, folder: RunFolder, config: TrainConfig, state: RunState, *, is_trained_here: bool) -> None:
        self.folder = folder
        self.id = folder.id
        self.config = config
        self.state = state
        self.is_trained_here = is_trained_here
        self.history = History()
        self.stop = threading.Event()  # ends training before the next step
        self.skip_test = threading.Event()  # ends, or forgoes, the measurement on the test set
        self.is_testing = False  # training is over, and the test set is being measured
        self.ended = threading.Event()  # set once nothing about the run will change any more
        self._published: Checkpoint | None = None  # by the training thread, while it trains here
        self._folder_lock = threading.Lock()
        self._has_history = is_trained_here

    @classmethod
    def read(cls, folder: RunFolder) -> "Run":
        """A run from its folder. Its history is read when first asked for: a list of runs needs none.

        Raises:
            RunFolderError: the folder is damaged.
        """
        return cls(folder, folder.read_config(), folder.read_state(), is_trained_here=False)

    @property
    def is_live(self) -> bool:
        """Whether it trains now, here or in another process."""
        return self.state.is_live

    @property
    def seconds(self) -> float:
        """Training time so far, or in all."""
        measured = self.snapshot().seconds
        return self.state.seconds if self.state.seconds is not None else float(measured[-1]) if len(measured) else 0.0

    @property
    def images_per_second(self) -> float | None:
        """Training images: of late while it trains, over the whole run once it has ended."""
        history = self.snapshot()
        if self.is_live:
            speed = history.steps_per_second()
            return speed and speed * self.config.batch_size
        # The last batch of an epoch is smaller than the others.
        epochs, rest = divmod(history.steps, self.config.steps_per_epoch)
        images = epochs * TRAIN_SIZE + rest * self.config.batch_size
        return images / self.seconds if self.seconds else None

    @property
    def seconds_left(self) -> float | None:
        """Estimate from its speed so far, validation included; None before the first steps."""
        history = self.snapshot()
        if not history.steps:
            return None
        return float(history.seconds[-1]) * (self.config.total_steps / history.steps - 1)

    def request_stop(self) -> None:
        """End training before the next step; asked again, or once training is over, end the test too."""
        if self.stop.is_set() or self.is_testing:
            self.skip_test.set()
        self.stop.set()

    def snapshot(self) -> Snapshot:
        """What it measured so far.

        Raises:
            RunFolderError: the history is damaged.
        """
        with self._folder_lock:
            if not self._has_history:
                self.folder.read_history(self.history)
                self._has_history = True
        return self.history.snapshot()

    def refresh(self) -> None:
        """Bring a run that another process trains up to date; for others there is nothing to do.

        Raises:
            RunFolderError: the folder is damaged.
        """
        if self.is_live and not self.is_trained_here:
            with self._folder_lock:
                self.state = self.folder.read_state()
                self._has_history = False  # read after the state: an ended run's history is whole

    @property
    def has_weights(self) -> bool:
        """Whether `checkpoint` has something to give."""
        return self._published is not None or self.folder.has_checkpoint

    def checkpoint(self) -> Checkpoint | None:
        """Its newest weights, while it trains here a fraction of a second old; None if there are none yet.

        A large network's are older: copying them may take no more than one part in fifty of the time.

        Raises:
            RunFolderError: the file is damaged.
        """
        return self._published or self.folder.load_checkpoint()

    def publish(self, checkpoint: Checkpoint | None) -> None:
        """Let others see the newest weights, or the folder's again; called on the training thread."""
        self._published = checkpoint


class RunManager:
    """Starts runs, finds them again, and stops them when the process ends. One per process.

    Args:
        home: the folder with `runs` and `data`; by default `home_folder()`.
    """

    def __init__(self, home: Path | None = None) -> None:
        self.home = home or home_folder()
        self._runs: OrderedDict[str, Run] = OrderedDict()
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()
        # Without this join a training thread would abort the interpreter as it shuts down.
        atexit.register(self.shutdown)

    def start(self, config: TrainConfig) -> Run:
        """Start training in the background.

        Raises:
            DeviceUnavailableError: the device cannot be used.
            ConfigError: the network would not fit into the device's memory.
            RunBusyError: a run is training here already.
            RunFolderError: the run's folder cannot be written.
        """
        device = find_device(config.device)
        check_fits(config, device.name)
        config = dataclasses.replace(config, device=device.name)
        with self._lock:
            if busy := self.training:
                raise RunBusyError(f"Run {busy.id} is still training. Stop it first, or wait until it ends.")
            state = RunState(device_label=device.label)
            run = Run(RunFolder.create(self.home, config, state), config, state, is_trained_here=True)
            self._thread = threading.Thread(target=_train, args=(run, self.home), name=f"run {run.id}", daemon=True)
            self._keep(run)
            self._thread.start()
        return run

    @property
    def training(self) -> Run | None:
        """The run that this process trains now."""
        with self._lock:
            return next((run for run in self._runs.values() if run.is_trained_here and not run.ended.is_set()), None)

    def get(self, run_id: str) -> Run:
        """The run with this id, up to date; "latest" is the newest.

        Raises:
            RunNotFoundError: there is none.
            RunFolderError: its folder is damaged.
        """
        if run_id == "latest":
            if latest := self.latest():
                return latest
            raise RunNotFoundError("There is no run yet. Train one first: `python -m mnist_trainer train`.")
        with self._lock:
            run = self._runs.get(run_id) or Run.read(RunFolder.find(self.home, run_id))
            self._keep(run)
        run.refresh()
        return run

    def latest(self) -> Run | None:
        """The newest run that can be read."""
        newest = next(self.all(), None)
        return newest and self.get(newest.id)

    def all(self) -> Iterator[Run]:
        """All runs that can be read, newest first. What is wrong with the others goes to the log."""
        for run_id in RunFolder.all_ids(self.home):
            try:
                # Not kept in memory for being listed: a run that somebody looks at is not pushed out.
                run = self._runs.get(run_id) or Run.read(RunFolder.find(self.home, run_id))
                run.refresh()
            except MnistTrainerError as error:
                log.warning("%s", error)
            else:
                yield run

    def unreadable(self) -> list[str]:
        """What is wrong with each run that cannot be read, as sentences."""
        problems = []
        for run_id in RunFolder.all_ids(self.home):
            try:
                if run_id not in self._runs:
                    Run.read(RunFolder.find(self.home, run_id))
            except MnistTrainerError as error:
                problems.append(str(error))
        return problems

    def shutdown(self, timeout_seconds: float = 4.0) -> None:
        """Stop what is training and wait for it, so that the process may end and the run is kept."""
        if run := self.training:
            run.stop.set()
            run.skip_test.set()
        if self._thread:
            self._thread.join(timeout_seconds)

    def _keep(self, run: Run) -> None:
        """Keep `run` in memory, with what was read of it, in place of the one longest not asked for."""
        self._runs[run.id] = run
        self._runs.move_to_end(run.id)
        for old_id in [key for key, old in self._runs.items() if not old.is_live][:-KEPT_IN_MEMORY]:
            del self._runs[old_id]


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

    def __init__(self, run: Run, model: MnistModel) -> None:
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
            _set_state(self.run, dataclasses.replace(state, message=message, suggested_learning_rate=suggestion))


def stall_warning(steps: Snapshot, config: TrainConfig, window: int) -> tuple[str, float | None]:
    """What to say, and which learning rate to offer, if it is hardly better than guessing.

    A learning rate that is too large rarely gives NaN here; it kills the ReLUs, and the loss stays at
    ln 10 = 2.303.

    Args:
        steps: what was measured.
        config: of the same run.
        window: how many steps to judge by, twice in a row.

    Returns:
        Empty and None while it learns, or before it had the steps to show it.
    """
    if steps.steps < 2 * window:
        return "", None
    recent = float(np.mean(steps.accuracies[-window:]))
    before = float(np.mean(steps.accuracies[-2 * window : -window]))
    if max(recent, before) >= STALL_ACCURACY:
        return "", None
    has_jumped = float(np.max(steps.losses[:window])) > 2 * math.log(10)
    suggestion = better_learning_rate(config, has_jumped)
    direction = "smaller" if suggestion < config.learning_rate else "larger"
    return (
        f"It is not learning: right on {recent:.0%} of its last training batches, hardly better than guessing "
        f"(10%). A {direction} learning rate such as {suggestion:g} should help.",
        suggestion,
    )


def better_learning_rate(config: TrainConfig, has_jumped: bool) -> float:
    """A learning rate to try instead of one that failed.

    Args:
        config: the settings that failed.
        has_jumped: whether the loss has leapt up, so that the rate must have been too large.
    """
    good = GOOD_LEARNING_RATES[config.optimizer]
    if config.learning_rate > good or has_jumped:
        return float(f"{min(good, config.learning_rate / 10):.1g}")
    return good if config.learning_rate < good else 10 * good


def _train(run: Run, home: Path) -> None:
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
    _set_state(
        run,
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


def _fail(run: Run, recorder: _Recorder | None, error: Exception) -> None:
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
    _set_state(run, dataclasses.replace(run.state, status="failed", message=message, seconds=seconds))


def _salvage(recorder: _Recorder) -> None:
    """Keep what a failed run had measured and learnt, as far as that still works."""
    for keep in (recorder.fetch, lambda: recorder.run.folder.save_checkpoint(recorder.checkpoint())):
        try:
            keep()
        except Exception:  # whatever broke the run may break this too; the run's own error is what is shown
            log.warning("Something of run %s could not be kept.", recorder.run.id, exc_info=True)


def _set_state(run: Run, state: RunState) -> None:
    """Write down, and then show, how the run stands."""
    try:
        run.folder.write_state(state)
    except OSError as error:
        log.exception("The state of run %s could not be written.", run.id)
        unsaved = f"It could not be written to {run.folder.path} ({error.strerror})."
        state = dataclasses.replace(state, message=f"{state.message} {unsaved}".strip())
    run.state = state


def _seeded_model(config: TrainConfig) -> MnistModel:
    # nn.Linear draws its weights from the process's one random state: put back as it was.
    with _init_lock, torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return MnistModel(hidden_size=config.hidden_size)
