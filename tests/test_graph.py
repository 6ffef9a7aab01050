"""The recorded step: what it does one by one, what it replays, and on a GPU that both give the same."""

import functools
import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mnist_trainer import graph
from mnist_trainer.config import OPTIMIZERS, TRAIN_SIZE, TrainConfig
from mnist_trainer.data import Mnist, ShuffledOrder, train_and_val_loaders
from mnist_trainer.graph import WARM_UP_STEPS, GraphedStep
from mnist_trainer.model import Batch, MnistModel
from mnist_trainer.training import OPTIMIZER_FACTORIES, Step, train_step

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


class FakeGpu:
    """Records by keeping the work, and replays by doing it: what a CUDA graph comes to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recordings = self.replays = self.side_steps = 0
        monkeypatch.setattr(graph, "recorded", self.recorded)
        monkeypatch.setattr(graph, "on_side_stream", self.on_side_stream)

    def recorded(self, work: Callable[[], None]) -> Callable[[], None]:
        self.recordings += 1
        return functools.partial(self.replay, work)

    def replay(self, work: Callable[[], None]) -> None:
        self.replays += 1
        work()

    def on_side_stream(self, work: Callable[[], Tensor]) -> Tensor:
        self.side_steps += 1
        return work()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch)


def batches(mnist: Mnist, sizes: list[int]) -> list[Batch]:
    """Of real digits."""
    images, labels = mnist.train_images[: sum(sizes)].float() / 255, mnist.train_labels[: sum(sizes)]
    return list(zip(images.split(sizes), labels.split(sizes), strict=True))


def trained(step: Step, batches: list[Batch], rates: list[float], optimizer: str = "SGD") -> tuple[MnistModel, Tensor]:
    """A network after a step with each batch at its learning rate; losses and accuracies, shape (2, steps)."""
    torch.manual_seed(0)
    model = MnistModel()
    optimizer_ = OPTIMIZER_FACTORIES[optimizer](model.parameters(), rates[0])
    losses, accuracies = [], []
    for batch, rate in zip(batches, rates, strict=True):
        optimizer_.param_groups[0]["lr"] = rate
        losses.append(step(model, optimizer_, batch))
        accuracies.append(model.train_acc)
    return model, torch.stack([*losses, *accuracies]).reshape(2, -1)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_recorded_step_trains_as_a_plain_one_does(optimizer: str, gpu: FakeGpu, mnist: Mnist) -> None:
    digits = batches(mnist, [64] * 10 + [40] + [64] * 5)
    rates = [0.1] * 12 + [0.05] * 4
    model, measured = trained(GraphedStep(), digits, rates, optimizer)
    plain, expected = trained(train_step, digits, rates, optimizer)
    assert torch.equal(measured, expected)  # each step's own, though a replay writes over the last one's
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True))
    assert gpu.side_steps == WARM_UP_STEPS
    assert gpu.recordings == 2  # once more for the other learning rate
    assert gpu.replays == len(digits) - WARM_UP_STEPS - 1  # the smaller batch came one by one


def test_the_usual_size_is_recorded_where_a_run_goes_on_with_an_epochs_last_batch(gpu: FakeGpu, mnist: Mnist) -> None:
    sizes = [40] + [64] * 6
    trained(GraphedStep(), batches(mnist, sizes), [0.1] * len(sizes))
    assert (gpu.recordings, gpu.replays) == (1, 6 - WARM_UP_STEPS)


def test_without_a_graph_it_trains_on_and_says_so(
    gpu: FakeGpu, mnist: Mnist, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(work: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(graph, "recorded", fail)
    digits = batches(mnist, [64] * 10)
    with caplog.at_level(logging.WARNING):
        _, measured = trained(GraphedStep(), digits, [0.1] * 10)
    assert torch.equal(measured, trained(train_step, digits, [0.1] * 10)[1])
    assert caplog.messages == [
        "Training goes on without a CUDA graph: operation not permitted when stream is capturing."
    ]


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_on_a_gpu_graph_and_plain_steps_give_equal_weights(optimizer: str, mnist: Mnist) -> None:
    config = TrainConfig(optimizer=optimizer)
    results = []
    for step in (GraphedStep(), train_step):
        loader, _ = train_and_val_loaders(mnist, config, "cuda", ShuffledOrder(TRAIN_SIZE, 0))
        torch.manual_seed(0)
        model = MnistModel().to("cuda")
        optimizer_ = OPTIMIZER_FACTORIES[optimizer](model.parameters(), 0.01)
        for group in optimizer_.param_groups:
            if "capturable" in group:
                group["capturable"] = True
        losses = [step(model, optimizer_, batch) for batch in loader]
        results.append([torch.stack(losses), *(parameter.detach() for parameter in model.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.cuda
@needs_gpu
def test_on_a_gpu_the_graph_is_used(mnist: Mnist, caplog: pytest.LogCaptureFixture) -> None:
    step = GraphedStep()
    loader, _ = train_and_val_loaders(mnist, TrainConfig(), "cuda")
    model = MnistModel().to("cuda")
    optimizer = OPTIMIZER_FACTORIES["SGD"](model.parameters(), 0.5)
    losses = [step(model, optimizer, batch) for batch in loader]
    assert torch.stack(losses[-50:]).mean() < 0.5
    assert step._replay is not None
    assert caplog.messages == []


@pytest.mark.cuda
@needs_gpu
def test_on_a_gpu_training_goes_on_after_a_recording_that_fails(mnist: Mnist, caplog: pytest.LogCaptureFixture) -> None:
    class Impatient(MnistModel):
        def training_step(self, batch: Batch) -> Tensor:
            loss = super().training_step(batch)
            loss.item()  # waits for the GPU, which no recording may
            return loss

    step, model = GraphedStep(), Impatient().to("cuda")
    loader, _ = train_and_val_loaders(mnist, TrainConfig(), "cuda")
    optimizer = OPTIMIZER_FACTORIES["SGD"](model.parameters(), 0.5)
    losses = [step(model, optimizer, batch) for batch in loader]
    assert torch.stack(losses[-50:]).mean() < 0.5
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert caplog.messages[0].startswith("Training goes on without a CUDA graph: ")
