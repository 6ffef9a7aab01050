"""How fast it trains here: the article's pipeline, the plainest loop, a dashboard's run, the bare matrix products."""

import dataclasses
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
from torch.utils.data import DataLoader, Subset

from .config import CLASSES, IMAGE_PIXELS, MAX_HIDDEN_SIZE, PIPELINES, TRAIN_SIZE, VAL_SIZE, TrainConfig
from .data import Mnist, load_mnist, split_indices
from .devices import DeviceDataLoader, cpu_threads, synchronize, threads_for
from .errors import MnistTrainerError
from .model import Batch, MnistModel
from .runs import RunManager
from .step_times import StepTimes, step_times
from .training import fit

REPEATS = 3
BATCH_SIZE, LEARNING_RATE = TrainConfig().batch_size, TrainConfig().learning_rate  # the article's
ARTICLE_WORKERS = 2
GPU_EPOCHS = 21  # of a run: on a GPU an epoch is over in a fraction of a second
CONTENDERS = ("article", "plain loop", "run", "products")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the benchmark.

    Attributes:
        device: PyTorch's name.
        hidden_size: units in the hidden layer.
        threads: of the CPU.
        way: one of `CONTENDERS`: "article" (`DataLoader` with two workers, `ToTensor`, `pin_memory`), "plain
            loop" (eager PyTorch on data that lie on the device), "run" (the same as the dashboard trains it,
            with history, checkpoint and stop), "products" (nothing but the matrix products).
        seconds: of an epoch, its validation included: the median of the repeats.
        times_article: how many times as fast as "article" on this device at this size.
        of_products: share of the speed of "products".
    """

    device: str
    hidden_size: int
    threads: int
    way: str
    seconds: float
    times_article: float
    of_products: float

    @property
    def images_per_second(self) -> float:
        """Training images."""
        return TRAIN_SIZE / self.seconds


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
    # PyTorch's threads suffer far more from a busy machine on a process's main thread than on another one, and the
    # dashboard trains on another one. A DataLoader's workers may freeze if they are not started on the main thread.
    with tempfile.TemporaryDirectory() as home, ThreadPoolExecutor(1, "bench") as beside:
        runs = RunManager(Path(home))
        mnist = load_mnist(runs.home / "data")
        try:
            for device in devices:
                for hidden_size in hidden_sizes:
                    measured: dict[str, list[float]] = {name: [] for name in CONTENDERS}
                    contenders = _contenders(mnist, runs, device, hidden_size)
                    for _ in range(repeats):
                        for name, measure in contenders.items():
                            report(done / total, f"{device}, hidden size {hidden_size:,}: {name}")
                            seconds = measure() if name == "article" else beside.submit(measure).result()
                            measured[name].append(seconds)
                            done += 1
                    rows += _rows(device, hidden_size, measured)
                for pipeline in PIPELINES:  # of the first size: in larger ones the products hide what is around them
                    report(done / total, f"{device}: the parts of a step")
                    config = TrainConfig(device=device, hidden_size=hidden_sizes[0], pipeline=pipeline)
                    times = beside.submit(step_times, config, mnist).result()
                    parts.append(Parts(device, hidden_sizes[0], pipeline, times))
        finally:
            runs.shutdown()
    return rows, parts


def _rows(device: str, hidden_size: int, measured: dict[str, list[float]]) -> Iterator[Row]:
    medians = {name: statistics.median(values) for name, values in measured.items()}
    for name, seconds in medians.items():
        threads = threads_for(MAX_HIDDEN_SIZE if name == "article" else hidden_size)
        ratios = medians["article"] / seconds, medians["products"] / seconds
        yield Row(device, hidden_size, threads, name, seconds, *ratios)


def _contenders(mnist: Mnist, runs: RunManager, device: str, hidden_size: int) -> dict[str, Callable[[], float]]:
    """What takes an epoch each contender's way, and gives the seconds it took, by name."""
    threads, loaders = threads_for(hidden_size), _article_loaders(mnist, device)
    train, val = (
        (mnist.train_images[rows].to(device), mnist.train_labels[rows].to(device)) for rows in split_indices(seed=0)
    )

    def model() -> MnistModel:
        return MnistModel(hidden_size=hidden_size).to(device)

    return {
        # With as many threads as PyTorch takes by itself.
        "article": lambda: _seconds(device, None, fit, 1, LEARNING_RATE, model(), *loaders, on_epoch=lambda *_: None),
        "plain loop": lambda: _seconds(device, threads, _plain_epoch, model(), train, val),
        "run": lambda: _run(runs, TrainConfig(device=device, hidden_size=hidden_size)),
        "products": lambda: _seconds(device, threads, _products, device, hidden_size),
    }


