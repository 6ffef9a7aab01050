"""A run's folder: what it holds, and how it is written so that a kill at any moment leaves it whole.

runs/<id>/config.json          format version, when it was made, what it was continued from, settings
          state.json           how it stands, and each change with its time: written aside, then put in place
          steps.csv            a line a step, appended several times a second, on the disk within one second
          epochs.csv           a line a finished epoch
          learning_rates.csv   a line for each time the learning rate was moved; often not there
          checkpoint.pt        the newest weights, and all that exact resuming needs: written aside, then put in place
          about.json           the name and the note that people gave it; often not there
          lock                 held by the process that trains it, and freed when that process dies
"""

import dataclasses
import functools
import io
import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from .config import HOME_VARIABLE, TrainConfig, check_learning_rate
from .errors import ConfigError, RunBusyError, RunFolderError, RunNotFoundError
from .history import EpochEnd, Floats, History, RateChange
from .state import MAX_NAME, MAX_NOTE, STATUSES, About, Change, Checkpoint, Origin, RunState, TrainingState

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FORMAT = 2  # 1 had no queue, no pause, no names, and checkpoints that cannot be resumed
ID = r"[^.\\/:\0][^\\/:\0]{0,99}"  # a plain name, which a folder copied by hand may have; no path, nothing hidden
STEP_COLUMNS = ("step", "loss", "accuracy", "seconds")
EPOCH_COLUMNS = tuple(field.name for field in dataclasses.fields(EpochEnd))
RATE_COLUMNS = tuple(field.name for field in dataclasses.fields(RateChange))


def home_folder() -> Path:
    """Where runs and data are kept: `MNIST_TRAINER_HOME`, or `mnist-trainer` in the user's home."""
    chosen = os.environ.get(HOME_VARIABLE, "").strip()
    return Path(chosen).expanduser().absolute() if chosen else Path.home() / "mnist-trainer"


def cannot_be_kept(home: Path, error: OSError) -> RunFolderError:
    """What to say when a new run finds no place."""
    return RunFolderError(
        f"The run cannot be kept in {home} ({error.strerror or error}). "
        f"Make room or make it writable, or set {HOME_VARIABLE} to another folder."
    )


def numbered(runs: Path, name: str) -> Iterator[Path]:
    """Where a run with this name may go: as it is, or with a number behind it."""
    yield runs / name
    yield from (runs / f"{name}-{number}" for number in range(2, 1000))


def rates_file(rates: Iterable[RateChange]) -> bytes:
    """The content of learning_rates.csv."""
    return b"".join(_line(row) for row in (RATE_COLUMNS, *((str(r.step), repr(r.learning_rate)) for r in rates)))


