"""Measurements in the background: one at a time, followed while they go on, kept when they are over."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mnist_trainer.config import MAX_HIDDEN_SIZE, TrainConfig
from mnist_trainer.devices import threads_for
from mnist_trainer.errors import RunBusyError
from mnist_trainer.job import Job
from mnist_trainer.measurements import Measurement, Measurements
from mnist_trainer.runs import RunManager
from tests.running import until

Emit = Callable[[Any], None]


def endless(job: Job, emit: Emit) -> None:
    emit("one")
    while True:
        job.check()
        threading.Event().wait(0.01)


@pytest.fixture
def measured(runs: RunManager) -> Iterator[Measurements]:
    measured = Measurements(runs)
    yield measured
    measured.stop(wait_seconds=60)


def ended(measurement: Measurement) -> Measurement:
    assert measurement.job.ended.wait(60)
    return measurement


def test_rows_can_be_read_while_it_goes_on_and_stay(measured: Measurements) -> None:
    measurement = measured.start("Copying", "cpu", endless)
    until(lambda: measurement.rows == ("one",))
    assert measurement.job.is_live
    measured.stop(wait_seconds=60)
    assert measurement.job.was_stopped
    assert measured.newest("Copying") is measurement
    assert (measurement.rows, measurement.about) == (("one",), "cpu")
    assert measured.newest("VGG16") is None


def test_another_one_is_refused_until_it_is_over(measured: Measurements) -> None:
    measured.start("Copying", "cpu", endless)
    for kind in ("Copying", "VGG16"):
        with pytest.raises(RunBusyError, match=r"^Copying is being measured, and each would slow the other\. Stop"):
            measured.start(kind, "cpu", endless)
    measured.stop(wait_seconds=60)
    ended(measured.start("VGG16", "cpu", lambda job, emit: emit(2)))
    assert measured.live is None


def test_a_new_one_takes_the_place_of_the_one_before(measured: Measurements) -> None:
    ended(measured.start("Copying", "cpu", lambda job, emit: emit(1)))
    second = ended(measured.start("Copying", "cpu", lambda job, emit: emit(2)))
    assert measured.newest("Copying") is second
    assert second.rows == (2,)


def test_a_failure_is_told_and_keeps_what_was_measured(measured: Measurements) -> None:
    def fail(job: Job, emit: Emit) -> None:
        emit(1)
        raise MemoryError

    measurement = ended(measured.start("Copying", "cpu", fail))
    assert "not enough memory" in measurement.job.problem
    assert measurement.rows == (1,)


def test_it_computes_with_all_of_the_cpu_whatever_was_set_and_leaves_that_as_it_was(measured: Measurements) -> None:
    torch.set_num_threads(1)
    measurement = ended(measured.start("Threads", "cpu", lambda job, emit: emit(torch.get_num_threads())))
    assert measurement.rows == (threads_for(MAX_HIDDEN_SIZE),)
    after = list[int]()
    thread = threading.Thread(target=lambda: after.append(torch.get_num_threads()))
    thread.start()
    thread.join(30)
    assert [torch.get_num_threads(), *after] == [1, 1]


def test_a_run_waits_for_a_measurement_and_a_measurement_is_refused_during_a_run(
    measured: Measurements, runs: RunManager
) -> None:
    measured.start("Copying", "cpu", endless)
    run = runs.start(TrainConfig(epochs=500))
    assert run.state.status == "queued"
    measured.stop(wait_seconds=60)
    until(lambda: run.snapshot().steps)
    with pytest.raises(RunBusyError, match=f"Run {run.id} is running"):
        measured.start("Copying", "cpu", endless)
    run.request_stop()
    assert run.ended.wait(60)
    measured.start("Copying", "cpu", endless)
