"""Fixtures on the real MNIST, unpacked once for the whole test run."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mnist_trainer.config import HOME_VARIABLE
from mnist_trainer.data import Mnist, load_mnist
from mnist_trainer.runs import RunManager
from mnist_trainer.ui import frame

torch.set_num_threads(1)  # as runs of the article's size do; several wait for each other on a busy machine
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in a shell's background job; what the tests start inherits it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def mnist_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with MNIST in it."""
    root = tmp_path_factory.mktemp("data")
    load_mnist(root)
    return root


@pytest.fixture(scope="session")
def mnist(mnist_root: Path) -> Mnist:
    return load_mnist(mnist_root)


@pytest.fixture
def home(tmp_path: Path, mnist_root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder of the test's own, without runs; its MNIST is the shared one."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "data").symlink_to(mnist_root, target_is_directory=True)
    monkeypatch.setenv(HOME_VARIABLE, str(folder))
    return folder


@pytest.fixture(scope="module")
def module_home(tmp_path_factory: pytest.TempPathFactory, mnist_root: Path) -> Path:
    """A data folder for what several tests of a module look at."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "data").symlink_to(mnist_root, target_is_directory=True)
    return folder


@pytest.fixture
def runs(home: Path) -> Iterator[RunManager]:
    """A run manager that is shut down after the test."""
    manager = RunManager(home)
    yield manager
    manager.shutdown()


@pytest.fixture
def app(home: Path) -> Iterator[RunManager]:
    """The pages' run manager, on a folder without runs; pages run under AppTest share it."""
    frame.manager.clear()
    yield frame.manager()
    frame.manager.clear()
