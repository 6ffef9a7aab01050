"""Where the time of a step goes, measured on real batches."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from mnist_trainer import step_times as module
from mnist_trainer.config import PIPELINES, TrainConfig
from mnist_trainer.data import Mnist
from mnist_trainer.job import JobStoppedError
from mnist_trainer.step_times import MAX_STEPS, WARM_UP_STEPS, StepTimes, step_times


@pytest.fixture(autouse=True)
def _no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many steps as there are, however busy the machine is."""
    monkeypatch.setattr(module, "WARM_UP_SECONDS", 1e9)
    monkeypatch.setattr(module, "MAX_SECONDS", 1e9)
    monkeypatch.setattr(module, "MAX_STEPS", 12)


def counting(limit: float = 1e9) -> tuple[list[int], Callable[[], None]]:
    """Counts the calls of a check, which asks for a stop after so many."""
    calls = list[int]()

    def check() -> None:
        calls.append(len(calls))
        if len(calls) > limit:
            raise JobStoppedError

    return calls, check


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_part_of_a_step_is_measured(mnist: Mnist, pipeline: str) -> None:
    calls, check = counting()
    times = step_times(TrainConfig(device="cpu", pipeline=pipeline), mnist, check)
    assert list(times.parts) == ["data", "copying", "forward", "backward", "optimizer"]
    assert all(seconds > 0 for name, seconds in times.parts.items() if name != "copying")
    assert times.total == pytest.approx(sum(times.parts.values()))
    assert (times.copying == 0) == (pipeline == "on-device")
    assert len(calls) == WARM_UP_STEPS + 12


def test_the_largest_part_is_named() -> None:
    assert StepTimes(data=0.2, copying=0.1, forward=0.5, backward=0.3, optimizer=0.1).largest == "forward"


def test_batches_of_all_images_go_on_from_epoch_to_epoch(mnist: Mnist) -> None:
    calls, check = counting()
    step_times(TrainConfig(device="cpu", batch_size=50_000, hidden_size=1), mnist, check)
    assert len(calls) == WARM_UP_STEPS + 12


def test_slow_steps_are_measured_for_a_while_only(mnist: Mnist, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_STEPS", MAX_STEPS)
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr(module, "time", clock)  # a look at the clock each second
    monkeypatch.setattr(module, "WARM_UP_SECONDS", 0.5)
    monkeypatch.setattr(module, "MAX_SECONDS", 20)
    calls, check = counting()
    times = step_times(TrainConfig(device="cpu", pipeline="DataLoader"), mnist, check)
    assert 2 < len(calls) < 10
    assert times == StepTimes(1, 1, 1, 1, 1)


@pytest.mark.parametrize("limit", [0, 3])
def test_it_stops_between_two_steps(mnist: Mnist, limit: int) -> None:
    calls, check = counting(limit)
    with pytest.raises(JobStoppedError):
        step_times(TrainConfig(device="cpu"), mnist, check)
    assert len(calls) == limit + 1


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_it_leaves_random_state_and_threads_of_the_process_alone(mnist: Mnist, pipeline: str) -> None:
    torch.rand(1)  # not where another run may have left it
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    step_times(TrainConfig(device="cpu", hidden_size=300, pipeline=pipeline), mnist)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_on_a_gpu_too_every_part_is_measured(mnist: Mnist, pipeline: str) -> None:
    times = step_times(TrainConfig(device="cuda:0", pipeline=pipeline), mnist)
    assert all(seconds > 0 for name, seconds in times.parts.items() if name != "copying")
    assert (times.copying == 0) == (pipeline == "on-device")
