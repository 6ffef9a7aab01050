"""Rates of multiplying and of copying, measured on the devices that are here."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from mnist_trainer import rates
from mnist_trainer.devices import Device
from mnist_trainer.job import Job
from mnist_trainer.rates import COPY_SIZES, PRODUCT_SIZES, Rate, binary_size, copy_rates, median_seconds, product_rates

CPU = Device("cpu", "CPU")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """As measured on a page, with fewer repeats."""
    monkeypatch.setattr(rates, "SIZE_SECONDS", 0.0)
    monkeypatch.setattr(rates, "PRODUCT_SIZES", PRODUCT_SIZES[:4])
    monkeypatch.setattr(rates, "COPY_SIZES", COPY_SIZES[:6])


def measured(measure: Callable[..., None], devices: Sequence[Device]) -> list[Rate]:
    rows = list[Rate]()
    job = Job(lambda job: measure(devices, job, rows.append), "rates")
    assert job.ended.wait(120)
    assert not job.problem
    return rows


@pytest.mark.usefixtures("quick")
def test_products_are_measured_size_by_size() -> None:
    found = measured(product_rates, [CPU])
    assert [rate.size for rate in found] == [32, 64, 128, 256]
    assert {(rate.device, rate.kind) for rate in found} == {("cpu", "")}
    assert all(1e5 < rate.per_second < 1e14 for rate in found)


@pytest.mark.usefixtures("quick")
def test_a_product_that_would_take_too_long_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "MAX_PRODUCT_SECONDS", 0.0)
    assert [rate.size for rate in measured(product_rates, [CPU])] == [32]


@pytest.mark.usefixtures("quick")
def test_with_no_other_device_copies_are_within_the_memory() -> None:
    found = measured(copy_rates, [CPU])
    assert [rate.size for rate in found] == list(COPY_SIZES[:6])
    assert {(rate.device, rate.kind) for rate in found} == {("cpu", "")}
    assert all(1e5 < rate.per_second < 1e13 for rate in found)


@pytest.mark.parametrize(
    ("device", "kinds"),
    [("cpu", ()), ("cuda:1", ("pageable", "pinned")), ("xpu:0", ("pageable", "pinned")), ("mps", ("pageable",))],
)
def test_memory_is_pinned_where_that_makes_a_difference(device: str, kinds: tuple[str, ...]) -> None:
    assert rates._kinds_of_memory(device) == kinds


@pytest.mark.parametrize("measure", [product_rates, copy_rates])
def test_a_stop_ends_it_in_the_middle_of_a_size(measure: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "SIZE_SECONDS", 600.0)
    job = Job(lambda job: measure([CPU], job, lambda rate: None), "rates")
    job.stop(wait_seconds=60)
    assert job.was_stopped


def test_quick_work_is_repeated_until_the_clock_can_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "SIZE_SECONDS", 0.0)
    calls, seconds = list[None](), list[float]()
    job = Job(lambda job: seconds.append(median_seconds(partial(calls.append, None), "cpu", job)), "quick")
    assert job.ended.wait(60)
    assert 0 < seconds[0] < rates.SAMPLE_SECONDS
    assert len(calls) > 100


@pytest.mark.usefixtures("quick")
def test_the_random_state_stays_as_it_was() -> None:
    before = torch.get_rng_state()
    measured(product_rates, [CPU])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("count", "text"), [(512, "512 bytes"), (4096, "4 KiB"), (2**20, "1 MiB"), (2**28, "256 MiB"), (2**31, "2 GiB")]
)
def test_sizes_are_written_as_people_write_them(count: int, text: str) -> None:
    assert binary_size(count) == text


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.usefixtures("quick")
def test_a_gpu_is_measured_beside_the_cpu_and_from_both_kinds_of_memory() -> None:
    devices: list[Any] = [Device("cuda:0", "GPU"), CPU]
    assert {rate.device for rate in measured(product_rates, devices)} == {"cuda:0", "cpu"}
    found = measured(copy_rates, devices)
    assert {(rate.device, rate.kind) for rate in found} == {("cuda:0", "pageable"), ("cuda:0", "pinned")}
