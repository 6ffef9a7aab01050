"""Where the time of a training step goes, measured apart from a run: a GPU that is waited for is a slower one."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from .config import TrainConfig
from .data import Mnist, train_and_val_loaders
from .devices import DeviceDataLoader, cpu_threads, synchronize, threads_for, to_device
from .model import Batch, seeded_model
from .training import OPTIMIZER_FACTORIES, Batches

WARM_UP_STEPS, WARM_UP_SECONDS = 10, 0.5  # whichever comes first, and one step at least
MAX_STEPS, MAX_SECONDS = 400, 1.5  # the same


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What each part of a training step takes: the mean over some steps, in seconds.

    Attributes:
        data: to make the batch. on-device: cut out by index, bytes to numbers in [0, 1]. DataLoader: each image
            by `Subset` and `ToTensor`, collated; for a CUDA GPU pinned, too.
        copying: to move the batch to the device; 0 where all images lie there already.
        forward: outputs, loss and accuracy.
        backward: gradients.
        optimizer: new weights, and the gradients forgotten.
    """

    data: float
    copying: float
    forward: float
    backward: float
    optimizer: float

    @property
    def total(self) -> float:
        """Seconds a step, all parts together."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """Name → seconds, in the order of a step."""
        return dataclasses.asdict(self)

    @property
    def largest(self) -> str:
        """Name of the part that takes longest."""
        return max(self.parts, key=self.parts.__getitem__)


def step_times(config: TrainConfig, mnist: Mnist, check: Callable[[], None] = lambda: None) -> StepTimes:
    """Train a network of these settings for a second or two, with a clock around each line of `train_step`.

    The device is waited for after each line, so that a GPU's time is seen where it is spent; a CUDA graph,
    as runs use it, has no lines. Neither the process's random state nor the number of its threads is changed.

    Args:
        config: settings, with the device by its full name.
        mnist: the images.
        check: called before each step; whatever it raises ends the measurement.
    """
    with cpu_threads(threads_for(config.hidden_size)):
        rows = _rows_after_warm_up(_timed_steps(config, mnist, check))
    return StepTimes(*np.mean(rows, axis=0).tolist())  # the mean: for a GPU, one step in many cuts the batches


def _timed_steps(config: TrainConfig, mnist: Mnist, check: Callable[[], None]) -> Iterator[list[float]]:
    """The seconds of each part, step by step, without end."""
    device = torch.device(config.device)

    def now() -> float:
        synchronize(device)
        return time.perf_counter()

    loader, _ = train_and_val_loaders(mnist, config, device)
    is_copied = isinstance(loader, DeviceDataLoader)
    batches = _again_and_again(loader.dl if isinstance(loader, DeviceDataLoader) else loader)
    model = seeded_model(config).to(device)
    optimizer = OPTIMIZER_FACTORIES[config.optimizer](model.parameters(), config.learning_rate)
    while True:
        check()
        times = [now()]
        batch = next(batches)
        times.append(now())
        if is_copied:
            batch = to_device(batch, device)
        times.append(now() if is_copied else times[-1])
        loss = model.training_step(batch)
        times.append(now())
        loss.backward()
        times.append(now())
        optimizer.step()
        optimizer.zero_grad()
        times.append(now())
        yield np.diff(times).tolist()


def _again_and_again(batches: Batches) -> Iterator[Batch]:
    """Epoch after epoch: of large batches there are few in one."""
    while True:
        yield from batches


def _rows_after_warm_up(steps: Iterator[list[float]]) -> list[list[float]]:
    list(_for_a_while(steps, WARM_UP_STEPS, WARM_UP_SECONDS))
    return list(_for_a_while(steps, MAX_STEPS, MAX_SECONDS))


def _for_a_while(steps: Iterator[list[float]], count: int, seconds: float) -> Iterator[list[float]]:
    """Up to `count` of them, within `seconds`; one at least."""
    deadline = time.perf_counter() + seconds
    for step in itertools.islice(steps, count):
        yield step
        if time.perf_counter() >= deadline:
            return
