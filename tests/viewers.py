"""What open Train pages cost a training run: `python -m tests.viewers --viewers 30 --seconds 20`.

A real server trains a long run that a page started. Its speed is measured by turns with no page open and with
N; before it, CPU is measured of a server that has nothing to train.

- Speed: lines that come into the run's steps.csv, from one of its writes to another.
- Update intervals: of each page, the times between the ends of its refreshes, as they reach it; a silence at the
  start or the end of a measurement counts if it is the page's longest.
- CPU: seconds of it a second, of the server, of all clients, and of everything else on the machine, which
  should be little.

The clients are websockets that speak Streamlit's protocol, in one process of their own. They decode messages
and keep the time, and draw nothing: in a class each phone does that for itself.
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from streamlit.proto.Alert_pb2 import Alert
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
from streamlit.proto.WidgetStates_pb2 import WidgetState
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException
from websockets.typing import Subprotocol

OPENING_SECONDS, SETTLE_SECONDS = 3.0, 2.0  # pages open one after another, so that they do not refresh in step
PATIENCE_SECONDS = 120.0
MAX_CACHED_AGE = 2  # Streamlit's global.maxCachedMessageAge
ENDS = (ForwardMsg.FINISHED_SUCCESSFULLY, ForwardMsg.FINISHED_FRAGMENT_RUN_SUCCESSFULLY)
COMPILE_ERROR = ForwardMsg.FINISHED_WITH_COMPILE_ERROR


class Page:
    """A tab, as Streamlit 1.67's browser side is one: read from its bundle, static/js/index.*.js.

    It sends the states of all widgets with every request. A fragment's timer (`auto_rerun`) is a setInterval: it
    asks whether or not the last refresh has come, and a run of the whole page drops all timers. Messages of 10 KB
    and more are kept for two refreshes, and their hashes told: the server may then send a reference instead.
    """

    def __init__(self, server: str, address: str) -> None:
        self._url = f"ws://{server}/_stcore/stream"
        self._name, _, self._query = address.partition("?")
        self._script = ""  # the page's hash, once the server has told it, takes the place of its name
        self._states: dict[str, WidgetState] = {}
        self._timers: dict[str, asyncio.Task[None]] = {}
        self._kept: dict[str, int] = {}  # hash of a message → number of the refresh that used it last
        self._received = 0
        self._socket: ClientConnection
        self.buttons: dict[str, str] = {}  # label → id
        self.is_ready = asyncio.Event()  # set when a run of the whole page has ended
        self.updates: list[tuple[float, int]] = []  # of each refresh: when it had come, and bytes received by then
        self.faults: list[str] = []

    async def stay(self) -> None:
        """Be open until cancelled."""
        protocol = [Subprotocol("streamlit")]
        try:  # a browser sends no pings
            async with connect(self._url, subprotocols=protocol, max_size=None, ping_interval=None) as self._socket:
                await self.ask()
                async for data in self._socket:
                    assert isinstance(data, bytes)
                    self._received += len(data)
                    self._take(ForwardMsg.FromString(data))
            self.faults.append("The server closed the connection.")
        except (OSError, WebSocketException) as error:
            self.faults.append(f"The connection was lost: {error}")
        finally:
            self._drop_timers(list(self._timers))

    async def ask(self, fragment: str = "", pressed: str = "") -> None:
        """Have the page, or a fragment of it, run again, perhaps because a button was pressed."""
        message = BackMsg()
        request = message.rerun_script
        request.query_string, request.fragment_id, request.is_auto_rerun = self._query, fragment, bool(fragment)
        request.page_script_hash, request.page_name = self._script, "" if self._script else self._name
        request.context_info.timezone, request.context_info.locale = "Europe/Berlin", "en-GB"
        request.widget_states.widgets.extend(self._states.values())
        if pressed:
            request.widget_states.widgets.add(id=self.buttons[pressed], trigger_value=True)
        request.cached_message_hashes.extend(self._kept)
        await self._socket.send(message.SerializeToString())

    async def _tick(self, fragment: str, interval: float) -> None:
        with suppress(WebSocketException):  # `stay` hears of it, too
            while True:
                await asyncio.sleep(interval)
                await self.ask(fragment)

    def _take(self, message: ForwardMsg) -> None:
        kind = message.WhichOneof("type")
        if message.metadata.cacheable:
            self._kept[message.hash] = len(self.updates)
        if kind == "delta" and message.delta.WhichOneof("type") == "new_element":
            self._take_element(message.delta.new_element)
        elif kind == "ref_hash" and message.ref_hash in self._kept:
            self._kept[message.ref_hash] = len(self.updates)
        elif kind == "new_session" and not message.metadata.run.fragment_ids:
            self._drop_timers(list(self._timers))
            self._states.clear()  # the page brings its widgets again, with their values
            self.buttons.clear()
        elif kind == "navigation":
            self._script = message.navigation.page_script_hash
        elif kind == "page_info_changed":
            self._query = message.page_info_changed.query_string
        elif kind == "auto_rerun":
            fragment, interval = message.auto_rerun.fragment_id, message.auto_rerun.interval
            self._drop_timers([fragment])
            self._timers[fragment] = asyncio.create_task(self._tick(fragment, interval))
        elif kind == "stop_auto_rerun":
            self._drop_timers(message.stop_auto_rerun.fragment_ids)
        elif kind == "script_finished" and message.script_finished in ENDS:
            self.updates.append((time.monotonic(), self._received))
            self._kept = {key: used for key, used in self._kept.items() if len(self.updates) - used <= MAX_CACHED_AGE}
            if not message.metadata.run.fragment_ids:
                self.is_ready.set()
        elif kind in ("ref_hash", "page_not_found", "session_event") or message.script_finished == COMPILE_ERROR:
            self.faults.append(f"{message}"[:500])

    def _take_element(self, element: Any) -> None:
        kind = element.WhichOneof("type")
        widget = getattr(element, kind)
        if kind == "exception" or (kind == "alert" and widget.format == Alert.ERROR):
            self.faults.append(f"{widget}"[:500])
        elif kind == "button":
            self.buttons[widget.label] = widget.id
        elif value := widget_value(kind, widget):
            self._states[widget.id] = WidgetState(id=widget.id, **value)

    def _drop_timers(self, fragments: Iterable[str]) -> None:
        for fragment in fragments:
            if timer := self._timers.pop(fragment, None):
                timer.cancel()


def widget_value(kind: str, widget: Any) -> dict[str, Any]:
    """What a browser sends of a widget that nobody has touched; empty for what has no value."""
    is_set = getattr(widget, "set_value", False)  # by the script, from the address or the session
    match kind:
        case "number_input":
            return {"double_value": widget.value if is_set else widget.default}
        case "checkbox":
            return {"bool_value": widget.value if is_set else widget.default}
        case "selectbox":
            return {"string_value": widget.raw_value if is_set else widget.options[widget.default]}
        case "slider" if widget.options:
            values = widget.raw_value if is_set else [widget.options[int(index)] for index in widget.default]
            return {"string_array_value": {"data": values}}
        case "slider":
            return {"double_array_value": {"data": widget.value if is_set else widget.default}}
        case "button_group":
            values = widget.raw_values if is_set else [widget.options[index].content for index in widget.default]
            return {"string_array_value": {"data": values}}
    return {}


async def start_run(server: str) -> None:
    """Start the run that is measured, by the page's button."""
    page = Page(server, "train?epochs=900&hidden=32")
    tab = asyncio.create_task(page.stay())
    async with asyncio.timeout(PATIENCE_SECONDS):
        await page.is_ready.wait()
        page.is_ready.clear()
        await page.ask(pressed="Start training")
        await page.is_ready.wait()
    tab.cancel()
    if page.faults or "Queue it" not in page.buttons:
        raise RuntimeError(f"The run did not start. {page.faults}")