def _article_loaders(mnist: Mnist, device: str) -> list[DeviceDataLoader]:
    """As in the tutorial: images one by one, two workers, batches copied to the device."""
    from torchvision.datasets import MNIST
    from torchvision.transforms import ToTensor

    dataset = MNIST(mnist.root, transform=ToTensor())
    train, val = (Subset(dataset, rows.tolist()) for rows in split_indices(seed=0))
    # Without a GPU it would warn, and do nothing.
    options: dict[str, Any] = {"num_workers": ARTICLE_WORKERS, "pin_memory": torch.device(device).type == "cuda"}
    loaders = DataLoader(train, BATCH_SIZE, shuffle=True, **options), DataLoader(val, 2 * BATCH_SIZE, **options)
    return [DeviceDataLoader(loader, device) for loader in loaders]


def _plain_epoch(model: MnistModel, train: Batch, val: Batch) -> None:
    """The plainest loop that one would write in PyTorch."""
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    images, labels = train
    for index in torch.randperm(len(labels), device=labels.device).split(BATCH_SIZE):
        F.cross_entropy(model(images[index].float() / 255), labels[index]).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        right = [
            (model(images.float() / 255).argmax(1) == labels).sum()
            for images, labels in zip(*(tensor.split(2 * BATCH_SIZE) for tensor in val), strict=True)
        ]
    torch.stack(right).sum().item()


def _run(runs: RunManager, config: TrainConfig) -> float:
    """As the dashboard does it, from its first validation to its last: what it keeps counts, warm-up does not."""
    epochs = 2 if config.device == "cpu" else GPU_EPOCHS
    run = runs.start(dataclasses.replace(config, epochs=epochs))
    run.ended.wait()
    if run.state.status != "finished":
        raise MnistTrainerError(f"The benchmark's run is {run.state.status}. {run.state.message}")
    return (run.epochs[-1].seconds - run.epochs[0].seconds) / (epochs - 1)


def _products(device: str, hidden_size: int) -> None:
    """The arithmetic alone: for each batch two products forward, and three backward in training."""
    shapes = ((BATCH_SIZE, IMAGE_PIXELS), (IMAGE_PIXELS, hidden_size), (hidden_size, CLASSES), (BATCH_SIZE, CLASSES))
    images, weights1, weights2, gradient = (torch.rand(shape, device=device) for shape in shapes)
    for _ in range(TRAIN_SIZE // BATCH_SIZE):
        hidden = images @ weights1
        _ = hidden @ weights2, hidden.T @ gradient, images.T @ (gradient @ weights2.T)
    for _ in range(VAL_SIZE // BATCH_SIZE):
        _ = images @ weights1 @ weights2


def _seconds(device: str, threads: int | None, work: Callable[..., object], *arguments: Any, **options: Any) -> float:
    """How long the device, and so many threads of the CPU, take for `work` with these arguments."""
    with cpu_threads(threads):
        synchronize(device)
        started = time.perf_counter()
        work(*arguments, **options)
        synchronize(device)
        return time.perf_counter() - started
