"""The training step as a CUDA graph: recorded once on the GPU, then launched as a whole."""

import logging
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from .devices import first_sentence
from .model import Batch, MnistModel
from .training import train_step

log = logging.getLogger(__name__)

WARM_UP_STEPS = 3  # before a recording: cuBLAS, autograd and the optimizer make what they keep
_one_at_a_time = threading.Lock()  # PyTorch records one graph at a time in a process


class GraphedStep:
    """`train_step` on a CUDA GPU, to the same effect: one launch in place of some forty.

    A network of this size keeps a GPU busy for a few microseconds a kernel, less than the CPU takes to
    launch it: step by step, the GPU mostly waits. A recording repeats the same kernels on the same
    memory, so it holds for one batch size and one learning rate. Batches of another size (the last of an
    epoch) are trained step by step; for another learning rate it is recorded anew. Where recording fails,
    all steps are trained one by one, and the log says why.

    For one model, one optimizer and one thread. An optimizer that counts its steps must be "capturable".

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    """

    def __init__(self) -> None:
        self._shape: torch.Size | None = None  # of the images: of the last batch, and then of the recorded one
        self._alike = 0  # steps with batches of this shape, one after the other
        self._rates: list[float] = []
        self._replay: Callable[[], None] | None = None
        self._has_failed = False

    def __call__(self, model: MnistModel, optimizer: torch.optim.Optimizer, batch: Batch) -> Tensor:
        """Train `model` on one batch; return the loss before the update, a detached scalar on the device."""
        images, labels = batch
        if self._has_failed or (self._replay and images.shape != self._shape):
            return train_step(model, optimizer, batch)
        if not self._replay and not self._is_warm(images.shape):
            return on_side_stream(lambda: train_step(model, optimizer, batch))
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        if rates != self._rates and not self._record(model, optimizer, batch, rates):
            return train_step(model, optimizer, batch)
        self._images.copy_(images)
        self._labels.copy_(labels)
        assert self._replay
        self._replay()
        # The next replay writes over these two.
        model.train_acc = self._accuracy.clone()
        return self._loss.clone()

    def _is_warm(self, shape: torch.Size) -> bool:
        """Whether a step with a batch of this shape may be recorded."""
        self._alike = self._alike + 1 if shape == self._shape else 1
        self._shape = shape
        return self._alike > WARM_UP_STEPS

    def _record(self, model: MnistModel, optimizer: torch.optim.Optimizer, batch: Batch, rates: list[float]) -> bool:
        self._images, self._labels = (tensor.clone() for tensor in batch)

        def work() -> None:
            self._loss = train_step(model, optimizer, (self._images, self._labels))
            self._accuracy = model.train_acc

        try:
            self._replay, self._rates = recorded(work), rates
        except Exception as error:  # drivers raise whatever they like; the steps are taken one by one then
            log.warning("Training goes on without a CUDA graph: %s.", first_sentence(error))
            self._replay, self._has_failed = None, True
            optimizer.zero_grad()
        return not self._has_failed


def recorded(work: Callable[[], None]) -> Callable[[], None]:
    """Record what `work` launches on the current GPU, without doing it; return what does it."""
    graph = torch.cuda.CUDAGraph()
    # On a stream of this GPU: the one that PyTorch would take by itself is of the GPU that recorded first.
    stream = torch.cuda.Stream()
    # A recording that fails leaves its stream the current one. Other threads may launch on the GPU meanwhile.
    with (
        _one_at_a_time,
        torch.cuda.stream(torch.cuda.current_stream()),
        torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
    ):
        work()
    return graph.replay


def on_side_stream(work: Callable[[], Tensor]) -> Tensor:
    """Do `work` as it will be recorded, off the GPU's default stream."""
    stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        result = work()
    current.wait_stream(stream)
    return result
