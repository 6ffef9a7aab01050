"""The Devices page, as a user reads it."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from mnist_trainer import devices, measurements, rates, vgg
from mnist_trainer.config import TrainConfig, readable_bytes
from mnist_trainer.devices import Device
from mnist_trainer.job import Job
from mnist_trainer.machine import this_machine
from mnist_trainer.measurements import Measurement, Measurements
from mnist_trainer.runs import RunManager
from mnist_trainer.ui import frame
from mnist_trainer.vgg import Step, vgg_memory
from tests.pages import button, click, component_data, open_page, rerun, text
from tests.running import until

PAGE = "pages/devices.py"
PRODUCTS, COPIES, VGG = "Matrix multiplication", "Copying to a device", "A step of VGG16"
GPU, CPU = Device("cuda:0", "NVIDIA H200, 139 GiB"), Device("cpu", "CPU")


@pytest.fixture
def measured(app: RunManager, monkeypatch: pytest.MonkeyPatch) -> Iterator[Measurements]:
    """The pages' measurements, none yet; each takes a moment only."""
    monkeypatch.setattr(rates, "SIZE_SECONDS", 0.0)
    monkeypatch.setattr(rates, "PRODUCT_SIZES", rates.PRODUCT_SIZES[:3])
    monkeypatch.setattr(rates, "COPY_SIZES", rates.COPY_SIZES[:4])
    frame.measurements.clear()
    yield frame.measurements()
    frame.measurements.clear()


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with a GPU that works, one that does not, and 10 GB to spare on each device."""
    found = (GPU, Device("xpu:0", "Intel Arc", "its driver is too old."), CPU)
    monkeypatch.setattr(devices, "all_devices", lambda: found)
    for module in (devices, vgg):
        monkeypatch.setattr(module, "free_memory", lambda device: 10_000_000_000)


def ended(measured: Measurements, kind: str) -> Measurement:
    measurement = measured.newest(kind)
    assert measurement is not None
    assert measurement.job.ended.wait(60)
    return measurement


def endless(job: Job, emit: Callable[[Any], None]) -> None:
    job.report(0.5, "Half")
    while True:
        job.check()
        threading.Event().wait(0.01)


def is_enabled(page: AppTest, kind: str) -> bool:
    return not page.button(key=f"begin {kind}").disabled


@pytest.mark.usefixtures("measured")
def test_it_says_what_the_machine_is_and_why_a_device_cannot_be_used() -> None:
    said = text(open_page(PAGE))
    assert f"built for {this_machine().torch_build}" in said
    assert "CPU, the default" in said
    for device in devices.all_devices():
        assert device.name in said
        assert device.problem in said
    assert "There is nothing to copy to here" in said


@pytest.mark.usefixtures("measured", "with_gpu")
def test_a_gpu_is_the_default_and_there_is_something_to_copy_to() -> None:
    page = open_page(PAGE)
    said = text(page)
    assert "NVIDIA H200, 139 GiB, the default" in said
    assert "Intel Arc: its driver is too old." in said
    assert "From pinned memory" in said
    assert [box.value for box in page.selectbox] == ["cuda:0", 32]
    page.selectbox(key="vgg_device").set_value("cpu")
    assert [box.value for box in rerun(page).selectbox] == ["cpu", 2]


@pytest.mark.parametrize(
    ("kind", "label", "points"), [(PRODUCTS, "Measure multiplication", 3), (COPIES, "Measure copying", 4)]
)
def test_a_rate_is_measured_and_every_page_shows_it_until_the_server_ends(
    kind: str, label: str, points: int, measured: Measurements
) -> None:
    page = click(open_page(PAGE), label)
    assert len(ended(measured, kind).rows) == points
    for shown in (rerun(page), open_page(PAGE)):  # the page itself, and another phone
        assert is_enabled(shown, kind)
        data = component_data(shown)
        assert [trace["name"] for trace in data["charts"][0]["traces"]] == ["cpu"]
        assert data["panels"][0]["progress"] is None


def test_while_one_is_measured_another_is_refused_and_it_can_be_stopped(measured: Measurements) -> None:
    measured.start(COPIES, "cpu", endless)
    page = open_page(PAGE)
    assert not is_enabled(page, COPIES)
    until(lambda: component_data(rerun(page))["panels"][0]["progress"] == [0.5, "Half …"])
    click(page, "Measure multiplication")
    assert page.error[0].value == (
        "Copying to a device is being measured, and each would slow the other. Stop that first, or wait."
    )
    page.button(key=f"stop {COPIES}").click()
    rerun(page)
    assert measured.live is None
    assert component_data(page)["panels"][0]["title"].startswith("cpu · stopped")
    click(page, "Measure multiplication")
    assert not page.error
    ended(measured, PRODUCTS)


def test_while_a_run_trains_nothing_is_measured(measured: Measurements, app: RunManager) -> None:
    run = app.start(TrainConfig(epochs=1000))
    page = click(open_page(PAGE), "Take one step")
    assert f"Run {run.name} is running: it would be measured, too." in page.error[0].value.replace("\\", "")
    assert measured.newest(VGG) is None


def test_a_measurement_on_a_busy_machine_says_that_it_may_be_too_low(
    measured: Measurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurements, "others_use", lambda seconds: 0.61)
    page = click(open_page(PAGE), "Measure multiplication")
    ended(measured, PRODUCTS)
    title = component_data(rerun(page))["panels"][0]["title"]
    assert title == "cpu · too low, perhaps: something else kept 61% of the CPU busy"


@pytest.mark.usefixtures("with_gpu")
def test_a_step_that_does_not_fit_is_refused_with_what_would(measured: Measurements) -> None:
    page = open_page(PAGE)
    page.selectbox(key="vgg_batch cuda:0").set_value(256)
    click(rerun(page), "Take one step")
    assert "A step of VGG16 on 256 images needs about" in page.error[0].value
    assert "Choose at most" in page.error[0].value
    assert measured.newest(VGG) is None


def test_a_failed_measurement_shows_a_sentence(measured: Measurements, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> float:
        raise MemoryError

    monkeypatch.setattr(rates, "median_seconds", full)
    page = click(open_page(PAGE), "Measure copying")
    ended(measured, COPIES)
    assert rerun(page).error[0].value == "There is not enough memory for it. Choose something smaller."
    assert is_enabled(page, COPIES)


def test_a_step_of_vgg16_is_set_against_the_articles_network(measured: Measurements) -> None:
    def measure(job: Job, emit: Callable[[Any], None]) -> None:
        emit(Step("VGG16", 138_357_544, 4, 0.5, 1.25, 0.25, 1_500_000_000))
        emit(Step("The article's network", 25_450, 4, 0.0001, 0.0002, 0.0001))

    measured.start(VGG, "4 images on cpu", measure)
    ended(measured, VGG)
    table = next(each.value for each in open_page(PAGE).markdown if "VGG16 |" in each.value)
    for line in (
        "| Parameters | 138,357,544 | 25,450 |",
        "| Backward pass | 1.25 s | 0.2 ms |",
        "| Images per second | 2 | 10,000 |",
        f"| Memory at its highest | 1.5 GB, estimated {readable_bytes(vgg_memory(4).total)} | – |",
    ):
        assert line in table
    assert button(open_page(PAGE), "Take one step")
