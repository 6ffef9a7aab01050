"""What a student takes home: the script gives the run's own figures, the weights read digits elsewhere."""

import ast
import importlib
import importlib.util
import io
import itertools
import os
import subprocess
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mnist_trainer import data
from mnist_trainer.config import MAX_SEED, OPTIMIZERS, PIPELINES, TrainConfig
from mnist_trainer.errors import MnistTrainerError, RunFolderError
from mnist_trainer.model import MnistModel
from mnist_trainer.prediction import model_of, predict
from mnist_trainer.runs import RunManager
from mnist_trainer.state import Checkpoint
from mnist_trainer.takeaway import has_onnx, model_file, onnx_file, script, snippet
from mnist_trainer.training import OPTIMIZER_FACTORIES, evaluate, fit

CHANGES = [(60, 0.1), (130, 1e-05)]
# Every kind of script.
SCRIPTS = [
    script(TrainConfig(pipeline=pipeline, optimizer=optimizer, hidden_size=hidden_size, seed=MAX_SEED), changes, steps)
    for pipeline, optimizer, hidden_size, changes, steps in itertools.product(
        PIPELINES, OPTIMIZERS, (32, 256), ([], CHANGES), (None, 150)
    )
]

needs_onnx = pytest.mark.skipif(not has_onnx(), reason="the optional package onnx is not installed")


class _StoppedError(Exception):
    pass


def python(source: str, folder: Path, *options: str) -> str:
    """What a script prints, run in `folder` on the CPU."""
    (folder / "this_file.py").write_text(source, encoding="utf-8")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, *options, "this_file.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def repeated(source: str, folder: Path, mnist_root: Path) -> tuple[str, dict[str, Tensor]]:
    """What a training script prints, and the weights it ends with."""
    (folder / "data").symlink_to(mnist_root, target_is_directory=True)
    printed = python(source + 'torch.save(model.state_dict(), "after.pt")\n', folder)
    weights: dict[str, Tensor] = torch.load(folder / "after.pt", weights_only=True)
    return printed, weights


def report(epochs: Iterable[tuple[float, float]], test_accuracy: float) -> str:
    """What the script should print for (validation loss, accuracy) of each epoch."""
    lines = [f"Epoch [{i}], val_loss: {loss:.4f}, val_acc: {acc:.4f}" for i, (loss, acc) in enumerate(epochs, start=1)]
    return "\n".join([*lines, f"Test accuracy: {test_accuracy:.2%}\n"])


def are_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.fixture(scope="module")
def trained(mnist: data.Mnist) -> Checkpoint:
    """Weights that read digits."""
    model = seeded_model(TrainConfig())
    loaders = data.train_and_val_loaders(mnist, TrainConfig(batch_size=500), "cpu")
    fit(1, 0.01, model, *loaders, torch.optim.Adam, on_epoch=lambda epoch, result: None)
    return Checkpoint(model.state_dict(), epoch=1, step=100, val_accuracy=0.9)


def seeded_model(config: TrainConfig) -> MnistModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return MnistModel(hidden_size=config.hidden_size)


def digits(mnist: data.Mnist, count: int = 20) -> Tensor:
    return mnist.test_images[:count].float() / 255


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(device="cpu", epochs=2),
        TrainConfig(
            device="cpu", epochs=1, optimizer="Adam", learning_rate=0.002, seed=7, batch_size=300, hidden_size=20
        ),
        TrainConfig(device="cpu", epochs=1, optimizer="SGD-momentum", learning_rate=0.05, batch_size=1000),
        TrainConfig(device="cpu", epochs=1, optimizer="AdamW", learning_rate=0.01, batch_size=1000),
        TrainConfig(device="cpu", epochs=1, pipeline="DataLoader", batch_size=7000),
    ],
    ids=lambda config: f"{config.optimizer} {config.pipeline}",
)
def test_the_script_gives_exactly_the_runs_figures(
    config: TrainConfig, runs: RunManager, tmp_path: Path, mnist_root: Path
) -> None:
    run = runs.start(config)
    assert run.ended.wait(timeout=240)
    kept, test_accuracy = run.checkpoint(), run.state.test_accuracy
    assert kept is not None
    assert test_accuracy is not None
    printed, weights = repeated(script(config), tmp_path, mnist_root)
    assert printed == report([(row.val_loss, row.val_accuracy) for row in run.snapshot().epochs], test_accuracy)
    assert are_equal(weights, kept.weights)


