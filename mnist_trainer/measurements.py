"""Measurements of this machine: in the background, one at a time, kept until the program ends."""

import contextlib
import ctypes
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .config import MAX_HIDDEN_SIZE
from .errors import RunBusyError
from .job import Job
from .trainer import threads_for

# Called on the measurement's thread with its job, and with what takes each row as soon as it is measured.
Measure = Callable[[Job, Callable[[Any], None]], None]


class Measurement:
    """One measurement, which begins at once.

    Args:
        kind: what a person calls it: "Copying".
        about: on what, with its settings: "cpu, 4 images".
        measure: what is done.

    Attributes:
        rows: what was measured so far, frozen values; may be read from any thread.
        job: to follow and to stop it.
    """

    def __init__(self, kind: str, about: str, measure: Measure) -> None:
        self.rows: tuple[Any, ...] = ()
        self.kind, self.about = kind, about
        self._measure = measure
        self.job = Job(self._work, kind)

    def _work(self, job: Job) -> None:
        try:
            with _all_threads():
                self._measure(job, self._add)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold on to the tensors
            raise
        finally:
            _give_back_memory()

    def _add(self, row: Any) -> None:
        self.rows += (row,)


class Measurements:
    """The newest measurement of each kind. Each would disturb the others: there is one at a time."""

    def __init__(self) -> None:
        self._newest: dict[str, Measurement] = {}
        self._lock = threading.Lock()

    def start(self, kind: str, about: str, measure: Measure) -> Measurement:
        """Begin a measurement, which takes the place of the one before of its kind; arguments as of `Measurement`.

        Raises:
            RunBusyError: another one is going on.
        """
        with self._lock:
            if live := self.live:
                raise RunBusyError(
                    f"{live.kind} is being measured, and each would slow the other. Stop that first, or wait."
                )
            self._newest[kind] = Measurement(kind, about, measure)
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


@contextlib.contextmanager
def _all_threads() -> Iterator[None]:
    """Compute with all of the CPU. PyTorch keeps the number by thread, and gives a new thread the number set last."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads_for(MAX_HIDDEN_SIZE))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _give_back_memory() -> None:
    """Let the system, and the device's other programs, have what is not used any more."""
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # not every C library has it
            # glibc keeps 70 to 250 MB of a step of VGG16 otherwise.
            ctypes.CDLL(None).malloc_trim(0)
