"""What to advise when a run does not learn."""

import math

import numpy as np

from .config import TrainConfig
from .history import Snapshot

STALL_STEPS, SHORT_STALL_STEPS = 200, 50  # judged by so many, twice in a row; a run that ends sooner by fewer
STALL_ACCURACY = 0.25  # guessing has 0.1
GOOD_LEARNING_RATES = {"SGD": 0.5, "SGD-momentum": 0.1, "Adam": 0.001, "AdamW": 0.001}


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
