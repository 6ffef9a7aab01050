"""All runs: started, queued, found again, resumed, continued, deleted."""

import atexit
import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from .archive import import_run
from .config import AT_ONCE_VARIABLE, TrainConfig, check_epochs, check_learning_rate
from .control import Control
from .devices import check_fits, find_device
from .errors import (
    ConfigError,
    DeviceUnavailableError,
    MnistTrainerError,
    RunBusyError,
    RunFolderError,
    RunNotFoundError,
)
from .history import RateChange
from .run import Run
from .state import About, Change, Checkpoint, Origin, RunState
from .store import RunFolder, home_folder, rates_file
from .trainer import train_run
from .trash import Trash

if TYPE_CHECKING:
    from .group import Group

log = logging.getLogger(__name__)

KEPT_IN_MEMORY = 16  # histories of ended runs; those of others are read from their folders again
RELIST_SECONDS = 1.0  # thirty pages that look for a new run look at the disk once
MAX_WAITING = 50


class _Partner(NamedTuple):
    """What the second run of a pair waits for."""

    run: Run  # the first one
    is_beside: bool  # it begins when that does, else when that has ended


class RunManager:
    """Starts runs, finds them again, and stops them when the process ends. One per process.

    Args:
        home: the folder with `runs` and `data`; by default `home_folder()`.
        at_once: how many runs train at a time, the others wait; by default what the environment variable
            `MNIST_TRAINER_RUNS_AT_ONCE` says, or 1.
        group: the processes that train its runs together, of which this is rank 0; by default this one alone.

    Raises:
        ConfigError: the environment variable is not a number from 1 to 16.
    """

    def __init__(self, home: Path | None = None, at_once: int | None = None, group: "Group | None" = None) -> None:
        self.home = home or home_folder()
        self.at_once = at_once or _at_once()
        self.group = group
        self._runs: dict[str, Run] = {}
        self._looked_at: OrderedDict[str, Run] = OrderedDict()  # whose history is in memory
        self._waiting: list[Run] = []
        self._partners: dict[Run, _Partner] = {}  # of each run that is the second of a pair, until it ends
        self._quiet = 0  # how many want no run to begin
        self._threads: dict[Run, threading.Thread] = {}
        self._listed: list[Run] = []
        self._damaged: dict[str, str] = {}
        self._listed_at = -RELIST_SECONDS
        self._is_shut = False
        self._lock = threading.RLock()
        self._trash = Trash(self.home)
        # Without this join a training thread would abort the interpreter as it shuts down.
        atexit.register(self.shutdown)

    def start(self, config: TrainConfig) -> Run:
        """Train in the background, now or when its turn comes.

        Raises:
            DeviceUnavailableError: the device cannot be used.
            ConfigError: the network would not fit into the device's memory.
            RunBusyError: too many runs are waiting already.
            RunFolderError: the run's folder cannot be written.
        """
        config, label = _placed(config, config.device)
        self._check_queue()
        state = RunState(device_label=label).turned("queued", 0)
        return self._enqueue(RunFolder.create(self.home, config, state))

    def start_pair(
        self, configs: tuple[TrainConfig, TrainConfig], names: tuple[str, str], *, at_once: bool
    ) -> tuple[Run, Run]:
        """Train two runs between which no other begins, now or when their turn comes.

        Args:
            configs: settings of the first and of the second.
            names: what they are called.
            at_once: whether the second trains beside the first, without a place of its own, or after it.

        Raises:
            As `start` does; then neither is made.
        """
        placed = [_placed(config, config.device) for config in configs]
        (first, _), (second, _) = placed
        if at_once and first.device == second.device:
            check_fits(second, second.device, taken_bytes=first.memory_bytes)
        self._check_queue(2)
        folders = list[RunFolder]()
        try:
            for (config, label), name in zip(placed, names, strict=True):
                folders.append(RunFolder.create(self.home, config, RunState(device_label=label).turned("queued", 0)))
                folders[-1].write_about(About(name))
        except RunFolderError:
            for folder in folders:
                folder.discard()
            raise
        with self._lock, self.quiet():  # neither begins before it is known that they are a pair
            run = self._enqueue(folders[0])
            return run, self._enqueue(folders[1], _Partner(run, at_once))

    @contextlib.contextmanager
    def quiet(self, *, alone: bool = False) -> Iterator[None]:
        """Let no run begin meanwhile, but the second of a pair: something is being measured.

        Args:
            alone: whether nothing else may train, or be measured, as it begins.

        Raises:
            RunBusyError: something does, or is.
        """
        with self._lock:
            if alone:
                self._check_quiet()
            self._quiet += 1
        try:
            yield
        finally:
            with self._lock:
                self._quiet -= 1
            self._start_next()

    def resume(self, run_id: str, device: str = "") -> Run:
        """Let a run that ended too soon go on from its last checkpoint, as if it had never stopped.

        Args:
            run_id: of a stopped, interrupted or failed run.
            device: another device; by default its own, or, where that is not here, the fastest.

        Raises:
            RunNotFoundError, RunFolderError: there is no such run, or it cannot be read or written.
            RunBusyError: it is live, or too many runs are waiting already.
            ConfigError: it has nothing left to do.
            DeviceUnavailableError: the device cannot be used.
        """
        run = self.get(run_id)
        if problem := self.problem_with_resuming(run):
            raise RunBusyError(problem) if run.is_live else ConfigError(problem)
        self._check_queue()
        config, label = _placed(run.config, device)
        folder = RunFolder(run.folder.path)
        folder.hold()
        try:
            if not run.is_up_to_date:  # it went on, and ended, between our look at it and our lock
                raise RunBusyError(f"Run {run.name} was changed by another program just now. Look at it again.")  # noqa: TRY301
            checkpoint = folder.load_checkpoint(with_training=True) or Checkpoint({}, 0, 0, None)
            if checkpoint.step and not checkpoint.training:
                raise ConfigError(f"Run {run.name} cannot go on exactly as it was. Continue it instead.")  # noqa: TRY301
            files = folder.history_until(checkpoint)
            folder.read_rates()
            # What it had come to stays, until it trains again.
            state = dataclasses.replace(run.state, device_label=label, steps=checkpoint.step, changes=_changes(run))
            before = folder.read_bytes("state.json")
            try:
                # First of all: a kill right after it leaves an interrupted run, whole.
                folder.write_state(state.turned("queued", checkpoint.step))
                folder.write_config(config, run.origin)
                folder.roll_back(files)
            except OSError as error:
                with contextlib.suppress(OSError):
                    folder.roll_back({"state.json": before})
                raise RunFolderError(
                    f"Run {run.name} cannot go on: {folder.path} cannot be written ({error.strerror or error}). "
                    "Make room or make it writable, and try again."
                ) from error
        except BaseException:
            folder.lock.release()
            raise
        return self._enqueue(folder)

    def continue_run(self, run_id: str, epochs: int, learning_rate: float | None = None, device: str = "") -> Run:
        """Train a network further, as a new run that begins with its history; the old one stays as it is.

        Args:
            run_id: of a run that is over.
            epochs: how many more.
            learning_rate: another one from here on; by default its last one.
            device: as in `resume`.

        Raises:
            As `start` and `resume` do.
        """
        run = self.get(run_id)
        if run.is_live:
            raise RunBusyError(f"Run {run.name} is {run.state.status}. Stop it first, or wait until it ends.")
        checkpoint = run.folder.load_checkpoint(with_training=True)
        if checkpoint is None:
            raise RunFolderError(f"Run {run.name} has no weights to continue from. Start a new run instead.")
        self._check_queue()
        config = dataclasses.replace(run.config, epochs=checkpoint.epoch + check_epochs(epochs))
        config, label = _placed(config, device)
        files = run.folder.history_until(checkpoint)
        files["checkpoint.pt"] = run.folder.read_bytes("checkpoint.pt")
        rates = [rate for rate in run.folder.read_rates() if rate.step <= checkpoint.step]
        if learning_rate is not None:
            change = RateChange(checkpoint.step, check_learning_rate(learning_rate))
            rates = [rate for rate in rates if rate.step < checkpoint.step] + [change]
        if rates:
            files["learning_rates.csv"] = rates_file(rates)
        state = RunState(device_label=label, threads=run.state.threads).turned("queued", checkpoint.step)
        origin = Origin(parent=run.id, parent_step=checkpoint.step)
        return self._enqueue(RunFolder.create(self.home, config, state, origin, files))

    def problem_with_resuming(self, run: Run) -> str:
        """Why this run cannot be resumed, as a sentence; empty if it can, as far as can be told without its files."""
        status = run.state.status
        if run.is_live:
            return f"Run {run.name} is {status} already."
        if status == "finished":
            return f"Run {run.name} is finished. Continue it for more epochs instead."
        if status == "diverged":
            return f"Run {run.name} diverged, and would again. Continue it with a smaller learning rate instead."
        return ""

    def import_run(self, source: BinaryIO, name: str) -> Run:
        """Put a run that was exported among the others; see `archive.import_run`."""
        run_id = import_run(self.home, source, name)
        self._forget_list()
        return self.get(run_id)

    def stop(self, run: Run, *, skip_test: bool = False) -> None:
        """End a run's training before its next step; one that waits is withdrawn, and keeps its folder.

        Args:
            run: that this process trains, or will.
            skip_test: whether it is not to be measured on the test set either.
        """
        with self._lock:
            if run not in self._waiting:
                run.request_stop(skip_test=skip_test)
                return
            self._waiting.remove(run)
            self._unpair(run)
            message = "It was withdrawn before its turn came."
            run.set_state(run.state.turned("stopped", run.snapshot().steps, message))
            run.end()

    @property
    def waiting(self) -> tuple[Run, ...]:
        """The runs that wait here for their turn, the next one first."""
        with self._lock:
            return tuple(self._waiting)

    @property
    def training(self) -> Run | None:
        """A run that this process trains now; of several the oldest."""
        with self._lock:
            return next((run for run in self._threads if not run.ended.is_set()), None)

    def current(self) -> Run | None:
        """The run that a class looks at: one that trains here, or elsewhere, or else the newest."""
        return self.training or next((run for run in self.all() if run.is_live), None) or self.latest()

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
            self._looked_at[run_id] = run
            self._looked_at.move_to_end(run_id)
            while len(self._looked_at) > KEPT_IN_MEMORY:
                self._looked_at.popitem(last=False)[1].forget_history()
        return run

    def latest(self) -> Run | None:
        """The newest run that can be read."""
        newest = next(iter(self.all()), None)
        return newest and self.get(newest.id)

    def all(self) -> list[Run]:
        """All runs that can be read, newest first, at most `RELIST_SECONDS` old."""
        with self._lock:
            self._list()
            return list(self._listed)

    def damaged(self) -> dict[str, str]:
        """What is wrong with each run that cannot be read, by its id, as sentences."""
        with self._lock:
            self._list()
            return dict(self._damaged)

    def _forget_list(self) -> None:
        """Have the next look at the runs be one at the disk."""
        self._listed_at = -RELIST_SECONDS

    def delete(self, run_id: str) -> None:
        """Take a run away; until this process ends it can be put back.

        Raises:
            RunNotFoundError: there is none.
            RunBusyError: it waits or trains, here or elsewhere.
            RunFolderError: it cannot be moved.
        """
        folder = RunFolder.find(self.home, run_id)
        if (run := self._runs.get(run_id)) and run.is_trained_here:
            raise RunBusyError(f"Run {run.name} is {run.state.status}. Stop it first, and delete it then.")
        folder.hold()
        try:
            if os.name == "nt":  # an open file keeps its folder from being moved there
                folder.lock.release()
            self._trash.put(folder.path)
        finally:
            folder.lock.release()
        with self._lock:
            self._runs.pop(run_id, None)
            self._looked_at.pop(run_id, None)
        self._forget_list()

    def undelete(self, run_id: str) -> None:
        """Put a deleted run back.

        Raises:
            RunFolderError: it cannot be moved.
        """
        with self._lock:
            self._trash.put_back(run_id, self.home / "runs")
        self._forget_list()

    @property
    def deleted(self) -> list[str]:
        """Ids of the runs that can be put back, the newest deleted last."""
        return self._trash.ids

    def shutdown(self, timeout_seconds: float = 4.0) -> None:
        """Stop what is training and wait for it, so that the process may end and every run is kept."""
        with self._lock:
            self._is_shut = True
            for run in self._waiting:  # on the disk it stays queued: the next program calls it interrupted
                run.end()
            self._waiting.clear()
            threads = dict(self._threads)
        for run in threads:
            if run.control:
                run.control.request_stop(skip_test=True)
        deadline = time.monotonic() + timeout_seconds
        for thread in threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        self._trash.empty()
        atexit.unregister(self.shutdown)

    def _find(self, run_id: str) -> Run:
        """From memory, brought up to date, or else from its folder."""
        run = self._runs.get(run_id)
        if run is None or not run.is_trained_here:
            try:
                folder = RunFolder.find(self.home, run_id)
            except RunNotFoundError:  # another program has deleted it
                self._runs.pop(run_id, None)
                raise
            run = self._runs[run_id] = run or Run(folder)
            run.refresh()
        return run

    def _list(self) -> None:
        if time.monotonic() - self._listed_at < RELIST_SECONDS:
            return
        known, self._listed, self._damaged = self._damaged, [], {}
        for run_id in RunFolder.all_ids(self.home):
            problem: Exception | None = None
            try:
                self._listed.append(self._find(run_id))
            except MnistTrainerError as error:
                problem = error
                self._damaged[run_id] = str(error)
            except Exception as error:  # whatever one folder holds, the others are listed
                problem = error
                self._damaged[run_id] = (
                    f"Run {run_id} is damaged in a way that nobody thought of. See the server's log."
                )
            if problem and known.get(run_id) != self._damaged[run_id]:  # once, not every second
                is_told = isinstance(problem, MnistTrainerError)
                log.warning("%s", self._damaged[run_id], exc_info=None if is_told else problem)
        self._runs = {run.id: run for run in (*self._listed, *self._threads, *self._waiting)}
        for run in self._runs.values():
            if run.id not in self._looked_at:  # as one that ended since anybody looked
                run.forget_history()
        self._listed_at = time.monotonic()

    def _check_quiet(self) -> None:
        if run := self.training or next((run for run in self.all() if run.state.status == "running"), None):
            raise RunBusyError(f"Run {run.name} is {run.state.status}: it would be measured, too. Stop it, or wait.")
        if self._quiet:
            raise RunBusyError("A race is being measured, and each would slow the other. Wait a moment.")

    def _check_queue(self, more: int = 1) -> None:
        """Refuse so many more, before anything is made for them."""
        if len(self._waiting) + more > MAX_WAITING:
            raise RunBusyError(f"{len(self._waiting)} runs are waiting already. Try again when some of them are done.")

    def _enqueue(self, folder: RunFolder, partner: _Partner | None = None) -> Run:
        run = Run(folder, Control())
        with self._lock:
            self._runs[run.id] = run
            self._waiting.append(run)
            if partner:
                self._partners[run] = partner
        self._forget_list()
        self._start_next()
        return run

    def _start_next(self) -> None:
        with self._lock:
            while not self._is_shut and (run := self._next()):
                self._waiting.remove(run)
                thread = threading.Thread(target=self._train, args=(run,), name=f"run {run.id}", daemon=True)
                try:
                    thread.start()  # it waits for our lock before it ends
                except RuntimeError as error:  # the system has no more threads
                    run.set_state(run.state.turned("failed", 0, f"The run could not begin: {error}. Resume it later."))
                    run.end()
                    self._unpair(run)
                    continue
                self._threads[run] = thread

    def _unpair(self, run: Run) -> None:
        """It will not train now; what is left of its pair is a run like any other."""
        pairs = self._partners.items()
        self._partners = {second: partner for second, partner in pairs if run not in (second, partner.run)}

    def _next(self) -> Run | None:
        """The run that may begin now, if any. A pair has the machine to itself."""
        training = {run for run in self._threads if not run.ended.is_set()}
        firsts = {partner.run for partner in self._partners.values()}
        for run in self._waiting:
            partner = self._partners.get(run)
            if partner and partner.run not in self._waiting and (partner.is_beside or partner.run not in training):
                return run
        if not self._waiting or self._quiet or training & (firsts | self._partners.keys()):
            return None
        first = self._waiting[0]
        return first if len(training) < (1 if first in firsts else self.at_once) else None

    def _train(self, run: Run) -> None:
        """The target of a training thread."""
        try:
            train_run(run, self.home, self.group)
        finally:
            with self._lock:
                del self._threads[run]
                for second, partner in tuple(self._partners.items()):
                    if second.ended.is_set() and partner.run.ended.is_set():
                        del self._partners[second]
            self._start_next()


def _placed(config: TrainConfig, device: str = "") -> tuple[TrainConfig, str]:
    """The settings with the device by its full name, and what a person calls it."""
    if not device:
        # A run of another machine goes on here, if not on what that one had.
        with contextlib.suppress(DeviceUnavailableError):
            device = find_device(config.device).name
    found = find_device(device or "auto")
    check_fits(config, found.name)
    return dataclasses.replace(config, device=found.name), found.label


def _changes(run: Run) -> tuple[Change, ...]:
    """The run's changes, with the end of its program among them, which nobody was there to write down."""
    if run.state.status != "interrupted":
        return run.state.changes
    steps = run.folder.path / "steps.csv"
    died_at = datetime.fromtimestamp(steps.stat().st_mtime, UTC).isoformat(timespec="milliseconds")
    return (*run.state.changes, Change("interrupted", died_at, run.snapshot().steps))


def _at_once() -> int:
    text = os.environ.get(AT_ONCE_VARIABLE, "1").strip()
    if not text.isdecimal() or not 1 <= int(text) <= 16:
        raise ConfigError(f"{AT_ONCE_VARIABLE} must be a whole number from 1 to 16; {text[:20]!r} is not.")
    return int(text)
