"""How fast this machine multiplies matrices on each device, and copies to it."""

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .devices import Device, synchronize
from .job import Job

PRODUCT_SIZES = tuple(2**power for power in range(5, 13))  # 32 to 4,096 rows and columns
COPY_SIZES = tuple(4**power for power in range(6, 15))  # 4 KiB to 256 MiB
MAX_PRODUCT_SECONDS = 0.6  # a larger product is not begun
# How long a size is measured, if three samples do not take longer; and a sample: long for the clock, and so short that
# few are spoilt when the system takes the cores away for some milliseconds.
SIZE_SECONDS, SAMPLE_SECONDS = 0.3, 0.0005
PINNING = ("cuda", "xpu")  # from other devices' memory the machine's is not apart


@dataclass(frozen=True, slots=True)
class Rate:
    """How much of something a device does in a second.

    Attributes:
        device: PyTorch's name.
        kind: of memory from which was copied, "pageable" or "pinned"; else empty.
        size: rows of the square matrices, or bytes that were copied.
        per_second: floating-point operations, or bytes.
    """

    device: str
    kind: str
    size: int
    per_second: float


def product_rates(devices: Sequence[Device], job: Job, emit: Callable[[Rate], None]) -> None:
    """Multiply square float32 matrices, size by size, on each of the devices.

    Args:
        devices: that are available.
        job: on whose thread this is called.
        emit: is given each rate as soon as it is measured.

    Raises:
        JobStoppedError: a stop was asked for.
    """
    for number, device in enumerate(devices):
        seconds = 0.0
        for index, size in enumerate(PRODUCT_SIZES):
            if 8 * seconds > MAX_PRODUCT_SECONDS:  # twice the size takes eight times as long
                break
            share = (number + index / len(PRODUCT_SIZES)) / len(devices)
            job.report(share, f"{device.name}: {size:,} × {size:,} matrices")
            generator = torch.Generator().manual_seed(size)  # the process's random state stays as it was
            left, right = (torch.rand(size, size, generator=generator).to(device.name) for _ in range(2))
            multiply = functools.partial(torch.mm, left, right, out=torch.empty_like(left))
            seconds = median_seconds(multiply, device.name, job)
            emit(Rate(device.name, "", size, 2 * size**3 / seconds))


def copy_rates(devices: Sequence[Device], job: Job, emit: Callable[[Rate], None]) -> None:
    """Copy bytes to each of the devices that is not the CPU; if there is none, within the machine's memory.

    Arguments and errors as of `product_rates`.
    """
    ways = [(device.name, kind) for device in devices for kind in _kinds_of_memory(device.name)] or [("cpu", "")]
    for number, (device, kind) in enumerate(ways):
        for index, size in enumerate(COPY_SIZES):
            share = (number + index / len(COPY_SIZES)) / len(ways)
            job.report(share, f"{device}: {binary_size(size)}" + f" from {kind} memory" * bool(kind))
            source = torch.zeros(size, dtype=torch.uint8, pin_memory=kind == "pinned")
            target = torch.zeros(size, dtype=torch.uint8, device=device)
            copy = functools.partial(target.copy_, source)  # waits, so that both kinds of memory are timed alike
            emit(Rate(device, kind, size, size / median_seconds(copy, device, job)))


def median_seconds(work: Callable[[], object], device: str, job: Job) -> float:
    """How long `work` takes on `device`, once it is warm: the median of samples of `SAMPLE_SECONDS` or more.

    Raises:
        JobStoppedError: a stop was asked for.
    """
    work()
    synchronize(device)
    samples, repeats, ends_at = list[float](), 1, time.perf_counter() + SIZE_SECONDS
    while len(samples) < 3 or time.perf_counter() < ends_at:
        job.check()
        begun = time.perf_counter()
        for _ in range(repeats):
            work()
        synchronize(device)
        seconds = time.perf_counter() - begun
        if seconds < SAMPLE_SECONDS:
            repeats = math.ceil(1.2 * repeats * SAMPLE_SECONDS / max(seconds, SAMPLE_SECONDS / 100))
        else:
            samples.append(seconds / repeats)
    return statistics.median(samples)


def binary_size(count: int) -> str:
    """A power of two of bytes, as a person writes it: 4 KiB, 16 MiB."""
    power = (count.bit_length() - 1) // 10
    return f"{count >> 10 * power:,} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"


def _kinds_of_memory(device: str) -> tuple[str, ...]:
    """From which it may be copied to this device."""
    if device.startswith("cpu"):
        return ()
    return ("pageable", "pinned") if device.startswith(PINNING) else ("pageable",)
