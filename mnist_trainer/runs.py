"""Runs: started here and trained on a background thread, or found in their folders."""

import atexit
import dataclasses
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from .config import TRAIN_SIZE, TrainConfig
from .devices import check_fits, find_device
from .errors import MnistTrainerError, RunBusyError, RunNotFoundError
from .history import History, Snapshot
from .store import Checkpoint, RunFolder, RunState, home_folder
from .trainer import train_run

log = logging.getLogger(__name__)

KEPT_IN_MEMORY = 16  # ended runs; older ones are read from their folders again


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

    def set_state(self, state: RunState) -> None:
        """Write down, and then show, how the run stands; called on the training thread."""
        try:
            self.folder.write_state(state)
        except OSError as error:
            log.exception("The state of run %s could not be written.", self.id)
            unsaved = f"It could not be written to {self.folder.path} ({error.strerror})."
            state = dataclasses.replace(state, message=f"{state.message} {unsaved}".strip())
        self.state = state

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
            self._thread = threading.Thread(target=train_run, args=(run, self.home), name=f"run {run.id}", daemon=True)
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
            run = self._find(run_id)
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
                run = self._find(run_id)
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
                self._find(run_id)
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

    def _find(self, run_id: str) -> Run:
        """From memory, else from its folder: a run that is only listed pushes none out that somebody looks at."""
        return self._runs.get(run_id) or Run.read(RunFolder.find(self.home, run_id))

    def _keep(self, run: Run) -> None:
        """Keep `run` in memory, with what was read of it, in place of the one longest not asked for."""
        self._runs[run.id] = run
        self._runs.move_to_end(run.id)
        for old_id in [key for key, old in self._runs.items() if not old.is_live][:-KEPT_IN_MEMORY]:
            del self._runs[old_id]
