"""What the machine is, and how busy it is, sampled for all pages together."""

import itertools
import re
import threading

import psutil
import pytest
import torch

from mnist_trainer import machine
from mnist_trainer.devices import Device
from mnist_trainer.machine import KEPT_SECONDS, GpuUse, Monitor, Use, recent_use, this_machine

X86 = "processor\t: 0\nmodel name\t: Intel(R) Core(TM) i5-8250U CPU @ 1.60GHz\n\nprocessor\t: 1\nmodel name\t: other\n"
BOARD = "processor\t: 0\nBogoMIPS\t: 108.00\n\nModel\t\t: Raspberry Pi 5 Model B Rev 1.0\n"


def test_the_facts_are_those_of_this_machine() -> None:
    found = this_machine()
    assert found.processor
    assert 1 <= (found.cores or 1) <= found.logical_cores == psutil.cpu_count()
    assert found.memory_bytes == psutil.virtual_memory().total
    assert found.torch_version == torch.__version__
    assert found.torch_build.split()[0] in ("CPU", "CUDA", "ROCm")


@pytest.mark.parametrize(
    ("cpuinfo", "model"),
    [(X86, "Intel(R) Core(TM) i5-8250U CPU @ 1.60GHz"), (BOARD, "Raspberry Pi 5 Model B Rev 1.0"), ("", "")],
)
def test_the_processors_model_is_read_as_linux_writes_it(cpuinfo: str, model: str) -> None:
    assert machine._model_in(cpuinfo) == model


def test_a_processor_that_is_not_told_is_named_by_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent() -> str:
        raise OSError("no such file")

    monkeypatch.setattr(machine, "_processor_model", silent)
    assert machine._processor()


def test_it_is_sampled_once_a_second_however_often_pages_ask() -> None:
    monitor = Monitor()
    samples = [monitor.recent(100 + tenth / 10)[-1] for tenth in range(21)]
    assert [sample.at for sample in monitor.recent(102.5)] == [100, 101, 102]
    assert len(set(map(id, samples))) == 3


def test_thirty_pages_at_once_take_one_sample() -> None:
    monitor, together, seen = Monitor(), threading.Barrier(30), list[tuple[Use, ...]]()

    def look() -> None:
        together.wait(30)
        seen.append(monitor.recent(100.0))

    threads = [threading.Thread(target=look) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(seen) == 30
    assert len({id(samples[0]) for samples in seen}) == 1


def test_samples_are_kept_for_two_minutes() -> None:
    monitor = Monitor()
    for second in range(500):
        samples = monitor.recent(float(second))
    assert samples[0].at == 499 - KEPT_SECONDS
    assert [later.at - sooner.at for sooner, later in itertools.pairwise(samples)] == [1.0] * int(KEPT_SECONDS)


def test_shares_are_shares_and_the_first_sample_has_no_time_to_be_one_of() -> None:
    monitor = Monitor()
    monitor.recent(0.0)
    started = sum(psutil.cpu_times())
    while sum(psutil.cpu_times()) - started < 0.1:  # the system counts in hundredths
        pass
    first, second = monitor.recent(1.0)
    assert first.busy is None
    assert second.busy is not None
    assert 0 < second.busy <= 1
    assert 0 < second.memory_used < second.memory_bytes == psutil.virtual_memory().total
    assert 0 < second.memory_share < 1
    assert recent_use()[-1].memory_bytes == second.memory_bytes


def test_what_a_gpus_driver_does_not_tell_is_not_known_and_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("NVML is not there")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(machine, "all_devices", lambda: (Device("cuda:0", "GPU"), Device("cpu", "CPU")))
    for name in ("utilization", "device_memory_used", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, fail)
    (sample,) = Monitor().recent(0.0)
    assert sample.gpus == (GpuUse("cuda:0", None, None, None),)
    assert sample.gpus[0].memory_share is None
    monkeypatch.setattr(machine, "_driver_version", fail)
    assert this_machine.__wrapped__().driver_version == ""


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_an_nvidia_gpu_tells_its_use_and_its_driver() -> None:
    gpu = recent_use()[-1].gpus[0]
    assert gpu.device == "cuda:0"
    assert gpu.busy is not None
    assert 0 <= gpu.busy <= 1
    assert gpu.memory_share is not None
    assert 0 < gpu.memory_share <= 1
    assert re.fullmatch(r"\d+(\.\d+)+", this_machine().driver_version)


def test_what_this_program_computes_is_not_what_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    machines, own = iter([(10.0, 100.0), (14.0, 108.0)]), iter([(1.0, 0.5), (3.0, 1.5)])
    monkeypatch.setattr(machine, "_cpu_times", lambda: next(machines))
    times = psutil.Process().cpu_times()
    monkeypatch.setattr(
        psutil.Process, "cpu_times", lambda _: times._replace(**dict(zip(("user", "system"), next(own), strict=True)))
    )
    assert machine.others_use(0.0) == (4 - 3) / 8
