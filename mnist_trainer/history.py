"""What a run measured while it trained: one row a step, one row an epoch, only ever appended to."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

RECENT_STEPS, RECENT_SECONDS = 50, 2.0  # what "now" means in figures shown while a run goes on


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """Measured once per epoch, after validation."""

    epoch: int  # counts from 1
    step: int  # steps done, all epochs together
    train_loss: float  # mean over the epoch's steps, nats per image
    train_accuracy: float  # the same, fraction in [0, 1]
    val_loss: float  # over the 10,000 validation images, nats per image
    val_accuracy: float  # the same, fraction in [0, 1], exact
    seconds: float  # since the first step


@dataclass(frozen=True, slots=True)
class RateChange:
    """The learning rate was moved while the run trained."""

    step: int  # steps done by then: the next one is the first with it
    learning_rate: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A history at one moment, safe to read while the run goes on.

    Attributes:
        losses: of each step, shape (steps,): cross-entropy of its batch before the update, nats per image.
        accuracies: of each step, shape (steps,): fraction of its batch that was right.
        seconds: when each step ended, shape (steps,), since the first began.
        epochs: one row per finished epoch.
        rates: every change of the learning rate, oldest first.
    """

    losses: Floats
    accuracies: Floats
    seconds: Floats
    epochs: tuple[EpochEnd, ...]
    rates: tuple[RateChange, ...] = ()

    @property
    def steps(self) -> int:
        """Steps recorded so far."""
        return len(self.losses)

    @property
    def last_epoch(self) -> EpochEnd | None:
        """The newest finished epoch."""
        return self.epochs[-1] if self.epochs else None

    @property
    def best_val_accuracy(self) -> float | None:
        """The highest validation accuracy of any epoch, fraction in [0, 1]."""
        return best_val_accuracy(self.epochs)

    def recent(self, values: Floats) -> float | None:
        """Mean of the last `RECENT_STEPS` of `losses` or `accuracies`; None before the first step."""
        return float(values[-RECENT_STEPS:].mean()) if len(values) else None

    def steps_per_second(self) -> float | None:
        """Speed over the last `RECENT_SECONDS`; None before there is any to measure."""
        if self.steps < 2:
            return None
        first = int(np.searchsorted(self.seconds, self.seconds[-1] - RECENT_SECONDS))
        first = min(first, self.steps - 2)
        elapsed = float(self.seconds[-1] - self.seconds[first])
        return (self.steps - 1 - first) / elapsed if elapsed > 0 else None


def best_val_accuracy(epochs: Iterable[EpochEnd]) -> float | None:
    """The highest validation accuracy of these epochs, fraction in [0, 1]; None if there are none."""
    return max((epoch.val_accuracy for epoch in epochs), default=None)


class History:
    """An append-only history with one writing thread and any number of readers.

    Rows are added in place behind what a snapshot shows, and published by one assignment, so readers
    need no lock and never copy.
    """

    def __init__(self) -> None:
        self._rows = np.empty((3, 1024), np.float32)
        empty = self._rows[0, :0]
        self._snapshot = Snapshot(empty, empty, empty, epochs=())

    def snapshot(self) -> Snapshot:
        """Everything recorded so far; costs the same however long the run is."""
        return self._snapshot

    def add_steps(self, losses: Sequence[float], accuracies: Sequence[float], seconds: Sequence[float]) -> None:
        """Append steps, oldest first; called on the writing thread."""
        start, stop = self._snapshot.steps, self._snapshot.steps + len(losses)
        if stop > self._rows.shape[1]:
            # Doubled, so that a long run copies each row a constant number of times. Old snapshots keep
            # the old array.
            grown = np.empty((3, max(stop, 2 * self._rows.shape[1])), np.float32)
            grown[:, :start] = self._rows[:, :start]
            self._rows = grown
        self._rows[:, start:stop] = losses, accuracies, seconds
        columns = dict(zip(("losses", "accuracies", "seconds"), self._rows[:, :stop], strict=True))
        self._snapshot = dataclasses.replace(self._snapshot, **columns)

    def add_epoch(self, epoch: EpochEnd) -> None:
        """Append a finished epoch; called on the writing thread."""
        self._snapshot = dataclasses.replace(self._snapshot, epochs=(*self._snapshot.epochs, epoch))

    def set_rates(self, rates: Iterable[RateChange]) -> None:
        """Tell of every change of the learning rate so far; called on the writing thread."""
        self._snapshot = dataclasses.replace(self._snapshot, rates=tuple(rates))
