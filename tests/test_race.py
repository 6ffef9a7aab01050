"""Races on real runs: a fair one, a dramatic one, and those that come to no result."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from mnist_trainer import devices, step_times
from mnist_trainer.config import TrainConfig
from mnist_trainer.devices import Device
from mnist_trainer.errors import ConfigError, DeviceUnavailableError, RunBusyError
from mnist_trainer.race import Race, Races, Result, lane_names
from mnist_trainer.runs import RunManager
from mnist_trainer.step_times import StepTimes
from tests.running import ended, has_steps, until

SHORT = TrainConfig(device="cpu", epochs=1, batch_size=1000)
ARTICLE = dataclasses.replace(SHORT, pipeline="DataLoader")
LONG = dataclasses.replace(SHORT, epochs=1000)
TIMES = StepTimes(0.3, 0.0, 0.2, 0.1, 0.1)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "MAX_STEPS", 2)
    monkeypatch.setattr(step_times, "WARM_UP_STEPS", 1)


def over(race: Race) -> Race:
    assert race.job.ended.wait(240)
    return race


def test_one_after_the_other_both_pipelines_learn_the_same_and_the_verdict_is_that_of_the_runs(
    runs: RunManager,
) -> None:
    race = over(Race(runs, (ARTICLE, SHORT), at_once=False))
    first, second = race.lanes
    assert race.job.problem == ""
    assert race.result
    assert first.state.changes[-1].at <= second.state.changes[1].at  # "finished" before "running"
    assert first.best_val_accuracy == second.best_val_accuracy
    assert first.state.test_accuracy == second.state.test_accuracy
    assert race.result.speeds == (50_000 / first.seconds, 50_000 / second.seconds)
    assert race.result.ratio == pytest.approx(max(first.seconds, second.seconds) / min(first.seconds, second.seconds))
    assert race.result.meanwhile == ()
    assert race.result.times[1].copying == 0 < race.result.times[0].copying
    if race.result.winner is not None:
        assert race.verdict == f"{race.names[race.result.winner]} is {race.result.ratio:.1f} × faster"


def test_its_lanes_are_runs_like_all_others_and_what_it_measured_outlives_them(runs: RunManager) -> None:
    race = over(Race(runs, (SHORT, ARTICLE), at_once=True))
    listed = runs.all()
    assert {run.id for run in listed} == {lane.id for lane in race.lanes}
    assert sorted(run.name.partition(" · ")[2] for run in listed) == ["DataLoader", "On-device"]
    assert all(run.name.startswith("Race ") for run in listed)
    for run in listed:
        runs.delete(run.id)
    assert [history.steps for history in race.histories] == [50, 50]


def test_a_lane_may_be_deleted_as_soon_as_it_has_ended(runs: RunManager) -> None:
    race = Race(runs, (SHORT, ARTICLE), at_once=False)
    ended(race.lanes[0])
    until(lambda: race.lanes[0] in race._kept)
    runs.delete(race.lanes[0].id)
    assert over(race).result
    assert [len(history.epochs) for history in race.histories] == [1, 1]


def test_a_program_may_end_while_a_race_is_on(home: Path) -> None:
    code = """
from mnist_trainer import RunManager, TrainConfig
from mnist_trainer.race import Race

