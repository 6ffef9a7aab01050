"""Devices that PyTorch can train on here, each tried before it is offered."""

import contextlib
import dataclasses
import functools
import math
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import nn

from .config import TrainConfig, readable_bytes
from .errors import ConfigError, DeviceUnavailableError
from .model import MnistModel

# A device must agree with the CPU this closely after so many steps, or its arithmetic is off (seen on MPS).
CHECK_STEPS, CHECK_TOLERANCE = 20, 0.01
USABLE_MEMORY = 0.9  # of what is free: others need some too
# What PyTorch says of full memory, by device and system.
OUT_OF_MEMORY = ("out of memory", "allocate memory", "not enough memory")

# Below this hidden size a second thread costs more than it brings; on a machine that also runs the
# server and a browser, threads that wait for each other cost most of the speed.
ONE_THREAD_BELOW = 256

_probe_lock = threading.Lock()
_all_threads = torch.get_num_threads()  # before anybody sets another number


@dataclass(frozen=True, slots=True)
class Device:
    """One device, offered or not.

    Attributes:
        name: what PyTorch calls it: "cpu", "cuda:0", "mps", "xpu:0".
        label: what a person calls it: "NVIDIA H200, 139 GiB".
        problem: why it cannot be used, as a sentence; empty if it can.
    """

    name: str
    label: str
    problem: str = ""

    @property
    def is_available(self) -> bool:
        return not self.problem

    def __str__(self) -> str:
        return f"{self.label}: not available, {self.problem}" if self.problem else self.label


def get_default_device() -> torch.device:
    """The fastest device that works here: a GPU if there is one, else the CPU."""
    return torch.device(next(device.name for device in all_devices() if device.is_available))


def to_device(data: Any, device: torch.device | str) -> Any:
    """Move tensors and modules to `device`, also inside lists, tuples and dicts, however nested.

    A module is moved in place and returned, as PyTorch does. What cannot be moved (a number, a
    string) is returned as it is.
    """
    if isinstance(data, list | tuple):
        moved = [to_device(item, device) for item in data]
        return type(data)(*moved) if hasattr(data, "_fields") else type(data)(moved)
    if isinstance(data, dict):
        return {key: to_device(value, device) for key, value in data.items()}
    if isinstance(data, torch.Tensor):
        # Towards the CPU a non-blocking copy may be read before it has arrived.
        return data.to(device, non_blocking=torch.device(device).type != "cpu")
    return data.to(device) if isinstance(data, nn.Module) else data


def synchronize(device: torch.device | str) -> None:
    """Wait until `device` has done what it was told: a clock read before that tells nothing."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(torch.device(device))


def threads_for(hidden_size: int) -> int:
    """How many threads of the CPU train a network of this size the fastest."""
    return 1 if hidden_size < ONE_THREAD_BELOW else _all_threads


@contextlib.contextmanager
def cpu_threads(count: int | None = None) -> Iterator[None]:
    """Have PyTorch compute with so many threads of the CPU, by default with all; then with as many as before.

    PyTorch keeps the number by thread, and gives a new thread the number that was set last.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count or _all_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class DeviceDataLoader:
    """A data loader whose batches arrive on `device`.

    Args:
        dl: any iterable of batches that knows its length, such as a `DataLoader`.
        device: where the batches go.
    """

    def __init__(self, dl: Any, device: torch.device | str) -> None:
        self.dl = dl
        self.device = device

    def __iter__(self) -> Iterator[Any]:
        for batch in self.dl:
            yield to_device(batch, self.device)

    def __len__(self) -> int:
        """Number of batches."""
        return len(self.dl)


def find_device(name: str) -> Device:
    """The device called `name`, ready to use; "auto" is the fastest, "cuda" the first CUDA GPU.

    Raises:
        DeviceUnavailableError: no such device, or it cannot be used; says why. Never another instead.
    """
    wanted = name.strip().lower()
    devices = all_devices()
    if wanted == "auto":
        wanted = str(get_default_device())
    kind = wanted.partition(":")[0]
    # By its name; by its kind alone; or, where there is none of the kind, the entry that says why.
    for device in sorted(devices, key=lambda device: device.name != wanted):
        if wanted in (device.name, device.name.partition(":")[0]) or (device.problem and device.name == kind):
            if device.is_available:
                return device
            raise DeviceUnavailableError(
                f"Device '{name[:40]}' is not available: {device.problem} Choose {_choices(devices)}."
            )
    raise DeviceUnavailableError(f"There is no device '{name[:40]}' here. Choose {_choices(devices)}.")


