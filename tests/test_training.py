"""`fit` and `evaluate` on real digits: the article's script, exact results, callbacks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mnist_trainer import data
from mnist_trainer.config import OPTIMIZERS, PIPELINES, TrainConfig
from mnist_trainer.data import DeviceBatches, Mnist, ShuffledOrder, train_and_val_loaders
from mnist_trainer.errors import ConfigError
from mnist_trainer.model import MnistModel
from mnist_trainer.training import OPTIMIZER_FACTORIES, evaluate, fit, load_optimizer


def seeded_model(seed: int = 0) -> MnistModel:
    torch.manual_seed(seed)
    return MnistModel()


def digits(mnist: Mnist, count: int, seed: int | None = None) -> DeviceBatches:
    """The first `count` training images in batches of 100, shuffled if there is a seed."""
    order = None if seed is None else ShuffledOrder(count, seed)
    return DeviceBatches(mnist.train_images[:count], mnist.train_labels[:count], 100, order)


def weights(model: MnistModel) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def are_equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_the_articles_script_works_as_it_is_typed(mnist: Mnist, capsys: pytest.CaptureFixture[str]) -> None:
    from torch.utils.data import DataLoader, random_split
    from torchvision.datasets import MNIST
    from torchvision.transforms import ToTensor

    from mnist_trainer import DeviceDataLoader, MnistModel, evaluate, fit, get_default_device, to_device

    torch.manual_seed(0)
    dataset = MNIST(root=str(mnist.root), download=True, transform=ToTensor())
    train_ds, val_ds, _ = random_split(dataset, [2000, 1000, 57000])
    device = get_default_device()
    train_loader = DeviceDataLoader(DataLoader(train_ds, 128, shuffle=True), device)
    val_loader = DeviceDataLoader(DataLoader(val_ds, 128 * 2), device)
    model = MnistModel(input_size=784, hidden_size=32, out_size=10)
    to_device(model, device)
    history = [evaluate(model, val_loader)]
    history += fit(3, 0.5, model, train_loader, val_loader)

    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in lines] == ["Epoch [1]", "Epoch [2]", "Epoch [3]"]
    assert lines[-1].endswith(f"val_loss: {history[-1]['val_loss']:.4f}, val_acc: {history[-1]['val_acc']:.4f}")
    assert history[0]["val_acc"] < 0.3
    assert history[-1]["val_acc"] > 0.8


def test_five_epochs_with_the_articles_numbers_read_96_of_100_test_images(mnist: Mnist) -> None:
    config = TrainConfig()
    model = seeded_model()
    history = fit(5, 0.5, model, *train_and_val_loaders(mnist, config, "cpu"))
    assert evaluate(model, data.test_loader(mnist, "cpu"))["val_acc"] >= 0.96
    assert [sorted(result) for result in history] == [["val_acc", "val_loss"]] * 5
    assert all(type(value) is float for result in history for value in result.values())
    assert history[-1]["val_loss"] < history[0]["val_loss"]


def test_one_seed_gives_equal_weights_twice(mnist: Mnist) -> None:
    trained = []
    for seed in (1, 1, 2):
        model = seeded_model(seed)
        fit(2, 0.5, model, digits(mnist, 500, seed), digits(mnist, 500), on_epoch=lambda *_: None)
        trained.append(weights(model))
    assert are_equal(trained[0], trained[1])
    assert not are_equal(trained[0], trained[2])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fit_equals_a_plain_pytorch_loop_bit_for_bit(optimizer: str, mnist: Mnist) -> None:
    model, plain = seeded_model(), seeded_model()
    fit(2, 0.01, model, digits(mnist, 450, seed=0), digits(mnist, 100), OPTIMIZER_FACTORIES[optimizer])

    torchs_own = {**OPTIMIZER_FACTORIES, "SGD": torch.optim.SGD}[optimizer]
    stepper = torchs_own(plain.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        for index in torch.randperm(450, generator=generator).split(100):
            stepper.zero_grad()
            logits = plain.linear2(F.relu(plain.linear1(mnist.train_images[index].reshape(-1, 784) / 255)))
            F.cross_entropy(logits, mnist.train_labels[index]).backward()
            stepper.step()
    assert are_equal(weights(model), weights(plain))


class EnoughError(Exception):
    """Ends a run from a callback."""


def ends_after(steps: int, losses: list[Tensor]) -> Callable[[Tensor], None]:
    def on_step(loss: Tensor) -> None:
        losses.append(loss)
        if len(losses) == steps:
            raise EnoughError

    return on_step


def test_both_pipelines_train_the_same_weights_bit_for_bit(mnist: Mnist) -> None:
    trained = []
    for pipeline in PIPELINES:
        model, losses = seeded_model(), list[Tensor]()
        loaders = train_and_val_loaders(mnist, TrainConfig(pipeline=pipeline, seed=5), "cpu")
        with pytest.raises(EnoughError):
            fit(1, 0.5, model, *loaders, on_step=ends_after(20, losses))
        trained.append([*weights(model), torch.stack(losses)])
    assert are_equal(*trained)


def test_an_exception_from_on_step_ends_the_run_after_that_step(mnist: Mnist) -> None:
    losses, epochs = list[Tensor](), list[int]()
    with pytest.raises(EnoughError):
        fit(
            3,
            0.5,
            seeded_model(),
            digits(mnist, 500),
            digits(mnist, 100),
            on_step=ends_after(7, losses),
            on_epoch=lambda epoch, _: epochs.append(epoch),
        )
    assert (len(losses), epochs) == (7, [1])


def test_callbacks_see_each_step_and_each_epoch(mnist: Mnist, capsys: pytest.CaptureFixture[str]) -> None:
    losses, epochs = list[Tensor](), list[tuple[int, dict[str, float]]]()
    model, train = seeded_model(), digits(mnist, 450)
    history = fit(
        3,
        0.5,
        model,
        train,
        digits(mnist, 100),
        on_step=losses.append,
        on_epoch=lambda epoch, result: epochs.append((epoch, result)),
    )
    assert epochs == list(enumerate(history, start=1))
    assert len(losses) == 3 * len(train) == 15
    assert {(tuple(loss.shape), loss.requires_grad) for loss in losses} == {((), False)}
    assert torch.equal(losses[0], seeded_model().training_step(next(iter(train))).detach())
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("epochs", "lr"), [(0, 0.5), (-1, 0.5), (1, float("nan")), (1, 0.0), (1, -0.1)])
def test_bad_numbers_are_refused_before_the_first_step(epochs: int, lr: float, mnist: Mnist) -> None:
    model = seeded_model()
    before, steps = weights(model), list[Tensor]()
    with pytest.raises(ConfigError):
        fit(epochs, lr, model, digits(mnist, 100), digits(mnist, 100), on_step=steps.append)
    assert steps == []
    assert are_equal(weights(model), before)


@pytest.mark.parametrize("was_training", [True, False])
def test_evaluating_changes_nothing_and_keeps_no_graph(was_training: bool, mnist: Mnist) -> None:
    seen: list[tuple[bool, bool]] = []

    class Watched(MnistModel):
        """Notes how validation is done."""

        def validation_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
            output = super().validation_step(batch)
            seen.append((self.training, output["val_loss"].requires_grad))
            return output

    model = Watched().train(was_training)
    before = weights(model)
    first, second = (evaluate(model, digits(mnist, 250)) for _ in range(2))
    assert first == second
    assert seen == [(False, False)] * 6
    assert model.training is was_training
    assert are_equal(weights(model), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.is_grad_enabled()


def test_training_goes_on_in_training_mode_after_validation(mnist: Mnist) -> None:
    model, modes = seeded_model().eval(), list[bool]()
    fit(2, 0.5, model, digits(mnist, 200), digits(mnist, 100), on_step=lambda _: modes.append(model.training))
    assert modes == [True] * 4


def test_there_is_a_factory_for_each_optimizer() -> None:
    assert tuple(OPTIMIZER_FACTORIES) == OPTIMIZERS


@pytest.mark.parametrize(("optimizer", "lr"), [("SGD", 0.5), ("SGD-momentum", 0.05), ("Adam", 0.01), ("AdamW", 0.01)])
def test_every_optimizer_lowers_the_loss_on_a_few_hundred_digits(optimizer: str, lr: float, mnist: Mnist) -> None:
    model, batches = seeded_model(), digits(mnist, 500)
    before = evaluate(model, batches)["val_loss"]
    fit(3, lr, model, batches, batches, OPTIMIZER_FACTORIES[optimizer])
    assert evaluate(model, batches)["val_loss"] < 0.8 * before


def test_an_optimizer_takes_the_state_of_one_on_a_gpu() -> None:
    first, second = (OPTIMIZER_FACTORIES["Adam"](seeded_model().parameters(), 0.01) for _ in range(2))
    for parameter in first.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    first.step()
    state = first.state_dict()
    state["param_groups"][0]["capturable"] = True  # as for a CUDA graph; on the CPU it cannot be stepped so
    load_optimizer(second, state)
    for parameter in second.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    second.step()
    assert second.state_dict()["state"][0]["step"] == 2


def test_plain_sgd_without_gradients_leaves_the_weights_alone() -> None:
    model = seeded_model()
    before = weights(model)
    OPTIMIZER_FACTORIES["SGD"](model.parameters(), 0.5).step()
    assert are_equal(before, weights(model))
