"""One run: its settings, its state, what it measured and learnt, and how it is steered."""

import dataclasses
import logging
import threading
from contextlib import suppress

from .config import TRAIN_SIZE
from .control import Control
from .errors import ConfigError, RunFolderError
from .history import EpochEnd, History, Snapshot, best_val_accuracy
from .state import MAX_NAME, MAX_NOTE, About, Checkpoint, RunState
from .store import RolledBackError, RunFolder

log = logging.getLogger(__name__)

MAX_RATES_SHOWN = 3


class Run:
    """A run, made by a `RunManager`.

    One that this process trains is kept up to date by the training thread; any other is brought up to
    date from its folder by `refresh`. All values handed out are frozen.

    Args:
        folder: where it is kept.
        control: how it is steered, if this process trains it, or will.

    Raises:
        RunFolderError: the folder is damaged.
    """

    def __init__(self, folder: RunFolder, control: Control | None = None) -> None:
        self.folder = folder
        self.id = folder.id
        self.about = About()
        self._stamp: tuple[object, ...] = ()
        self.control = control
        self.is_testing = False  # training is over, and the test set is being measured
        self.ended = threading.Event()  # set once this process is through with it
        self.history_problem = self._about_problem = ""  # what is wrong with its folder, as sentences
        self._history = History()
        self._is_stale = True  # the folder may have more of the history than we do
        self._published: Checkpoint | None = None  # by the training thread, while it trains here
        self._lock = threading.RLock()
        self._read()

    @property
    def is_live(self) -> bool:
        """Whether it waits, trains or is paused, here or in another process."""
        return self.state.is_live

    @property
    def is_trained_here(self) -> bool:
        """Whether this process trains it, or will when its turn comes."""
        return self.control is not None and not self.ended.is_set()

    @property
    def problem(self) -> str:
        """What is wrong with its folder, as a sentence; empty as far as anybody has found."""
        return self.history_problem or self._about_problem

    @property
    def name(self) -> str:
        """What people call it: the name that somebody gave it, or its id."""
        return self.about.name or self.id

    @property
    def seconds(self) -> float:
        """Training time so far, or in all, pauses left out."""
        if self.state.seconds is not None:
            return self.state.seconds
        if not self.is_live:
            return self.epochs[-1].seconds if self.epochs else 0.0
        measured = self.snapshot().seconds
        return float(measured[-1]) if len(measured) else 0.0

    @property
    def epochs(self) -> tuple[EpochEnd, ...]:
        """The finished epochs; of an ended run without reading its steps."""
        return self.snapshot().epochs if self.is_live or not self._is_stale else self._epochs

    @property
    def best_val_accuracy(self) -> float | None:
        """The highest validation accuracy of any epoch, fraction in [0, 1]."""
        return best_val_accuracy(self.epochs)

    @property
    def images_per_second(self) -> float | None:
        """Training images: of late while it trains, over the whole run once it has ended."""
        if self.is_live:
            speed = self.snapshot().steps_per_second()
            return speed and speed * self.config.batch_size
        steps = self.state.steps
        if steps is None:
            steps = self.epochs[-1].step if self.epochs else 0
        # The last batch of an epoch is smaller than the others.
        epochs, rest = divmod(steps, self.config.steps_per_epoch)
        images = epochs * TRAIN_SIZE + rest * self.config.batch_size
        return images / self.seconds if self.seconds and images else None

    @property
    def seconds_left(self) -> float | None:
        """Estimate from its speed so far, validation included; None before the first steps."""
        history = self.snapshot()
        if not history.steps:
            return None
        return float(history.seconds[-1]) * (self.config.total_steps / history.steps - 1)

    @property
    def learning_rates(self) -> list[float]:
        """That of the settings, and each to which it was moved since; of an ended run without reading its steps."""
        rates = self.snapshot().rates if self.is_live or not self._is_stale else self._rates
        return [self.config.learning_rate, *(rate.learning_rate for rate in rates)]

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step, or of the last one."""
        return self.learning_rates[-1]

    @property
    def rates_text(self) -> str:
        """The learning rates as a person writes them: "0.5 → 0.1"."""
        first, *moved = (f"{rate:g}" for rate in self.learning_rates)
        return " → ".join([first, *(["…"] if len(moved) > MAX_RATES_SHOWN else []), *moved[-MAX_RATES_SHOWN:]])

    def request_stop(self, *, skip_test: bool = False) -> None:
        """End training before the next step; asked again, or once training is over, end the test too."""
        if self.control:
            self.control.request_stop(skip_test=skip_test or self.is_testing)

    def set_about(self, name: str | None = None, note: str | None = None) -> None:
        """Give it a name or a note; None leaves what is there, an empty text takes it away.

        Raises:
            ConfigError: one is too long.
            RunFolderError: the folder cannot be written.
        """
        if len(name or "") > MAX_NAME or len(note or "") > MAX_NOTE:
            raise ConfigError(f"A name has at most {MAX_NAME} characters, and a note {MAX_NOTE:,}. Shorten it.")
        with self._lock:
            about = self.about
            with suppress(RunFolderError):  # damaged: what is written now mends it
                about = self.folder.read_about()
            name = about.name if name is None else " ".join(name.split())
            self.folder.write_about(About(name, about.note if note is None else note.strip()))
            self._read_about()

    def set_state(self, state: RunState) -> None:
        """Write down, and then show, how the run stands; called by whoever holds its lock."""
        try:
            self.folder.write_state(state)
        except OSError as error:
            log.error("The state of run %s could not be written: %s", self.id, error)  # noqa: TRY400
            unsaved = f"It could not be written to {self.folder.path} ({error.strerror})."
            state = dataclasses.replace(state, message=f"{state.message} {unsaved}".strip())
        self.state = state

    @property
    def history(self) -> History:
        """What it measured, for the training thread to add to."""
        self.snapshot()
        return self._history

    def snapshot(self) -> Snapshot:
        """What it measured so far; `problem` then says whether all of it could be read."""
        if self._is_stale:
            with self._lock:
                self._read_history()
        return self._history.snapshot()

    def refresh(self) -> None:
        """Bring it up to date with its folder, where this process does not train it.

        Raises:
            RunFolderError: the folder is damaged.
        """
        with self._lock:
            if self.is_trained_here:
                if (stamp := self.folder.stamp()) != self._stamp:
                    self._stamp = stamp
                    self._read_about()
                return
            if self.is_live or not self.is_up_to_date:
                if self.control:  # it was trained here, so that its history was never read
                    self.control = None
                    self._start_over()
                self._read()

    @property
    def is_up_to_date(self) -> bool:
        """Whether nobody has changed its folder since it was last read."""
        return self.folder.stamp() == self._stamp

    def forget_history(self) -> None:
        """Give back the memory of its steps; they are read again when asked for."""
        with self._lock:
            if not self.is_trained_here and not self._is_stale:
                self._epochs, self._rates = self._history.snapshot().epochs, self._history.snapshot().rates
                self._start_over()

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

    def weights(self) -> Checkpoint:
        """As `checkpoint`, where there have to be some.

        Raises:
            RunFolderError: there are none yet, or the file is damaged.
        """
        checkpoint = self.checkpoint()
        if checkpoint is None:
            raise RunFolderError(
                f"Run {self.name} has no weights yet: its first epoch is not done. Wait, or choose another."
            )
        return checkpoint

    def publish(self, checkpoint: Checkpoint) -> None:
        """Let others see the newest weights; called on the training thread."""
        self._published = checkpoint

    def end(self) -> None:
        """This process is through with it: nothing about it will change any more."""
        try:
            self._published = None
            self._stamp = self.folder.stamp()
            self._read_about()
        finally:  # whatever is wrong with the folder, others may have it, and the next run begins
            self.folder.lock.release()
            self.ended.set()

    def _read(self) -> None:
        self._stamp = self.folder.stamp()  # before the files: what changes meanwhile is read next time
        self.config = self.folder.read_config()
        self.origin = self.folder.read_origin()
        self.state = self.folder.read_state()
        self.history_problem, self._epochs, self._rates = "", (), ()
        self._read_about()
        if not self.is_live:
            try:
                self._rates = self.folder.read_rates()
                self._epochs = self.folder.read_epochs()
                self._check_epochs(self.state.steps or 0)
            except RunFolderError as error:
                self.history_problem = str(error)
        self._is_stale = True  # read after the state: an ended run's history is whole

    def _read_about(self) -> None:
        self._about_problem = ""
        try:
            self.about = self.folder.read_about()
        except RunFolderError as error:
            self._about_problem = str(error)

    def _check_epochs(self, steps: int) -> None:
        """Find rows that are missing from the end of a file, where what is left reads well."""
        # A run may be stopped after an epoch's last step, before its row.
        if len(self._epochs) < (steps - 1) // self.config.steps_per_epoch:
            raise RunFolderError(f"Run {self.id} has a damaged history: epochs are missing from epochs.csv.")

    def _read_history(self) -> None:
        if not self._is_stale:  # another thread was faster
            return
        try:
            try:
                self.folder.read_history(self._history)
            except RolledBackError:
                self._start_over()
                self.folder.read_history(self._history)
            if not self.is_live and self._history.snapshot().steps < (self.state.steps or 0):
                raise RunFolderError(f"Run {self.id} has a damaged history: steps are missing from steps.csv.")  # noqa: TRY301
        except RunFolderError as error:
            self.history_problem = str(error)
        self._is_stale = False

    def _start_over(self) -> None:
        """Have its history read from the beginning, when it is next asked for."""
        self.folder = RunFolder(self.folder.path)
        self._history, self._is_stale = History(), True