class RolledBackError(Exception):
    """The history of a run is shorter than it was when it was last read."""


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
        self._read = {"steps.csv": (0, 0), "epochs.csv": (0, 0)}  # inode, and bytes of it given out so far
        self._written: dict[str, int] = {}  # bytes of whole lines in a file, as far as this object wrote it

    @classmethod
    def create(
        cls,
        home: Path,
        config: TrainConfig,
        state: RunState | None = None,
        origin: Origin | None = None,
        files: dict[str, bytes] | None = None,
    ) -> Self:
        """Make a new folder for a run with these settings and this first state, and take its lock.

        Args:
            home: gets it under `runs`.
            config: its settings.
            state: how it stands at first.
            origin: the run that it continues; by default it is a new one, made now.
            files: the history and the checkpoint that it begins with, as `history_until` gives them.

        Raises:
            RunFolderError: the folder cannot be written.
        """
        now = datetime.now(UTC)
        origin = dataclasses.replace(origin or Origin(), created_at=now.isoformat(timespec="seconds"))
        empty = {"steps.csv": _line(STEP_COLUMNS), "epochs.csv": _line(EPOCH_COLUMNS)}
        folder = None
        try:
            folder = cls(_new_folder(home / "runs", now.astimezone().strftime("%Y-%m-%d_%H-%M-%S")))
            folder.lock.acquire(timeout=5)  # a reader may just be looking whether it is held
            for name, content in {**empty, **(files or {})}.items():
                folder._put(name, content)
            folder.write_state(state or RunState().turned("queued", 0))
            folder.write_config(config, origin)  # last: a folder without it is not a run yet
            sync_folder(folder.path.parent)
        except OSError as error:
            if folder:
                folder.discard()
            raise cannot_be_kept(home, error) from error
        return folder

    def discard(self) -> None:
        """Take it away again, before anything has begun in it; called by who made it."""
        self.lock.release()
        shutil.rmtree(self.path, ignore_errors=True)  # it takes room, where there may be none

    @classmethod
    def find(cls, home: Path, run_id: str) -> Self:
        """The folder of the run with this id.

        Raises:
            RunNotFoundError: there is none. The id is a plain name: no path is followed.
        """
        path = home / "runs" / run_id
        if not re.fullmatch(ID, run_id) or not _is_run(path):
            shown = run_id if len(run_id) <= 60 else run_id[:57] + "…"
            raise RunNotFoundError(
                f"There is no run '{shown}'. The Runs page lists them all, and so does the command 'runs'."
            )
        return cls(path)

    @classmethod
    def all_ids(cls, home: Path) -> list[str]:
        """Ids of all runs, newest first.

        Raises:
            RunFolderError: the folder cannot be read.
        """
        try:
            folders = [path for path in (home / "runs").iterdir() if _is_run(path)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RunFolderError(
                f"The runs in {home} cannot be read ({error.strerror}). "
                f"Make it a folder that can be, or set {HOME_VARIABLE} to another."
            ) from error
        folders = [path for path in folders if re.fullmatch(ID, path.name)]
        return [path.name for path in sorted(folders, key=_age, reverse=True)]

    def hold(self) -> None:
        """Take the run's lock: from now on this process alone trains it.

        Raises:
            RunBusyError: another one does.
            RunFolderError: the folder cannot be written.
        """
        try:
            self.lock.acquire(timeout=1)  # a reader may just be looking whether it is held
            for leftover in self.path.glob("*.part"):  # of a process that was killed
                if not leftover.name.startswith("about.json"):  # anybody may be writing that now
                    leftover.unlink()
        except Timeout:
            raise RunBusyError(f"Run {self.id} is in the hands of another program now. Wait until it ends.") from None
        except OSError as error:
            self.lock.release()
            raise self._cannot_be_written(error) from error

    def stamp(self) -> tuple[object, ...]:
        """Another value as soon as settings, state, name or finished epochs have changed."""
        return tuple(_stamp(self.path / name) for name in ("config.json", "state.json", "about.json", "epochs.csv"))

    def read_config(self) -> TrainConfig:
        """The settings it was started with.

        Raises:
            RunFolderError: damaged, or of a newer format.
        """
        values = self._read_json("config.json")
        if not isinstance(values.get("format"), int) or values["format"] > FORMAT:
            raise RunFolderError(
                f"Run {self.id} is of format {str(values.get('format'))[:20]}; this version reads up to {FORMAT}. "
                "Update MNIST Trainer to open it."
            )
        try:
            return TrainConfig.from_json(values.get("settings"))
        except (ConfigError, TypeError) as error:
            raise RunFolderError(f"Run {self.id} has damaged settings (config.json). {error}") from error

    def read_origin(self) -> Origin:
        """Where it comes from, as far as that can be read."""
        values = self._read_json("config.json")
        known = {name: values.get(name) for name in ("created_at", "parent", "parent_step")}
        texts = {name: value for name, value in known.items() if isinstance(value, int if "step" in name else str)}
        return Origin(**texts)  # type: ignore[arg-type]  # just checked

    def write_config(self, config: TrainConfig, origin: Origin) -> None:
        """Put settings in place of those before, all of them or nothing."""
        values = {"format": FORMAT, **dataclasses.asdict(origin), "settings": config.to_json()}
        self._write_json("config.json", values)

    def read_state(self) -> RunState:
        """How it stands; "interrupted" if it says it is live and nobody holds its lock.

        Raises:
            RunFolderError: damaged.
        """
        values = self._read_json("state.json")
        known = {field.name: values[field.name] for field in dataclasses.fields(RunState) if field.name in values}
        changes = known.pop("changes", [])
        is_sound = all(_fits(name, value) for name, value in known.items())
        try:
            rows = tuple(Change(str(change["status"]), str(change["at"]), int(change["step"])) for change in changes)
            is_sound = is_sound and all(row.step >= 0 for row in rows)
            state = RunState(**known, changes=rows)
        except (TypeError, LookupError, ValueError, OverflowError):
            is_sound = False
        if not is_sound or known.get("status") not in STATUSES:
            raise self._damaged("state.json is damaged")
        if state.is_live and not self.is_locked():
            message = "The program that trained it ended before the run did."
            if state.status == "queued":
                message = "The program ended before this run's turn came."
            state = dataclasses.replace(state, status="interrupted", message=message)
        return state

    def write_state(self, state: RunState) -> None:
        """Put `state` in place of the one before, all of it or nothing."""
        self._write_json("state.json", dataclasses.asdict(state))

    def read_about(self) -> About:
        """Its name and note; empty where nobody gave any.

        Raises:
            RunFolderError: damaged.
        """
        if _stamp(self.path / "about.json") is None:
            return About()
        try:
            values = self._read_json("about.json")
        except RunFolderError:
            values = {"name": None}
        name, note = values.get("name", ""), values.get("note", "")
        if not isinstance(name, str) or not isinstance(note, str):
            raise RunFolderError(f"The name of run {self.id} cannot be read: about.json is damaged. Name it anew.")
        return About(name[:MAX_NAME], note[:MAX_NOTE])

    def write_about(self, about: About) -> None:
        """Put name and note in place of those before. Needs no lock: anybody may name a run, also while it trains.

        Raises:
            RunFolderError: the folder cannot be written.
        """
        try:
            self._write_json("about.json", dataclasses.asdict(about))
        except OSError as error:
            raise self._cannot_be_written(error) from error

    def append_steps(self, first: int, rows: Sequence[Sequence[float]]) -> None:
        """Append steps to the history. What an error leaves of them is taken back by the next append.

        Args:
            first: number of the first of them, from 1.
            rows: (loss, accuracy, seconds) each.
        """
        # As float32 they come back bit for bit: a resumed run's means are those of one that never stopped.
        values = np.array(rows, np.float32).reshape(-1, 3)
        lines = (f"{first + i},{loss!s},{acc!s},{sec:.4f}\n" for i, (loss, acc, sec) in enumerate(values))
        self._append("steps.csv", "".join(lines).encode())

    def sync_steps(self) -> None:
        """Wait until all steps that were appended are on the disk itself."""
        self._append("steps.csv", b"", is_synced=True)

    def append_epoch(self, epoch: EpochEnd) -> None:
        """Append a finished epoch to the history, onto the disk itself."""
        self._append("epochs.csv", _line(map(repr, dataclasses.astuple(epoch))), is_synced=True)

    def write_rates(self, rates: Sequence[RateChange]) -> None:
        """Put the changes of the learning rate in place of those before, all of them or nothing."""
        self._put("learning_rates.csv", rates_file(rates))

    def read_rates(self) -> tuple[RateChange, ...]:
        """Every change of the learning rate, also those that a resumed run has yet to come to.

        Raises:
            RunFolderError: damaged.
        """
        try:
            content = (self.path / "learning_rates.csv").read_bytes()
            rates = tuple(
                RateChange(int(step), check_learning_rate(float(rate)))
                for step, rate in (line.split(b",") for line in _whole_lines(content)[1:])
            )
            if content != rates_file(rates):  # it is always written whole
                raise ValueError("truncated")  # noqa: TRY301
            return rates
        except FileNotFoundError:
            return ()
        except (OSError, ValueError) as error:
            raise RunFolderError(f"Run {self.id} has a damaged history (learning_rates.csv).") from error

    def read_history(self, history: History) -> None:
        """Append to `history` what has been written since the last call. A half-written line waits.

        Raises:
            RunFolderError: a file is missing, or a line damaged; what stands before it has been appended.
            RolledBackError: the run has been resumed since the last call: read it anew, with a new `RunFolder`.
        """
        # Steps are written before the epoch they end, so they are read after it: no epoch lacks its steps.
        epochs, steps = self._new_lines("epochs.csv", EPOCH_COLUMNS), self._new_lines("steps.csv", STEP_COLUMNS)
        known = history.snapshot()
        rows = _rows(steps, known.steps + 1)
        history.add_steps(*rows.T)
        self._advance("steps.csv", steps[: len(rows)])
        ends = _ends(epochs, len(known.epochs) + 1, history.snapshot().steps)
        for end in ends:
            history.add_epoch(end)
        self._advance("epochs.csv", epochs[: len(ends)])
        if len(rows) < len(steps) or len(ends) < len(epochs):
            raise RunFolderError(
                f"Run {self.id} has a damaged history (steps.csv or epochs.csv). "
                f"What is whole is shown: {history.snapshot().steps:,} steps."
            )
        history.set_rates([rate for rate in self.read_rates() if rate.step <= history.snapshot().steps])

    def read_epochs(self) -> tuple[EpochEnd, ...]:
        """All finished epochs, without the steps: what a list of runs needs.

        Raises:
            RunFolderError: the file is missing or damaged.
        """
        lines = _whole_lines(self.read_bytes("epochs.csv"))[1:]
        ends = _ends(lines, 1, 2**62)
        if len(ends) < len(lines):
            raise RunFolderError(f"Run {self.id} has a damaged history (epochs.csv).")
        return tuple(ends)

    def history_until(self, checkpoint: Checkpoint) -> dict[str, bytes]:
        """The files of the history, as they were when `checkpoint` was made.

        Raises:
            RunFolderError: something of it is missing or damaged.
        """
        steps = _whole_lines(self.read_bytes("steps.csv"))[1 : checkpoint.step + 1]
        epochs = _whole_lines(self.read_bytes("epochs.csv"))[1 : checkpoint.epoch + 1]
        epochs = epochs[: len(_ends(epochs, 1, checkpoint.step))]
        last = checkpoint.training and checkpoint.training.last_epoch
        if last and len(epochs) == checkpoint.epoch - 1:  # killed between the checkpoint and this line
            epochs.append(_line(map(repr, dataclasses.astuple(last)))[:-1])
        if len(_rows(steps, 1)) != checkpoint.step or len(_ends(epochs, 1, checkpoint.step)) != checkpoint.epoch:
            raise RunFolderError(
                f"The history of run {self.id} is damaged before its checkpoint (step {checkpoint.step:,}). "
                "It cannot go on from there; start a new run with its settings."
            )
        return {
            "steps.csv": _line(STEP_COLUMNS) + b"".join(line + b"\n" for line in steps),
            "epochs.csv": _line(EPOCH_COLUMNS) + b"".join(line + b"\n" for line in epochs),
        }

    def roll_back(self, files: dict[str, bytes]) -> None:
        """Put these in place of the files of the same names, each of them whole."""
        for name, content in files.items():
            self._put(name, content)
        self._written.clear()

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Put `checkpoint` in place of the one before, all of it or nothing."""
        values = {name: getattr(checkpoint, name) for name in ("weights", "epoch", "step", "val_accuracy")}
        if training := checkpoint.training:
            last = training.last_epoch and dataclasses.asdict(training.last_epoch)
            values["training"] = {"optimizer": training.optimizer, "order": training.order, "last_epoch": last}
        buffer = io.BytesIO()
        torch.save({"format": FORMAT, **values}, buffer)
        self._put("checkpoint.pt", buffer.getbuffer())

    @property
    def has_checkpoint(self) -> bool:
        return (self.path / "checkpoint.pt").is_file()

    def load_checkpoint(self, *, with_training: bool = False) -> Checkpoint | None:
        """The newest weights on disk, or None if there are none yet.

        Only tensors and plain values are read: a file with code in it is refused.

        Args:
            with_training: load what resuming needs, too.

        Raises:
            RunFolderError: damaged, not a checkpoint, or of a newer format.
        """
        path = self.path / "checkpoint.pt"
        try:
            return _load(path) if with_training else _load_weights(path, path.stat().st_mtime_ns)
        except FileNotFoundError:
            return None
        except Exception as error:  # torch.load raises half a dozen kinds for a file that is not one of its own
            raise RunFolderError(
                f"The weights of run {self.id} cannot be read: checkpoint.pt is damaged, or of a newer format."
            ) from error

    def is_locked(self) -> bool:
        """Whether a process trains it, or will."""
        return self.lock.is_locked or is_held(self.path / "lock")

    def _cannot_be_written(self, error: OSError) -> RunFolderError:
        return RunFolderError(
            f"{self.path} cannot be written ({error.strerror or error}). Make room or make it writable, and try again."
        )

    def read_bytes(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            raise self._damaged(f"{name} is missing") from error

    def _damaged(self, what: str) -> RunFolderError:
        return RunFolderError(
            f"Run {self.id} cannot be read: {what}. Put the file back from a copy of the run, or delete the run."
        )

    def _read_json(self, name: str) -> dict[str, Any]:
        try:
            values = json.loads((self.path / name).read_text(encoding="utf-8"), parse_constant=_refuse)
        except (OSError, ValueError, RecursionError) as error:
            raise self._damaged(f"{name} is missing or damaged") from error
        if not isinstance(values, dict):
            raise self._damaged(f"{name} is damaged")
        return values

    def _write_json(self, name: str, values: dict[str, Any]) -> None:
        self._put(name, json.dumps(values, indent=2).encode())

    def _put(self, name: str, content: bytes | memoryview) -> None:
        aside = self.path / f"{name}.{os.getpid()}.part"
        try:
            with aside.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            _replace(aside, self.path / name)
        except OSError:
            with suppress(OSError):
                aside.unlink()  # it takes room, where there may be none
            raise
        sync_folder(self.path)

    def _append(self, name: str, content: bytes, *, is_synced: bool = False) -> None:
        # Opened anew each time: a few times a second it costs nothing, and no handle is left behind.
        with (self.path / name).open("r+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            end = self._written.setdefault(name, size)
            if size != end:  # an append that failed has left a part of itself
                file.truncate(end)
                file.seek(end)
            rest = memoryview(content)
            while rest:  # a disk that becomes full on the way takes a part first, and says why then
                rest = rest[file.write(rest) :]
            if is_synced:
                os.fsync(file.fileno())
        self._written[name] = end + len(content)

    def _new_lines(self, name: str, columns: Sequence[str]) -> list[bytes]:
        """Whole lines that have not been given out, without the header; "" in place of a header that is wrong."""
        try:
            with (self.path / name).open("rb") as file:
                inode, offset = self._read[name]
                found = os.fstat(file.fileno())
                if offset and (found.st_ino != inode or found.st_size < offset):
                    raise RolledBackError
                self._read[name] = (found.st_ino, offset)
                file.seek(offset)
                lines = _whole_lines(file.read())
        except OSError as error:
            raise self._damaged(f"{name} is missing") from error
        if offset or not lines:
            return lines
        if lines[0] + b"\n" != _line(columns):
            return [b"", *lines]
        self._advance(name, lines[:1])
        return lines[1:]

    def _advance(self, name: str, lines: Sequence[bytes]) -> None:
        inode, offset = self._read[name]
        self._read[name] = (inode, offset + sum(map(len, lines)) + len(lines))


def _load(path: Path) -> Checkpoint:
    values = torch.load(path, map_location="cpu", weights_only=True)
    if values["format"] > FORMAT:
        raise ValueError(f"format {values['format']}")
    training = None
    if kept := values.get("training"):
        last = kept["last_epoch"] and EpochEnd(**kept["last_epoch"])
        training = TrainingState(dict(kept["optimizer"]), kept["order"], last)
    step, epoch = int(values["step"]), int(values["epoch"])
    checkpoint = Checkpoint(dict(values["weights"]), epoch, step, values["val_accuracy"], training)
    is_sound = isinstance(checkpoint.val_accuracy, float | int | None)
    if not is_sound or not all(isinstance(tensor, Tensor) for tensor in checkpoint.weights.values()):
        raise ValueError("weights that are no tensors")
    return checkpoint


@functools.lru_cache(maxsize=2)  # the run being drawn for, and one more: a large network's weights are gigabytes
def _load_weights(path: Path, _written_ns: int) -> Checkpoint:
    return dataclasses.replace(_load(path), training=None)


def _line(cells: Iterable[str]) -> bytes:
    return (",".join(cells) + "\n").encode()


def _whole_lines(content: bytes) -> list[bytes]:
    """Lines with an end, without it."""
    return content.split(b"\n")[:-1]


def _rows(lines: Sequence[bytes], first: int) -> Floats:
    """(loss, accuracy, seconds) of the lines of steps.csv up to the first that is damaged; shape (steps, 3)."""
    try:
        rows = np.loadtxt(lines, delimiter=",", ndmin=2, comments=None) if all(lines) and lines else np.empty((0, 4))
        is_whole = rows.shape == (len(lines), 4) and bool((rows[:, 0] == np.arange(first, first + len(lines))).all())
        is_whole = is_whole and bool(np.isfinite(rows).all())
    except ValueError:
        is_whole = False
    if is_whole:
        return rows[:, 1:].astype(np.float32)
    half = len(lines) // 2  # the damage is found by halves: all that stands before it is kept
    if not half:
        return np.empty((0, 3), np.float32)
    before = _rows(lines[:half], first)
    return before if len(before) < half else np.concatenate([before, _rows(lines[half:], first + half)])


def _ends(lines: Sequence[bytes], first: int, steps: int) -> list[EpochEnd]:
    """Rows of epochs.csv up to the first that is damaged, or that ends after more than `steps` steps."""
    ends: list[EpochEnd] = []
    for number, line in enumerate(lines, first):
        try:
            epoch, step, *texts = line.decode().split(",")
            measured = list(map(float, texts))
            end = EpochEnd(int(epoch), int(step), *measured)
        except (ValueError, TypeError):
            break
        if not all(map(math.isfinite, measured)):
            break
        if end.epoch != number or not (ends[-1].step if ends else 0) < end.step <= steps:
            break
        ends.append(end)
    return ends


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def sync_folder(path: Path) -> None:
    """Have a rename in `path` outlast a power cut; Windows does so by itself, and knows no such call."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_run(folder: Path) -> bool:
    """Whether a folder is a run; also one that has lost its settings, but not one that is just being made."""
    names = ("config.json", "state.json", "steps.csv")
    has_settings, *has_more = (_stamp(folder / name) is not None for name in names)
    return has_settings or (any(has_more) and not is_held(folder / "lock"))


def is_held(lock: Path) -> bool:
    """Whether a process holds this lock. Looking takes nothing away from others who look, and makes no file."""
    if fcntl is None:
        try:
            with FileLock(lock, timeout=0):
                return False
        except Timeout:
            return True
        except OSError:
            return False
    try:
        handle = os.open(lock, os.O_RDONLY)
    except OSError:  # there is none: nobody trains in it
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def _fits(name: str, value: object) -> bool:
    """Whether a field of `RunState` may have this value: whoever reads it will calculate with it."""
    if name in ("status", "message", "device_label"):
        return isinstance(value, str)
    if value is None:
        return name != "processes"
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:  # NaN fails this too
        return False
    if name in ("steps", "threads", "processes"):
        return isinstance(value, int) and (value <= 1024 or name == "steps") and (value >= 1 or name != "processes")
    return value <= 1 or name != "test_accuracy"


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def _new_folder(runs: Path, name: str) -> Path:
    runs.mkdir(parents=True, exist_ok=True)
    for path in numbered(runs, name):
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise FileExistsError(f"too many runs called {name}")


def _age(folder: Path) -> tuple[str, int, str]:
    """Sorts folders by when their runs were made; of those of one second, a longer name is newer ("…-10")."""
    config = folder / "config.json"
    return _created_at(config, _stamp(config)), len(folder.name), folder.name


@functools.lru_cache(maxsize=4096)
def _created_at(config: Path, _stamp: object) -> str:
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
