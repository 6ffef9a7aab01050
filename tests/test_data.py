"""MNIST on real files: unpacked, repaired, fetched, split and cut into batches."""

import errno
import gzip
import hashlib
import io
import shutil
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from itertools import islice
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from mnist_trainer import data
from mnist_trainer.config import TrainConfig
from mnist_trainer.data import (
    MD5,
    MNIST_FOLDER,
    SHIPPED,
    DeviceBatches,
    Mnist,
    ShuffledOrder,
    load_mnist,
    prepare_files,
)
from mnist_trainer.devices import DeviceDataLoader
from mnist_trainer.errors import DataError
from mnist_trainer.training import Batches

TRAIN_LABELS, TEST_LABELS = "train-labels-idx1-ubyte", "t10k-labels-idx1-ubyte"
IMAGES = "train-images-idx3-ubyte"


class Response(io.BytesIO):
    """What `urlopen` returns, as far as torchvision looks at it."""

    def __init__(self, url: str, body: bytes) -> None:
        super().__init__(body)
        self.url, self.length = url, len(body)


def serve(monkeypatch: pytest.MonkeyPatch, answer: Callable[[str], bytes]) -> list[float | None]:
    """Put `answer` in the network's place; the list returned grows by the time-out in force at each request."""
    timeouts: list[float | None] = []

    def urlopen(request: urllib.request.Request) -> Response:
        timeouts.append(socket.getdefaulttimeout())
        return Response(request.full_url, answer(request.full_url))

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    return timeouts


def original(url: str) -> bytes:
    return (SHIPPED / Path(url).name).read_bytes()


def unplugged(url: str) -> bytes:
    raise urllib.error.URLError(f"no network for {url}")


def is_good(root: Path) -> bool:
    raw = root / MNIST_FOLDER
    return all((raw / name).exists() and md5_of(raw / name) == md5 for name, (_, md5) in MD5.items())


