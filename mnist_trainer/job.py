"""Work in a thread of its own, to be followed and stopped: a race, a measurement."""

import atexit
import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

from .devices import first_sentence, is_out_of_memory
from .errors import MnistTrainerError, RunBusyError

log = logging.getLogger(__name__)

STOP_SECONDS = 3.0  # what a process that ends waits for a job


class JobStoppedError(Exception):
    """Raised by `Job.check` on the job's thread, once a stop was asked for."""


class Progress(NamedTuple):
    """How far a job is."""

    share: float  # in [0, 1]
    text: str


class Job:
    """Runs `work` in the background, once. All of it may be read from any thread.

    Args:
        work: is called with the job on its own thread; calls `report` as it gets on, and `check` often.
        name: of the thread.

    Attributes:
        progress: the newest that was reported.
        problem: why it ended too soon, as a sentence; empty if it did not.
        was_stopped: whether it ended because it was asked to.
        ended: set once it is over, in whatever way.

    Raises:
        RunBusyError: the system has no more threads.
    """

    def __init__(self, work: Callable[["Job"], None], name: str) -> None:
        self.progress = Progress(0.0, "")
        self.problem = ""
        self.was_stopped = False
        self.ended = threading.Event()
        self._work = work
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # As for runs: a thread inside PyTorch would abort the interpreter as it shuts down.
        atexit.register(self.stop, STOP_SECONDS)
        try:
            self._thread.start()
        except RuntimeError as error:
            atexit.unregister(self.stop)
            raise RunBusyError(f"This machine has no thread left for it ({error}). Try again later.") from error

    @property
    def is_live(self) -> bool:
        """Whether it still works."""
        return not self.ended.is_set()

    def stop(self, wait_seconds: float = 0.0) -> None:
        """Ask it to end; wait for that up to `wait_seconds`."""
        self._stopping.set()
        self.ended.wait(wait_seconds)

    def report(self, share: float, text: str) -> None:
        """Say how far it is; called on its thread."""
        self.progress = Progress(share, text)

    def check(self) -> None:
        """Called on its thread, often.

        Raises:
            JobStoppedError: a stop was asked for.
        """
        if self._stopping.is_set():
            raise JobStoppedError

    def _run(self) -> None:
        try:
            self._work(self)
        except JobStoppedError:
            self.was_stopped = True
        except MnistTrainerError as error:
            self.problem = str(error)
        except Exception as error:  # the thread's last stop: what is not shown from here nobody sees
            log.exception("%s failed", self._thread.name)
            self.problem = (
                "There is not enough memory for it. Choose something smaller."
                if is_out_of_memory(error)
                else f"It failed: {first_sentence(error)}. The details are in the server's log."
            )
        finally:
            self.ended.set()
            atexit.unregister(self.stop)
