"""Measurements of this machine: in the background, one at a time, kept until the program ends."""

import contextlib
import ctypes
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from .devices import cpu_threads
from .errors import RunBusyError
from .job import Job
from .machine import others_use
from .runs import RunManager

LISTEN_SECONDS = 0.5  # how long it looks at what else the machine does

# Called on the measurement's thread with its job, and with what takes each row as soon as it is measured.
Measure = Callable[[Job, Callable[[Any], None]], None]


class Measurement:
    """One measurement, which begins at once.

    Args:
        kind: what a person calls it: "Copying".
        about: on what, with its settings: "cpu, 4 images".
        measure: what is done.
        alone: is left when it is over.

    Attributes:
        rows: what was measured so far, frozen values; may be read from any thread.
        job: to follow and to stop it.
        busy_before: share of the CPU that other programs used just before it began, in [0, 1].
    """

    def __init__(
        self, kind: str, about: str, measure: Measure, alone: AbstractContextManager[Any] | None = None
    ) -> None:
        self.rows: tuple[Any, ...] = ()
        self.kind, self.about = kind, about
        self.busy_before = 0.0
        self._measure = measure
        self._alone = alone or contextlib.nullcontext()
        self.job = Job(self._work, kind)

    def _work(self, job: Job) -> None:
        try:
            with self._alone, cpu_threads():
                self.busy_before = others_use(LISTEN_SECONDS)
                self._measure(job, self._add)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold on to the tensors
            raise
        finally:
            _give_back_memory()

    def _add(self, row: Any) -> None:
        self.rows += (row,)


class Measurements:
    """The newest measurement of each kind. Each would disturb the others: there is one at a time.

    Args:
        runs: which let no run begin meanwhile.
    """

    def __init__(self, runs: RunManager) -> None:
        self._runs = runs
        self._newest: dict[str, Measurement] = {}
        self._lock = threading.Lock()

    def start(self, kind: str, about: str, measure: Measure) -> Measurement:
        """Begin a measurement, which takes the place of the one before of its kind; arguments as of `Measurement`.

        Raises:
            RunBusyError: another one is going on, or a run, or a race.
        """
        with self._lock:
            if live := self.live:
                raise RunBusyError(
                    f"{live.kind} is being measured, and each would slow the other. Stop that first, or wait."
                )
            alone = contextlib.ExitStack()
            alone.enter_context(self._runs.quiet(alone=True))
            try:
                self._newest[kind] = Measurement(kind, about, measure, alone)
            except RunBusyError:  # the system has no thread for it
                alone.close()
                raise
            return self._newest[kind]

    def newest(self, kind: str) -> Measurement | None:
        """The newest of this kind, going on or over."""
        return self._newest.get(kind)

    @property
    def live(self) -> Measurement | None:
        """The one that is going on."""
        return next((each for each in tuple(self._newest.values()) if each.job.is_live), None)

    def stop(self, wait_seconds: float = 0.0) -> None:
        """Stop what is going on, and wait for that up to `wait_seconds`."""
        if live := self.live:
            live.job.stop(wait_seconds)


def _give_back_memory() -> None:
    """Let the system, and the device's other programs, have what is not used any more."""
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # not every C library has it
            # glibc keeps 70 to 250 MB of a step of VGG16 otherwise.
            ctypes.CDLL(None).malloc_trim(0)
