"""The command line, as a shell sees it: what it prints, where, and its exit status."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageOps

from mnist_trainer.cli import main
from mnist_trainer.config import HOME_VARIABLE, TrainConfig
from mnist_trainer.data import Mnist
from mnist_trainer.prediction import model_of, predict
from mnist_trainer.run import Run
from mnist_trainer.runs import RunManager

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _sigterm() -> Iterator[None]:
    """`train` takes over SIGTERM; give it back."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, mnist_root: Path) -> Run:
    """A run of one epoch, in a home of its own."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "data").symlink_to(mnist_root, target_is_directory=True)
    run = RunManager(folder).start(TrainConfig(device="cpu", epochs=1))
    assert run.ended.wait(timeout=240)
    return run


@pytest.fixture
def run(trained: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The one run that the command line sees."""
    monkeypatch.setenv(HOME_VARIABLE, str(trained.folder.path.parents[1]))
    return trained


def rows(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def is_one_line(text: str) -> bool:
    return text.count("\n") == 1 and text.endswith(".\n") and "Traceback" not in text


def test_train_prints_its_result_and_keeps_the_run(home: Path, capsys: Captured) -> None:
    arguments = ["train", "--device", "CPU", "--epochs", "2", "--batch-size", "250", "--optimizer", "adam", "--json"]
    assert main([*arguments, "--lr", "1e-3", "--hidden", "16", "--seed", "3"]) == 0
    output = capsys.readouterr()
    (row,) = rows(output.out)
    run = RunManager(home).get("latest")
    assert row["id"] == run.id
    assert (row["status"], row["steps"], row["epochs"]) == ("finished", 400, 2)
    assert row["test_accuracy"] == run.state.test_accuracy
    assert row["test_accuracy"] > 0.8
    assert row["settings"] == run.config.to_json()
    assert run.config == TrainConfig("cpu", 2, 1e-3, 16, 250, "Adam", 3)
    for epoch in run.snapshot().epochs:  # the article's line
        expected = f"Epoch [{epoch.epoch}], val_loss: {epoch.val_loss:.4f}, val_acc: {epoch.val_accuracy:.4f}"
        assert expected in output.err


def test_train_says_in_words_how_it_ended(home: Path, capsys: Captured) -> None:
    assert main(["train", "--device", "cpu", "--epochs", "1", "--batch-size", "1000"]) == 0
    good = capsys.readouterr().out
    assert good.startswith("Finished after ")
    assert "Test accuracy" in good
    assert str(home) in good
    assert main(["train", "--device", "cpu", "--lr", "1e8"]) == 1
    assert "the learning rate 1e+08 is too large. Try 0.5." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        *(("--epochs", value, "Epochs must be a whole number") for value in ("0", "-1", "1001", "five", "1.5", "")),
        *(("--lr", value, "Learning rate must be a number") for value in ("0", "-1e-3", "nan", "-inf", "fast", "1e10")),
        *(("--hidden", value, "Hidden size must be a whole number") for value in ("0", "1e3", "9" * 30, "9" * 5000)),
        *(("--batch-size", value, "Batch size must be a whole number") for value in ("0", "50001", "half")),
        *(("--seed", value, "Seed must be a whole number") for value in ("-1", "4294967296", "x")),
        ("--optimizer", "RMSprop", "Optimizer must be one of SGD, SGD-momentum, Adam, AdamW; 'RMSprop' is not"),
        ("--pipeline", "fast", "Pipeline must be one of on-device, DataLoader; 'fast' is not"),
        ("--device", "tpu", "There is no device 'tpu' here. Choose "),
        ("--device", " ", "Device must be a name such as 'cpu'"),
    ],
)
def test_a_bad_value_is_one_sentence(home: Path, capsys: Captured, flag: str, value: str, message: str) -> None:
    assert main(["train", flag, value]) == 2
    output = capsys.readouterr()
    assert output.err.startswith(message)
    assert is_one_line(output.err)
    assert output.out == ""
    assert not (home / "runs").exists()


