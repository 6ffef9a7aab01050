"""A race: two runs with one seed, which is how many times as fast, and where the time of a step goes."""

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from .config import TrainConfig
from .data import load_mnist
from .devices import find_device
from .errors import ConfigError, RaceError, RunBusyError
from .history import Snapshot
from .job import Job
from .run import Run
from .runs import RunManager
from .state import MAX_NAME
from .step_times import StepTimes, step_times

TIE = 1.2  # on a laptop with a browser open, twice the same run differs by as much
LOOK_SECONDS = 0.05
ENDINGS = {"stopped": "was stopped", "diverged": "diverged", "failed": "failed"}

Configs = tuple[TrainConfig, TrainConfig]


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a race.

    Attributes:
        speeds: of each lane, training images per second of its whole run, validation included.
        times: of each lane, where the time of a step goes.
        meanwhile: names of other runs that trained while the race was on, and slowed it.
    """

    speeds: tuple[float, float]
    times: tuple[StepTimes, StepTimes]
    meanwhile: tuple[str, ...]

    @property
    def ratio(self) -> float:
        """How many times as fast the faster lane is, 1 or more."""
        return max(self.speeds) / min(self.speeds)

    @property
    def winner(self) -> int | None:
        """The faster lane, 0 or 1; None where they differ by too little to tell."""
        return None if self.ratio < TIE else self.speeds.index(max(self.speeds))


class Race:
    """Two runs, its lanes, conducted on a thread of its own. All of it may be read from any thread.

    Args:
        runs: trains them, when their turn comes.
        configs: settings of the lanes, with one seed and one number of epochs.
        at_once: whether both train at the same time, or the second after the first.

    Attributes:
        names: what tells the lanes from each other.
        lanes: the runs, in `runs` like all others.
        job: its work: over once there is a result, or none will come.
        result: None until then.

    Raises:
        ConfigError: the lanes differ in seed or epochs.
        Else as `RunManager.start` does. Neither lane begins then.
    """

    def __init__(self, runs: RunManager, configs: Configs, *, at_once: bool) -> None:
        first, second = configs
        if (first.seed, first.epochs) != (second.seed, second.epochs):
            raise ConfigError("Both lanes of a race have the same seed and as many epochs. Choose one of each.")
        self.configs = configs
        self.at_once = at_once
        self.names = lane_names(configs)
        self.result: Result | None = None
        self._runs = runs
        self._kept: dict[Run, Snapshot] = {}
        one, other = (f"Race {datetime.now():%H:%M} · {name}"[:MAX_NAME] for name in self.names)
        self.lanes = runs.start_pair(configs, (one, other), at_once=at_once)
        try:
            self.job = Job(self._conduct, "race")
        except RunBusyError:
            for lane in reversed(self.lanes):
                runs.stop(lane)
            raise

    @property
    def is_live(self) -> bool:
        """Whether there may still come a result."""
        return self.job.is_live

    @property
    def histories(self) -> tuple[Snapshot, ...]:
        """What each lane measured so far. Once it has ended that stays, whatever becomes of its run."""
        return tuple(self._kept.get(lane) or lane.snapshot() for lane in self.lanes)

    @property
    def verdict(self) -> str:
        """Which lane is how much faster; empty while there is no result."""
        if self.result is None:
            return ""
        if self.result.winner is None:
            return f"{self.names[0]} and {self.names[1]} are about equally fast"
        ratio = self.result.ratio
        return f"{self.names[self.result.winner]} is {ratio:,.{0 if ratio >= 100 else 1}f} × faster"

    def stop(self, wait_seconds: float = 0.0) -> None:
        """Stop both lanes after the step they are at, and keep them; wait for that up to `wait_seconds`."""
        self.job.stop(wait_seconds)

    def _conduct(self, job: Job) -> None:
        try:
            self._follow(job, lambda _: self.lanes[0].state.status != "queued")
            with self._runs.quiet():  # whoever waits begins when all is measured
                self._follow(job, lambda lane: lane.ended.is_set())
                times = self._measured(job)
                self.result = Result(self._speeds(), times, tuple(self._meanwhile()))
        finally:
            for lane in reversed(self.lanes):  # the second first, or it would begin when the first has stopped
                if lane.is_trained_here:
                    self._runs.stop(lane, skip_test=True)
            for lane in self.lanes:
                lane.ended.wait()  # after its step
            self._keep()

    def _follow(self, job: Job, is_there: Callable[[Run], bool]) -> None:
        """Wait until both lanes are there.

        Raises:
            RaceError: one has ended, but not finished.
            JobStoppedError: a stop was asked for.
        """
        while True:
            self._keep()
            if told := self._told_of_endings():
                raise RaceError(f"The race has no result: {told}")
            late = next((lane for lane in self.lanes if not is_there(lane)), None)
            if late is None:
                return
            job.check()
            late.ended.wait(LOOK_SECONDS)

    def _told_of_endings(self) -> str:
        """How lanes ended that did not finish, as sentences."""
        return " ".join(
            f"{name} {ENDINGS.get(lane.state.status, 'did not begin')}. {lane.state.message}".strip()
            for name, lane in zip(self.names, self.lanes, strict=True)
            if lane.ended.is_set() and lane.state.status != "finished"
        )

    def _keep(self) -> None:
        """Hold on to what lanes that have ended measured."""
        for lane in self.lanes:
            if lane.ended.is_set() and lane not in self._kept:
                self._kept[lane] = lane.snapshot()

    def _measured(self, job: Job) -> tuple[StepTimes, StepTimes]:
        mnist = load_mnist(self._runs.home / "data")
        job.report(0.0, "Finished. Measuring a step of each …")
        first, second = (step_times(lane.config, mnist, job.check) for lane in self.lanes)
        return first, second

    def _speeds(self) -> tuple[float, float]:
        first, second = (lane.images_per_second for lane in self.lanes)
        assert first  # both have finished
        assert second
        return first, second

    def _meanwhile(self) -> Iterator[str]:
        """Names of the other runs that trained since the first lane began, in this process or another."""
        lanes = [lane.id for lane in self.lanes]
        since = min(begin for begin, _ in _training_times(self.lanes[0]))
        for run in self._runs.all():
            if run.id not in lanes and any(end > since for _, end in _training_times(run)):
                yield run.name


class Races:
    """The races of a process, one at a time.

    Args:
        runs: trains their lanes.

    Attributes:
        newest: the one that is on, or was last.
    """

    def __init__(self, runs: RunManager) -> None:
        self.newest: Race | None = None
        self._runs = runs
        self._lock = threading.Lock()

    def start(self, configs: Configs, *, at_once: bool) -> Race:
        """Begin a race; asked for again while it is on, the same one is meant.

        Raises:
            RunBusyError: another race is on.
            Else as `Race` does.
        """
        with self._lock:
            race = self.newest
            if race is None or not race.is_live:
                race = self.newest = Race(self._runs, configs, at_once=at_once)
            elif (race.configs, race.at_once) != (configs, at_once):
                raise RunBusyError("Another race is on. Stop it, or wait until it ends.")
            return race

    def stop(self, wait_seconds: float = 0.0) -> None:
        """Stop the race that is on; wait for that up to `wait_seconds`."""
        if self.newest:
            self.newest.stop(wait_seconds)


def lane_names(configs: Configs) -> tuple[str, str]:
    """What tells the lanes from each other, in a few words: "DataLoader" and "On-device", "CPU" and "NVIDIA H200".

    Raises:
        DeviceUnavailableError: a device cannot be used.
    """
    devices = [find_device(config.device) for config in configs]
    labels = [device.label.partition(",")[0] for device in devices]  # without its memory
    if labels[0] == labels[1] and devices[0] != devices[1]:
        labels = [f"{label} ({device.name})" for label, device in zip(labels, devices, strict=True)]
    traits = [
        (label, config.pipeline, f"hidden size {config.hidden_size:,}", f"batch size {config.batch_size:,}")
        for label, config in zip(labels, configs, strict=True)
    ]
    differing = [pair for pair in zip(*traits, strict=True) if pair[0] != pair[1]] or [("lane 1", "lane 2")]
    first, second = (", ".join(traits) for traits in zip(*differing, strict=True))
    return first[0].upper() + first[1:], second[0].upper() + second[1:]


def _training_times(run: Run) -> Iterator[tuple[str, str]]:
    """From when to when it trained, as its folder has times; of one that died it is not known to when."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    for change, following in itertools.zip_longest(run.state.changes, run.state.changes[1:]):
        if change.status == "running" and (following or run.is_live):
            yield change.at, following.at if following else now
