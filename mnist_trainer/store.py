"""A run's folder: what it holds, and how it is written so that a kill at any moment leaves it whole.

runs/<id>/config.json     format version, when it was made, settings; written once
          state.json      how it stands: written aside, then put in place
          steps.csv       a line a step, appended several times a second
          epochs.csv      a line a finished epoch
          checkpoint.pt   the newest weights, on the CPU; written aside, then put in place
          lock            held by the process that trains it, and freed when that process dies
"""

import csv
import dataclasses
import functools
import io
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from .config import HOME_VARIABLE, TrainConfig
from .errors import ConfigError, RunFolderError, RunNotFoundError
from .history import EpochEnd, History

FORMAT = 1
ID = r"[^.\\/:\0][^\\/:\0]{0,99}"  # a plain name, which a folder copied by hand may have; no path, nothing hidden
STATUSES = ("running", "finished", "stopped", "diverged", "failed", "interrupted")
STEP_COLUMNS = ("step", "loss", "accuracy", "seconds")
EPOCH_COLUMNS = tuple(field.name for field in dataclasses.fields(EpochEnd))


def home_folder() -> Path:
    """Where runs and data are kept: `MNIST_TRAINER_HOME`, or `mnist-trainer` in the user's home."""
    chosen = os.environ.get(HOME_VARIABLE, "").strip()
    return Path(chosen).expanduser().absolute() if chosen else Path.home() / "mnist-trainer"


