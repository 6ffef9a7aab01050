"""The training loop: one `fit` for the article's script, the dashboard and the command line."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from .config import check_epochs, check_learning_rate
from .model import Batch, MnistModel

OptimizerFactory = Callable[..., torch.optim.Optimizer]
Step = Callable[[MnistModel, torch.optim.Optimizer, Batch], Tensor]


class LeanSGD(torch.optim.SGD):
    """Plain `torch.optim.SGD`, bit for bit, without its bookkeeping: a sixth of a step at the article's sizes.

    No momentum, no weight decay, no hooks; its state and groups are those of `torch.optim.SGD`.
    """

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nothing here has a closure
        """Move each parameter against its gradient, by the learning rate."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                torch._foreach_add_(parameters, [parameter.grad for parameter in parameters], alpha=-group["lr"])

    # torch wraps each optimizer's `step` that does not say so, for its profiler and its hooks.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; they are always set to None."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


# The keys are config.OPTIMIZERS's. Called with (parameters, lr), as the article calls `opt_func`.
OPTIMIZER_FACTORIES: dict[str, OptimizerFactory] = {
    "SGD": LeanSGD,
    "SGD-momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
}


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], *, for_graph: bool = False) -> None:
    """Give `optimizer` the state of another one of its kind, whatever device that was on.

    Args:
        optimizer: for parameters on their device.
        state: a `state_dict`; it is changed.
        for_graph: whether its steps will be recorded as a CUDA graph: Adam's count of steps then lies on the
            GPU, and only then.
    """
    for group in state["param_groups"]:
        if "capturable" in group:
            group["capturable"] = for_graph
    optimizer.load_state_dict(state)


class Batches(Protocol):
    """An iterable of (images, labels) that can be gone through again and again."""

    def __iter__(self) -> Iterator[Batch]: ...

    def __len__(self) -> int: ...


def fit(
    epochs: int,
    lr: float,
    model: MnistModel,
    train_loader: Iterable[Any],
    val_loader: Iterable[Any],
    opt_func: OptimizerFactory = torch.optim.SGD,
    *,
    step: Step | None = None,
    on_step: Callable[[Tensor], None] | None = None,
    on_epoch: Callable[[int, dict[str, float]], None] | None = None,
    first_epoch: int = 1,
) -> list[dict[str, float]]:
    """Train `model`, and validate it after each epoch.

    Args:
        epochs: passes over `train_loader`, those before `first_epoch` counted in.
        lr: learning rate.
        model: already on the device of the batches.
        train_loader: yields (images, labels).
        val_loader: the same, for validation.
        opt_func: called with the model's parameters and `lr`.
        step: in place of `train_step`, to the same effect.
        on_step: called after each optimizer step with its loss, a detached scalar on the device.
            Reading the number makes a GPU wait, so a caller that can should read many at once.
        on_epoch: called after each epoch with its number, from 1, and its validation result, in place
            of `model.epoch_end`, which prints.
        first_epoch: where to go on; `opt_func` then gives an optimizer that knows what went before.

    Returns:
        One `{"val_loss": float, "val_acc": float}` an epoch.

    Raises:
        ConfigError: epochs or learning rate out of range.
        Whatever a loader or a callback raises; that is how a run is stopped.
    """
    check_epochs(epochs)
    check_learning_rate(lr)
    history = []
    optimizer = opt_func(model.parameters(), lr)
    step = step or train_step
    for epoch in range(first_epoch, epochs + 1):
        model.train()
        for batch in train_loader:
            loss = step(model, optimizer, batch)
            if on_step:
                on_step(loss)
        result = evaluate(model, val_loader)
        (on_epoch or model.epoch_end)(epoch, result)
        history.append(result)
    return history


def train_step(model: MnistModel, optimizer: torch.optim.Optimizer, batch: Batch) -> Tensor:
    """Train `model` on one batch; return the loss before the update, a detached scalar on the device."""
    loss = model.training_step(batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@torch.no_grad()
def evaluate(model: MnistModel, val_loader: Iterable[Any]) -> dict[str, float]:
    """Loss and accuracy of `model` on all batches of `val_loader`.

    Returns:
        `{"val_loss": mean cross-entropy in nats per image, "val_acc": fraction right, exact}`.
    """
    was_training = model.training
    model.eval()
    outputs = [model.validation_step(batch) for batch in val_loader]
    model.train(was_training)
    return model.validation_epoch_end(outputs)
