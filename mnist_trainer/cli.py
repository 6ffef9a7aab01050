"""The command line: train, predict, devices, bench, runs, with no Streamlit in sight."""

# PyTorch takes seconds to import: each command imports what it needs, so that `--help` answers at once.

import argparse
import dataclasses
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .cli_bench import add_bench
from .cli_runs import FAILED, INTERRUPTED, OK, USAGE, add_runs, run_as_json
from .config import OPTIMIZERS, PIPELINES, TrainConfig
from .errors import (
    ConfigError,
    DeviceUnavailableError,
    ImageError,
    MnistTrainerError,
    RunNotFoundError,
)

if TYPE_CHECKING:
    from .group import Group
    from .run import Run

EPILOG = """\
examples:
  python -m mnist_trainer train --epochs 5 --lr 0.5 --hidden 32
  python -m mnist_trainer predict my-seven.png
  python -m mnist_trainer train --resume latest
  python -m mnist_trainer runs export latest
  python -m mnist_trainer bench

Runs are kept in `mnist-trainer/runs` in your home folder, where the dashboard shows them;
the environment variable MNIST_TRAINER_HOME names another folder instead of `mnist-trainer`.

exit status: 0 all is well, 1 a run or a picture failed, 2 bad arguments or settings, 130 stopped by Ctrl-C
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    options = _parser().parse_args(_joined(sys.argv[1:] if arguments is None else arguments))
    try:
        status: int = options.command(options)
    except MnistTrainerError as error:
        print(error, file=sys.stderr)
        return _exit_status(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    return status


def _exit_status(error: MnistTrainerError) -> int:
    return USAGE if isinstance(error, ConfigError | DeviceUnavailableError | RunNotFoundError) else FAILED


def _joined(arguments: Sequence[str]) -> list[str]:
    """`--lr -1e-3` as `--lr=-1e-3`: argparse takes a negative number for a flag unless it is a plain decimal."""
    joined: list[str] = []
    for argument in arguments:
        if joined and re.match("--.", joined[-1]) and re.match(r"-[\d.]|-inf|-nan", argument, re.IGNORECASE):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mnist_trainer",
        description="Train a digit classifier on MNIST, and have it read pictures.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_train(commands)
    _add_predict(commands)
    devices = commands.add_parser("devices", help="list the devices that can train, and why others cannot")
    devices.add_argument("--json", action="store_true", help="one JSON object a line")
    devices.set_defaults(command=_devices)
    add_bench(commands)
    add_runs(commands)
    return parser


def _add_train(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="train a network and keep it as a run",
        description="Train 784 → hidden → 10 on 50,000 MNIST images, validate on 10,000 after each epoch, and "
        "measure once on the 10,000 test images at the end. Ctrl-C stops after the current step and keeps the run.",
    )
    default = TrainConfig()
    # Taken as text and checked by TrainConfig: one place, one sentence for a bad value.
    for flag, field, text in (
        ("--device", "device", "auto (the fastest), cpu, cuda, cuda:1, mps, xpu; see `devices`"),
        ("--epochs", "epochs", "passes over the training images"),
        ("--lr", "learning_rate", "learning rate; 0.5 suits SGD, 0.1 SGD-momentum, 0.001 Adam and AdamW"),
        ("--hidden", "hidden_size", "units in the hidden layer"),
        ("--batch-size", "batch_size", "images per step"),
        ("--optimizer", "optimizer", ", ".join(OPTIMIZERS)),
        ("--seed", "seed", "of the split, the first weights and the order of the images"),
        ("--pipeline", "pipeline", " or ".join(PIPELINES) + " (the article's, image by image)"),
    ):
        train.add_argument(
            flag, dest=field, metavar=flag[2:].upper(), help=f"{text} (default {getattr(default, field)})"
        )
    earlier = train.add_mutually_exclusive_group()
    earlier.add_argument("--resume", metavar="ID", help="let a run that ended too soon go on; no other settings")
    earlier.add_argument(
        "--from", dest="parent", metavar="ID", help="continue a run for --epochs more, as a new run; takes --lr too"
    )
    train.add_argument("--json", action="store_true", help="print the result as one JSON object")
    train.set_defaults(command=_train)


def _add_predict(commands: Any) -> None:
    predict = commands.add_parser(
        "predict",
        help="read the digit in each picture",
        description="Read the digit in each picture: dark on light or light on dark, any size, PNG, JPEG and others.",
    )
    predict.add_argument("--run", default="latest", metavar="ID", help="whose weights to use (default latest)")
    predict.add_argument(
        "--json",
        action="store_true",
        help='one JSON object a line: {"file", "digit", "probabilities"}, or {"file", "error"}',
    )
    predict.add_argument("images", nargs="+", metavar="IMAGE")
    predict.set_defaults(command=_predict)


def _train(options: argparse.Namespace) -> int:
    names = ("device", "epochs", "learning_rate", "hidden_size", "batch_size", "optimizer", "seed", "pipeline")
    texts = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ["WORLD_SIZE"] != "1":
        return _train_together(options, texts)
    return _train_here(options, texts)


def _train_together(options: argparse.Namespace, texts: dict[str, str]) -> int:
    """Train as one of the processes that `torchrun` started; all of them end with the same status."""
    from .distributed import follow
    from .group import Group

    group, status = Group(), FAILED
    if group.rank:
        group.agree_on_device(texts.get("device", "auto"))
        return follow(group)
    try:
        group.agree_on_device(texts.get("device", "auto"))
        status = _train_here(options, texts, group)
    except MnistTrainerError as error:
        status = _exit_status(error)
        raise
    except KeyboardInterrupt:
        status = INTERRUPTED
        raise
    finally:
        for kind in (signal.SIGINT, signal.SIGTERM):  # once another has ended, the launcher ends this one too
            signal.signal(kind, signal.SIG_IGN)
        group.dismiss(status)
    return status


def _train_here(options: argparse.Namespace, texts: dict[str, str], group: "Group | None" = None) -> int:
    """Train in this process; with a group, as the one that leads."""
    config = TrainConfig.from_text(texts)
    _check_earlier(options, texts)

    from .runs import RunManager

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill keeps the run as Ctrl-C does
    manager = RunManager(group=group)
    device = group.device if group else texts.get("device", "")
    if options.resume:
        run = manager.resume(manager.get(options.resume).id, device)
    elif options.parent:
        learning_rate = config.learning_rate if "learning_rate" in texts else None
        run = manager.continue_run(manager.get(options.parent).id, config.epochs, learning_rate, device)
    else:
        run = manager.start(dataclasses.replace(config, device=device or config.device))
    try:
        _show_progress(run, group.size if group else 1)
    except KeyboardInterrupt:
        print("Stopping; the run is kept.", file=sys.stderr)
    finally:
        manager.shutdown(timeout_seconds=60)
    print(json.dumps(run_as_json(run)) if options.json else _ending(run))
    return {"finished": OK, "stopped": INTERRUPTED}.get(run.state.status, FAILED)


def _check_earlier(options: argparse.Namespace, texts: dict[str, str]) -> None:
    """Refuse settings that an earlier run has already decided."""
    allowed = {"device"} if options.resume else {"device", "epochs", "learning_rate"}
    if (options.resume or options.parent) and (decided := sorted(set(texts) - allowed)):
        flag = "--resume" if options.resume else "--from"
        names = ", ".join(name.replace("_", " ") for name in decided)
        raise ConfigError(f"With {flag} the run's own settings stay as they were: leave out {names}.")
    if options.parent and "epochs" not in texts:
        raise ConfigError("--from needs --epochs: for how many more the run is to be continued.")


def _show_progress(run: "Run", processes: int) -> None:
    """Follow `run` on standard error until it ends: a bar on a terminal, a line an epoch anywhere."""
    from tqdm import tqdm

    shown, told = len(run.snapshot().epochs), ""
    together = f", {processes} processes" if processes > 1 else ""
    print(f"Run {run.id} on {run.state.device_label}{together}", file=sys.stderr)
    total, done = run.config.total_steps, run.snapshot().steps
    with tqdm(total=total, initial=done, unit="step", disable=None, file=sys.stderr) as bar:
        while True:
            has_ended = run.ended.wait(0.2)
            snapshot = run.snapshot()
            for epoch in snapshot.epochs[shown:]:
                line = f"Epoch [{epoch.epoch}], val_loss: {epoch.val_loss:.4f}, val_acc: {epoch.val_accuracy:.4f}"
                tqdm.write(line, file=sys.stderr)
            shown = len(snapshot.epochs)
            if run.is_live and run.state.message not in (told, ""):
                tqdm.write(told := run.state.message, file=sys.stderr)
            if (loss := snapshot.recent(snapshot.losses)) is not None:
                bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            bar.update(snapshot.steps - bar.n)
            if has_ended:
                return


def _ending(run: "Run") -> str:
    state = run.state
    lines = [f"{state.status.capitalize()} after {run.seconds:.1f} s. {state.message}".strip()]
    if state.test_accuracy is not None:
        lines.append(f"Test accuracy {state.test_accuracy:.2%} (10,000 images the network never saw).")
    lines.append(f"Kept in {run.folder.path}")
    return "\n".join(lines)


def _predict(options: argparse.Namespace) -> int:
    from .drawing import open_image, to_mnist
    from .prediction import model_of, predict
    from .runs import RunManager

    run = RunManager().get(options.run)
    checkpoint = run.weights()
    model = model_of(checkpoint)
    if not options.json:
        print(f"Weights of run {run.id}, {checkpoint.trust}.", file=sys.stderr)
    status = OK
    for file in options.images:
        try:
            prediction = predict(model, to_mnist(open_image(file)))
        except ImageError as error:
            status = FAILED
            row = {"file": file, "error": str(error)}
            text = f"{file}: {error}"
        else:
            row = {"file": file, "digit": prediction.digit, "probabilities": prediction.probabilities}
            text = f"{file}: {prediction}"
        print(json.dumps(row) if options.json else text)
    return status


def _devices(options: argparse.Namespace) -> int:
    from .devices import all_devices

    for device in all_devices():
        if options.json:
            print(json.dumps({"name": device.name, "label": device.label, "problem": device.problem or None}))
        else:
            print(f"{device.name:8} {device}")
    return OK
