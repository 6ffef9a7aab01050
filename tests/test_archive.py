"""Runs as zips: out and in again whole, and nothing of a zip that is broken or means harm."""

import dataclasses
import io
import json
import os
import shutil
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from mnist_trainer.archive import FILES, MAX_ENTRIES, check_tensors, export_run, import_run
from mnist_trainer.config import TrainConfig
from mnist_trainer.errors import ArchiveError, MnistTrainerError, RunFolderError
from mnist_trainer.history import History
from mnist_trainer.model import MnistModel
from mnist_trainer.runs import RunManager
from mnist_trainer.store import RunFolder

from .running import ended, until

CONFIG = TrainConfig(device="cpu", epochs=1, batch_size=1000, optimizer="Adam", learning_rate=0.001)
Files = dict[str, bytes]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, mnist_root: Path) -> RunFolder:
    """A run of one epoch that has a name, and a leftover that is nobody's business."""
    home = tmp_path_factory.mktemp("archive")
    (home / "data").symlink_to(mnist_root, target_is_directory=True)
    manager = RunManager(home)
    run = manager.start(CONFIG)
    assert run.ended.wait(timeout=240)
    manager.shutdown()
    (run.folder.path / "about.json").write_text(json.dumps({"name": "Größer", "note": "½\n🙂"}))
    (run.folder.path / "state.json.99.part").write_bytes(b"half")
    return RunFolder(run.folder.path)


@pytest.fixture(scope="module")
def files(original: RunFolder) -> Files:
    """What an export of `original` has to hold, by name."""
    return {name: (original.path / name).read_bytes() for name in FILES if (original.path / name).exists()}


def exported(folder: RunFolder) -> io.BytesIO:
    target = io.BytesIO()
    export_run(folder, target)
    return target


def zipped(files: Files, root: str = "run/", compression: int = zipfile.ZIP_DEFLATED) -> io.BytesIO:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(root + name, content)
    return target


def with_entry(source: io.BytesIO, *added: zipfile.ZipInfo | str | bytes) -> io.BytesIO:
    with zipfile.ZipFile(source, "a") as archive:
        archive.writestr(*added)  # type: ignore[arg-type]  # a name and a content
    return source


def entry(name: str, mode: int = 0) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    return info


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refusal(home: Path, source: io.BytesIO, name: str = "upload.zip") -> str:
    """The sentence with which a zip is refused; nothing of it is left."""
    (home / "runs" / "earlier").mkdir(parents=True)
    (home / "runs" / "earlier" / "steps.csv").write_text("mine")
    with pytest.raises(ArchiveError) as caught:
        import_run(home, source, name)
    assert [path.name for path in (home / "runs").rglob("*")] == ["earlier", "steps.csv"]
    assert not [path for path in home.parent.rglob("*") if path.name in ("x", "owned")]
    return sentence(caught.value)


def sentence(error: MnistTrainerError) -> str:
    text = str(error)
    assert text.endswith(".")
    assert text.isprintable()
    assert 20 < len(text) < 300
    assert ".import" not in text
    return text


