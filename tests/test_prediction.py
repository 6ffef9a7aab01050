"""Which digit a network reads, and from which weights."""

import pytest
import torch
from torch import Tensor

from mnist_trainer.data import Mnist
from mnist_trainer.errors import RunFolderError
from mnist_trainer.model import MnistModel
from mnist_trainer.prediction import model_of, predict
from mnist_trainer.state import Checkpoint


def checkpoint(model: MnistModel, **changes: Tensor) -> Checkpoint:
    """Its weights, some of them changed; an underscore stands for the dot in a name."""
    changed = {name.replace("_", "."): tensor for name, tensor in changes.items()}
    return Checkpoint(model.state_dict() | changed, epoch=1, step=391, val_accuracy=0.9)


def test_probabilities_are_softmax_of_the_networks_outputs(mnist: Mnist) -> None:
    model = MnistModel()
    for image in mnist.test_images[:50].float() / 255:
        prediction = predict(model, image)
        expected = torch.softmax(model(image[None]), dim=1)[0]
        torch.testing.assert_close(torch.tensor(prediction.probabilities), expected)
        assert sum(prediction.probabilities) == pytest.approx(1, abs=1e-6)
        assert prediction.digit == int(expected.argmax())
        assert prediction.probability == max(prediction.probabilities)


@pytest.mark.parametrize("hidden_size", [1, 32, 500])
def test_a_network_is_rebuilt_from_the_sizes_of_its_weights(mnist: Mnist, hidden_size: int) -> None:
    model, images = MnistModel(hidden_size=hidden_size), mnist.test_images[:10].float() / 255
    rebuilt = model_of(checkpoint(model))
    assert rebuilt.linear1.out_features == hidden_size
    assert torch.equal(rebuilt(images), model(images))
    assert not any(parameter.requires_grad for parameter in rebuilt.parameters())


def test_weights_of_double_precision_are_read_too(mnist: Mnist) -> None:
    model, image = MnistModel(), mnist.test_images[0].float() / 255
    doubles = {name: tensor.double() for name, tensor in model.state_dict().items()}
    rebuilt = model_of(Checkpoint(doubles, epoch=1, step=391, val_accuracy=0.9))
    assert predict(rebuilt, image) == predict(model, image)


def test_rebuilding_leaves_the_random_state_of_the_process_alone() -> None:
    weights = checkpoint(MnistModel())
    before = torch.get_rng_state()
    model_of(weights)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "changes",
    [
        {"linear1_weight": torch.zeros(32)},
        {"linear2_weight": torch.zeros(10, 31)},
        {"linear1_bias": torch.zeros(31)},
        {"linear3_weight": torch.zeros(10, 10)},
        {"linear2_bias": torch.tensor(0.0)},
        {"linear1_weight": torch.zeros(32, 100)},
        {"linear2_weight": torch.zeros(3, 32), "linear2_bias": torch.zeros(3)},
    ],
    ids=lambda changes: ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in changes.items()),
)
def test_weights_of_another_network_are_refused(changes: dict[str, Tensor]) -> None:
    with pytest.raises(RunFolderError, match=r"do not belong to the network .*\.$"):
        model_of(checkpoint(MnistModel(), **changes))


@pytest.mark.parametrize("weights", [{}, {"fc.weight": torch.zeros(10, 784), "fc.bias": torch.zeros(10)}])
def test_weights_with_other_names_are_refused(weights: dict[str, Tensor]) -> None:
    with pytest.raises(RunFolderError, match=r"do not belong to the network .*\.$"):
        model_of(Checkpoint(weights, epoch=1, step=391, val_accuracy=0.9))
