"""The network: shapes, and figures that equal PyTorch's own over all images."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mnist_trainer.data import Mnist
from mnist_trainer.model import Batch, MnistModel, accuracy


@pytest.fixture
def pixels(mnist: Mnist) -> Tensor:
    """All 10,000 test images, float32 in [0, 1]."""
    return mnist.test_images.float() / 255


@pytest.fixture
def model() -> MnistModel:
    torch.manual_seed(0)
    return MnistModel()


def batches_of(size: int, images: Tensor, labels: Tensor) -> Iterator[Batch]:
    return zip(images.split(size), labels.split(size), strict=True)


@pytest.mark.parametrize("shape", [(5, 1, 28, 28), (5, 28, 28), (5, 784), (1, 1, 28, 28), (0, 784)])
def pixels_of_any_shape_give_ten_logits_each(shape: tuple[int, ...], model: MnistModel) -> None:
    assert model(torch.rand(shape)).shape == (shape[0], 10)


def test_the_sizes_are_free() -> None:
    model = MnistModel(input_size=6, hidden_size=4, out_size=3)
    assert model(torch.rand(2, 2, 3)).shape == (2, 3)
    assert [tuple(weights.shape) for weights in model.parameters()] == [(4, 6), (4,), (3, 4), (3,)]


def test_the_network_is_linear_relu_linear(model: MnistModel, pixels: Tensor) -> None:
    flat = pixels[:50].reshape(50, 784)
    hidden = (flat @ model.linear1.weight.T + model.linear1.bias).clamp(min=0)
    expected = hidden @ model.linear2.weight.T + model.linear2.bias
    torch.testing.assert_close(model(pixels[:50]), expected)


def test_logits_are_where_the_model_is(model: MnistModel) -> None:
    assert model.to("meta")(torch.rand(2, 784, device="meta")).device == torch.device("meta")


def test_accuracy_is_a_count_of_right_answers(model: MnistModel, mnist: Mnist, pixels: Tensor) -> None:
    logits = model(pixels[:300])
    pairs = zip(logits.tolist(), mnist.test_labels[:300].tolist(), strict=True)
    right = sum(row.index(max(row)) == label for row, label in pairs)
    assert accuracy(logits, mnist.test_labels[:300]).item() == pytest.approx(right / 300)
    assert accuracy(torch.eye(4), torch.tensor([0, 1, 2, 0])).item() == 0.75


def test_a_training_step_is_cross_entropy_ready_for_backward(model: MnistModel, mnist: Mnist, pixels: Tensor) -> None:
    images, labels = pixels[:64], mnist.test_labels[:64]
    loss = model.training_step((images, labels))
    assert torch.equal(loss, F.cross_entropy(model(images), labels))
    assert torch.equal(model.train_acc, accuracy(model(images), labels))
    assert not model.train_acc.requires_grad
    loss.backward()
    assert all(weights.grad is not None and weights.grad.abs().sum() > 0 for weights in model.parameters())


@torch.no_grad()
@pytest.mark.parametrize("size", [1, 7, 200, 256, 4096, 10_000])
def test_validation_equals_pytorchs_own_over_all_images(
    size: int, model: MnistModel, mnist: Mnist, pixels: Tensor
) -> None:
    result = model.validation_epoch_end(
        [model.validation_step(batch) for batch in batches_of(size, pixels, mnist.test_labels)]
    )
    logits = model(pixels)
    right = int((logits.argmax(1) == mnist.test_labels).sum())
    assert result["val_acc"] == right / 10_000
    assert result["val_loss"] == pytest.approx(F.cross_entropy(logits.double(), mnist.test_labels).item(), rel=1e-5)
    assert [type(value) for value in result.values()] == [float, float]


def test_batches_weigh_by_their_size(model: MnistModel) -> None:
    outputs: list[dict[str, Any]] = [
        {"val_loss": torch.tensor(1.0), "val_acc": torch.tensor(1.0), "size": 96},
        {"val_loss": torch.tensor(5.0), "val_acc": torch.tensor(0.0), "size": 32},
    ]
    assert model.validation_epoch_end(outputs) == {"val_loss": 2.0, "val_acc": 0.75}


def test_the_articles_own_steps_without_sizes_are_averaged(model: MnistModel) -> None:
    outputs = [{"val_loss": torch.tensor(loss), "val_acc": torch.tensor(loss / 4)} for loss in (1.0, 2.0)]
    assert model.validation_epoch_end(outputs) == {"val_loss": 1.5, "val_acc": 0.375}


def test_an_epochs_end_prints_the_articles_line(model: MnistModel, capsys: pytest.CaptureFixture[str]) -> None:
    model.epoch_end(3, {"val_loss": 0.123456, "val_acc": 0.9471})
    assert capsys.readouterr().out == "Epoch [3], val_loss: 0.1235, val_acc: 0.9471\n"
