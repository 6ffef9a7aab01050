"""How fast it trains here: the article's pipeline, the plainest loop, a dashboard's run, the bare matrix products."""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from .config import CLASSES, IMAGE_PIXELS, PIPELINES, TRAIN_SIZE, TrainConfig
from .data import Mnist, load_mnist, split_indices
from .devices import DeviceDataLoader, synchronize
from .errors import MnistTrainerError
from .model import Batch, MnistModel
from .runs import RunManager
from .step_times import StepTimes, step_times
from .trainer import threads_for
from .training import train_step

REPEATS = 5
BATCH_SIZE, LEARNING_RATE = TrainConfig().batch_size, TrainConfig().learning_rate  # the article's
ARTICLE_WORKERS = 2
WARM_UP_BATCHES = 8  # of a DataLoader: its workers start, and fetch ahead
SLICE_SECONDS = 1.0  # of one measurement, at most; a run takes two epochs, however long
CONTENDERS = ("article", "plain loop", "run", "products")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the benchmark.

    Attributes:
        device: PyTorch's name.
        hidden_size: units in the hidden layer.
        threads: of the CPU.
        pipeline: one of `CONTENDERS`: "article" (`DataLoader` with two workers, `ToTensor`, `pin_memory`), "plain
            loop" (eager PyTorch on data that lie on the device), "run" (the same as the dashboard trains it,
            with history, checkpoint and stop), "products" (nothing but the five matrix products of a step).
        images_per_second: training images, median of the repeats; validation left out.
        times_article: how many times as fast as "article" on this device at this size.
        of_products: share of the speed of "products".
    """

    device: str
    hidden_size: int
    threads: int
    pipeline: str
    images_per_second: float
    times_article: float
    of_products: float


@dataclass(frozen=True, slots=True)
class Parts:
    """Where the time of a step goes: one line of the benchmark's second table.

    Attributes:
        device: PyTorch's name.
        hidden_size: units in the hidden layer.
        pipeline: of a run, one of `config.PIPELINES`.
        times: of each part.
    """

    device: str
    hidden_size: int
    pipeline: str
    times: StepTimes


def bench(
    devices: Sequence[str],
    hidden_sizes: Sequence[int],
    repeats: int,
    report: Callable[[float, str], None],
) -> tuple[list[Row], list[Parts]]:
    """Measure all contenders in turn, again and again: what disturbs one disturbs the others too.

    Args:
        devices: PyTorch names.
        hidden_sizes: of the networks, one at least.
        repeats: how often each is measured; the median counts.
        report: called before each measurement with the share that is done, and what comes next.
    """
    rows, parts = list[Row](), list[Parts]()
    total, done = len(devices) * len(hidden_sizes) * repeats * len(CONTENDERS), 0
    threads_before = torch.get_num_threads()
    # PyTorch's threads suffer far more from a busy machine on a process's main thread than on another one, and the
    # dashboard trains on another one. A DataLoader's workers may freeze if they are not started on the main thread.
    with tempfile.TemporaryDirectory() as home, ThreadPoolExecutor(1, "bench") as beside:
        runs = RunManager(Path(home))
        mnist = load_mnist(runs.home / "data")
        try:
            for device in devices:
                for hidden_size in hidden_sizes:
                    threads = threads_for(hidden_size)
                    torch.set_num_threads(threads)
                    beside.submit(torch.set_num_threads, threads).result()
                    measured: dict[str, list[float]] = {name: [] for name in CONTENDERS}
                    contenders = _contenders(mnist, runs, device, hidden_size)
                    for _ in range(repeats):
                        for name, measure in contenders.items():
                            report(done / total, f"{device}, hidden size {hidden_size:,}: {name}")
                            speed = measure() if name == "article" else beside.submit(measure).result()
                            measured[name].append(speed)
                            done += 1
                    rows += _rows(device, hidden_size, threads, measured)
                for pipeline in PIPELINES:  # of the first size: in larger ones the products hide what is around them
                    report(done / total, f"{device}: the parts of a step")
                    config = TrainConfig(device=device, hidden_size=hidden_sizes[0], pipeline=pipeline)
                    times = beside.submit(step_times, config, mnist).result()
                    parts.append(Parts(device, hidden_sizes[0], pipeline, times))
        finally:
            torch.set_num_threads(threads_before)
            runs.shutdown()
    return rows, parts


def _rows(device: str, hidden_size: int, threads: int, measured: dict[str, list[float]]) -> Iterator[Row]:
    speeds = {name: statistics.median(values) for name, values in measured.items()}
    for name, speed in speeds.items():
        yield Row(device, hidden_size, threads, name, speed, speed / speeds["article"], speed / speeds["products"])


def _contenders(mnist: Mnist, runs: RunManager, device: str, hidden_size: int) -> dict[str, Callable[[], float]]:
    """What gives each contender's speed, in images per second, by name."""
    train, _ = split_indices(seed=0)
    on_device = mnist.train_images[train].to(device), mnist.train_labels[train].to(device)
    return {
        "article": lambda: _article(mnist, train, device, hidden_size),
        "plain loop": lambda: _plain_loop(*on_device, hidden_size),
        "run": lambda: _run(runs, TrainConfig(device=device, epochs=2, hidden_size=hidden_size)),
        "products": lambda: _products(device, hidden_size),
    }