@pytest.mark.parametrize("steps", [None, 150, 200], ids=["to the end", "mid-epoch", "after an epoch's last step"])
def test_the_script_changes_the_learning_rate_and_stops_where_the_run_did(
    steps: int | None, mnist: data.Mnist, tmp_path: Path, mnist_root: Path
) -> None:
    config = TrainConfig(epochs=2, batch_size=500, optimizer="Adam", learning_rate=0.01, seed=3)
    model, rates = seeded_model(config), dict(CHANGES)
    optimizers, losses, epochs = list[torch.optim.Optimizer](), list[Tensor](), list[tuple[float, float]]()

    def optimizer(parameters: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
        optimizers.append(OPTIMIZER_FACTORIES[config.optimizer](parameters, lr))
        return optimizers[0]

    def on_step(loss: Tensor) -> None:
        losses.append(loss)
        for group in optimizers[0].param_groups:
            group["lr"] = rates.get(len(losses), group["lr"])
        if len(losses) == steps and steps % config.steps_per_epoch:
            raise _StoppedError

    def on_epoch(epoch: int, result: dict[str, float]) -> None:
        epochs.append((result["val_loss"], result["val_acc"]))

    train_loader, val_loader = data.train_and_val_loaders(mnist, config, "cpu")
    opening = (config.epochs, config.learning_rate, model, train_loader, val_loader, optimizer)
    try:
        fit(*opening, on_step=on_step, on_epoch=on_epoch)
    except _StoppedError:
        assert (len(losses), len(epochs)) == (150, 1)
    printed, weights = repeated(script(config, CHANGES, steps), tmp_path, mnist_root)
    assert printed == report(epochs, evaluate(model, data.test_loader(mnist, "cpu"))["val_acc"])
    assert are_equal(weights, model.state_dict())
    assert not are_equal(weights, seeded_model(config).state_dict())


def test_scripts_import_only_torch_torchvision_and_the_standard_library() -> None:
    assert len(SCRIPTS) == len(set(SCRIPTS))
    for source in SCRIPTS:
        nodes = list(ast.walk(ast.parse(source)))
        modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        modules += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        assert {name.partition(".")[0] for name in modules} <= {"torch", "torchvision", *sys.stdlib_module_names}


def test_scripts_define_the_articles_names() -> None:
    functions = {"get_default_device", "to_device", "accuracy", "evaluate", "fit"}
    methods = {"forward", "training_step", "validation_step", "validation_epoch_end", "epoch_end"}
    for source in SCRIPTS:
        body = ast.parse(source).body
        classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
        assert functions <= {node.name for node in body if isinstance(node, ast.FunctionDef)}
        assert {"DeviceDataLoader", "MnistModel"} <= set(classes)
        assert methods <= {node.name for node in classes["MnistModel"].body if isinstance(node, ast.FunctionDef)}


def test_scripts_are_formatted_and_have_nothing_that_is_not_used(tmp_path: Path) -> None:
    for number, source in enumerate([*SCRIPTS, snippet()]):
        (tmp_path / f"script{number}.py").write_text(source, encoding="utf-8")
    for command in (["format", "--check"], ["check", "--select=E,F,W,I,B,UP"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--isolated", str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_script_has_only_what_its_run_needs() -> None:
    plain = script(TrainConfig())
    for absent in ("ToTensor", "random_split", "momentum", "Adam", "LEARNING_RATES", "STEPS", "%", "$"):
        assert absent not in plain.replace(":.2%}", "")
    assert "set_num_threads" in plain
    assert "set_num_threads" not in script(TrainConfig(hidden_size=256))
    assert "DeviceBatches" not in script(TrainConfig(pipeline="DataLoader"))
    changed = script(TrainConfig(), [(60, 0.1), (60, 0.2)], steps=1234)
    assert "LEARNING_RATES = {\n    60: 0.2,\n}\nSTEPS = 1_234  #" in changed


def test_the_weights_are_plain_tensors_of_their_own_size() -> None:
    large = torch.rand(1000, 784)
    weights = MnistModel().state_dict() | {
        "linear1.weight": large[:32],
        "linear1.bias": torch.ones(32).requires_grad_(),
    }
    content = model_file(Checkpoint(weights, epoch=1, step=391, val_accuracy=0.9))
    assert len(content) < 150_000
    loaded = torch.load(io.BytesIO(content), weights_only=True)
    assert type(loaded) is dict
    assert are_equal(loaded, weights)
    assert {(tensor.device.type, tensor.requires_grad) for tensor in loaded.values()} == {("cpu", False)}
    MnistModel().load_state_dict(loaded)


def test_the_snippet_reads_a_digit_as_the_dashboard_does(
    trained: Checkpoint, mnist: data.Mnist, tmp_path: Path
) -> None:
    (tmp_path / "model.pt").write_bytes(model_file(trained))
    torch.save(digits(mnist)[3:4], tmp_path / "digit.pt")
    source = snippet().replace("\nhidden =", '\nimage = torch.load("digit.pt")\nhidden =')
    answer, probabilities = python(source + "print(probabilities.tolist())\n", tmp_path).splitlines()
    expected = predict(model_of(trained), digits(mnist)[3])
    assert ast.literal_eval(probabilities) == pytest.approx(expected.probabilities, abs=1e-6)
    assert answer == f"{expected.digit} ({expected.probability:.1%})"


def test_the_snippet_as_it_stands_reads_a_stroke(trained: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(model_file(trained))
    assert python(snippet(), tmp_path, "-I").startswith("1 (")


@needs_onnx
def test_the_onnx_file_gives_torchs_probabilities(trained: Checkpoint, mnist: data.Mnist) -> None:
    onnx: Any = importlib.import_module("onnx")
    reference: Any = importlib.import_module("onnx.reference")
    before = torch.get_rng_state(), list(warnings.filters)
    network = onnx.load_from_string(onnx_file(trained))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert warnings.filters == before[1]
    onnx.checker.check_model(network)
    for images in (digits(mnist, 1), digits(mnist, 50)):
        (probabilities,) = reference.ReferenceEvaluator(network).run(["probabilities"], {"image": images.numpy()})
        expected = model_of(trained)(images).softmax(dim=1)
        torch.testing.assert_close(torch.from_numpy(probabilities), expected, rtol=0, atol=1e-5)


@needs_onnx
def test_the_onnx_file_of_other_weights_is_refused() -> None:
    with pytest.raises(RunFolderError, match="do not belong"):
        onnx_file(Checkpoint({"linear1.weight": torch.zeros(32)}, epoch=1, step=391, val_accuracy=0.9))


def test_without_its_packages_the_onnx_file_says_what_to_install(
    trained: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not has_onnx()
    with pytest.raises(MnistTrainerError, match=r"pip install onnx$"):
        onnx_file(trained)
