"""One training step of VGG16, a network of 138 million parameters: how long it takes, and how much memory."""

import functools
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import readable_bytes
from .devices import USABLE_MEMORY, Device, free_memory, synchronize
from .errors import ConfigError
from .job import Job
from .model import MnistModel

IMAGE_SHAPE = (3, 224, 224)  # ImageNet's
LEARNING_RATE = 0.01
# Beside what can be counted: the gradients that are passed on, of the largest layer's output and input, and a copy as
# the convolution lays it out; the code compiled for it; what the allocator rounds up. On two CPU cores, batches of 4
# to 16, a step took 3 to 13 % less than all of the estimate.
WORKSPACE_BYTES, WORKSPACE_LAYERS = 200_000_000, 3
ARTICLE_STEPS = 50  # each takes less than a millisecond
# The layers with weights, as the paper counts them: 16, hence its name.
LAYER_NAMES = (
    *("conv1_1", "conv1_2", "conv2_1", "conv2_2", "conv3_1", "conv3_2", "conv3_3"),
    *("conv4_1", "conv4_2", "conv4_3", "conv5_1", "conv5_2", "conv5_3", "fc6", "fc7", "fc8"),
)
FILLING_SHARE = 0.2  # of the time, for the weights
PEAK_SECONDS = 0.005  # between looks at the memory: a layer is over in a fraction of a second


@dataclass(frozen=True, slots=True)
class Memory:
    """Estimate of what a training step takes, in bytes."""

    weights: int
    gradients: int
    activations: int  # kept from the forward pass for the backward one, the images among them
    workspace: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.activations + self.workspace


@dataclass(frozen=True, slots=True)
class LayerTime:
    """What one layer took, with all that follows it until the next one: ReLU, pooling.

    Attributes:
        layer: its name in the paper: "conv1_1" to "fc8".
        is_backward: whether of the backward pass.
        seconds: wall clock.
    """

    layer: str
    is_backward: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class Step:
    """What one training step took.

    Attributes:
        network: "VGG16".
        parameters: how many it has.
        images: in the batch.
        forward_seconds: with the loss.
        backward_seconds: the gradients.
        optimizer_seconds: the update.
        memory_bytes: the most that was taken beyond what was taken before, weights included; None if not known.
    """

    network: str
    parameters: int
    images: int
    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    memory_bytes: int | None = None

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds + self.optimizer_seconds

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds


def vgg16() -> nn.Module:
    """VGG16 without memory for its weights, on PyTorch's device "meta".

    It has no dropout, whose masks would come from the process's one random state; that is no measurable part of
    its work.
    """
    from torchvision.models import vgg16

    with torch.device("meta"):
        model: nn.Module = vgg16(weights=None, init_weights=False, dropout=0.0)
    return model


@functools.cache
def vgg_memory(batch_size: int) -> Memory:
    """What a training step of VGG16 takes, with SGD."""
    model = vgg16()
    weights = 4 * _parameters(model)
    images = torch.empty(batch_size, *IMAGE_SHAPE, device="meta")
    activations = activation_bytes(model, images, torch.empty(batch_size, dtype=torch.int64, device="meta"))
    workspace = WORKSPACE_BYTES + WORKSPACE_LAYERS * max(activations)
    return Memory(weights, gradients=weights, activations=sum(activations), workspace=workspace)


def check_vgg_fits(batch_size: int, device: str) -> Memory:
    """The memory that a step takes, if `device` has as much to spare.

    Raises:
        ConfigError: it has not; says how much it would take, how much is free, and what batch would fit.
    """
    needed, free = vgg_memory(batch_size), int(USABLE_MEMORY * free_memory(device))
    if needed.total <= free:
        return needed
    one, two = vgg_memory(1).total, vgg_memory(2).total
    fitting = (free - one) // (two - one) + 1  # it grows by the same for each image
    advice = f"Choose at most {fitting:,}." if fitting > 0 else "Not even one image fits: choose another device."
    raise ConfigError(
        f"A step of VGG16 on {batch_size:,} images needs about {readable_bytes(needed.total)}, and {device} has "
        f"{readable_bytes(free)} to spare. {advice}"
    )


def vgg_step(device: Device, batch_size: int, job: Job, emit: Callable[[LayerTime | Step], None]) -> None:
    """Train VGG16 for one step on made-up images; then the article's network, to compare.

    Args:
        device: that is available.
        batch_size: images.
        job: on whose thread this is called; a stop is heeded between layers.
        emit: is given the time of each layer, forward, then backward; at the end each network's step, VGG16's first.

    Raises:
        ConfigError: it would not fit into the device's memory.
        JobStoppedError: a stop was asked for.
    """
    check_vgg_fits(batch_size, device.name)
    model = vgg16()
    laps = list[LayerTime]()

    def lap(time: LayerTime) -> None:
        laps.append(time)
        emit(time)
        share = FILLING_SHARE + (1 - FILLING_SHARE) * len(laps) / (2 * len(LAYER_NAMES))
        job.report(share, f"{'Backward' if time.is_backward else 'Forward'} pass: {time.layer} is done")
        job.check()

    with _Peak(device.name) as peak:
        _materialize(model, device.name, job)
        if device.name != "cpu":  # a GPU loads its code at its first step
            _train_layer_by_layer(model, _images(1, device.name), lambda _: job.check())
        update_seconds = _train_layer_by_layer(model, _images(batch_size, device.name), lap)
    forward, backward = (sum(lap.seconds for lap in laps if lap.is_backward is which) for which in (False, True))
    emit(Step("VGG16", _parameters(model), batch_size, forward, backward, update_seconds, peak.bytes))
    del model
    job.report(1.0, "The article's network, to compare")
    emit(_article_step(device.name, batch_size, job))


