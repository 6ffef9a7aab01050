"""What a student takes home from a run: a script that repeats it, and its weights for use elsewhere."""

import importlib.util
import io
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from string import Template

import torch

from .config import TrainConfig
from .devices import ONE_THREAD_BELOW
from .errors import MnistTrainerError
from .prediction import model_of
from .run import Run
from .state import Checkpoint

SCRIPT = Path(__file__).with_suffix(".txt")

# As they are written in the script; the keys are config.OPTIMIZERS's.
OPTIMIZER_SOURCES = {
    "SGD": "torch.optim.SGD",
    "SGD-momentum": "partial(torch.optim.SGD, momentum=0.9)",
    "Adam": "torch.optim.Adam",
    "AdamW": "torch.optim.AdamW",
}

SNIPPET = '''\
"""Read one digit with the network in model.pt: pip install torch"""

import torch
import torch.nn.functional as F

weights = torch.load("model.pt", weights_only=True)

# One image, shape (1, 1, 28, 28): white ink (1) on black (0), prepared as MNIST is:
# the digit fills a box of 20 × 20, and its centre of mass is in the middle.
image = torch.zeros(1, 1, 28, 28)
image[:, :, 4:24, 13:15] = 1  # a stroke, top to bottom; put your own digit here

hidden = F.linear(image.flatten(1), weights["linear1.weight"], weights["linear1.bias"])
outputs = F.linear(F.relu(hidden), weights["linear2.weight"], weights["linear2.bias"])
probabilities = F.softmax(outputs, dim=1)[0]  # of the digits 0 to 9
print(f"{probabilities.argmax()} ({probabilities.max():.1%})")
'''


def script_of(run: Run) -> str:
    """`script` of a run that is over: of the weights that it kept.

    Raises:
        RunFolderError: it has none, or they are damaged.
    """
    steps = None if run.state.status == "finished" else run.weights().step
    rates = [(rate.step, rate.learning_rate) for rate in run.snapshot().rates if steps is None or rate.step < steps]
    return script(run.config, rates, steps, run.state.threads)


def script(
    config: TrainConfig,
    learning_rates: Sequence[tuple[int, float]] = (),
    steps: int | None = None,
    threads: int | None = None,
) -> str:
    """The source of one Python file that repeats a run with torch and torchvision alone.

    On the CPU it gives figures and weights of a run of one process, bit for bit; it uses a CUDA GPU if there is one.

    Args:
        config: the run's settings; `device` is not one of the script's.
        learning_rates: changes while it trained: (after so many steps, rate from then on). Of two at
            one step the later in the sequence holds.
        steps: after how many the run was stopped. The epoch it was in is not validated, unless that
            was its last step.
        threads: of the CPU, that the run trained with; by default as many as a run would choose, or all.
    """
    if threads is None and config.hidden_size < ONE_THREAD_BELOW:
        threads = 1
    facts = {config.pipeline}
    if config.optimizer == "SGD-momentum":
        facts.add("momentum")
    if threads is not None:
        facts.add("one-thread" if threads == 1 else "threads")
    if learning_rates:
        facts.add("changed")
    if steps is not None:
        facts.add("stopped")
    values = {
        "epochs": f"{config.epochs:_}",
        "learning_rate": repr(config.learning_rate),
        "hidden_size": f"{config.hidden_size:_}",
        "batch_size": f"{config.batch_size:_}",
        "optimizer": OPTIMIZER_SOURCES[config.optimizer],
        "seed": f"{config.seed:_}",
        "learning_rates": "\n".join(f"    {step:_}: {rate!r}," for step, rate in dict(learning_rates).items()),
        "steps": f"{steps or 0:_}",
        "threads": str(threads),
    }
    return _filled(SCRIPT.read_text(encoding="utf-8"), facts, values)


def model_file(checkpoint: Checkpoint) -> bytes:
    """The weights alone as a `model.pt`: float32 on the CPU, read by `torch.load(…, weights_only=True)`."""
    # Copied: of a part of a larger tensor, torch.save writes the whole.
    weights = {name: tensor.detach().to("cpu", torch.float32, copy=True) for name, tensor in checkpoint.weights.items()}
    buffer = io.BytesIO()
    torch.save(weights, buffer)
    return buffer.getvalue()


def snippet() -> str:
    """The source of a Python file that reads one digit with the `model.pt` beside it."""
    return SNIPPET


def has_onnx() -> bool:
    """Whether the optional package that `onnx_file` needs is installed."""
    return importlib.util.find_spec("onnx") is not None


def onnx_file(checkpoint: Checkpoint) -> bytes:
    """The network as a `model.onnx`, for ONNX Runtime and others.

    Its input is "image": float32, shape (batch, 1, 28, 28), any batch, white ink 1 on black 0. Its
    output is "probabilities": float32, shape (batch, 10).

    Raises:
        MnistTrainerError: the package `onnx` is not installed.
        RunFolderError: the weights are not an `MnistModel`'s.
    """
    if not has_onnx():
        raise MnistTrainerError("A package is missing to write an ONNX file. Install it: pip install onnx")
    # Put together by hand: torch.onnx.export takes ten seconds and two more packages, and shares state with
    # all threads of its process. It was seen to break a run that trained at the same time.
    from onnx import TensorProto, helper, numpy_helper

    weights = model_of(checkpoint).state_dict()
    nodes = [
        helper.make_node("Flatten", ["image"], ["pixels"], axis=1),
        helper.make_node("Gemm", ["pixels", "linear1.weight", "linear1.bias"], ["hidden"], transB=1),
        helper.make_node("Relu", ["hidden"], ["active"]),
        helper.make_node("Gemm", ["active", "linear2.weight", "linear2.bias"], ["logits"], transB=1),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
    ]
    graph = helper.make_graph(
        nodes,
        "mnist",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, 28, 28])],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["batch", 10])],
        [numpy_helper.from_array(tensor.numpy(), name) for name, tensor in weights.items()],
    )
    # Both old enough for any runtime of the last years.
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    content: bytes = model.SerializeToString()
    return content


def _filled(template: str, facts: Set[str], values: Mapping[str, str]) -> str:
    """The template with its values, and without the lines for other runs.

    Lines from `%if this or that` to `%else` or `%end` are kept if one of the facts holds; `$name` is a value.
    """
    kept, is_kept = list[str](), True
    for line in template.splitlines(keepends=True):
        match line.split():
            case ["%if", *names]:
                is_kept = not facts.isdisjoint(names)
            case ["%else"]:
                is_kept = not is_kept
            case ["%end"]:
                is_kept = True
            case _ if is_kept:
                kept.append(line)
    return Template("".join(kept)).substitute(values)