@pytest.mark.parametrize("arguments", [["--epochs", "1000", "--batch-size", "1"], ["--hidden", "1000000"]])
def test_values_that_are_too_large_together_are_one_sentence(
    home: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr("mnist_trainer.devices.free_memory", lambda device: 2**30)
    assert main(["train", "--device", "cpu", *arguments]) == 2
    assert is_one_line(capsys.readouterr().err)
    assert not (home / "runs").exists()


@pytest.fixture
def pictures(mnist: Mnist, tmp_path: Path) -> list[str]:
    """Test images 0 to 3 as files, every other one dark on light."""
    files = []
    for index in range(4):
        image = Image.fromarray(mnist.test_images[index, 0].numpy())
        files.append(str(tmp_path / f"digit {index}.png"))
        (ImageOps.invert(image) if index % 2 else image).save(files[-1])
    return files


def test_predict_gives_the_probabilities_of_the_test_set(
    run: Run, mnist: Mnist, pictures: list[str], capsys: Captured
) -> None:
    checkpoint = run.checkpoint()
    assert checkpoint is not None
    assert main(["predict", "--json", *pictures]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    for index, row in enumerate(rows(output.out)):
        expected = predict(model_of(checkpoint), mnist.test_images[index].float() / 255)
        assert list(row) == ["file", "digit", "probabilities"]
        assert (row["file"], row["digit"]) == (pictures[index], expected.digit)
        assert len(row["probabilities"]) == 10
        torch.testing.assert_close(row["probabilities"], list(expected.probabilities), rtol=0, atol=5e-4)
    assert len(rows(output.out)) == 4


def test_a_file_name_may_look_like_a_number(
    run: Run, pictures: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(pictures[0]).rename("-7.png")
    assert main(["predict", "--", "-7.png"]) == 0
    assert capsys.readouterr().out.startswith("-7.png: 7 (")


def test_predict_says_which_weights_answered(run: Run, pictures: list[str], capsys: Captured) -> None:
    assert main(["predict", "--run", run.id, pictures[0]]) == 0
    output = capsys.readouterr()
    assert output.out.startswith(f"{pictures[0]}: 7 (")
    assert output.err.startswith(f"Weights of run {run.id}, epoch 1, ")
    assert is_one_line(output.err)


def test_a_picture_that_cannot_be_read_does_not_stop_the_others(
    run: Run, pictures: list[str], tmp_path: Path, capsys: Captured
) -> None:
    blank = tmp_path / "blank.png"
    Image.new("L", (50, 50), 255).save(blank)
    files = ["missing.png", pictures[0], str(blank), __file__, str(tmp_path), pictures[1]]
    assert main(["predict", "--json", *files]) == 1
    found = rows(capsys.readouterr().out)
    assert [row["file"] for row in found] == files
    assert ["digit" in row for row in found] == [False, True, False, False, False, True]
    for row in (found[0], found[2], found[3], found[4]):
        assert list(row) == ["file", "error"]
        assert row["error"].endswith(".")
    assert main(["predict", *files]) == 1
    output = capsys.readouterr()
    assert len(output.out.splitlines()) == len(files)
    assert "Traceback" not in output.err


@pytest.mark.parametrize("run_id", ["../../etc/passwd", "", "2001-01-01_00-00-00", "a/b", "x" * 200])
def test_predict_with_a_run_that_is_not_there_is_one_sentence(
    run: Run, pictures: list[str], capsys: Captured, run_id: str
) -> None:
    assert main(["predict", "--run", run_id, *pictures]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("There is no run '")
    assert is_one_line(output.err)
    assert output.out == ""


def test_predict_without_any_run_says_what_to_do(home: Path, pictures: list[str], capsys: Captured) -> None:
    assert main(["predict", *pictures]) == 2
    error = capsys.readouterr().err
    assert error == "There is no run yet. Train one first: `python -m mnist_trainer train`.\n"


def test_predict_with_damaged_weights_is_one_sentence(home: Path, pictures: list[str], capsys: Captured) -> None:
    assert main(["train", "--device", "cpu", "--epochs", "1", "--batch-size", "5000"]) == 0
    folder = RunManager(home).get("latest").folder.path
    (folder / "checkpoint.pt").write_bytes(b"garbage")
    capsys.readouterr()
    assert main(["predict", *pictures]) == 1
    assert is_one_line(capsys.readouterr().err)
    (folder / "checkpoint.pt").unlink()
    assert main(["predict", *pictures]) == 1
    assert "has no weights yet" in capsys.readouterr().err


def test_runs_are_listed(run: Run, capsys: Captured) -> None:
    assert main(["runs", "--json"]) == 0
    (row,) = rows(capsys.readouterr().out)
    assert (row["id"], row["status"], row["steps"]) == (run.id, "finished", 391)
    assert row["test_accuracy"] == run.state.test_accuracy
    assert main(["runs"]) == 0
    line = capsys.readouterr().out
    assert line.startswith(run.id)
    assert f"test accuracy {run.state.test_accuracy:.2%}" in line
    assert "cpu, 1 epoch, lr 0.5, hidden 32, batch 128, SGD, seed 0, on-device" in line


def test_without_runs_none_are_listed(home: Path, capsys: Captured) -> None:
    for arguments in (["runs"], ["runs", "--json"]):
        assert main(arguments) == 0
        assert capsys.readouterr().out == ""


def test_devices_are_listed_with_what_is_wrong_with_them(capsys: Captured) -> None:
    assert main(["devices", "--json"]) == 0
    found = rows(capsys.readouterr().out)
    assert found[-1] == {"name": "cpu", "label": "CPU", "problem": None}
    assert main(["devices"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(found) > 1
    for line, row in zip(lines, found, strict=True):
        assert line.startswith(row["name"])
        assert row["label"] in line
        assert ("not available" in line) == bool(row["problem"])
        assert (row["problem"] or "") in line


@pytest.mark.parametrize("command", [[], ["train"], ["predict"], ["devices"], ["runs"]])
def test_help_answers_without_waiting_for_pytorch(command: list[str]) -> None:
    # -X importtime names every module that is imported.
    arguments = [sys.executable, "-X", "importtime", "-m", "mnist_trainer", *command, "--help"]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert result.returncode == 0
    assert result.stdout.startswith("usage: python -m mnist_trainer")
    assert "mnist_trainer.cli" in imported
    assert imported.isdisjoint({"torch", "numpy", "PIL", "streamlit"})


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "a polite kill"])
def test_a_signal_stops_training_and_keeps_the_run(home: Path, kind: signal.Signals) -> None:
    arguments = [sys.executable, "-m", "mnist_trainer", "train", "--device", "cpu", "--epochs", "1000", "--json"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 120
            while not any(path.stat().st_size > 100 for path in home.glob("runs/*/steps.csv")):
                assert process.poll() is None
                assert time.monotonic() < deadline, "no step was written"
                threading.Event().wait(0.05)
            os.kill(process.pid, kind)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Stopping; the run is kept." in err
    assert "Traceback" not in err
    (row,) = rows(out)
    run = RunManager(home).get(row["id"])
    checkpoint = run.checkpoint()
    assert row["status"] == run.state.status == "stopped"
    assert checkpoint is not None
    assert row["steps"] == run.snapshot().steps == checkpoint.step > 0
