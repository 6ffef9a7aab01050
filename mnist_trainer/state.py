"""How a run stands, where it comes from, what people call it, and what it learnt: the values a run's folder keeps."""

import dataclasses
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

from torch import Tensor

from .history import EpochEnd

STATUSES = ("queued", "running", "paused", "finished", "stopped", "diverged", "failed", "interrupted")
LIVE = STATUSES[:3]
MAX_NAME, MAX_NOTE = 80, 2_000  # characters


@dataclass(frozen=True, slots=True)
class Change:
    """A run's change to another status.

    Attributes:
        status: the new one.
        at: when, ISO 8601, UTC.
        step: steps done by then.
    """

    status: str
    at: str
    step: int


@dataclass(frozen=True, slots=True)
class RunState:
    """How a run stands.

    Attributes:
        status: one of `STATUSES`. "interrupted" (its process died) is only ever read, never written.
        message: what the user should know about it, a sentence or two; empty if all is well.
        suggested_learning_rate: one to try instead, if this one was the trouble.
        device_label: what it trains on, as a person calls it.
        seconds: how long it took, from the first step to the last validation, pauses left out; None while it trains.
        steps: steps done when it ended; None while it trains.
        threads: of the CPU, with which each process trains: with another number sums are rounded differently.
        test_loss: over the 10,000 test images, nats per image; None until it has ended.
        test_accuracy: the same, fraction in [0, 1].
        changes: every change of the status, oldest first.
        processes: that train it together, or did so last.
    """

    status: str = "queued"
    message: str = ""
    suggested_learning_rate: float | None = None
    device_label: str = ""
    seconds: float | None = None
    steps: int | None = None
    threads: int | None = None
    test_loss: float | None = None
    test_accuracy: float | None = None
    changes: tuple[Change, ...] = ()
    processes: int = 1

    @property
    def is_live(self) -> bool:
        """Whether it trains, or will go on by itself or at a word."""
        return self.status in LIVE

    def turned(self, status: str, step: int, message: str = "") -> Self:
        """This state once the run has become `status`, now, after so many steps."""
        change = Change(status, datetime.now(UTC).isoformat(timespec="milliseconds"), step)
        return dataclasses.replace(self, status=status, message=message, changes=(*self.changes, change))


@dataclass(frozen=True, slots=True)
class About:
    """What people wrote on a run: a name, and a note."""

    name: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a run comes from.

    Attributes:
        created_at: when it was made, ISO 8601, UTC; empty if that is not known.
        parent: id of the run that it was continued from, or empty.
        parent_step: the step from which it was continued.
    """

    created_at: str = ""
    parent: str = ""
    parent_step: int = 0


@dataclass(frozen=True, slots=True)
class TrainingState:
    """What training needs, besides the weights, to go on as if it had never stopped.

    Attributes:
        optimizer: its state_dict, on the CPU.
        order: uint8, state of the generator of the images' order, before it drew that of the epoch in progress.
        last_epoch: the newest row of the history of epochs, which a kill may have kept off its file.
    """

    optimizer: dict[str, Any]
    order: Tensor
    last_epoch: EpochEnd | None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A network's weights at one moment.

    Attributes:
        weights: the model's state_dict, on the CPU; not to be written to.
        epoch: finished epochs.
        step: steps done.
        val_accuracy: after the last finished epoch, fraction in [0, 1]; None before the first.
        training: for resuming; None where only the weights are at hand.
    """

    weights: dict[str, Tensor]
    epoch: int
    step: int
    val_accuracy: float | None
    training: TrainingState | None = None

    @property
    def trust(self) -> str:
        """How far these weights may be trusted, in a few words."""
        if self.step == 0:
            return "untrained: guessing"
        if self.val_accuracy is None:
            return f"step {self.step:,}, before the end of its first epoch"
        return f"epoch {self.epoch:,}, {self.val_accuracy:.1%} of the validation images right"