def activation_bytes(model: nn.Module, images: Tensor, labels: Tensor) -> list[int]:
    """Sizes of all that a forward pass keeps for the backward one, the parameters left out.

    What shares memory is counted once. On the device "meta" this computes nothing.
    """
    kept = set[torch.UntypedStorage]()

    def keep(tensor: Tensor) -> Tensor:
        kept.add(tensor.untyped_storage())
        return torch.empty(0)  # the tensor itself would keep its graph, and so itself, alive for good

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        F.cross_entropy(model(images), labels)
    return [storage.nbytes() for storage in kept - {parameter.untyped_storage() for parameter in model.parameters()}]


def layers(model: nn.Module) -> dict[str, nn.Sequential]:
    """VGG16 in parts, each a layer with weights and what follows it, by their names in the paper."""
    parts, names = dict[str, list[nn.Module]](), iter(LAYER_NAMES)
    for module in (*model.features, model.avgpool, nn.Flatten(), *model.classifier):  # type: ignore[misc]
        if isinstance(module, nn.Conv2d | nn.Linear):
            modules = parts[next(names)] = []
        modules.append(module)
    return {name: nn.Sequential(*modules) for name, modules in parts.items()}


class _Peak:
    """The most memory taken on a device inside a `with`, beyond what was taken before."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._over = threading.Event()

    def __enter__(self) -> Self:
        if self._device == "cpu":
            self._before = self._highest = psutil.Process().memory_info().rss
            self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
            self._thread.start()
        else:
            torch.accelerator.reset_peak_memory_stats(self._device)
            self._before = torch.accelerator.memory_allocated(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        if self._device == "cpu":
            self._over.set()
            self._thread.join()
        else:
            self._highest = torch.accelerator.max_memory_allocated(self._device)

    def _watch(self) -> None:
        process = psutil.Process()
        while not self._over.wait(PEAK_SECONDS):
            self._highest = max(self._highest, process.memory_info().rss)

    @property
    def bytes(self) -> int | None:
        return self._highest - self._before or None  # not every allocator counts


def _train_layer_by_layer(model: nn.Module, images: Tensor, lap: Callable[[LayerTime], None]) -> float:
    """Train VGG16 for one step of SGD; return how long the update took.

    The backward pass goes by layers as the forward pass does, and gives what one call for all of them would: that
    one can be left by an exception only, and PyTorch then holds on to the gradients until the thread has ended.

    Args:
        model: on the device of the images.
        images: shape (batch, 3, 224, 224).
        lap: is called after each layer, forward and backward; it may raise.
    """
    device = str(images.device)
    labels = torch.zeros(len(images), dtype=torch.int64, device=device)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    optimizer.zero_grad()
    parts = layers(model)
    inputs, outputs = list[Tensor](), list[Tensor]()
    synchronize(device)
    since = time.perf_counter()
    for name, part in parts.items():
        # The images themselves need no gradient.
        inputs.append(outputs[-1].detach().requires_grad_() if outputs else images)
        outputs.append(part(inputs[-1]))
        if len(outputs) == len(parts):
            outputs[-1] = F.cross_entropy(outputs[-1], labels)
        since = _lap(name, False, since, device, lap)
    gradient: Tensor | None = None  # of the loss, with respect to the layer's output
    for name in reversed(parts):
        outputs.pop().backward(gradient)
        gradient = inputs.pop().grad
        since = _lap(name, True, since, device, lap)
    optimizer.step()
    synchronize(device)
    return time.perf_counter() - since


def _lap(name: str, is_backward: bool, since: float, device: str, lap: Callable[[LayerTime], None]) -> float:
    """Take a layer's time; return when the next one's begins."""
    synchronize(device)
    lap(LayerTime(name, is_backward, time.perf_counter() - since))
    return time.perf_counter()


def _materialize(model: nn.Module, device: str, job: Job) -> None:
    """Give a model on "meta" random weights on `device`, and leave the process's random state alone."""
    generator = torch.Generator(device).manual_seed(0)
    total, done = _parameters(model), 0
    model.to_empty(device=device)
    for parameter in model.parameters():
        job.check()
        job.report(FILLING_SHARE * done / total, f"Making {total:,} random weights")
        if parameter.dim() > 1:
            nn.init.kaiming_uniform_(parameter, nonlinearity="relu", generator=generator)
        else:
            nn.init.zeros_(parameter)
        done += parameter.numel()


def _article_step(device: str, batch_size: int, job: Job) -> Step:
    """The median step of the article's network on so many images."""
    with torch.device("meta"):
        model = MnistModel()
    _materialize(model, device, job)
    images = torch.rand(batch_size, 1, 28, 28, generator=torch.Generator(device).manual_seed(0), device=device)
    labels = torch.zeros(batch_size, dtype=torch.int64, device=device)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    each = list[tuple[float, float, float]]()
    for _ in range(ARTICLE_STEPS):
        job.check()
        times = [time.perf_counter()]
        loss = F.cross_entropy(model.forward(images), labels)
        for work in (loss.backward, optimizer.step, optimizer.zero_grad):
            synchronize(device)
            times.append(time.perf_counter())
            work()
        each.append((times[1] - times[0], times[2] - times[1], times[3] - times[2]))
    forward, backward, update = (statistics.median(seconds) for seconds in zip(*each, strict=True))
    return Step("The article's network", _parameters(model), batch_size, forward, backward, update)


def _images(count: int, device: str) -> Tensor:
    return torch.rand(count, *IMAGE_SHAPE, generator=torch.Generator(device).manual_seed(0), device=device)


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
