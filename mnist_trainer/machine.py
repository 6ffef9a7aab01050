"""The machine that this runs on: what it is, and how busy it is now."""

import functools
import logging
import platform
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
import torch

from .devices import Device, all_devices

log = logging.getLogger(__name__)

SAMPLE_SECONDS, KEPT_SECONDS = 1.0, 120.0
LOST_SECONDS = 10.0  # between samples so far apart nobody asked

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Machine:
    """What does not change while the program runs. Texts are empty where there is nothing to say.

    Attributes:
        processor: its model: "Intel(R) Core(TM) i5-8250U CPU @ 1.60GHz".
        cores: that compute independently; None if the system does not tell.
        logical_cores: as the system counts them: twice as many where each runs two threads.
        memory_bytes: in all.
        instruction_set: the widest that PyTorch uses: "AVX2".
        system: "Linux 6.12 (x86_64)".
        torch_version: of PyTorch, with its build: "2.14.1+cu130".
        torch_build: what it was built for: "CPU", "CUDA 13.0", "ROCm 7.1".
        driver_version: of the NVIDIA driver.
    """

    processor: str
    cores: int | None
    logical_cores: int
    memory_bytes: int
    instruction_set: str
    system: str
    torch_version: str
    torch_build: str
    driver_version: str


@dataclass(frozen=True, slots=True)
class GpuUse:
    """How busy one NVIDIA GPU is; None is what its driver does not tell.

    Attributes:
        device: PyTorch's name, "cuda:0".
        busy: share of the last moments in which it computed anything, in [0, 1].
        memory_used: bytes, of all programs together.
        memory_bytes: in all.
    """

    device: str
    busy: float | None
    memory_used: int | None
    memory_bytes: int | None

    @property
    def memory_share(self) -> float | None:
        """Of the GPU's memory, the part that is used, in [0, 1]."""
        return self.memory_used / self.memory_bytes if self.memory_used is not None and self.memory_bytes else None


@dataclass(frozen=True, slots=True)
class Use:
    """How busy the machine is at one moment.

    Attributes:
        at: the time, in seconds of `time.monotonic`.
        busy: share of the time since the sample before in which the CPU's cores computed, in [0, 1], all programs
            together; None for the first sample, and after a long pause.
        memory_used: bytes that no other program could have.
        memory_bytes: in all.
        gpus: the NVIDIA GPUs that work here.
    """

    at: float
    busy: float | None
    memory_used: int
    memory_bytes: int
    gpus: tuple[GpuUse, ...] = ()

    @property
    def memory_share(self) -> float:
        """Of the memory, the part that is used, in [0, 1]."""
        return self.memory_used / self.memory_bytes


class Monitor:
    """Samples of the machine's use, taken when somebody asks, at most once every `SAMPLE_SECONDS`."""

    def __init__(self) -> None:
        self._samples = deque[Use]()
        self._lock = threading.Lock()
        # psutil.cpu_percent remembers its last call by thread, and each refresh of a page has another.
        self._cpu_times: tuple[float, float] | None = None

    def recent(self, now: float | None = None) -> tuple[Use, ...]:
        """The samples of the last `KEPT_SECONDS`, one of now among them; called from any thread.

        Args:
            now: by default the time, in seconds of `time.monotonic`.
        """
        now = time.monotonic() if now is None else now
        with self._lock:
            if not self._samples or now - self._samples[-1].at >= SAMPLE_SECONDS:
                self._samples.append(self._sample(now))
            while now - self._samples[0].at > KEPT_SECONDS:
                self._samples.popleft()
            return tuple(self._samples)

    def _sample(self, now: float) -> Use:
        before, self._cpu_times = self._cpu_times, _cpu_times()
        if self._samples and now - self._samples[-1].at > LOST_SECONDS:
            before = None  # nobody looked for long: the mean since then is not how busy it is now
        memory = psutil.virtual_memory()
        return Use(
            at=now,
            busy=_share(before, self._cpu_times) if before else None,
            memory_used=memory.total - memory.available,
            memory_bytes=memory.total,
            gpus=tuple(_gpu_use(device.name) for device in _nvidia_gpus()),
        )


_monitor = Monitor()


def recent_use() -> tuple[Use, ...]:
    """The machine's use over the last two minutes, as far as anybody asked, the newest last."""
    return _monitor.recent()


def others_use(seconds: float) -> float:
    """Watch for so long which share of the CPU other programs use, in [0, 1]."""
    process = psutil.Process()
    before, own_before = _cpu_times(), process.cpu_times()
    time.sleep(seconds)
    after, own = _cpu_times(), process.cpu_times()
    ours = own.user + own.system - own_before.user - own_before.system
    busy = _share((before[0] + ours, before[1]), after)
    return busy or 0.0


@functools.cache
def this_machine() -> Machine:
    """What this machine is."""
    build = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return Machine(
        processor=_processor(),
        cores=psutil.cpu_count(logical=False),
        logical_cores=psutil.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        instruction_set=torch.backends.cpu.get_cpu_capability(),
        system=f"{platform.system()} {platform.release()} ({platform.machine()})",
        torch_version=torch.__version__,
        torch_build=build if torch.version.hip or torch.version.cuda else "CPU",
        driver_version=(_known(_driver_version) or "") if _nvidia_gpus() else "",
    )


def _processor() -> str:
    """The model of the CPU, or at least its kind."""
    model = _known(_processor_model)
    return model or platform.processor() or platform.machine()


def _processor_model() -> str:
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    if sys.platform == "win32":
        import winreg

        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"HARDWARE\DESCRIPTION\System\CentralProcessor\0") as key:
            return str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()
    return _model_in(Path("/proc/cpuinfo").read_text(encoding="utf-8"))


def _model_in(cpuinfo: str) -> str:
    """The processor's, or on a small ARM board the board's, as Linux writes it; empty if it does not."""
    facts = dict[str, str]()
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    return facts.get("model name") or facts.get("Model", "")


def _cpu_times() -> tuple[float, float]:
    """Seconds since the machine began that its cores computed, and in all."""
    times = psutil.cpu_times()
    # Linux counts what it gives to guests among its own time too.
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    return total - times.idle - getattr(times, "iowait", 0.0), total


def _share(before: tuple[float, float], after: tuple[float, float]) -> float | None:
    """Of the time between two values of `_cpu_times`, the part that the cores computed, in [0, 1]."""
    busy, total = after[0] - before[0], after[1] - before[1]
    return min(max(busy / total, 0.0), 1.0) if total > 0 else None


def _nvidia_gpus() -> list[Device]:
    if torch.version.cuda is None:
        return []
    return [device for device in all_devices() if device.name.startswith("cuda") and device.is_available]


def _gpu_use(device: str) -> GpuUse:
    # PyTorch asks NVIDIA's library, and finds there the GPU that it calls by this name.
    busy = _known(lambda: torch.cuda.utilization(device))
    return GpuUse(
        device=device,
        busy=None if busy is None else busy / 100,
        memory_used=_known(lambda: torch.cuda.device_memory_used(device)),
        memory_bytes=_known(lambda: torch.cuda.get_device_properties(device).total_memory),
    )


def _driver_version() -> str:
    import pynvml

    pynvml.nvmlInit()
    return str(pynvml.nvmlSystemGetDriverVersion())


def _known(read: Callable[[], T]) -> T | None:
    """What `read` gives, or None: systems and drivers that do not tell raise whatever they like."""
    try:
        return read()
    except Exception as error:
        log.debug("%s is not known: %s", getattr(read, "__name__", read), error)
        return None