def _article(mnist: Mnist, train: Tensor, device: str, hidden_size: int) -> float:
    """As in the tutorial: images one by one, two workers, batches copied to the device."""
    from torchvision.datasets import MNIST
    from torchvision.transforms import ToTensor

    dataset = Subset(MNIST(mnist.root, transform=ToTensor()), train.tolist())
    pins = torch.device(device).type == "cuda"  # elsewhere it warns, and does nothing
    loader = DataLoader(dataset, BATCH_SIZE, shuffle=True, num_workers=ARTICLE_WORKERS, pin_memory=pins)
    model = MnistModel(hidden_size=hidden_size).to(device)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    batches = iter(DeviceDataLoader(loader, device))
    for _ in range(WARM_UP_BATCHES):
        train_step(model, optimizer, next(batches))
    return _speed(device, batches, lambda batch: train_step(model, optimizer, batch))


def _plain_loop(images: Tensor, labels: Tensor, hidden_size: int) -> float:
    """The plainest loop that one would write in PyTorch."""
    model = MnistModel(hidden_size=hidden_size).to(labels.device)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)

    def batches() -> Iterator[Batch]:
        for index in torch.randperm(len(labels), device=labels.device).split(BATCH_SIZE):
            yield images[index].float() / 255, labels[index]

    def step(batch: Batch) -> None:
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return _speed(str(labels.device), batches(), step)


def _run(runs: RunManager, config: TrainConfig) -> float:
    """As the dashboard does it. Validation is left out, what is kept of the first epoch is not."""
    run = runs.start(config)
    run.ended.wait()
    if run.state.status != "finished":
        raise MnistTrainerError(f"The benchmark's run is {run.state.status}. {run.state.message}")
    history = run.snapshot()
    validation = history.epochs[0].seconds - history.seconds[config.steps_per_epoch - 1]
    return 2 * TRAIN_SIZE / float(history.seconds[-1] - validation)


def _products(device: str, hidden_size: int) -> float:
    """The arithmetic alone: two products forward, three backward."""
    shapes = ((BATCH_SIZE, IMAGE_PIXELS), (IMAGE_PIXELS, hidden_size), (hidden_size, CLASSES), (BATCH_SIZE, CLASSES))
    images, weights1, weights2, gradient = (torch.rand(shape, device=device) for shape in shapes)

    def step(_: int) -> tuple[Tensor, ...]:
        hidden = images @ weights1
        return hidden @ weights2, hidden.T @ gradient, images.T @ (gradient @ weights2.T)

    return _speed(device, iter(range(TRAIN_SIZE // BATCH_SIZE)), step)


def _speed(device: str, batches: Iterator[Any], step: Callable[[Any], object]) -> float:
    """Images per second of `step` on `batches`, for `SLICE_SECONDS` or to their end."""
    steps = 0
    synchronize(device)
    started = time.perf_counter()
    for batch in batches:
        step(batch)
        steps += 1
        if time.perf_counter() - started > SLICE_SECONDS:
            break
    synchronize(device)
    return steps * BATCH_SIZE / (time.perf_counter() - started)
