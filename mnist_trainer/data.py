"""MNIST: unpacked from the copy in this package, checked, split, and cut into batches."""

import errno
import functools
import hashlib
import http.client
import shutil
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor
from torch.utils.data import DataLoader, Subset, default_collate

from .config import HOME_VARIABLE, TRAIN_SIZE, VAL_SIZE, TrainConfig
from .devices import DeviceDataLoader
from .errors import DataError
from .model import Batch
from .training import Batches

SHIPPED = Path(__file__).with_name("mnist")
MNIST_FOLDER = Path("MNIST", "raw")  # inside the root, where torchvision looks

# File → MD5 of the .gz (torchvision's own) and MD5 unpacked.
MD5 = {
    "train-images-idx3-ubyte": ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "6bbc9ace898e44ae57da46a324031adb"),
    "train-labels-idx1-ubyte": ("d53e105ee54ea40749a09fcbcd1e9432", "a25bea736e30d166cdddb491f175f624"),
    "t10k-images-idx3-ubyte": ("9fb629c4189551a2d022fa330f9573f3", "2646ac647ad5339dbf082846283269ea"),
    "t10k-labels-idx1-ubyte": ("ec29112dd5afa0611ce80d1b7f02629c", "27ae3e4e09519cfbb04c329615203637"),
}
# One process's part of the indices of a batch that several train on.
Share = Callable[[Tensor], Tensor]

DOWNLOAD_TIMEOUT_SECONDS = 10.0  # of silence, a mirror each
LOCK_TIMEOUT_SECONDS = 60.0  # unpacking takes half a second; a download some more
CUT_AT_ONCE = 8_192  # images: 26 MB as numbers


@dataclass(frozen=True, slots=True)
class Mnist:
    """All of MNIST in memory, as bytes: ink 255 on background 0.

    Attributes:
        root: the folder that holds `MNIST/raw`.
        train_images: uint8, shape (60000, 1, 28, 28); validation is cut from these.
        train_labels: int64, shape (60000,).
        test_images: uint8, shape (10000, 1, 28, 28).
        test_labels: int64, shape (10000,).
    """

    root: Path
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


class ShuffledOrder:
    """The order in which training goes through the images: a new one for each epoch, by seed.

    Drawn on the CPU, whatever the device: one seed gives one order. torch's own RandomSampler draws a
    second permutation to drop it.

    Args:
        count: images.
        seed: of all its orders.
    """

    def __init__(self, count: int, seed: int) -> None:
        self.count = count
        self.generator = torch.Generator().manual_seed(seed)
        # uint8; from it the order of the epoch in progress was, or will be, drawn.
        self.state = self.generator.get_state()
        self.skipped = 0

    def resume(self, state: Tensor, skipped: int) -> None:
        """Go on where a run was left: the next order is the one drawn from `state`, without its first `skipped`."""
        self.generator.set_state(state)
        self.state, self.skipped = state, skipped

    def draw(self) -> Tensor:
        """The next epoch's order: int64 indices, shape (count,), on the CPU."""
        self.state = self.generator.get_state()
        order = torch.randperm(self.count, generator=self.generator)[self.skipped :]
        self.skipped = 0
        return order

    def end_epoch(self) -> None:
        """The epoch is over: what comes next is a new order."""
        self.state = self.generator.get_state()

    def __iter__(self) -> Iterator[int]:
        """As `DataLoader` asks its sampler."""
        numbers: list[int] = self.draw().tolist()
        return iter(numbers)

    def __len__(self) -> int:
        """Number of images."""
        return self.count