@dataclass(frozen=True, slots=True)
class RunState:
    """How a run stands.

    Attributes:
        status: one of `STATUSES`. "interrupted" (its process died) is only ever read, never written.
        message: what the user should know about it, a sentence or two; empty if all is well.
        suggested_learning_rate: one to try instead, if this one was the trouble.
        device_label: what it trains on, as a person calls it.
        seconds: how long it took, from the first step to the last validation; None while it trains.
        test_loss: over the 10,000 test images, nats per image; None until it has ended.
        test_accuracy: the same, fraction in [0, 1].
    """

    status: str = "running"
    message: str = ""
    suggested_learning_rate: float | None = None
    device_label: str = ""
    seconds: float | None = None
    test_loss: float | None = None
    test_accuracy: float | None = None

    @property
    def is_live(self) -> bool:
        return self.status == "running"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A network's weights at one moment.

    Attributes:
        weights: the model's state_dict, on the CPU; not to be written to.
        epoch: finished epochs.
        step: steps done.
        val_accuracy: after the last finished epoch, fraction in [0, 1]; None before the first.
    """

    weights: dict[str, Tensor]
    epoch: int
    step: int
    val_accuracy: float | None

    @property
    def trust(self) -> str:
        """How far these weights may be trusted, in a few words."""
        if self.step == 0:
            return "untrained: guessing"
        if self.val_accuracy is None:
            return f"step {self.step:,}, before the end of its first epoch"
        return f"epoch {self.epoch:,}, {self.val_accuracy:.1%} of the validation images right"


class RunFolder:
    """One run's folder.

    Args:
        path: the folder; its name is the run's id.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.name
        # Taken by the thread that starts a run, freed by the one that trained it.
        self.lock = FileLock(path / "lock", thread_local=False)
        self._steps_read = self._epochs_read = 0  # bytes of history given out so far

    @classmethod
    def create(cls, home: Path, config: TrainConfig, state: RunState | None = None) -> Self:
        """Make a new folder for a run with these settings and this first state, and take its lock.

        Raises:
            RunFolderError: the folder cannot be written.
        """
        now = datetime.now(UTC)
        folder = None
        try:
            folder = cls(_new_folder(home / "runs", now.astimezone().strftime("%Y-%m-%d_%H-%M-%S")))
            folder.lock.acquire(timeout=5)  # a reader may just be looking whether it is held
            (folder.path / "steps.csv").write_text(",".join(STEP_COLUMNS) + "\n", encoding="utf-8")
            (folder.path / "epochs.csv").write_text(",".join(EPOCH_COLUMNS) + "\n", encoding="utf-8")
            folder.write_state(state or RunState())
            values = {"format": FORMAT, "created_at": now.isoformat(timespec="seconds"), "settings": config.to_json()}
            folder._write_json("config.json", values)  # last: a folder without it is not a run yet
        except OSError as error:
            if folder:
                folder.lock.release()
            raise RunFolderError(
                f"The run cannot be kept in {home} ({error.strerror or error}). "
                f"Make room or make it writable, or set {HOME_VARIABLE} to another folder."
            ) from error
        return folder

    @classmethod
    def find(cls, home: Path, run_id: str) -> Self:
        """The folder of the run with this id.

        Raises:
            RunNotFoundError: there is none. The id is a plain name: no path is followed.
        """
        path = home / "runs" / run_id
        if not re.fullmatch(ID, run_id) or not (path / "config.json").is_file():
            shown = run_id if len(run_id) <= 60 else run_id[:57] + "…"
            raise RunNotFoundError(f"There is no run '{shown}'. The Draw page, and the command `runs`, list them all.")
        return cls(path)

    @classmethod
    def all_ids(cls, home: Path) -> list[str]:
        """Ids of all runs, newest first.

        Raises:
            RunFolderError: the folder cannot be read.
        """
        try:
            folders = [path for path in (home / "runs").iterdir() if (path / "config.json").is_file()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RunFolderError(
                f"The runs in {home} cannot be read ({error.strerror}). "
                f"Make it a folder that can be, or set {HOME_VARIABLE} to another."
            ) from error
        folders = [path for path in folders if re.fullmatch(ID, path.name)]
        return [path.name for path in sorted(folders, key=_age, reverse=True)]

    def read_config(self) -> TrainConfig:
        """The settings it was started with.

        Raises:
            RunFolderError: damaged, or of a newer format.
        """
        values = self._read_json("config.json")
        if not isinstance(values.get("format"), int) or values["format"] > FORMAT:
            raise RunFolderError(
                f"Run {self.id} is of format {values.get('format')!r}; this version reads up to {FORMAT}. "
                "Update MNIST Trainer to open it."
            )
        try:
            return TrainConfig.from_json(values.get("settings"))
        except (ConfigError, TypeError) as error:
            raise RunFolderError(f"Run {self.id} has damaged settings (config.json). {error}") from error

    def read_state(self) -> RunState:
        """How it stands; "interrupted" if it says it is running and nobody holds its lock.

        Raises:
            RunFolderError: damaged.
        """
        values = self._read_json("state.json")
        known = {field.name: values[field.name] for field in dataclasses.fields(RunState) if field.name in values}
        texts = ("status", "message", "device_label")
        is_sound = all(isinstance(v, str if name in texts else int | float | None) for name, v in known.items())
        if not is_sound or known.get("status") not in STATUSES:
            raise RunFolderError(f"Run {self.id} cannot be read: state.json is damaged.")
        state = RunState(**known)
        if state.is_live and not self._is_locked():
            state = dataclasses.replace(
                state, status="interrupted", message="The program that trained it ended before the run did."
            )
        return state

    def write_state(self, state: RunState) -> None:
        """Put `state` in place of the one before, all of it or nothing."""
        self._write_json("state.json", dataclasses.asdict(state))

    def append_steps(self, first: int, rows: Sequence[Sequence[float]]) -> None:
        """Append steps to the history.

        Args:
            first: number of the first of them, from 1.
            rows: (loss, accuracy, seconds) each.
        """
        lines = (f"{first + i},{loss:.6g},{acc:.6g},{sec:.4f}\n" for i, (loss, acc, sec) in enumerate(rows))
        self._append("steps.csv", lines)

    def append_epoch(self, epoch: EpochEnd) -> None:
        """Append a finished epoch to the history."""
        self._append("epochs.csv", [",".join(map(repr, dataclasses.astuple(epoch))) + "\n"])

    def read_history(self, history: History) -> None:
        """Append to `history` what has been written since the last call. A half-written line waits.

        Raises:
            RunFolderError: a line is not numbers.
        """
        # Steps are written before the epoch they end, so they are read after it: no epoch lacks its steps.
        epochs, epochs_read = self._new_lines("epochs.csv", self._epochs_read)
        steps, steps_read = self._new_lines("steps.csv", self._steps_read)
        try:
            if steps:
                columns = np.loadtxt(io.StringIO(steps), delimiter=",", ndmin=2, unpack=True, usecols=(1, 2, 3))
            ends = [
                EpochEnd(int(number), int(step), *map(float, measured))
                for number, step, *measured in csv.reader(io.StringIO(epochs))
            ]
        except (ValueError, TypeError) as error:
            raise RunFolderError(f"Run {self.id} has a damaged history (steps.csv or epochs.csv).") from error
        if steps:
            history.add_steps(*columns)
        for end in ends:
            history.add_epoch(end)
        self._steps_read, self._epochs_read = steps_read, epochs_read

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Put `checkpoint` in place of the one before, all of it or nothing."""
        buffer = io.BytesIO()
        torch.save({"format": FORMAT, **{f.name: getattr(checkpoint, f.name) for f in _CHECKPOINT_FIELDS}}, buffer)
        self._put("checkpoint.pt", buffer.getvalue())

    @property
    def has_checkpoint(self) -> bool:
        return (self.path / "checkpoint.pt").is_file()

    def load_checkpoint(self) -> Checkpoint | None:
        """The newest weights on disk, or None if there are none yet.

        Only tensors and plain values are read: a file with code in it is refused.

        Raises:
            RunFolderError: damaged, not a checkpoint, or of a newer format.
        """
        path = self.path / "checkpoint.pt"
        try:
            return _load_checkpoint(path, path.stat().st_mtime_ns)
        except FileNotFoundError:
            return None
        except Exception as error:  # torch.load raises half a dozen kinds for a file that is not one of its own
            raise RunFolderError(
                f"The weights of run {self.id} cannot be read: checkpoint.pt is damaged, or of a newer format."
            ) from error

    def _is_locked(self) -> bool:
        if self.lock.is_locked:  # by this process
            return True
        try:
            with FileLock(self.path / "lock", timeout=0):
                return False
        except Timeout:
            return True
        except OSError:  # a read-only copy: nobody trains in it
            return False

    def _read_json(self, name: str) -> dict[str, Any]:
        try:
            values = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunFolderError(f"Run {self.id} cannot be read: {name} is missing or damaged.") from error
        if not isinstance(values, dict):
            raise RunFolderError(f"Run {self.id} cannot be read: {name} is damaged.")
        return values

    def _write_json(self, name: str, values: dict[str, Any]) -> None:
        self._put(name, json.dumps(values, indent=2).encode())

    def _put(self, name: str, content: bytes) -> None:
        aside = self.path / f"{name}.part"
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        _replace(aside, self.path / name)

    def _append(self, name: str, lines: Iterator[str] | list[str]) -> None:
        # Opened anew each time: a few times a second it costs nothing, and no handle is left behind.
        with (self.path / name).open("a", encoding="utf-8", newline="") as file:
            file.writelines(lines)

    def _new_lines(self, name: str, start: int) -> tuple[str, int]:
        """Complete lines from byte `start`, without the header, and where to go on."""
        try:
            with (self.path / name).open("rb") as file:
                file.seek(start)
                content = file.read()
        except OSError as error:
            raise RunFolderError(f"Run {self.id} cannot be read: {name} is missing.") from error
        complete = content[: content.rfind(b"\n") + 1]
        text = complete.decode("utf-8", errors="replace")
        return (text if start else text.partition("\n")[2]), start + len(complete)


_CHECKPOINT_FIELDS = dataclasses.fields(Checkpoint)


@functools.lru_cache(maxsize=2)  # the run being drawn for, and one more: a large network's weights are gigabytes
def _load_checkpoint(path: Path, written_ns: int) -> Checkpoint:
    values = torch.load(path, map_location="cpu", weights_only=True)
    checkpoint = Checkpoint(**{field.name: values[field.name] for field in _CHECKPOINT_FIELDS})
    if values["format"] > FORMAT or not all(isinstance(tensor, Tensor) for tensor in checkpoint.weights.values()):
        raise ValueError(f"format {values['format']}")
    return checkpoint


def _new_folder(runs: Path, name: str) -> Path:
    runs.mkdir(parents=True, exist_ok=True)
    for number in range(1, 1000):
        path = runs / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise FileExistsError(f"too many runs called {name}")


def _age(folder: Path) -> tuple[str, int, str]:
    """Sorts folders by when their runs were made; of those of one second, a longer name is newer ("…-10")."""
    config = folder / "config.json"
    return _created_at(config, config.stat().st_mtime_ns), len(folder.name), folder.name


@functools.lru_cache(maxsize=4096)
def _created_at(config: Path, _written_ns: int) -> str:
    try:
        return str(json.loads(config.read_text(encoding="utf-8"))["created_at"])
    except (OSError, ValueError, LookupError, TypeError):  # damaged: said where the run is read
        return ""


def _replace(source: Path, target: Path) -> None:
    for _ in range(50):
        try:
            source.replace(target)
            return
        except PermissionError:  # Windows, while another process reads the file: a matter of milliseconds
            time.sleep(0.01)
    source.replace(target)
