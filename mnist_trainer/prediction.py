"""Which digit a network reads, and how sure it is."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import RunFolderError
from .model import MnistModel
from .state import Checkpoint


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a network says of one digit image.

    Attributes:
        digit: the most probable one.
        probabilities: of the digits 0 to 9; they add up to 1.
    """

    digit: int
    probabilities: tuple[float, ...]

    @property
    def probability(self) -> float:
        """Of `digit`, in [0, 1]."""
        return self.probabilities[self.digit]

    def __str__(self) -> str:
        sure = "> 99.9%" if self.probability > 0.9995 else f"{self.probability:.1%}"  # certainty is never whole
        return f"{self.digit} ({sure})"


def model_of(checkpoint: Checkpoint) -> MnistModel:
    """The network with these weights, on the CPU, rebuilt from their own sizes.

    Raises:
        RunFolderError: they are not an `MnistModel`'s.
    """
    weights = checkpoint.weights
    try:
        hidden_size, _ = weights["linear1.weight"].shape
        with torch.device("meta"):  # no numbers drawn: the process's random state is left alone
            model = MnistModel(hidden_size=hidden_size)
        # It refuses other names and shapes.
        model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, assign=True)
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise RunFolderError("These weights do not belong to the network that this version trains.") from error
    return model.eval().requires_grad_(False)


def predict(model: MnistModel, image: Tensor) -> Prediction:
    """Read one digit.

    Args:
        model: on the device of `image`.
        image: float32, shape (1, 28, 28), as `drawing.to_mnist` prepares it.
    """
    with torch.inference_mode():
        probabilities = model(image[None]).softmax(dim=1)[0].tolist()
    return Prediction(max(range(len(probabilities)), key=probabilities.__getitem__), tuple(probabilities))
