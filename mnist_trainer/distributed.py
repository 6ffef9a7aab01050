"""Training of one run by several processes: each takes its share of every batch, and all take the same step."""

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from . import data
from .config import TRAIN_SIZE, TrainConfig
from .devices import first_sentence
from .errors import MnistTrainerError
from .group import DismissedError, Group
from .model import Batch, MnistModel
from .store import home_folder
from .training import OPTIMIZER_FACTORIES, Batches, fit, load_optimizer


@dataclass(frozen=True, slots=True)
class Start:
    """What a process needs to train along with rank 0; the weights come with the model.

    Attributes:
        config: the run's settings; each process has a device of its own.
        first_epoch: where the run begins or goes on.
        order: uint8, state of the generator of the images' order.
        skipped: images of the first epoch that are done with.
        optimizer: its state_dict, on the CPU; None for a new one.
        threads: of the CPU, for each process.
    """

    config: TrainConfig
    first_epoch: int
    order: Tensor
    skipped: int
    optimizer: dict[str, Any] | None
    threads: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """So many steps with this learning rate; then listen again."""

    steps: int
    learning_rate: float


class SharedModel(MnistModel):
    """The network of one of several processes, kept equal on all of them by `DistributedDataParallel`.

    `training_step` takes this process's share of a batch, which may be empty. After `backward` on every
    process, gradients, `train_loss` and `train_acc` are those of the whole batch.

    Args:
        model: with rank 0's weights, on the device of the group; the others' are overwritten.
        group: of all processes, which make it at the same time.
    """

    def __init__(self, model: MnistModel, group: Group) -> None:
        nn.Module.__init__(self)
        self.linear1, self.linear2 = model.linear1, model.linear2
        self.train_acc = model.train_acc
        self.train_loss = torch.zeros(())  # of the last training step, nats per image
        self._sums = torch.zeros(3)
        self._group = group.training
        shared = DistributedDataParallel(self, process_group=group.training, gradient_as_bucket_view=True)
        shared.register_comm_hook(None, self._reduced)
        self._shared = (shared,)  # in a tuple, or it would be taken for a part of its own part

    def training_step(self, batch: Batch) -> Tensor:
        """Cross-entropy of this process's share of the batch, in nats, summed over its images."""
        images, labels = batch
        outputs = self._shared[0](images)
        loss = F.cross_entropy(outputs, labels, reduction="sum")
        right = (outputs.detach().argmax(dim=1) == labels).sum()
        self._sums = torch.stack([loss.detach(), right, loss.new_full((), len(labels))])
        return loss

    def validation_epoch_end(self, outputs: Sequence[dict[str, Any]]) -> dict[str, float]:
        """As ever on rank 0; nothing where there are no images to validate on."""
        return super().validation_epoch_end(outputs) if outputs else {}

    def _reduced(  # the stub of torch.distributed leaves the class out
        self,
        _: None,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        """Add up gradients, loss, right answers and images of all processes, in one go; divide by the images.

        The mean of the processes' means, which DistributedDataParallel takes by itself, would let an image of
        a smaller share count for more.
        """
        is_last = bucket.is_last()
        sums = torch.cat([bucket.buffer(), self._sums])
        work = dist.all_reduce(sums, group=self._group, async_op=True)
        assert work is not None  # this process is one of the group

        def divided(added: torch.futures.Future[list[Tensor]]) -> Tensor:
            (sums,) = added.value()  # raises what went wrong, without which a step would be taken with half a sum
            means = sums / sums[-1]
            if is_last:
                self.train_loss, self.train_acc, _ = means[-3:].clone()  # kept a while, without the gradients
            return means[:-3]

        return work.get_future().then(divided)


def follow(group: Group) -> int:
    """Train along with rank 0 until it ends; return the exit status that it gives.

    Ctrl-C, or a polite kill, is passed on to rank 0, so that all stop at the same step.
    """
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, lambda *_: group.ask_to_stop())
    try:
        _Follower(group, group.hear()).train()
        while True:  # rank 0 measures on its own now
            group.hear()
    except DismissedError as dismissed:
        group.leave()
        return dismissed.status
    except Exception as error:
        group.explained(error)  # if another has died, rank 0 knows which, and ends this process meanwhile
        group.fail(first_sentence(error))
        if isinstance(error, MnistTrainerError):
            return 1
        raise


class _Follower:
    """Takes the steps that rank 0 tells of: gives out each batch once rank 0 comes to it."""

    def __init__(self, group: Group, start: Start) -> None:
        self.group = group
        self.start = start
        self.steps_left = 0
        self.batches: Batches
        self.optimizer: torch.optim.Optimizer

    def train(self) -> None:
        """Go through the whole run, as far as rank 0 does.

        Raises:
            DismissedError: it does no more.
        """
        start, config, device = self.start, self.start.config, self.group.device
        torch.set_num_threads(min(start.threads, torch.get_num_threads()))
        order = data.ShuffledOrder(TRAIN_SIZE, config.seed)
        order.resume(start.order, start.skipped)
        mnist = data.load_mnist(home_folder() / "data")
        self.batches, _ = data.train_and_val_loaders(mnist, config, device, order, self.group.share)
        model = SharedModel(MnistModel(hidden_size=config.hidden_size).to(device), self.group)
        fit(
            config.epochs,
            config.learning_rate,
            model,
            self,
            [],
            self.build_optimizer,
            on_epoch=lambda epoch, result: None,
            first_epoch=start.first_epoch,
        )

    def build_optimizer(self, parameters: Any, learning_rate: float) -> torch.optim.Optimizer:
        """What `fit` calls as `opt_func`."""
        self.optimizer = OPTIMIZER_FACTORIES[self.start.config.optimizer](parameters, learning_rate)
        if self.start.optimizer:
            load_optimizer(self.optimizer, self.start.optimizer)
        return self.optimizer

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            self._heed()
            yield batch

    def _heed(self) -> None:
        while not self.steps_left:
            stretch: Stretch = self.group.hear()
            self.steps_left = stretch.steps
            for group in self.optimizer.param_groups:
                group["lr"] = stretch.learning_rate
        self.steps_left -= 1
