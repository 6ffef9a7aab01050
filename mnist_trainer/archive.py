"""A run's folder as a zip: out to take along, and in again with suspicion, whoever made it."""

import math
import os
import pickletools
import re
import shutil
import stat
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath
from typing import BinaryIO

import torch
from torch import Tensor

from .config import TrainConfig, parameter_count, readable_bytes
from .errors import ArchiveError, RunFolderError
from .history import History
from .prediction import model_of
from .store import ID, RunFolder, cannot_be_kept, numbered, sync_folder

# Read in this order, a run that trains meanwhile gives a history that is never behind its checkpoint, and steps
# that are never behind the epochs they end.
FILES = ("checkpoint.pt", "epochs.csv", "steps.csv", "learning_rates.csv", "state.json", "about.json", "config.json")
NEEDED = ("config.json", "state.json", "steps.csv", "epochs.csv")

MB = 1_000_000
CHUNK = MB // 4  # bytes in memory at a time
MAX_ENTRIES = 1_000
ABANDONED_SECONDS = 3_600  # no import takes as long
# What torch.save names in a file of plain tensors.
ALLOWED_GLOBALS = r"collections OrderedDict|torch\._utils _rebuild_tensor_v2|torch \w+Storage"
MAX_DIRECTORY = MB  # bytes of a zip's table of contents; some 100 a file are usual
MAX_PICKLE = MB // 10  # of a checkpoint without its numbers: some 3 kB are usual; a byte may become a list

_HINT = "Choose a zip that was exported here, or zip a run's folder."


def export_run(folder: RunFolder, target: BinaryIO) -> None:
    """Write a zip with a run's files in one folder, named after its id; the run may train meanwhile.

    Raises:
        RunFolderError: a file cannot be read, or the zip not written.
    """
    try:
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in (folder.path / name for name in FILES):
                if path.name in NEEDED or path.exists():
                    _add(archive, path, f"{folder.id}/{path.name}")
    except OSError as error:
        where = Path(error.filename).name if error.filename else "the zip"
        raise RunFolderError(
            f"Run {folder.id} cannot be exported ({where}: {error.strerror or error}). "
            "Make its folder whole and readable, and room for the zip."
        ) from error


def import_run(home: Path, source: BinaryIO, name: str) -> str:
    """Make a run of a zip, all of it or nothing: an exported one, or a run's folder zipped by hand.

    Files that a run does not have are left out; nothing in the zip is run.

    Args:
        home: gets the run under `runs`.
        source: the zip, seekable.
        name: what its file is called; it names the run if the folder in the zip cannot.

    Returns:
        The run's id: that of the folder in the zip, with a number behind it if there is such a run already.

    Raises:
        ArchiveError: it is not a run, is damaged, or means harm.
        RunFolderError: there is no room for it, or `home` cannot be written.
    """
    try:
        with _damage_told("it is not a zip, or damaged"):
            archive = zipfile.ZipFile(_Sparing(source))
        with archive:
            root, entries = _run_in(_files(archive))
            run_id = next(filter(_is_id, (PureWindowsPath(root).name, PureWindowsPath(name).stem)), "imported")
            runs = home / "runs"
            runs.mkdir(parents=True, exist_ok=True)
            _sweep(runs)
            # Hidden, so that nobody takes it for a run; within it the folder has its name, for the readers' messages.
            with tempfile.TemporaryDirectory(prefix=".import-", dir=runs, ignore_cleanup_errors=True) as aside:
                run = RunFolder(Path(aside) / run_id)
                run.path.mkdir()
                _unpack(archive, entries, run)
                return _put_in_place(run.path, runs)
    except ArchiveError as error:
        raise ArchiveError(f"{_shown(name)} cannot be imported: {error}") from error
    except RunFolderError as error:  # a reader's own sentence
        raise ArchiveError(str(error)) from error
    except OSError as error:
        raise cannot_be_kept(home, error) from error


def check_tensors(values: object, max_bytes: float = math.inf) -> None:
    """Make sure that tensors of unknown origin can be used, without touching their numbers.

    A tensor with a stride of 0 holds one number and may claim terabytes: whoever copies it runs out of memory.

    Args:
        values: tensors, or dicts, lists and tuples of them, as deep as it may be.
        max_bytes: what they may claim together.

    Raises:
        ValueError: one is not a plain tensor on the CPU, or not backed by as much memory as it claims, or
            they claim too much.
    """
    rest, seen, claimed = [values], set[int](), 0
    while rest:
        value = rest.pop()
        if id(value) in seen:  # a small file can hold the same list a million times, or within itself
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            rest.extend(value.values())
        elif isinstance(value, list | tuple | set):
            rest.extend(value)
        elif isinstance(value, Tensor):
            if type(value) is not Tensor or value.layout is not torch.strided or value.is_nested or not value.is_cpu:
                raise ValueError("a tensor of an unusual kind")
            size = math.prod(value.shape) * value.element_size()
            claimed += size
            if size > value.untyped_storage().nbytes() or claimed > max_bytes:
                raise ValueError(f"a tensor that claims {size} bytes")