def md5_of(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


@pytest.fixture
def unpacked(tmp_path: Path, mnist_root: Path) -> Path:
    """A root of the test's own with good unpacked files, and no archives."""
    shutil.copytree(mnist_root, tmp_path / "root", ignore=shutil.ignore_patterns("*.gz", ".lock"))
    return tmp_path / "root"


@pytest.fixture
def damaged_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package's copy of MNIST, its largest file cut short."""
    folder = tmp_path / "shipped"
    shutil.copytree(SHIPPED, folder)
    archive = folder / f"{IMAGES}.gz"
    archive.write_bytes(archive.read_bytes()[:100_000])
    monkeypatch.setattr(data, "SHIPPED", folder)
    return folder


def test_it_is_the_mnist_everybody_knows(mnist: Mnist) -> None:
    assert mnist.train_images.shape == (60_000, 1, 28, 28)
    assert mnist.test_images.shape == (10_000, 1, 28, 28)
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert mnist.train_labels.bincount().tolist() == counts
    assert mnist.test_labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    pixels = mnist.train_images.float() / 255
    assert pixels.mean().item() == pytest.approx(0.1307, abs=5e-5)
    assert pixels.std().item() == pytest.approx(0.3081, abs=5e-5)


def test_it_reads_the_files_as_torchvision_does(mnist: Mnist) -> None:
    from torchvision.datasets import MNIST

    train, test = MNIST(mnist.root, train=True), MNIST(mnist.root, train=False)
    for ours, theirs in (
        (mnist.train_images.squeeze(1), train.data),
        (mnist.train_labels, train.targets),
        (mnist.test_images.squeeze(1), test.data),
        (mnist.test_labels, test.targets),
    ):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def test_the_split_is_drawn_from_the_seed() -> None:
    train, val = data.split_indices(0)
    assert (len(train), len(val)) == (50_000, 10_000)
    assert torch.equal(torch.cat([train, val]).sort().values, torch.arange(60_000))
    assert torch.equal(data.split_indices(0)[1], val)
    assert not torch.equal(data.split_indices(1)[1], val)


def test_it_unpacks_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = serve(monkeypatch, unplugged)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a socket was opened"))
    prepare_files(tmp_path / "new" / "root")
    assert is_good(tmp_path / "new" / "root")
    assert requests == []


def interrupt(raw: Path) -> None:
    """Leave what is there when the power fails while the first file is unpacked."""
    archive = original(f"{IMAGES}.gz")
    for path in raw.iterdir():
        path.unlink()
    (raw / f"{IMAGES}.gz").write_bytes(archive[:5_000_000])
    (raw / IMAGES).write_bytes(gzip.decompress(archive)[:1_000])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "half a file": lambda raw: (raw / IMAGES).write_bytes((raw / IMAGES).read_bytes()[:20_000_000]),
    "an empty file": lambda raw: (raw / TRAIN_LABELS).write_bytes(b""),
    "a portal's page": lambda raw: (raw / TRAIN_LABELS).write_text("<html>Welcome to our Wi-Fi</html>"),
    "labels all zero": lambda raw: (raw / TRAIN_LABELS).write_bytes(
        (raw / TRAIN_LABELS).read_bytes()[:8] + bytes(60_000)
    ),
    "the test set's labels": lambda raw: shutil.copyfile(raw / TEST_LABELS, raw / TRAIN_LABELS),
    "a missing file": lambda raw: (raw / TEST_LABELS).rename(raw / "elsewhere"),
    "an interrupted unpacking": interrupt,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_and_repaired(kind: str, unpacked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = serve(monkeypatch, unplugged)
    DAMAGE[kind](unpacked / MNIST_FOLDER)
    assert not is_good(unpacked)
    prepare_files(unpacked)
    assert is_good(unpacked)
    assert requests == []


def test_good_files_are_left_alone(unpacked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "SHIPPED", unpacked / "nowhere")
    before = {path: path.stat().st_mtime_ns for path in unpacked.rglob("*")}
    prepare_files(unpacked)
    assert {path: path.stat().st_mtime_ns for path in unpacked.rglob("*")} == before


def test_two_processes_at_once_both_find_the_files(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from mnist_trainer.data import prepare_files; "
        "import torchvision; print('ready', flush=True); sys.stdin.readline(); prepare_files(Path(sys.argv[1]))"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            cwd=SHIPPED.parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in processes:  # both have imported everything before either starts
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    ends = [(process.communicate(timeout=60)[1], process.returncode) for process in processes]
    assert ends == [("", 0), ("", 0)]
    assert is_good(tmp_path)


def test_an_unpacking_in_another_process_is_not_disturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "LOCK_TIMEOUT_SECONDS", 0.1)
    raw = tmp_path / MNIST_FOLDER
    raw.mkdir(parents=True)
    with FileLock(raw / ".lock"), pytest.raises(DataError, match=r"could not be unpacked.*and try again"):
        prepare_files(tmp_path)
    assert {path.name for path in raw.iterdir()} <= {".lock"}
    prepare_files(tmp_path)
    assert is_good(tmp_path)


def test_a_damaged_shipped_file_is_downloaded_with_a_time_out(
    damaged_shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts = serve(monkeypatch, original)
    prepare_files(tmp_path / "root")
    assert is_good(tmp_path / "root")
    assert set(timeouts) == {data.DOWNLOAD_TIMEOUT_SECONDS}
    assert socket.getdefaulttimeout() is None


def silent(url: str) -> bytes:
    raise TimeoutError("timed out")


def forbidden(url: str) -> bytes:
    raise urllib.error.HTTPError(url, 403, "Forbidden", Message(), None)


@pytest.mark.parametrize("mirror", [unplugged, silent, forbidden, lambda url: b"<html>Log in to the Wi-Fi</html>"])
def test_a_failed_download_says_in_a_sentence_what_to_put_where(
    mirror: Callable[[str], bytes], damaged_shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts = serve(monkeypatch, mirror)
    with pytest.raises(DataError) as caught:
        prepare_files(tmp_path / "root")
    message = str(caught.value)
    assert timeouts
    assert str(tmp_path / "root" / MNIST_FOLDER) in message
    assert [name for name in MD5 if f"{name}.gz" not in message] == []
    assert message.endswith("and try again.")
    assert "\n" not in message
    assert socket.getdefaulttimeout() is None
    serve(monkeypatch, original)  # the network is back
    prepare_files(tmp_path / "root")
    assert is_good(tmp_path / "root")


def test_archives_that_the_user_put_there_are_taken(
    damaged_shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = serve(monkeypatch, unplugged)
    shutil.copytree(SHIPPED, tmp_path / "root" / MNIST_FOLDER)
    prepare_files(tmp_path / "root")
    assert is_good(tmp_path / "root")
    assert requests == []


def test_a_read_only_package_gives_files_that_can_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = tmp_path / "shipped"
    shutil.copytree(SHIPPED, shipped)
    for path in [*shipped.iterdir(), shipped]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    monkeypatch.setattr(data, "SHIPPED", shipped)
    prepare_files(tmp_path / "root")
    assert is_good(tmp_path / "root")
    assert all(path.stat().st_mode & 0o200 for path in (tmp_path / "root").rglob("*"))


@pytest.mark.parametrize("root", ["file", "file/below", "folder"])
def test_a_file_in_a_folders_place_or_the_reverse_is_told(root: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "folder" / MNIST_FOLDER / IMAGES).mkdir(parents=True)
    with pytest.raises(DataError, match=f"could not be unpacked to {tmp_path / root}"):
        prepare_files(tmp_path / root)


def test_ten_tabs_load_it_once(unpacked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []
    monkeypatch.setattr(data, "prepare_files", calls.append)
    barrier = threading.Barrier(10)

    def load(_: int) -> Mnist:
        barrier.wait(timeout=30)
        return load_mnist(unpacked)

    with ThreadPoolExecutor(10) as pool:
        loaded = list(pool.map(load, range(10)))
    assert len(calls) == 1
    assert len({id(mnist) for mnist in loaded}) == 1


def loaders(mnist: Mnist, pipeline: str, batch_size: int = 128) -> tuple[Batches, Batches]:
    return data.train_and_val_loaders(mnist, TrainConfig(pipeline=pipeline, batch_size=batch_size, seed=3), "cpu")


def test_both_pipelines_give_the_same_batches_bit_for_bit(mnist: Mnist) -> None:
    ours, articles = loaders(mnist, "on-device"), loaders(mnist, "DataLoader")
    assert [len(batches) for batches in ours] == [len(batches) for batches in articles] == [391, 40]
    for mine, theirs in zip(ours, articles, strict=True):
        for (images, labels), (expected, expected_labels) in islice(zip(mine, theirs, strict=True), 5):
            assert torch.equal(images, expected)
            assert torch.equal(labels, expected_labels)


def test_both_pipelines_give_the_same_order_in_the_second_epoch_too(mnist: Mnist) -> None:
    (ours, _), (articles, _) = loaders(mnist, "on-device"), loaders(mnist, "DataLoader")
    assert isinstance(articles, DeviceDataLoader)
    for _ in ours:  # the first epoch
        pass
    for _ in articles.dl.batch_sampler:  # the first epoch of the order, without the images
        pass
    assert torch.equal(next(iter(ours))[1], next(iter(articles))[1])


def test_each_epoch_has_the_same_images_in_another_order(mnist: Mnist) -> None:
    # Labels that count from 0 say which image is which.
    batches = DeviceBatches(mnist.test_images, torch.arange(10_000), 128, ShuffledOrder(10_000, seed=0))
    first, second = (torch.cat([labels for _, labels in batches]) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(first.sort().values, torch.arange(10_000))
    assert torch.equal(second.sort().values, torch.arange(10_000))
    images, labels = next(iter(batches))
    assert torch.equal(images, mnist.test_images[labels].float() / 255)


def test_validation_has_what_training_has_not(mnist: Mnist) -> None:
    train, val = loaders(mnist, "on-device", batch_size=50_000)
    (_, train_labels), (images, val_labels) = next(iter(train)), next(iter(val))
    assert torch.equal(train_labels.bincount() + val_labels.bincount(), mnist.train_labels.bincount())
    assert images.dtype == torch.float32
    assert (images.min().item(), images.max().item()) == (0, 1)


@pytest.mark.parametrize(("size", "sizes"), [(4, [4, 4, 2]), (5, [5, 5]), (10, [10]), (99, [10]), (1, [1] * 10)])
def test_the_last_batch_is_what_is_left(size: int, sizes: list[int], mnist: Mnist) -> None:
    batches = DeviceBatches(mnist.test_images[:10], mnist.test_labels[:10], size)
    assert len(batches) == len(sizes)
    assert [len(labels) for _, labels in batches] == sizes
    assert torch.equal(torch.cat([labels for _, labels in batches]), mnist.test_labels[:10])


def test_batches_cut_many_at_a_time_as_on_a_gpu_are_the_same(mnist: Mnist) -> None:
    train, _ = data.train_and_val_loaders(mnist, TrainConfig(), "cpu")
    many, _ = data.train_and_val_loaders(mnist, TrainConfig(), "cpu")
    assert isinstance(many, DeviceBatches)
    many._at_once = 64 * many.batch_size
    for one, other in zip(train, many, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def test_the_test_set_comes_whole(mnist: Mnist) -> None:
    batches = list(data.test_loader(mnist, "cpu"))
    assert torch.equal(torch.cat([labels for _, labels in batches]), mnist.test_labels)
    assert torch.equal(torch.cat([images for images, _ in batches]), mnist.test_images.float() / 255)


def test_a_full_disk_is_told_and_not_taken_for_missing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(DataError, match=r"No space left.*Make room there.*MNIST_TRAINER_HOME"):
        prepare_files(tmp_path)


def test_a_folder_of_an_old_torchvision_is_not_loaded_unchecked(unpacked: Path) -> None:
    (unpacked / "MNIST" / "processed").mkdir()
    with pytest.raises(DataError, match="processed is from an old version"):
        prepare_files(unpacked)
