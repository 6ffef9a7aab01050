"""What a run measured: appended on one thread, read on others."""

import functools
import sys
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from mnist_trainer.history import EpochEnd, History, Snapshot


def epoch_end(epoch: int, val_accuracy: float = 0.9) -> EpochEnd:
    return EpochEnd(epoch, 391 * epoch, 0.5, 0.8, 0.4, val_accuracy, 1.5 * epoch)


def add_numbered(history: History, numbers: Sequence[int]) -> None:
    """Add steps whose values tell their place: step i has loss i, accuracy i / 2 and time i / 4."""
    history.add_steps(list(numbers), [i / 2 for i in numbers], [i / 4 for i in numbers])


def is_numbered(snapshot: Snapshot) -> bool:
    numbers = np.arange(snapshot.steps, dtype=np.float32)
    return (
        np.array_equal(snapshot.losses, numbers)
        and np.array_equal(snapshot.accuracies, numbers / 2)
        and np.array_equal(snapshot.seconds, numbers / 4)
    )


@pytest.mark.parametrize("sizes", [[1] * 3000, [1023, 1, 1, 1024, 1], [10_000, 1, 50_000], [0, 5, 0, 5]])
def test_steps_stay_right_while_the_history_grows(sizes: list[int]) -> None:
    history, count = History(), 0
    for size in sizes:
        add_numbered(history, range(count, count + size))
        count += size
    assert history.snapshot().steps == count
    assert is_numbered(history.snapshot())


def test_a_snapshot_does_not_change_when_more_is_added() -> None:
    history = History()
    add_numbered(history, range(1000))
    history.add_epoch(epoch_end(1))
    old = history.snapshot()
    for start in range(1000, 9000, 1000):
        add_numbered(history, range(start, start + 1000))
    history.add_epoch(epoch_end(2))
    assert old.steps == 1000
    assert is_numbered(old)
    assert old.epochs == (epoch_end(1),)


def test_readers_never_see_a_half_added_step(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(functools.partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)  # threads take turns as often as they can
    history, has_ended, has_looked = History(), threading.Event(), threading.Event()
    wrong, seen = list[Snapshot](), set[int]()

    def read() -> None:
        while not has_ended.is_set():
            snapshot = history.snapshot()
            # Of the newest step first: what is late may have come by the time that all are looked at.
            newest = [values[-1:].sum() for values in (snapshot.losses, snapshot.accuracies, snapshot.seconds)]
            expected = [max(snapshot.steps - 1, 0) / divisor for divisor in (1, 2, 4)]
            last_step = snapshot.last_epoch.step if snapshot.last_epoch else 0
            if newest != expected or last_step > snapshot.steps:
                wrong.append(snapshot)
            seen.add(snapshot.steps)
            has_looked.set()

    readers = [threading.Thread(target=read, daemon=True) for _ in range(3)]
    for reader in readers:
        reader.start()
    for epoch in range(1, 201):
        for start in range(391 * (epoch - 1), 391 * epoch, 23):
            add_numbered(history, range(start, start + 23))
        history.add_epoch(epoch_end(epoch))
        has_looked.clear()
        assert has_looked.wait(timeout=30)
    has_ended.set()
    for reader in readers:
        reader.join(timeout=30)
    assert not wrong
    assert len(seen) >= 20  # they did read while it was written
    assert is_numbered(history.snapshot())
    assert len(history.snapshot().epochs) == 200


def test_an_empty_history_has_no_figures() -> None:
    snapshot = History().snapshot()
    assert snapshot.steps == 0
    assert snapshot.last_epoch is None
    assert snapshot.best_val_accuracy is None
    assert snapshot.recent(snapshot.losses) is None
    assert snapshot.steps_per_second() is None


def test_recent_is_the_mean_of_the_last_fifty_steps() -> None:
    history = History()
    add_numbered(history, range(4))
    assert history.snapshot().recent(history.snapshot().losses) == pytest.approx(1.5)
    add_numbered(history, range(4, 1000))
    snapshot = history.snapshot()
    assert snapshot.recent(snapshot.losses) == pytest.approx(np.mean(range(950, 1000)))
    assert snapshot.recent(snapshot.accuracies) == pytest.approx(np.mean(range(950, 1000)) / 2)


def test_the_best_validation_accuracy_may_be_an_earlier_epoch() -> None:
    history = History()
    for epoch, val_accuracy in enumerate([0.91, 0.97, 0.93], start=1):
        history.add_epoch(epoch_end(epoch, val_accuracy))
    assert history.snapshot().best_val_accuracy == 0.97
    assert history.snapshot().last_epoch == epoch_end(3, 0.93)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([0.5], None),  # one step tells no speed
        ([1.0, 1.0], None),  # nor two at the same moment
        ([0.5, 1.0, 1.5, 2.0], 2),
        ([i / 100 for i in range(1000)], 100),
        # Of late only: ten steps a second for ten seconds, then a hundred.
        ([i / 10 for i in range(100)] + [10 + i / 100 for i in range(500)], 100),
        ([0.0, 60.0], 1 / 60),  # slower than the time looked at
    ],
)
def test_speed_is_that_of_the_last_seconds(seconds: list[float], expected: float | None) -> None:
    history = History()
    history.add_steps([0.0] * len(seconds), [0.0] * len(seconds), seconds)
    speed = history.snapshot().steps_per_second()
    assert speed == (None if expected is None else pytest.approx(expected, rel=0.02))
