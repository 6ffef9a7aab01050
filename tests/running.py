"""What the tests of runs share."""

import threading
import time
from collections.abc import Callable

import torch

from mnist_trainer.run import Run
from mnist_trainer.runs import RunManager
from mnist_trainer.state import Checkpoint


def until(condition: Callable[[], object], seconds: float = 120) -> None:
    """Wait for `condition`, which no event tells of."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        threading.Event().wait(0.01)


def has_steps(run: Run, steps: int) -> bool:
    """Whether it has done so many, or has ended."""
    return run.snapshot().steps >= steps or run.ended.is_set()


def has_epochs(run: Run, epochs: int) -> bool:
    """Whether it has finished so many, as its folder has it."""
    return len(run.folder.read_epochs()) >= epochs


def ended(run: Run) -> Run:
    assert run.ended.wait(timeout=240)
    return run


def stopped_after(run: Run, steps: int) -> Run:
    """The run, stopped once it has done so many steps, at least."""
    until(lambda: has_steps(run, steps))
    run.request_stop()
    return ended(run)


def weights(run: Run) -> Checkpoint:
    checkpoint = run.checkpoint()
    assert checkpoint is not None
    return checkpoint


def are_equal(first: Checkpoint, second: Checkpoint) -> bool:
    """Whether their weights are, bit for bit."""
    return all(torch.equal(tensor, second.weights[name]) for name, tensor in first.weights.items())


def assert_the_same(one: Run, other: Run) -> None:
    """Weights, optimizer and history are equal bit for bit, in memory and on the disk; times are left out."""
    ours, theirs = (run.folder.load_checkpoint(with_training=True) for run in (one, other))
    assert ours
    assert theirs
    assert are_equal(ours, theirs)
    assert (ours.epoch, ours.step, ours.val_accuracy) == (theirs.epoch, theirs.step, theirs.val_accuracy)
    assert ours.training
    assert theirs.training
    assert torch.equal(ours.training.order, theirs.training.order)
    assert_equal_values(ours.training.optimizer, theirs.training.optimizer)
    for run in (one, other):  # what it has in memory is what another program reads
        read = RunManager(run.folder.path.parents[1]).get(run.id)
        assert without_times(read) == without_times(run)
    assert without_times(one) == without_times(other)
    assert one.state.test_accuracy == other.state.test_accuracy


def without_times(run: Run) -> tuple[object, ...]:
    history = run.snapshot()
    assert not run.problem
    epochs = [(e.epoch, e.step, e.train_loss, e.train_accuracy, e.val_loss, e.val_accuracy) for e in history.epochs]
    return history.losses.tobytes(), history.accuracies.tobytes(), epochs, history.rates


def assert_equal_values(one: object, other: object) -> None:
    """Nested values with tensors in them are equal."""
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor)
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert isinstance(other, dict)
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_equal_values(value, other[key])
    elif isinstance(one, list | tuple):
        assert isinstance(other, list | tuple)
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_equal_values(mine, theirs)
    else:
        assert one == other