class Heard(NamedTuple):
    """What a page has to tell once it is closed: of each update when it came, and bytes received by then."""

    updates: list[tuple[float, int]]
    faults: list[str]


def be_viewers(server: str, count: int, pipe: Connection) -> None:
    """Be so many Train pages; say when all are open, and when told to close, send a `Heard` of each."""

    async def be() -> None:
        pages, tabs = [Page(server, "train") for _ in range(count)], []
        for page in pages:
            tabs.append(asyncio.create_task(page.stay()))
            await asyncio.sleep(OPENING_SECONDS / count)
        waits = [asyncio.create_task(page.is_ready.wait()) for page in pages]
        _, late = await asyncio.wait(waits, timeout=PATIENCE_SECONDS)
        pipe.send(None)
        await asyncio.to_thread(pipe.recv)
        for task in (*tabs, *late):
            task.cancel()
        pipe.send([Heard(page.updates, page.faults + ["A page never came."] * bool(late)) for page in pages])

    asyncio.run(be())


class Rates(NamedTuple):
    """A moment's counts, or what a second added to them: steps, and CPU seconds."""

    steps: float
    server: float
    clients: float
    others: float


class Bench:
    """Measures one server.

    Attributes:
        rates: the situation, like "run, no page" → its measurements.
        intervals: between a page's updates while a run trains, in seconds, all pages together.
        received: by each page while a run trains, bytes a second.
        faults: what went wrong.
    """

    def __init__(self, server: Any, seconds: float) -> None:
        self._address, self._home, self._seconds = server.url.removeprefix("http://"), server.home, seconds
        self._server = psutil.Process(server.process.pid)
        self._steps_file: Any = None
        self._steps = 0
        self.rates: dict[str, list[Rates]] = {}
        self.intervals: list[float] = []
        self.received: list[float] = []
        self.faults: list[str] = []

    def start(self) -> None:
        """Have a run to measure."""
        asyncio.run(start_run(self._address))
        self._steps_file = next(self._home.glob("runs/*/steps.csv")).open("rb")

    def measure(self, situation: str, viewers: int = 0) -> None:
        """Measure once, with so many pages open."""
        if not viewers:
            time.sleep(SETTLE_SECONDS)
            self._count(situation, None)
            return
        spawn = multiprocessing.get_context("spawn")
        pipe, theirs = spawn.Pipe()
        process = spawn.Process(target=be_viewers, args=(self._address, viewers, theirs), daemon=True)
        process.start()
        theirs.close()  # so that its end is noticed
        pipe.recv()
        time.sleep(SETTLE_SECONDS)
        start, end = self._count(situation, psutil.Process(process.pid))
        pipe.send(None)
        for page in pipe.recv():
            self.faults += page.faults
            if self._steps_file:
                self._hear(page, start, end)
        process.join()

    def _count(self, situation: str, clients: psutil.Process | None) -> tuple[float, float]:
        start, before = self._mark(clients)
        time.sleep(self._seconds)
        end, after = self._mark(clients)
        rates = Rates(*((b - a) / (end - start) for a, b in zip(before, after, strict=True)))
        self.rates.setdefault(situation, []).append(rates)
        return start, end

    def _mark(self, clients: psutil.Process | None) -> tuple[float, Rates]:
        """The time, and the counts by then; of a run just after one of its writes, of which a second has several."""
        if self._steps_file:
            self._steps += self._steps_file.read().count(b"\n")
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not (new := self._steps_file.read()):
                if time.monotonic() > deadline:
                    raise RuntimeError("The run no longer trains. Choose fewer rounds, or seconds.")
                time.sleep(0.01)
            self._steps += new.count(b"\n")
        server, theirs = (sum(process.cpu_times()[:2]) if process else 0.0 for process in (self._server, clients))
        machine = psutil.cpu_times()
        others = machine.user + machine.nice + machine.system - server - theirs
        return time.monotonic(), Rates(self._steps, server, theirs, others)

    def _hear(self, page: Heard, start: float, end: float) -> None:
        updates = [(when, received) for when, received in page.updates if start <= when <= end]
        gaps = [b - a for a, b in itertools.pairwise([start, *(when for when, _ in updates), end])]
        first, between, last = gaps[0], gaps[1:-1], gaps[-1]
        self.intervals += between + [silence for silence in (first, last) if silence > max(between, default=0)]
        if between:
            self.received.append((updates[-1][1] - updates[0][1]) / sum(between))

    def summary(self) -> dict[str, Any]:
        """The figures, all rounds together, and the shares kept of each."""
        alone, watched = ([rates.steps for rates in self.rates[name]] for name in ("run, no page", "run, pages"))
        percent = statistics.quantiles(self.intervals, n=100, method="inclusive")
        return {
            "steps_per_second_alone": statistics.mean(alone),
            "steps_per_second_watched": statistics.mean(watched),
            "share_kept": statistics.mean(watched) / statistics.mean(alone),
            # Each measured against those just before and after it.
            "shares": [2 * w / (a + b) for w, (a, b) in zip(watched, itertools.pairwise(alone), strict=True)],
            "update_seconds": {"median": percent[49], "95 %": percent[94], "worst": max(self.intervals)},
            "bytes_per_page_second": statistics.mean(self.received or [0.0]),
            "cpu": {
                name: Rates(*map(statistics.mean, zip(*rounds, strict=True)))._asdict()
                for name, rounds in self.rates.items()
            },
            "faults": sorted(set(self.faults)),
        }


