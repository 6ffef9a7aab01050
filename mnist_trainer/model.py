"""The article's network, 784 → hidden → ReLU → 10, and how it is trained and validated."""

import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import CLASSES, IMAGE_PIXELS, TrainConfig

Batch = tuple[Tensor, Tensor]

_init_lock = threading.Lock()


def accuracy(outputs: Tensor, labels: Tensor) -> Tensor:
    """The share of images whose largest output is at their label.

    Args:
        outputs: logits or probabilities, shape (batch, classes).
        labels: int64, shape (batch,).

    Returns:
        float32 scalar in [0, 1], on the device of `outputs`: reading it is up to the caller, so that a
        GPU need not wait.
    """
    return (outputs.argmax(dim=1) == labels).float().mean()


class MnistModel(nn.Module):
    """A network with one hidden layer.

    Args:
        input_size: numbers per image, 28 × 28.
        hidden_size: units in the hidden layer.
        out_size: number of classes.
    """

    def __init__(self, input_size: int = IMAGE_PIXELS, hidden_size: int = 32, out_size: int = CLASSES) -> None:
        super().__init__()
        self.linear1 = nn.Linear(input_size, hidden_size)
        self.linear2 = nn.Linear(hidden_size, out_size)
        # Of the last training step, on the model's device, for whoever watches `fit`.
        self.train_acc = torch.zeros(())

    def forward(self, xb: Tensor) -> Tensor:
        """Logits, shape (batch, classes), of images of any shape (batch, …) with `input_size` numbers each."""
        xb = xb.flatten(start_dim=1)
        outputs: Tensor = self.linear2(F.relu(self.linear1(xb)))
        return outputs

    def training_step(self, batch: Batch) -> Tensor:
        """Mean cross-entropy of the batch, nats per image, ready for `backward`."""
        images, labels = batch
        outputs = self(images)
        self.train_acc = accuracy(outputs.detach(), labels)
        return F.cross_entropy(outputs, labels)

    def validation_step(self, batch: Batch) -> dict[str, Any]:
        """Loss and accuracy of one batch, with its size as their weight."""
        images, labels = batch
        outputs = self(images)
        return {
            "val_loss": F.cross_entropy(outputs, labels),
            "val_acc": accuracy(outputs, labels),
            "size": len(labels),
        }

    def validation_epoch_end(self, outputs: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Loss and accuracy over all images.

        Batches are weighed by their size: the article's plain mean of means lets a last batch of 16
        count as much as one of 256. The accuracy is exact: right answers over images.
        """
        sizes = [output.get("size", 1) for output in outputs]
        losses = torch.stack([output["val_loss"] for output in outputs]).tolist()
        accuracies = torch.stack([output["val_acc"] for output in outputs]).tolist()
        total = sum(sizes)
        # float32 holds right / size only nearly; times the size it is within 1e-3 of a whole number.
        right = [a * n if n == 1 else round(a * n) for a, n in zip(accuracies, sizes, strict=True)]
        return {
            "val_loss": sum(loss * n for loss, n in zip(losses, sizes, strict=True)) / total,
            "val_acc": sum(right) / total,
        }

    def epoch_end(self, epoch: int, result: dict[str, float]) -> None:
        """Print an epoch's validation result; `epoch` counts from 1."""
        print(f"Epoch [{epoch}], val_loss: {result['val_loss']:.4f}, val_acc: {result['val_acc']:.4f}")


def seeded_model(config: TrainConfig) -> MnistModel:
    """The network of these settings, on the CPU, with the first weights of their seed."""
    # nn.Linear draws its weights from the process's one random state: put back as it was.
    with _init_lock, torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return MnistModel(hidden_size=config.hidden_size)
