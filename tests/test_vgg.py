"""A step of VGG16: its memory foretold, its layers timed, stopped between them, and all of it given back."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mnist_trainer import vgg
from mnist_trainer.devices import Device
from mnist_trainer.errors import ConfigError
from mnist_trainer.job import Job
from mnist_trainer.measurements import Measurement
from mnist_trainer.vgg import (
    LAYER_NAMES,
    LayerTime,
    Step,
    activation_bytes,
    check_vgg_fits,
    layers,
    vgg16,
    vgg_memory,
    vgg_step,
)

PARAMETERS = 138_357_544
CPU = Device("cpu", "CPU")
KEPT_BYTES = 150_000_000  # PyTorch's own compiled code and caches stay


class TinyVgg(nn.Module):
    """Of VGG16's make, with three layers that have weights."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.avgpool = nn.AdaptiveAvgPool2d(2)
        self.classifier = nn.Sequential(nn.Linear(16, 8), nn.ReLU(inplace=True), nn.Linear(8, 10))

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.classifier(self.avgpool(self.features(images)).flatten(1))
        return found


@pytest.fixture
def resident() -> Callable[[], int]:
    """Bytes of memory that this process has taken since the test began."""
    vgg16()  # imports torchvision, which stays
    before = psutil.Process().memory_info().rss
    return lambda: psutil.Process().memory_info().rss - before


def test_it_has_its_138_million_parameters_and_no_memory_for_them() -> None:
    model = vgg16()
    assert sum(weights.numel() for weights in model.parameters()) == PARAMETERS
    assert {weights.device.type for weights in model.parameters()} == {"meta"}


def test_its_layers_are_the_papers_and_hold_all_of_it_in_order() -> None:
    model = vgg16()
    parts = layers(model)
    assert tuple(parts) == LAYER_NAMES
    weights = [parameter for part in parts.values() for parameter in part.parameters()]
    assert all(mine is its for mine, its in zip(weights, model.parameters(), strict=True))
    images = torch.empty(2, 3, 224, 224, device="meta")
    for part in parts.values():
        images = part(images)
    assert images.shape == (2, 1000)


def test_what_is_kept_for_the_backward_pass_is_counted_once_to_the_byte() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        images, labels = torch.empty(5, 3), torch.empty(5, dtype=torch.int64)
    # Images; the ReLU's output, kept by it and by the second layer; log-probabilities; labels; their total weight.
    assert sorted(activation_bytes(model, images, labels)) == sorted([5 * 3 * 4, 5 * 4 * 4, 5 * 2 * 4, 5 * 8, 4])


def test_counting_leaves_nothing_behind() -> None:
    vgg_memory.__wrapped__(1)
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter) and one.is_meta]


def test_the_estimate_has_weights_and_gradients_and_grows_by_the_same_for_each_image() -> None:
    one, two, nine = vgg_memory(1), vgg_memory(2), vgg_memory(9)
    assert one.weights == one.gradients == 4 * PARAMETERS
    assert two.activations > 1.9 * one.activations > 100_000_000
    assert nine.total - one.total == 8 * (two.total - one.total)


def test_what_does_not_fit_is_refused_with_the_batch_that_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vgg, "free_memory", lambda device: 3_000_000_000)
    message = r"^A step of VGG16 on 256 images needs about \d.* GB, and cuda:0 has 2\.7 GB to spare\. Choose at most"
    with pytest.raises(ConfigError, match=message) as caught:
        check_vgg_fits(256, "cuda:0")
    fitting = int(str(caught.value).rpartition("at most ")[2].strip("."))
    assert check_vgg_fits(fitting, "cuda:0").total <= 2_700_000_000 < vgg_memory(fitting + 1).total
    monkeypatch.setattr(vgg, "free_memory", lambda device: 1_000_000_000)
    with pytest.raises(ConfigError, match="Not even one image fits: choose another device"):
        check_vgg_fits(1, "cuda:0")


def test_layer_by_layer_it_learns_what_it_would_at_once() -> None:
    torch.manual_seed(0)
    model, images, laps = TinyVgg(), torch.rand(6, 3, 12, 12), list[LayerTime]()
    other = TinyVgg()
    other.load_state_dict(model.state_dict())
    vgg._train_layer_by_layer(model, images, laps.append)
    F.cross_entropy(other(images), torch.zeros(6, dtype=torch.int64)).backward()
    torch.optim.SGD(other.parameters(), vgg.LEARNING_RATE).step()
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, its)
    names = list(LAYER_NAMES[:3])
    assert [lap.layer for lap in laps] == names + names[::-1]
    assert [lap.is_backward for lap in laps] == [False] * 3 + [True] * 3


def test_a_real_step_is_timed_and_keeps_to_its_estimate(resident: Callable[[], int]) -> None:
    random_state = torch.get_rng_state()
    measurement = Measurement("VGG16", "cpu", partial(vgg_step, CPU, 1))
    assert measurement.job.ended.wait(240)
    assert not measurement.job.problem
    laps: list[Any] = list(measurement.rows[:32])
    step, article = measurement.rows[32:]
    assert [lap.layer for lap in laps] == [*LAYER_NAMES, *reversed(LAYER_NAMES)]
    assert (step.network, step.parameters, step.images, article.parameters) == ("VGG16", PARAMETERS, 1, 25_450)
    assert step.forward_seconds == sum(lap.seconds for lap in laps[:16])
    assert step.backward_seconds == sum(lap.seconds for lap in laps[16:])
    assert step.images_per_second == 1 / step.seconds < article.images_per_second
    estimate = vgg_memory(1)
    assert estimate.weights < step.memory_bytes < estimate.total + KEPT_BYTES
    assert resident() < KEPT_BYTES
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("lap", [2, 20])
def test_a_stop_is_heeded_after_the_layer_and_gives_the_memory_back(lap: int, resident: Callable[[], int]) -> None:
    def measure(job: Job, emit: Callable[[Any], None]) -> None:
        seen = list[LayerTime | Step]()

        def stop_at(row: LayerTime | Step) -> None:
            seen.append(row)
            emit(row)
            if len(seen) == lap:
                job.stop()

        vgg_step(CPU, 1, job, stop_at)

    measurement = Measurement("VGG16", "cpu", measure)
    assert measurement.job.ended.wait(240)
    assert measurement.job.was_stopped
    assert len(measurement.rows) == lap
    assert resident() < KEPT_BYTES


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_step_on_a_gpu_keeps_to_its_estimate_and_gives_the_memory_back() -> None:
    before = torch.cuda.memory_reserved(0)
    measurement = Measurement("VGG16", "cuda:0", partial(vgg_step, Device("cuda:0", "GPU"), 8))
    assert measurement.job.ended.wait(240)
    assert not measurement.job.problem
    step: Any = measurement.rows[32]
    estimate = vgg_memory(8)
    assert estimate.weights + estimate.gradients < step.memory_bytes < estimate.total
    assert torch.cuda.memory_reserved(0) < before + KEPT_BYTES