config = TrainConfig(device="cpu", epochs=1000)
race = Race(RunManager(), (config, config), at_once=True)
while not all(lane.snapshot().steps for lane in race.lanes):
    race.job.ended.wait(0.1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert [run.state.status for run in RunManager(home).all()] == ["stopped", "stopped"]


def test_at_once_both_lanes_train_at_the_same_time(runs: RunManager) -> None:
    race = Race(runs, (LONG, LONG), at_once=True)
    until(lambda: all(has_steps(lane, 1) for lane in race.lanes))
    assert [lane.state.status for lane in race.lanes] == ["running", "running"]
    race.stop(wait_seconds=60)
    assert not race.is_live
    assert race.job.was_stopped
    assert [lane.state.status for lane in race.lanes] == ["stopped", "stopped"]
    assert all(lane.has_weights for lane in race.lanes)
    assert (race.result, race.verdict) == (None, "")


def test_a_race_waits_its_turn_and_others_wait_until_all_is_measured(runs: RunManager) -> None:
    earlier = runs.start(LONG)
    race = Race(runs, (SHORT, SHORT), at_once=False)
    later = runs.start(SHORT)
    assert [run.state.status for run in (*race.lanes, later)] == 3 * ["queued"]
    earlier.request_stop()
    assert over(race).result
    assert race.result
    assert race.result.meanwhile == ()
    assert ended(later).state.status == "finished"


def test_a_run_that_trains_at_the_same_time_is_named(runs: RunManager) -> None:
    other = RunManager(runs.home)  # as another program
    beside = other.start(LONG)
    race = over(Race(runs, (SHORT, SHORT), at_once=False))
    assert race.result
    assert race.result.meanwhile == (beside.name,)
    other.shutdown()


@pytest.mark.parametrize("lane", [0, 1])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_lane_that_is_stopped_elsewhere_ends_the_race_in_a_sentence(
    runs: RunManager, lane: int, at_once: bool
) -> None:
    race = Race(runs, (LONG, dataclasses.replace(LONG, hidden_size=16)), at_once=at_once)
    until(lambda: has_steps(race.lanes[0], 1))
    runs.stop(race.lanes[lane])
    over(race)
    assert f"The race has no result: Hidden size {(32, 16)[lane]} was stopped." in race.job.problem
    assert not race.job.was_stopped
    assert race.result is None
    assert [ended(each).state.status for each in race.lanes] == ["stopped", "stopped"]


def test_a_lane_that_diverges_ends_the_race_in_a_sentence(runs: RunManager) -> None:
    race = over(Race(runs, (dataclasses.replace(LONG, learning_rate=1e9), LONG), at_once=True))
    assert "The race has no result: Lane 1 diverged. The loss stopped being a finite number" in race.job.problem
    assert race.result is None


def test_the_end_of_the_program_ends_a_race(runs: RunManager) -> None:
    race = Race(runs, (LONG, LONG), at_once=False)
    runs.shutdown(timeout_seconds=60)
    assert over(race).result is None


def test_a_stop_is_over_when_both_lanes_are_and_measures_neither_on_the_test_set(runs: RunManager) -> None:
    race = Race(runs, (LONG, dataclasses.replace(LONG, hidden_size=16)), at_once=True)
    until(lambda: all(has_steps(lane, 1) for lane in race.lanes))
    race.stop(wait_seconds=60)
    assert race.job.was_stopped
    for lane in race.lanes:
        assert lane.ended.is_set()
        assert (lane.state.status, lane.state.test_accuracy) == ("stopped", None)


def test_a_stop_ends_the_measuring_too(runs: RunManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "MAX_STEPS", 10**9)
    monkeypatch.setattr(step_times, "MAX_SECONDS", 1e9)
    race = Race(runs, (SHORT, SHORT), at_once=True)
    until(lambda: "Measuring" in race.job.progress.text)
    race.stop(wait_seconds=60)
    assert race.job.was_stopped
    assert [lane.state.status for lane in race.lanes] == ["finished", "finished"]


def test_a_race_with_a_device_that_is_not_there_or_unequal_lanes_makes_no_run(runs: RunManager) -> None:
    with pytest.raises(DeviceUnavailableError, match="cuda:99"):
        Race(runs, (SHORT, dataclasses.replace(SHORT, device="cuda:99")), at_once=False)
    with pytest.raises(ConfigError, match="the same seed"):
        Race(runs, (SHORT, dataclasses.replace(SHORT, seed=1)), at_once=False)
    assert runs.all() == []


def test_there_is_one_race_at_a_time_and_a_second_click_means_the_same(runs: RunManager) -> None:
    races = Races(runs)
    first = races.start((LONG, LONG), at_once=False)
    assert races.start(first.configs, at_once=False) is first
    with pytest.raises(RunBusyError, match="Another race is on"):
        races.start(first.configs, at_once=True)
    races.stop(wait_seconds=60)
    assert not first.is_live
    second = races.start(first.configs, at_once=False)
    assert second is not first
    assert races.newest is second
    races.stop()
    assert len(runs.all()) == 4


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, ("Lane 1", "Lane 2")),
        ({"pipeline": "DataLoader"}, ("On-device", "DataLoader")),
        (
            {"hidden_size": 1024, "batch_size": 64},
            ("Hidden size 32, batch size 1,000", "Hidden size 1,024, batch size 64"),
        ),
    ],
)
def test_lanes_are_called_by_what_differs(changes: dict[str, int | str], names: tuple[str, str]) -> None:
    assert lane_names((SHORT, TrainConfig(**{**SHORT.to_json(), **changes}))) == names


def test_devices_are_called_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tuple(Device(f"cuda:{number}", "NVIDIA H200, 139 GiB") for number in range(2))
    monkeypatch.setattr(devices, "all_devices", lambda: (*found, Device("cpu", "CPU")))
    on = [dataclasses.replace(SHORT, device=device) for device in ("cpu", "cuda:0", "cuda:1")]
    assert lane_names((on[0], on[1])) == ("CPU", "NVIDIA H200")
    assert lane_names((on[1], on[2])) == ("NVIDIA H200 (cuda:0)", "NVIDIA H200 (cuda:1)")


@pytest.mark.parametrize(
    ("speeds", "ratio", "winner"), [((1000, 21_300), 21.3, 1), ((300, 100), 3, 0), ((100, 104), 1.04, None)]
)
def test_the_verdict_says_no_more_than_the_speeds_do(speeds: tuple[float, float], ratio: float, winner: int) -> None:
    result = Result(speeds, (TIMES, TIMES), ())
    assert result.ratio == pytest.approx(ratio)
    assert result.winner == winner