def torch_file(values: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


def checkpoint(weights: object, **others: object) -> bytes:
    return torch_file({"format": 1, "weights": weights, "epoch": 1, "step": 50, "val_accuracy": 0.9} | others)


def with_weights(hidden_size: int = CONFIG.hidden_size, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    names = {name.replace("_", "."): tensor for name, tensor in tensors.items()}
    return MnistModel(hidden_size=hidden_size).state_dict() | names


def repacked(content: bytes, compression: int, others: Files) -> bytes:
    """A torch file with its entries packed again, some of them others."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(target, "w", compression) as archive:
        for entry in source.infolist():
            name = entry.filename.rpartition("/")[2]
            archive.writestr(entry.filename, others.get(name) or source.read(entry))
    return target.getvalue()


# What comes out.


def test_an_export_holds_the_files_of_a_run_in_one_folder_and_nothing_else(original: RunFolder, files: Files) -> None:
    with zipfile.ZipFile(exported(original)) as archive:
        assert archive.testzip() is None
        assert {name: archive.read(name) for name in archive.namelist()} == {
            f"{original.id}/{name}": content for name, content in files.items()
        }
        packing = {entry.filename.rpartition("/")[2]: entry.compress_type for entry in archive.infolist()}
    assert packing.pop("checkpoint.pt") == zipfile.ZIP_STORED
    assert set(packing.values()) == {zipfile.ZIP_DEFLATED}
    assert "about.json" in files
    assert "learning_rates.csv" not in files


def test_an_export_reads_the_checkpoint_first_then_epochs_then_steps(original: RunFolder) -> None:
    with zipfile.ZipFile(exported(original)) as archive:
        names = [name.rpartition("/")[2] for name in archive.namelist()]
    assert names[:3] == ["checkpoint.pt", "epochs.csv", "steps.csv"]


def test_a_run_can_be_exported_while_it_trains_and_its_history_is_never_behind(
    runs: RunManager, tmp_path: Path
) -> None:
    run = runs.start(dataclasses.replace(CONFIG, epochs=1000))
    until(lambda: run.snapshot().epochs)
    sources = [exported(run.folder) for _ in range(20)]
    assert run.is_live
    run.request_stop()
    ended(run)
    for number, source in enumerate(sources):
        home = tmp_path / str(number)
        folder = RunFolder.find(home, import_run(home, source, "upload.zip"))
        checkpoint = folder.load_checkpoint(with_training=True)
        assert checkpoint
        folder.history_until(checkpoint)  # it can be resumed


def test_a_run_without_its_history_cannot_be_exported(original: RunFolder, tmp_path: Path) -> None:
    folder = RunFolder(Path(shutil.copytree(original.path, tmp_path / "copy")))
    (folder.path / "steps.csv").unlink()
    with pytest.raises(RunFolderError, match=r"Run copy cannot be exported \(steps\.csv: No such file") as caught:
        exported(folder)
    sentence(caught.value)


def test_a_full_disk_is_a_sentence_where_a_run_is_exported(original: RunFolder) -> None:
    with (
        Path("/dev/full").open("wb", buffering=0) as full,
        pytest.raises(RunFolderError, match="No space left") as caught,
    ):
        export_run(original, full)
    sentence(caught.value)


# What comes in.


def test_a_round_trip_gives_equal_files_under_an_id_that_is_free(home: Path, original: RunFolder, files: Files) -> None:
    source = exported(original)
    assert import_run(home, source, "upload.zip") == original.id
    assert import_run(home, source, "upload.zip") == f"{original.id}-2"
    assert import_run(home, source, "upload.zip") == f"{original.id}-3"
    assert len(list((home / "runs").iterdir())) == 3
    for path in (home / "runs").iterdir():
        assert contents(path) == files


def test_an_imported_run_has_the_settings_the_history_and_the_weights(home: Path, original: RunFolder) -> None:
    run = RunManager(home).get(import_run(home, exported(original), "upload.zip"))
    history = History()
    original.read_history(history)
    assert run.config == CONFIG
    assert run.state == original.read_state()
    assert np.array_equal(run.snapshot().losses, history.snapshot().losses)
    assert run.snapshot().epochs == history.snapshot().epochs
    ours, theirs = run.checkpoint(), original.load_checkpoint()
    assert ours
    assert theirs
    assert all(torch.equal(tensor, theirs.weights[name]) for name, tensor in ours.weights.items())


def test_a_run_that_was_training_comes_in_as_interrupted(home: Path, original: RunFolder, files: Files) -> None:
    state = json.loads(files["state.json"]) | {"status": "running"}
    run_id = import_run(home, zipped(files | {"state.json": json.dumps(state).encode()}), "upload.zip")
    assert RunFolder.find(home, run_id).read_state().status == "interrupted"


def test_a_run_without_weights_comes_in_too(home: Path, files: Files) -> None:
    run_id = import_run(home, zipped({n: content for n, content in files.items() if n != "checkpoint.pt"}), "a.zip")
    assert not RunFolder.find(home, run_id).has_checkpoint


@pytest.mark.parametrize(
    ("root", "name", "expected"),
    [
        ("my run (2)/", "upload.zip", "my run (2)"),
        ("", "my run.zip", "my run"),
        ("", r"C:\fakepath\über.zip", "über"),
        ("", ".zip", "imported"),
        ("", "a\nb.zip", "imported"),
        ("", "?.zip", "imported"),
        (f"{'a' * 96}/", f"{'é' * 130}.zip", "imported"),
        ("what?/", "upload.zip", "upload"),
        ("run\\", "upload.zip", "run"),
        ("./runs/deep/", "upload.zip", "deep"),
    ],
)
def test_a_zip_made_by_hand_is_called_as_its_folder_or_its_file(
    home: Path, files: Files, root: str, name: str, expected: str
) -> None:
    assert import_run(home, zipped(files, root), name) == expected
    assert contents(home / "runs" / expected) == files


def test_what_other_tools_leave_in_a_zip_is_not_written(home: Path, files: Files) -> None:
    source = zipped(files)
    with zipfile.ZipFile(source, "a") as archive:
        archive.mkdir("run")
        archive.mkdir("__MACOSX")
        for name in ("__MACOSX/run/._config.json", "run/.DS_Store", "run/lock", "run/notes/plan.txt", "desktop.ini"):
            archive.writestr(name, b"x")
    import_run(home, source, "upload.zip")
    assert contents(home / "runs") == {f"run/{name}": content for name, content in files.items()}


# What is refused.


@pytest.mark.parametrize(
    "harmful",
    [
        entry("../x"),
        entry("run/../../x"),
        entry("run/..\\..\\x"),
        entry("/x"),
        entry("//server/x"),
        entry("C:\\x"),
        entry("c:x"),
        entry("\\x"),
        entry("run/x", stat.S_IFLNK | 0o777),
        entry("run/x", stat.S_IFIFO | 0o666),
    ],
)
def test_a_zip_with_a_path_out_of_its_folder_is_refused(home: Path, files: Files, harmful: zipfile.ZipInfo) -> None:
    source = with_entry(zipped(files), harmful, b"/etc/passwd")
    assert "leads out of its folder" in refusal(home, source)


@pytest.mark.parametrize("name", ["config.json", "state.json", "steps.csv", "epochs.csv"])
def test_a_file_that_is_missing_is_named(home: Path, files: Files, name: str) -> None:
    text = refusal(home, zipped({other: content for other, content in files.items() if other != name}))
    assert text.startswith(f"'upload.zip' cannot be imported: it is not a whole run; it lacks {name}.")


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_zip_is_refused(home: Path, original: RunFolder, kept: float) -> None:
    content = exported(original).getvalue()
    assert "it is not a zip, or damaged" in refusal(home, io.BytesIO(content[: int(len(content) * kept)]))


def test_a_file_of_another_kind_is_refused(home: Path) -> None:
    assert "'a?b.zip' cannot be imported: it is not a zip" in refusal(home, io.BytesIO(b"garbage" * 999), "a\nb.zip")


def test_an_empty_zip_is_refused(home: Path) -> None:
    assert "it lacks config.json" in refusal(home, zipped({}))


@pytest.mark.parametrize("damage", range(6))
def test_a_zip_with_flipped_bits_is_whole_or_refused(home: Path, original: RunFolder, damage: int) -> None:
    rng = np.random.default_rng(damage)
    whole = exported(original).getvalue()
    for _ in range(40):
        content = bytearray(whole)
        # The table of contents at the end, and each file's header, matter more than what is between them.
        start = len(content) - 700 if damage % 2 else 0
        for place in rng.integers(start, len(content), size=1 + damage):
            content[place] ^= 1 << rng.integers(8)
        try:
            import_run(home, io.BytesIO(content), "upload.zip")
        except ArchiveError as error:
            sentence(error)
        assert not list((home / "runs").glob(".*"))


def test_several_runs_in_one_zip_are_refused(home: Path, files: Files) -> None:
    both = {f"{run}/{name}": content for run in "ab" for name, content in files.items()}
    assert "it holds 2 runs" in refusal(home, zipped(both, root=""))


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", ["run/state.json", "run\\state.json"])
def test_two_files_of_one_name_are_refused(home: Path, files: Files, name: str) -> None:
    assert "'run/state.json' twice" in refusal(home, with_entry(zipped(files), name, files["state.json"]))


def test_a_password_is_refused(home: Path, files: Files) -> None:
    content = bytearray(zipped(files).getvalue())
    for signature, offset in ((b"PK\1\2", 8), (b"PK\3\4", 6)):
        content[content.rindex(signature) + offset] |= 1
    assert "has a password" in refusal(home, io.BytesIO(content))


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_unusual_packing_is_refused(home: Path, files: Files, compression: int) -> None:
    assert "packed in an unusual way" in refusal(home, zipped(files, compression=compression))


def test_thousands_of_files_are_refused(home: Path, files: Files) -> None:
    many = {f"{number}.txt": b"" for number in range(MAX_ENTRIES)}
    assert "files, more than 1,000" in refusal(home, zipped(files | many))


def test_a_table_of_contents_of_many_megabytes_is_refused_before_it_is_read(home: Path, files: Files) -> None:
    many = {f"{number}{'x' * 60_000}": b"" for number in range(20)}
    assert "holds too much" in refusal(home, zipped(files | many))


@pytest.mark.parametrize(
    ("name", "bomb"),
    [
        ("config.json", b" " * 2_000_000),
        ("state.json", b" " * 100_000_000),
        ("about.json", b" " * 2_000_000),
        ("steps.csv", bytes(100_000_000)),
        ("steps.csv", b"\n" * 1_000),  # few bytes, but more lines than the run has steps
        ("epochs.csv", bytes(2_000_000)),
        ("learning_rates.csv", bytes(2_000_000)),
        ("checkpoint.pt", bytes(3_000_000)),
    ],
)
def test_a_bomb_is_refused(home: Path, files: Files, name: str, bomb: bytes) -> None:
    source = zipped(files | {name: bomb})
    assert len(source.getvalue()) < 600_000
    assert f"{name} in it is larger than a run with its settings can make it" in refusal(home, source)


@pytest.mark.parametrize("claimed", [10, 3_000])
def test_a_header_that_lies_about_a_size_does_not_help(home: Path, files: Files, claimed: int) -> None:
    content = bytearray(zipped(files | {"steps.csv": bytes(50_000_000)}).getvalue())
    place = content.index(b"run/steps.csv", content.index(b"PK\1\2")) - 46
    assert content[place : place + 4] == b"PK\1\2"
    content[place + 24 : place + 28] = claimed.to_bytes(4, "little")
    assert "damaged" in refusal(home, io.BytesIO(content))


@pytest.mark.parametrize("name", ["steps.csv", "epochs.csv", "learning_rates.csv"])
@pytest.mark.parametrize("line", [b"garbage\n", b"\xff\x00\n"])
def test_a_damaged_history_is_refused(home: Path, files: Files, name: str, line: bytes) -> None:
    # Its last line is replaced: one more than the run may have would be refused before it is read.
    lines = files.get(name, b"step,learning_rate\n5,0.1\n").splitlines(keepends=True)
    assert "history is damaged" in refusal(home, zipped(files | {name: b"".join([*lines[:-1], line])}))


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("config.json", {"format": 99}, "Run run is of format 99; this version reads up to"),
        ("config.json", {"settings": {"epochs": 0}}, "Run run has damaged settings"),
        ("state.json", {"status": "dancing"}, "state.json is damaged"),
        ("about.json", {"name": 3}, "about.json is damaged"),
    ],
)
def test_damaged_or_newer_settings_are_refused_with_the_readers_own_sentence(
    home: Path, files: Files, name: str, change: dict[str, object], expected: str
) -> None:
    values = json.loads(files[name]) | change
    assert expected in refusal(home, zipped(files | {name: json.dumps(values).encode()}))


class _Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


HUGE = torch.zeros(1).expand(10**13 // 4)
WIDE = torch.zeros(1).expand(CONFIG.hidden_size, 784)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param(lambda _: b"garbage", "checkpoint.pt is damaged", id="garbage"),
        pytest.param(lambda _: b"", "checkpoint.pt is damaged", id="empty"),
        pytest.param(lambda path: checkpoint({"w": _Payload(path)}), "and not just tensors", id="code"),
        pytest.param(lambda path: torch_file(_Payload(path)), "and not just tensors", id="code alone"),
        pytest.param(lambda _: torch_file([1, 2]), "cannot be read", id="another torch file"),
        pytest.param(lambda _: b"x" + checkpoint(with_weights()), "checkpoint.pt is damaged", id="not at its start"),
        pytest.param(lambda _: checkpoint(with_weights(8)), "are of hidden size 8, its settings say 32", id="size"),
        pytest.param(lambda _: checkpoint({"w": torch.zeros(3)}), "do not belong to the network", id="other names"),
        pytest.param(lambda _: checkpoint(with_weights(), step=10**9), "of a moment", id="step"),
        pytest.param(lambda _: checkpoint(with_weights(), val_accuracy="a lot"), "cannot be read", id="accuracy"),
        pytest.param(lambda _: checkpoint(with_weights(linear1_bias=HUGE)), "claims 10000000000000", id="terabytes"),
        pytest.param(lambda _: checkpoint(with_weights(linear1_weight=WIDE)), "claims 100352 bytes", id="stride 0"),
        pytest.param(
            lambda _: checkpoint(with_weights(linear1_bias=torch.zeros(32, device="meta"))),
            "not just tensors",
            id="meta",
        ),
        pytest.param(
            lambda _: checkpoint(with_weights(linear1_bias=torch.zeros(32).to_sparse())),
            "not just tensors",
            id="sparse",
        ),
        pytest.param(
            lambda _: checkpoint(
                with_weights(),
                training={"optimizer": {"state": [[HUGE]]}, "order": torch.zeros(1), "last_epoch": None},
            ),
            "claims 10000000000000",
            id="terabytes in the optimizer",
        ),
        pytest.param(
            lambda _: repacked(checkpoint(with_weights()), zipfile.ZIP_DEFLATED, {}),
            "checkpoint.pt is damaged",
            id="packed",
        ),
        pytest.param(
            lambda _: repacked(torch_file(torch.zeros(9)), zipfile.ZIP_DEFLATED, {"0": bytes(200_000_000)}),
            "checkpoint.pt is damaged",
            id="bomb",
        ),
        pytest.param(
            lambda _: repacked(checkpoint({}), zipfile.ZIP_STORED, {"data.pkl": b"\x80\2" + b"]" * 200_000 + b"."}),
            "checkpoint.pt is damaged",
            id="a pickle of lists",
        ),
        pytest.param(  # which `weights_only` lets through: it would take all the memory there is
            lambda _: repacked(
                checkpoint({}), zipfile.ZIP_STORED, {"data.pkl": b"\x80\2c__builtin__\nbytearray\nK\x09\x85R."}
            ),
            "'__builtin__ bytearray', and not just tensors",
            id="a call",
        ),
    ],
)
def test_a_checkpoint_that_is_none_of_the_run_is_refused(
    home: Path, files: Files, tmp_path: Path, content: Callable[[Path], bytes], expected: str
) -> None:
    assert expected in refusal(home, zipped(files | {"checkpoint.pt": content(tmp_path / "owned")}))


def test_tensors_are_found_wherever_they_are_and_a_list_within_itself_ends_the_search() -> None:
    loop: list[object] = [torch.zeros(3)]
    loop.append({"deep": (loop, [torch.zeros(5)])})
    check_tensors(loop, max_bytes=32)
    with pytest.raises(ValueError, match="claims"):
        check_tensors(loop, max_bytes=31)
    check_tensors(torch.zeros(8)[::2])


@pytest.mark.parametrize("place", ["home", "home/runs"])
def test_a_home_that_cannot_be_written_is_a_sentence(tmp_path: Path, original: RunFolder, place: str) -> None:
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text("a file")
    with pytest.raises(RunFolderError, match="The run cannot be kept in") as caught:
        import_run(tmp_path / "home", exported(original), "upload.zip")
    assert "Make room or make it writable" in str(caught.value)
    assert not isinstance(caught.value, ArchiveError)


def test_a_disk_that_becomes_full_leaves_nothing(
    home: Path, original: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open

    def full(path: Path, mode: str = "r", **options: str) -> object:
        is_it = (path.name, mode) == ("steps.csv", "wb")
        return opened(Path("/dev/full") if is_it else path, mode, **options)  # type: ignore[call-overload]  # passed on

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(RunFolderError, match="No space left on device"):
        import_run(home, exported(original), "upload.zip")
    assert list((home / "runs").iterdir()) == []