class DeviceBatches:
    """Batches cut where the images lie: no per-image Python, and nothing copied to the device per step.

    Args:
        images: uint8, shape (n, 1, 28, 28), on the device.
        labels: int64, shape (n,), on the same device.
        batch_size: images per batch; the last may be smaller.
        order: drawn from each time it is gone through; without one the order stays.
        rows: which of the images, int64, on the CPU; by default all.
        share: of each batch, the images to give; by default all.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        batch_size: int,
        order: ShuffledOrder | None = None,
        rows: Tensor | None = None,
        share: Share | None = None,
    ) -> None:
        self.images = images
        self.labels = labels
        self.batch_size = batch_size
        self.order = order
        self.share = share
        self.rows = torch.arange(len(labels)) if rows is None else rows
        # A GPU is told what to do less often, and has the memory; the CPU's caches hold a batch, not many.
        is_cut_singly = labels.device.type == "cpu" or share
        self._at_once = batch_size if is_cut_singly else batch_size * max(1, CUT_AT_ONCE // batch_size)

    def __iter__(self) -> Iterator[Batch]:
        rows = self.rows[self.order.draw()] if self.order else self.rows
        if not len(rows):  # resumed after an epoch's last step; `split` would give an empty batch
            return
        cuts = rows.to(self.labels.device).split(self._at_once)
        for index in map(self.share, cuts) if self.share else cuts:
            # As torchvision's ToTensor: float32 in [0, 1].
            images, labels = self.images.index_select(0, index).float().div_(255), self.labels.index_select(0, index)
            if len(index) <= self.batch_size:
                yield images, labels
            else:
                yield from zip(images.split(self.batch_size), labels.split(self.batch_size), strict=True)

    def __len__(self) -> int:
        """Number of batches."""
        return -(-len(self.rows) // self.batch_size)


def load_mnist(root: Path) -> Mnist:
    """MNIST from `root`, unpacked there first if need be. Loaded once per process and root.

    Raises:
        DataError: the data cannot be had; says what to put where.
    """
    with _load_lock:  # ten tabs on a cold server load it once
        return _load_mnist(root.resolve())


def split_indices(seed: int) -> tuple[Tensor, Tensor]:
    """Which of the 60,000 are for training (50,000) and which for validation (10,000), by seed."""
    order = torch.randperm(TRAIN_SIZE + VAL_SIZE, generator=torch.Generator().manual_seed(seed))
    return order[:TRAIN_SIZE], order[TRAIN_SIZE:]


def train_and_val_loaders(
    mnist: Mnist,
    config: TrainConfig,
    device: torch.device | str,
    order: ShuffledOrder | None = None,
    share: Share | None = None,
) -> tuple[Batches, Batches]:
    """The training and validation batches of a run, on `device`; of training only this process's `share`.

    Both pipelines give the same batches in the same order. Training order is drawn anew each epoch, from
    `order`, or as the settings' seed has it; validation batches are twice as large, as in the article.
    """
    train, val = split_indices(config.seed)
    order = order or ShuffledOrder(TRAIN_SIZE, config.seed)
    if config.pipeline == "DataLoader":
        return _article_loaders(mnist.root, config, device, train, val, order, share)
    images, labels = mnist.train_images.to(device), mnist.train_labels.to(device)  # once, for both; no copy on the CPU
    return (
        DeviceBatches(images, labels, config.batch_size, order, train, share),
        DeviceBatches(images, labels, 2 * config.batch_size, rows=val),
    )


def test_loader(mnist: Mnist, device: torch.device | str) -> Batches:
    """The 10,000 test images in batches, on `device`."""
    return DeviceBatches(mnist.test_images.to(device), mnist.test_labels.to(device), batch_size=256)


def prepare_files(root: Path) -> None:
    """Put the four files, unpacked and checked, into `root/MNIST/raw`.

    Safe against an interrupted unpacking (files are checked by MD5, not by name) and against other
    processes doing the same.

    Raises:
        DataError: not to be had from the package nor by download, or the folder cannot be written.
    """
    raw = root / MNIST_FOLDER
    old = raw.with_name("processed")
    if old.exists():  # torchvision would load this in place of the files that are checked
        raise DataError(
            f"{old} is from an old version of torchvision, and cannot be checked. Remove it, and try again."
        )
    try:
        if not _damaged(raw):
            return
        raw.mkdir(parents=True, exist_ok=True)
        with FileLock(raw / ".lock", timeout=LOCK_TIMEOUT_SECONDS):
            _unpack(raw)
    except (OSError, RuntimeError, EOFError, zlib.error, http.client.HTTPException) as error:
        # What a full disk, a broken archive and torchvision's download raise, one after the other.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"MNIST could not be unpacked to {raw} ({reason}). {_advice(error)}") from error


def _unpack(raw: Path) -> None:
    from torchvision.datasets import MNIST

    damaged = _damaged(raw)
    if not damaged:  # another process was faster
        return
    for name in damaged:
        (raw / name).unlink(missing_ok=True)
    for name, (md5, _) in MD5.items():  # all four: torchvision would download one it misses
        archive = SHIPPED / f"{name}.gz"
        if _md5(raw / archive.name) != md5 and _md5(archive) == md5:
            shutil.copyfile(archive, raw / archive.name)
    # It unpacks the archives it finds there, and downloads those whose MD5 is wrong.
    # urllib has no time-out of its own: a dead network would hang here for minutes.
    timeout_before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(DOWNLOAD_TIMEOUT_SECONDS)
    try:
        MNIST(raw.parents[1], download=True)
    finally:
        socket.setdefaulttimeout(timeout_before)
    if damaged := _damaged(raw):
        raise OSError(f"{', '.join(damaged)} came out damaged")


@functools.lru_cache(maxsize=1)
def _load_mnist(root: Path) -> Mnist:
    # Not through torchvision, which takes two seconds and 170 MB to import: the files are checked, to the byte.
    prepare_files(root)
    return Mnist(root, *_read(root / MNIST_FOLDER, "train"), *_read(root / MNIST_FOLDER, "t10k"))


def _read(raw: Path, name: str) -> Batch:
    """All images and labels of a set. A file begins with four bytes for its kind and four for each dimension."""
    images = np.fromfile(raw / f"{name}-images-idx3-ubyte", np.uint8, offset=16)
    labels = np.fromfile(raw / f"{name}-labels-idx1-ubyte", np.uint8, offset=8)
    return torch.from_numpy(images).reshape(-1, 1, 28, 28), torch.from_numpy(labels).long()


_load_lock = threading.Lock()


def _article_loaders(
    root: Path,
    config: TrainConfig,
    device: torch.device | str,
    train: Tensor,
    val: Tensor,
    order: ShuffledOrder,
    share: Share | None,
) -> tuple[Batches, Batches]:
    """The article's way: images one by one through `ToTensor`, batches copied to the device.

    Without worker processes: started from the dashboard's thread they can freeze, they outlive a
    stopped run, and on Windows they are many times slower.
    """
    from torchvision.datasets import MNIST
    from torchvision.transforms import ToTensor

    prepare_files(root)  # read anew here: they may have been damaged since the other copy was loaded
    dataset = MNIST(root, transform=ToTensor())
    training, validation = Subset(dataset, train.tolist()), Subset(dataset, val.tolist())
    # A generator of their own: they draw a seed for workers, else from the process's random state.
    options: dict[str, Any] = {"pin_memory": torch.device(device).type == "cuda", "generator": torch.Generator()}
    batches: dict[str, Any] = {"batch_size": config.batch_size, "sampler": order}
    if share:
        batches = {"batch_sampler": _Shares(order, config.batch_size, share), "collate_fn": _collated}
    return (
        DeviceDataLoader(DataLoader(training, **batches, **options), device),
        DeviceDataLoader(DataLoader(validation, 2 * config.batch_size, **options), device),
    )


class _Shares:
    """Of each batch, the indices of the images that this process trains on: a `batch_sampler`."""

    def __init__(self, order: ShuffledOrder, batch_size: int, share: Share) -> None:
        self.order = order
        self.batch_size = batch_size
        self.share = share

    def __iter__(self) -> Iterator[list[int]]:
        if len(order := self.order.draw()):
            for index in order.split(self.batch_size):
                yield self.share(index).tolist()

    def __len__(self) -> int:
        return -(-len(self.order) // self.batch_size)


def _collated(images: list[tuple[Tensor, int]]) -> Batch:
    """A batch of these images and labels, of which there may be none."""
    if images:
        return default_collate(images)  # type: ignore[no-any-return]
    return torch.empty(0, 1, 28, 28), torch.empty(0, dtype=torch.int64)


def _damaged(raw: Path) -> list[str]:
    return [name for name, (_, md5) in MD5.items() if _md5(raw / name) != md5]


def _md5(path: Path) -> str:
    try:
        with path.open("rb") as file:
            # A check against accidents, not a signature.
            return hashlib.file_digest(file, functools.partial(hashlib.md5, usedforsecurity=False)).hexdigest()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return ""


def _advice(error: BaseException) -> str:
    if isinstance(error, Timeout):
        return "Another program is unpacking it and does not come to an end. Stop that, and try again."
    if isinstance(error, OSError) and error.errno in _FOLDER_FAULTS:
        return f"Make room there or make it writable, or set {HOME_VARIABLE} to another folder."
    files = ", ".join(f"{name}.gz" for name in MD5)
    return f"Put the four original files there, {files}, and try again."


_FOLDER_FAULTS = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
}