@contextmanager
def served() -> Iterator[Any]:
    """A server on a data folder of its own, as the browser tests start theirs; it has to end well."""
    from mnist_trainer.data import load_mnist  # PyTorch, for which the clients' process has no use
    from tests.browser.conftest import start_server

    with tempfile.TemporaryDirectory(prefix="viewers-") as folder:
        load_mnist(Path(folder) / "data")
        server = start_server(Path(folder))
        try:
            yield server
            if server.stop() or "Traceback" in server.log.read_text():
                raise RuntimeError(f"The server failed: {server.log.read_text()}")
        finally:
            server.process.kill()
            server.process.wait()


def measure(viewers: int, seconds: float, rounds: int) -> dict[str, Any]:
    """The summary of a server's measurements; those with a run by turns, first and last without a page."""
    with served() as server:
        bench = Bench(server, seconds)
        bench.measure("no run, pages", viewers)  # first: a server loads PyTorch for its first page
        bench.measure("no run, no page")
        bench.start()
        bench.measure("run, no page")
        for _ in range(rounds):
            bench.measure("run, pages", viewers)
            bench.measure("run, no page")
    return bench.summary()


def table(viewers: int, summary: dict[str, Any]) -> str:
    """The figures as lines of text."""
    rounds = ", ".join(f"{share:.0%}" for share in summary["shares"])
    updates = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in summary["update_seconds"].items())
    who = ("server", "clients", "others")
    lines = [
        f"speed alone        {summary['steps_per_second_alone']:8.0f} steps/s",
        f"with {viewers:3} viewers   {summary['steps_per_second_watched']:8.0f} steps/s",
        f"share kept         {summary['share_kept']:8.0%} (each round: {rounds})",
        f"update interval    {updates}",
        f"received           {summary['bytes_per_page_second'] / 1000:8.1f} KB a page a second",
        f"{'CPU (1 = a core)':17}" + "".join(f"{name:>10}" for name in who),
        *(f"{name:17}" + "".join(f"{cpu[one]:10.2f}" for one in who) for name, cpu in summary["cpu"].items()),
    ]
    return "\n".join(lines + [f"FAULT: {fault}" for fault in summary["faults"]])


def main() -> int:
    """Return 0 if nothing failed, however slow it was."""
    parser = argparse.ArgumentParser(description="Measures what open Train pages cost a training run.")
    parser.add_argument("--viewers", type=int, default=30, help="pages that are open (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20, help="of each measurement (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements with pages (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    if min(options.viewers, options.seconds, options.rounds) <= 0:
        parser.error("Each number has to be more than 0.")
    summary = measure(options.viewers, options.seconds, options.rounds)
    print(json.dumps(summary, indent=2) if options.json else table(options.viewers, summary))
    return 1 if summary["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
