"""A real server and a real Chromium. After each test nothing may have failed, and nothing left this machine."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mnist_trainer.config import HOME_VARIABLE, TrainConfig
from mnist_trainer.runs import RunManager

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).parents[2]
START_SECONDS, STOP_SECONDS = 60, 20
PATIENCE_MS = 60_000  # a busy machine is no fault
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
]
# Opened below its root, Streamlit looks for its server at two places, and tries the wrong one first.
STREAMLIT_PROBES = ("/_stcore/health", "/_stcore/host-config")


@dataclass
class Server:
    """The dashboard, as `streamlit run app.py` starts it."""

    process: subprocess.Popen[bytes]
    url: str
    home: Path
    log: Path

    def stop(self) -> int:
        """Press Ctrl-C; return the exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(STOP_SECONDS)

    def has_live_run(self) -> bool:
        return any(run.is_live for run in RunManager(self.home).all())


def start_server(home: Path) -> Server:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = home / "server.log"
    command = ["-m", "streamlit", "run", "app.py", "--server.port", str(port), "--server.headless", "true"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, HOME_VARIABLE: str(home)},
        )
    server = Server(process, f"http://127.0.0.1:{port}", home, log)
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(f"{server.url}/_stcore/health", timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return server
    process.kill()
    pytest.fail(f"The server did not start: {log.read_text()}")


@pytest.fixture
def own_home(tmp_path: Path, mnist_root: Path) -> Path:
    (tmp_path / "data").symlink_to(mnist_root, target_is_directory=True)
    return tmp_path


@pytest.fixture(scope="session")
def trained_home(tmp_path_factory: pytest.TempPathFactory, mnist_root: Path) -> Path:
    """A data folder with one run that reads well."""
    home = tmp_path_factory.mktemp("served")
    (home / "data").symlink_to(mnist_root, target_is_directory=True)
    run = RunManager(home).start(TrainConfig(epochs=5, hidden_size=128, learning_rate=0.3))
    assert run.ended.wait(120)
    return home


def end_server(server: Server) -> None:
    assert server.stop() == 0, server.log.read_text()
    assert "Traceback" not in server.log.read_text(), server.log.read_text()


@pytest.fixture(scope="session")
def servers(trained_home: Path) -> Iterator[list[Server]]:
    """The one server of all tests that leave no run behind, and none before the first."""
    servers = list[Server]()
    yield servers
    for server in servers:
        end_server(server)


@pytest.fixture
def server(servers: list[Server], trained_home: Path) -> Iterator[Server]:
    if not servers:
        servers.append(start_server(trained_home))
    yield servers[0]
    if servers[0].has_live_run():  # of a test that failed: the next one is not to find it
        end_server(servers.pop())


@pytest.fixture(scope="session")
def browser() -> Iterator["Browser"]:
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        reason = "no Chromium found: install it, or name it in the environment variable CHROMIUM"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


class Pages:
    """Opens pages, and keeps a list of what went wrong in them."""

    def __init__(self, browser: "Browser", url: str) -> None:
        self.browser = browser
        self.url = url
        self.faults: list[str] = []
        self.contexts: list[Any] = []

    def open(self, path: str = "/", **options: Any) -> "Page":
        """A tab of a new visitor, at `path`; `options` are those of a Playwright context."""
        options = {"viewport": {"width": 1300, "height": 1000}, **options}
        context = self.browser.new_context(base_url=self.url, **options)
        context.set_default_timeout(PATIENCE_MS)
        self.contexts.append(context)
        context.on("request", lambda request: self._check_request(request.url))
        context.on("weberror", lambda error: self.faults.append(f"page error: {error.error}"))
        context.on("console", self._check_console)
        page = context.new_page()
        page.goto(path)
        return page

    def _check_request(self, url: str) -> None:
        if not url.startswith((self.url, self.url.replace("http", "ws"), "data:", "blob:")):
            self.faults.append(f"request to {url}")

    def _check_console(self, message: Any) -> None:
        if message.type == "error" and not message.location["url"].endswith(STREAMLIT_PROBES):
            self.faults.append(f"console: {message.text}")

    def close(self) -> None:
        for context in self.contexts:
            context.close()
        assert not self.faults


@pytest.fixture
def pages(browser: "Browser", server: Server) -> Iterator[Pages]:
    pages = Pages(browser, server.url)
    yield pages
    pages.close()