def check_fits(config: TrainConfig, device: str, taken_bytes: int = 0) -> None:
    """Refuse a network that would not fit into the memory now free on `device`, of which so much is promised.

    Raises:
        ConfigError: says how much it would take, how much is free, and a hidden size that fits.
    """
    free = max(0, int(USABLE_MEMORY * free_memory(device)) - taken_bytes)
    if config.memory_bytes <= free:
        return
    one, two = (dataclasses.replace(config, hidden_size=size).memory_bytes for size in (1, 2))
    fitting = (free - one) // (two - one) + 1  # it grows by the same for each unit
    advice = f"at most {fitting:,}" if fitting > 0 else "a smaller batch"
    raise ConfigError(
        f"Hidden size {config.hidden_size:,} needs about {readable_bytes(config.memory_bytes)} to train, and "
        f"{device} has {readable_bytes(free)} to spare. Choose {advice}."
    )


def free_memory(device: str) -> int:
    """Bytes that a run may still take on `device`."""
    if device.startswith("cuda"):
        # What PyTorch keeps of ended runs counts as taken there, and is reused.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(torch.device(device))[0]) + kept
    # MPS shares the machine's memory; for XPU PyTorch has no portable call, and the machine's is a fair guess.
    return int(psutil.virtual_memory().available)


def all_devices() -> tuple[Device, ...]:
    """Every device, the fastest first, with the reason for each that cannot be used.

    Tried once per process: a GPU takes a second or two to wake up.
    """
    with _probe_lock:  # ten tabs on a cold server try them once
        return _all_devices()


def problem_with(device: str, reference_loss: Callable[[], float] | None = None) -> str:
    """Train a few steps on `device`; return why it cannot be used, or "" if it agrees with the CPU.

    Args:
        device: a PyTorch name.
        reference_loss: the loss to agree with; by default that of the same steps on the CPU.
    """
    try:
        loss = _loss_after_steps(device)
        expected = (reference_loss or functools.partial(_loss_after_steps, "cpu"))()
    except Exception as error:  # drivers raise whatever they like; the reason goes to the user
        return f"it failed when tried ({first_sentence(error)})."
    if not math.isclose(loss, expected, rel_tol=CHECK_TOLERANCE):
        return f"its arithmetic is off (loss {loss:.4f} where the CPU has {expected:.4f})."
    return ""


def first_sentence(error: BaseException | str) -> str:
    """The first line of an error's text, without the closing full stop."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].partition(". ")[0].rstrip(".")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it says that a device's memory, or the machine's, is full."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(part in text for part in OUT_OF_MEMORY)


def _loss_after_steps(device: str) -> float:
    """Loss of the article's network on made-up digits after `CHECK_STEPS` steps of SGD."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(128, 1, 28, 28, generator=generator)
    labels = torch.randint(0, 10, (128,), generator=generator)
    with torch.device("meta"):  # weights of its own, below: the process's random state stays as it was
        model = MnistModel()
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator).sub_(0.5).mul_(0.1))
    batch = to_device((images, labels), device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(CHECK_STEPS):
        optimizer.zero_grad()
        loss = model.training_step(batch)
        loss.backward()
        optimizer.step()
    return model.training_step(batch).item()


@functools.cache
def _all_devices() -> tuple[Device, ...]:
    return (*_cuda(), *_xpu(), *_mps(), Device("cpu", "CPU"))


def _cuda() -> Iterable[Device]:
    if torch.version.cuda is None and torch.version.hip is None:
        return [Device("cuda", "NVIDIA GPU", "this is a CPU build of PyTorch.")]
    with warnings.catch_warnings(record=True) as caught:  # an old driver is told in a warning only
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        problem = first_sentence(str(caught[0].message)) if caught else "PyTorch sees no NVIDIA GPU or no driver for it"
        return [Device("cuda", "NVIDIA GPU", f"{problem}.")]
    return [_tried(f"cuda:{i}", torch.cuda.get_device_properties) for i in range(count)]


def _xpu() -> Iterable[Device]:
    if not torch.xpu.is_available():
        return [Device("xpu", "Intel GPU", "PyTorch sees no Intel GPU.")]
    return [_tried(f"xpu:{i}", torch.xpu.get_device_properties) for i in range(torch.xpu.device_count())]


def _mps() -> Iterable[Device]:
    if not torch.backends.mps.is_built():
        return [Device("mps", "Apple GPU", "this PyTorch is not built for Apple GPUs.")]
    if not torch.backends.mps.is_available():
        return [Device("mps", "Apple GPU", "it needs a Mac with an Apple GPU and macOS 14 or newer.")]
    return [Device("mps", "Apple GPU", problem_with("mps"))]


def _tried(name: str, properties: Callable[[str], Any]) -> Device:
    try:
        found = properties(name)
    except Exception as error:  # as in `problem_with`
        return Device(name, name, f"it failed when tried ({first_sentence(error)}).")
    label = f"{found.name}, {found.total_memory / 2**30:.0f} GiB"
    return Device(name, label, problem_with(name))


def _choices(devices: Iterable[Device]) -> str:
    return " or ".join(f"'{device.name}'" for device in devices if device.is_available)