def _add(archive: zipfile.ZipFile, path: Path, name: str) -> None:
    entry = zipfile.ZipInfo.from_file(path, name, strict_timestamps=False)
    entry.compress_type = zipfile.ZIP_STORED if path.suffix == ".pt" else zipfile.ZIP_DEFLATED
    with path.open("rb") as file, archive.open(entry, "w") as packed:
        shutil.copyfileobj(file, packed, CHUNK)


class _Sparing:
    """A stream without the one large read in zipfile: a table of contents of any size, before its files are counted."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.seek, self.tell, self.seekable = stream.seek, stream.tell, stream.seekable

    def read(self, size: int = -1) -> bytes:
        if size > MAX_DIRECTORY:
            raise ArchiveError(f"it holds too much, or is damaged. {_HINT}")
        return self._stream.read(size)


@contextmanager
def _damage_told(what: str) -> Iterator[None]:
    try:
        yield
    except ArchiveError:
        raise
    except Exception as error:  # zipfile raises a dozen kinds for a file that is damaged or has been tampered with
        raise ArchiveError(f"{what}. {_HINT}") from error


def _files(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """All files by their paths, without those that Windows and macOS leave behind."""
    if len(archive.infolist()) > MAX_ENTRIES:
        raise ArchiveError(f"it holds {len(archive.infolist()):,} files, more than {MAX_ENTRIES:,}. {_HINT}")
    files = dict[str, zipfile.ZipInfo]()
    for entry in archive.infolist():
        path = entry.filename.replace("\\", "/")  # some tools on Windows write these
        parts = path.split("/")
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if re.match(r"/|[A-Za-z]:", path) or ".." in parts or kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise ArchiveError(f"{_shown(path)} in it leads out of its folder. {_HINT}")
        if entry.flag_bits & 1:
            raise ArchiveError("it has a password. Zip the run's folder without one.")
        if path.endswith("/") or parts[0] == "__MACOSX" or parts[-1].startswith("."):
            continue
        if path in files:
            raise ArchiveError(f"it holds {_shown(path)} twice. {_HINT}")
        files[path] = entry
    return files


def _run_in(files: Mapping[str, zipfile.ZipInfo]) -> tuple[str, dict[str, zipfile.ZipInfo]]:
    """The path of the run's folder, "" if it is the zip itself, and the run's files by their names."""
    roots = [path.removesuffix("config.json") for path in files if path.split("/")[-1] == "config.json"]
    if len(roots) > 1:
        raise ArchiveError(f"it holds {len(roots):,} runs. Zip and import them one by one.")
    root = roots[0] if roots else ""
    found = {name: files[root + name] for name in FILES if root + name in files}
    if missing := [name for name in NEEDED if name not in found] if roots else ["config.json"]:
        raise ArchiveError(f"it is not a whole run; it lacks {' and '.join(missing)}. {_HINT}")
    for name, entry in found.items():
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ArchiveError(f"{name} in it is packed in an unusual way. Zip the run's folder with plain 'deflate'.")
    return root, found


def _unpack(archive: zipfile.ZipFile, entries: Mapping[str, zipfile.ZipInfo], run: RunFolder) -> None:
    """Write the files, and have each of them read by those who will read it later."""
    _extract(archive, entries["config.json"], run.path / "config.json", MB, MB)
    config = run.read_config()
    limits = _limits(config)
    for name in entries.keys() - {"config.json"}:
        _extract(archive, entries[name], run.path / name, *limits[name])
    run.read_state()
    run.read_about()
    try:
        run.read_history(History())
    except RunFolderError as error:  # its sentence is about a run that is shown all the same
        raise ArchiveError("its history is damaged. Export it once more, or zip its folder again.") from error
    if run.has_checkpoint:
        _check_checkpoint(run, config, limits["checkpoint.pt"][0])


def _limits(config: TrainConfig) -> dict[str, tuple[int, int]]:
    """How many bytes and lines each file of a run with these settings may have."""
    steps, epochs = config.total_steps + 2, config.epochs + 1  # a header; the rate may change after the last step
    return {
        "state.json": (MB, MB),
        "about.json": (MB, MB),
        "steps.csv": (100 * steps, steps),  # a line has some 40 bytes
        "epochs.csv": (300 * epochs, epochs),  # some 120
        "learning_rates.csv": (min(100 * steps, 10 * MB), steps),
        # Weights and up to two moments of the optimizer in float32, and as much again to spare.
        "checkpoint.pt": (size := 4 * 4 * parameter_count(config.hidden_size) + MB, size),
    }


def _extract(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, target: Path, max_bytes: int, max_lines: int) -> None:
    """Unpack one file; what counts is what comes out, whatever its header says."""
    size = lines = 0
    damage = f"{target.name} in it is damaged"
    with _damage_told(damage):
        packed = archive.open(entry)
    with packed, target.open("wb") as file:
        while True:
            with _damage_told(damage):
                chunk = packed.read(CHUNK)
            if not chunk:
                os.fsync(file.fileno())  # an imported run outlasts a power cut as others do
                return
            size, lines = size + len(chunk), lines + chunk.count(b"\n")
            if size > max_bytes or lines > max_lines:
                raise ArchiveError(
                    f"{target.name} in it is larger than a run with its settings can make it "
                    f"({readable_bytes(max_bytes)}). Export the run once more."
                )
            file.write(chunk)


def _check_checkpoint(run: RunFolder, config: TrainConfig, max_bytes: int) -> None:
    """Make sure that the checkpoint belongs to these settings, and takes no more memory than they need."""
    damage = "its checkpoint.pt is damaged, or no checkpoint"
    with (run.path / "checkpoint.pt").open("rb") as file, _damage_told(damage):
        is_zip = file.read(4) == b"PK\3\4"  # torch.load gives anything else to its older readers
        inner = zipfile.ZipFile(_Sparing(file)).infolist()
    numbers = sum(entry.file_size for entry in inner if re.search(r"/data/\d+$", entry.filename))
    others = sum(entry.file_size for entry in inner) - numbers
    names = {entry.filename.rpartition("/")[2]: entry for entry in inner}
    if is_zip and "data.pkl" in names and names["data.pkl"].file_size <= MAX_PICKLE:
        with zipfile.ZipFile(run.path / "checkpoint.pt") as packed, _damage_told(damage):
            _check_pickle(packed.read(names["data.pkl"]))
    # torch.save packs nothing, but torch.load would unpack it.
    is_packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in inner)
    if not is_zip or is_packed or numbers > max_bytes or others > MAX_PICKLE:
        raise ArchiveError(f"{damage}. {_HINT}")
    checkpoint = run.load_checkpoint(with_training=True)  # this way no cache keeps it
    assert checkpoint
    training = checkpoint.training
    try:
        check_tensors([checkpoint.weights, training and training.optimizer, training and training.order], max_bytes)
    except ValueError as error:
        raise ArchiveError(f"its checkpoint.pt holds {error}. {_HINT}") from error
    hidden_size = model_of(checkpoint).linear1.out_features
    if hidden_size != config.hidden_size:
        raise ArchiveError(
            f"its weights are of hidden size {hidden_size:,}, its settings say {config.hidden_size:,}. {_HINT}"
        )
    is_in_run = 0 <= checkpoint.epoch <= config.epochs and 0 <= checkpoint.step <= config.total_steps
    if not is_in_run or not isinstance(checkpoint.val_accuracy, float | int | None):
        raise ArchiveError(f"its weights are of a moment that its settings do not have. {_HINT}")


def _check_pickle(pickled: bytes) -> None:
    """Let through what torch.save writes of plain tensors: `weights_only` allows more, as a bytearray of any size."""
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name == "GLOBAL" and re.fullmatch(ALLOWED_GLOBALS, str(argument)):
            continue
        if opcode.name in ("GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4"):
            raise ArchiveError(f"its checkpoint.pt holds {_shown(str(argument))}, and not just tensors. {_HINT}")


def _sweep(runs: Path) -> None:
    """Remove what an import left behind whose process was killed."""
    for aside in runs.glob(".import-*"):
        if time.time() - aside.stat().st_mtime > ABANDONED_SECONDS:
            shutil.rmtree(aside, ignore_errors=True)


def _put_in_place(path: Path, runs: Path) -> str:
    for target in numbered(runs, path.name):
        if target.exists():  # an empty folder would be replaced
            continue
        try:
            path.rename(target)
        except OSError:
            if not target.exists():  # nobody else took the name just now
                raise
            continue
        sync_folder(runs)
        return target.name
    raise FileExistsError(f"too many runs called {path.name}")


def _is_id(text: str) -> bool:
    """Whether a folder may have this name on every system, and a number behind it."""
    is_plain = text.isprintable() and text == text.strip(" .") and not set(text) & set('<>"|?*')
    return is_plain and bool(re.fullmatch(ID, text)) and len(text) <= 95 and len(text.encode()) <= 250


def _shown(text: str) -> str:
    text = "".join(sign if sign.isprintable() else "?" for sign in text)
    return f"'{text}'" if len(text) <= 60 else f"'{text[:57]}…'"
