"""What people ask of a run while it trains: stop, pause, one step, another learning rate."""

import threading

from .config import check_learning_rate


class Control:
    """Asked from any thread; heeded by the training thread between two steps."""

    def __init__(self) -> None:
        self.stop = threading.Event()  # ends training before the next step
        self.skip_test = threading.Event()  # ends, or forgoes, the measurement on the test set
        self.news = threading.Event()  # something below may have changed: all that the loop looks at before a step
        self._lock = threading.Lock()
        self._is_paused = False
        self._steps = 0
        self._learning_rate: float | None = None

    @property
    def is_paused(self) -> bool:
        """Whether a pause is asked for."""
        return self._is_paused

    def request_stop(self, *, skip_test: bool = False) -> None:
        """End training before the next step; asked again, end the test too."""
        if skip_test or self.stop.is_set():
            self.skip_test.set()
        self.stop.set()
        self.news.set()

    def pause(self) -> None:
        """Hold on before the next step."""
        with self._lock:
            self._is_paused = True
        self.news.set()

    def go_on(self) -> None:
        """End the pause; where it waits for room on the disk, try again at once."""
        with self._lock:
            self._is_paused, self._steps = False, 0
        self.news.set()

    def step(self) -> None:
        """Pause, and take one more step."""
        with self._lock:
            self._is_paused = True
            self._steps += 1
        self.news.set()

    def set_learning_rate(self, learning_rate: float) -> None:
        """Go on with this learning rate from the next step.

        Raises:
            ConfigError: it is out of range.
        """
        check_learning_rate(learning_rate)
        with self._lock:
            self._learning_rate = float(learning_rate)
        self.news.set()

    @property
    def has_step(self) -> bool:
        """Whether one more step is asked for."""
        return self._steps > 0

    def take_step(self) -> bool:
        """Whether one more step is asked for; it counts as taken."""
        with self._lock:
            self._steps -= (has_one := self._steps > 0)
            return has_one

    def take_learning_rate(self) -> float | None:
        """The learning rate asked for since the last call, if any."""
        with self._lock:
            learning_rate, self._learning_rate = self._learning_rate, None
            return learning_rate
