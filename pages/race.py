"""The Race page: two lanes side by side, one button, and at the end how many times as fast, and why."""

from typing import Any

import streamlit as st

from mnist_trainer import devices
from mnist_trainer.charts import comparison_figures, step_times_figure
from mnist_trainer.config import TrainConfig
from mnist_trainer.errors import MnistTrainerError
from mnist_trainer.history import Snapshot
from mnist_trainer.race import Configs, Race, Races, Result
from mnist_trainer.run import Run
from mnist_trainer.runs import RunManager
from mnist_trainer.ui.frame import errors_shown, page, plain
from mnist_trainer.ui.live import (
    DEFAULT_SMOOTHING,
    Panel,
    Tile,
    duration,
    has_wrong_interval,
    live,
    live_data,
    number,
    page_interval,
    shared,
)
from mnist_trainer.ui.settings import (
    ARTICLE,
    batch_size_input,
    check_address,
    device_input,
    hidden_size_input,
    number_input,
    pipeline_input,
    whole,
)

LOOKOUT_SECONDS = 5.0  # for a race that somebody else starts
SETTLE_SECONDS = 2.0  # to stop takes a step of each lane
ADVICE = "race_advice"  # in the session: why the last start was refused
EPOCHS = 2  # without a GPU the default race then takes some fifteen seconds
GPU_HIDDEN_SIZE = 512  # the article's 32 units leave a GPU waiting for the next step most of the time
MODES = {
    "One after the other": "Fair: each lane has the machine to itself, and the second begins when the first has "
    "finished.",
    "At once": "Dramatic, but less fair: both lanes train at the same time, and slow each other down.",
}
FAIR = next(iter(MODES))

# A control's key, which is its name in the URL too → the setting: those of both lanes, then each lane's own.
SHARED = {"both_epochs": "epochs", "both_lr": "learning_rate"}
LANES: tuple[dict[str, str], ...] = tuple(
    {
        f"device{lane}": "device",
        f"pipeline{lane}": "pipeline",
        f"hidden{lane}": "hidden_size",
        f"batch{lane}": "batch_size",
    }
    for lane in (1, 2)
)


@st.cache_resource(
    show_spinner=False, hash_funcs={RunManager: id}, max_entries=1, on_release=lambda races: races.stop()
)
def races_of(runs: RunManager) -> Races:
    """The races of this process: any tab shows the same one."""
    return Races(runs)


def main(runs: RunManager) -> None:
    st.header("Race")
    check_address(SHARED | LANES[0] | LANES[1])
    check_mode()
    races = races_of(runs)
    race = races.newest
    # Looked at once, before anything is shown of it: what changes meanwhile is seen by the panel and the lookout.
    is_on, training = race is not None and race.is_live, runs.training
    shown = statuses(race) if race else []
    lane_settings(is_open=race is None)
    buttons(races, race, is_on=is_on, is_busy=training is not None and not is_on)
    above = st.container()  # the panel keeps its place on the page from race to race, and so stays mounted
    with above:
        if problem := st.session_state.pop(ADVICE, ""):
            st.error(plain(problem), icon=":material/error:")
        if race is None:
            st.info("Two networks race for the same epochs, from the same seed. Press **Start race**.")
        elif not is_on:
            outcome(race)
    if race:
        interval = page_interval()
        panel = st.fragment(live_panel, run_every=interval if is_on else None)
        panel(races, race, is_on, shown, interval)
    if race and not is_on:
        if race.result:
            breakdown(race, race.result)
        live(f"curves {race.lanes[0].id}", live_data(curves(race), f"curves {race.lanes[0].id}"))
        compare_button(race)
    st.fragment(lookout, run_every=None if is_on else LOOKOUT_SECONDS)(runs, races, race, training)


def check_mode() -> None:
    """As `check_address`, for what is no setting of a run."""
    text = st.query_params.get("mode")
    if text is not None and "mode" not in st.session_state and text not in MODES:
        choices = " or ".join(f"'{mode}'" for mode in MODES)
        st.warning(plain(f"Lanes run {choices}; '{text[:60]}' is neither. (The address has mode={text[:60]}.)"))


def lane_settings(*, is_open: bool) -> None:
    """What each lane has of its own, side by side. Out of the way once there is a race to look at."""
    with st.expander("Settings of the lanes", expanded=is_open):
        places = zip(st.columns(2, border=True), LANES, default_lanes(), strict=True)
        for lane_number, (place, controls, lane) in enumerate(places, 1):
            device, pipeline, hidden_size, batch_size = controls
            with place:
                st.markdown(f"**Lane {lane_number}**")
                grid = st.grid(2, min_column_width=130)
                device_input(grid, device, lane.device)
                pipeline_input(grid, pipeline, lane.pipeline)
                hidden_size_input(grid, hidden_size, lane.hidden_size)
                batch_size_input(grid, batch_size)


def default_lanes() -> Configs:
    """The CPU against the fastest GPU; where there is none, the article's pipeline against data on the device."""
    best = next(device.name for device in devices.all_devices() if device.is_available)
    if best == "cpu":
        return TrainConfig("cpu", pipeline="DataLoader"), TrainConfig("cpu")
    return TrainConfig("cpu", hidden_size=GPU_HIDDEN_SIZE), TrainConfig(best, hidden_size=GPU_HIDDEN_SIZE)


def buttons(races: Races, race: Race | None, *, is_on: bool, is_busy: bool) -> None:
    """What both lanes share, and the button. They keep their places, whatever the race's state."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        number_input(
            st, "Epochs", "both_epochs", EPOCHS, 1, "Passes of each lane over the 50,000 training images.", width=130
        )
        number_input(st, "Learning rate", "both_lr", ARTICLE.learning_rate, 0.1, "Of both lanes.", width=190)
        st.segmented_control("Lanes run", list(MODES), default=FAIR, required=True, key="mode", bind="query-params")
        st.button(
            "Queue the race" if is_busy else "Start race",
            type="primary",
            icon=":material/playlist_add:" if is_busy else ":material/sports_score:",
            key="start_race",
            disabled=is_on,
            on_click=start,
            args=(races,),
        )
        st.button("Stop", icon=":material/stop:", key="stop_race", disabled=not is_on, on_click=stop, args=(race,))
    st.caption(MODES[chosen_mode()])


def chosen_mode() -> str:
    """How the lanes run: of an address without a word for it the control makes nothing."""
    return st.session_state.get("mode") or FAIR


def start(races: Races) -> None:
    """Callback of Start race: the controls' values have come with the click."""
    try:
        first, second = (
            TrainConfig.from_json(
                {setting: whole(st.session_state[key], setting) for key, setting in (SHARED | lane).items()}
            )
            for lane in LANES
        )
        races.start((first, second), at_once=chosen_mode() != FAIR)
    except MnistTrainerError as error:
        st.session_state[ADVICE] = str(error)


def stop(race: Race) -> None:
    race.stop(SETTLE_SECONDS)


def outcome(race: Race) -> None:
    """What came of it, to be read from the last row."""
    if race.job.problem:
        st.warning(plain(race.job.problem), icon=":material/flag:")
    if race.job.was_stopped:
        st.warning("The race was stopped: it has no result. Its lanes are kept as they are.", icon=":material/flag:")
    if race.result is None:
        return
    st.title(f":material/sports_score: {plain(race.verdict)}", anchor=False)
    st.markdown(plain(explained(race)))
    if race.result.meanwhile:
        names = ", ".join(race.result.meanwhile)
        st.warning(
            plain(f"At the same time this trained, too, and slowed the race: {names}. Race again for a fair result.")
        )
    for name, lane in zip(race.names, race.lanes, strict=True):
        if lane.state.message:
            st.warning(plain(f"{name}: {lane.state.message}"))


def explained(race: Race) -> str:
    """The figures behind the verdict, in sentences."""
    first, second = race.configs
    took = ", ".join(f"{name} in {duration(lane.seconds)}" for name, lane in zip(race.names, race.lanes, strict=True))
    epochs = f"{first.epochs:,} epoch{'s' * (first.epochs != 1)}"
    text = f"{epochs} from seed {first.seed}, validation included: {took}. "
    one, other = (f"{history.epochs[-1].val_accuracy:.2%}" for history in race.histories)
    if first.batch_size == second.batch_size and one == other:
        text += f"The same batches, and the same result: both read {one} of the validation images."
    else:
        text += f"Of the validation images they read {one} and {other}."
    if race.at_once:
        text += " They shared the machine: one after the other is the fair way to compare."
    return text


def statuses(race: Race) -> list[str]:
    """How the lanes stand: the sidebar tells of it, too."""
    return [lane.state.status for lane in race.lanes]


def live_panel(races: Races, race: Race, is_on: bool, shown: list[str], interval: float) -> None:
    """Both lanes, and their curves while they train: the only part of the page that refreshes by itself."""
    with errors_shown():
        is_wrong = is_on and has_wrong_interval(interval)
        if races.newest is not race or race.is_live != is_on or statuses(race) != shown or is_wrong:
            st.rerun()  # the page around it depends on them
        key = ("race", is_on, *(lane.id for lane in race.lanes), *shown)
        version = [
            (lane.state, lane.is_testing, history.steps, len(history.epochs))
            for lane, history in zip(race.lanes, race.histories, strict=True)
        ]
        payload = shared(key, (version, race.job.progress), lambda: panel_data(race, is_on), is_moving=is_on)
        live("race", payload)


def panel_data(race: Race, is_on: bool) -> dict[str, Any]:
    """What the panel shows, the same for all pages."""
    charts = curves(race) if is_on else []  # those of a race that is over stand further down
    return live_data(charts, race.lanes[0].id, [lane_panel(race, lane) for lane in (0, 1)], is_large=True)


def lane_panel(race: Race, lane: int) -> Panel:
    run, history = race.lanes[lane], race.histories[lane]
    last, speed = history.last_epoch, run.images_per_second
    validation = f"validation {last.val_accuracy:.2%}" if last else "last 50 batches" * bool(history.steps)
    tiles = [
        Tile("Time", f"{run.seconds:,.1f} s", f"{speed:,.0f} images/s" if speed else ""),
        Tile("Training accuracy", number(history.recent(history.accuracies), ".1%"), validation),
    ]
    return Panel(
        tiles, (history.steps / run.config.total_steps, progress_text(race, run, history)), race.names[lane], lane
    )


def progress_text(race: Race, run: Run, history: Snapshot) -> str:
    status = run.state.status
    if status == "queued":
        is_next = not race.at_once and run is race.lanes[1] and race.lanes[0].state.status != "queued"
        return f"Begins when {race.names[0]} has finished" if is_next else "Waiting until the runs before it have ended"
    if status == "finished" and race.is_live and race.job.progress.text:
        return race.job.progress.text
    if status == "paused":
        return "Paused: on the Train page it can go on"
    if status == "stopped" and not history.steps:
        return "Did not begin"
    if status != "running":
        return status.capitalize()
    if run.control and run.control.stop.is_set():
        return "Stopping after this step …"
    if run.is_testing:
        return "Trained. Measuring on the test images …"
    if not history.steps:
        return "Loading MNIST …"
    epoch = min(history.steps // run.config.steps_per_epoch + 1, run.config.epochs)
    return f"Epoch {epoch:,} of {run.config.epochs:,}"


def curves(race: Race) -> list[tuple[dict[str, Any], str]]:
    """Accuracy and loss of both lanes over the seconds."""
    lanes = [
        (name, history, lane.config) for name, history, lane in zip(race.names, race.histories, race.lanes, strict=True)
    ]
    loss, right = comparison_figures(lanes, "seconds", DEFAULT_SMOOTHING, is_log=False)
    names = " and ".join(race.names)
    return [
        (right, f"Accuracy of {names} over the seconds: training smoothed, validation as marks."),
        (loss, f"Loss of {names} over the seconds: training smoothed, validation as marks."),
    ]


def breakdown(race: Race, result: Result) -> None:
    """Where the time of a step goes, as bars and in figures."""
    st.subheader("Where the time of a step goes", anchor=False)
    lanes = list(zip(race.names, result.times, strict=True))
    told = [
        f"{name}: {1000 * times.total:.2f} ms a step, the largest part {times.largest} "
        f"({times.parts[times.largest] / times.total:.0%})."
        for name, times in lanes
    ]
    st.markdown(plain(" ".join(told)))
    bars = step_times_figure([(name, times.parts) for name, times in lanes])
    description = "Milliseconds that each part of a training step takes; the table below has the figures."
    live(f"breakdown {race.lanes[0].id}", live_data([(bars, description)], "breakdown"))
    rows = {
        "lane": list(race.names),
        **{
            part: [f"{1000 * times.parts[part]:.2f} ms · {times.parts[part] / times.total:.0%}" for _, times in lanes]
            for part in result.times[0].parts
        },
        "together": [f"{1000 * times.total:.2f} ms" for _, times in lanes],
    }
    st.dataframe(rows, hide_index=True, alt="What each part of a training step takes, in milliseconds and percent.")
    st.caption(
        "Measured after the race, on up to 400 more steps of each lane, alone; the device is waited for after each "
        "part. data: to make the batch. copying: to move it to the device. forward: outputs, loss and accuracy. "
        "backward: gradients. optimizer: new weights."
        + " In the race itself an NVIDIA GPU does the last three as one recorded graph, which is faster."
        * any(lane.config.device.startswith("cuda") for lane in race.lanes)
    )


def compare_button(race: Race) -> None:
    if st.button("Compare them on the Runs page", icon=":material/folder_open:"):
        st.switch_page("pages/runs.py", query_params={"run": [lane.id for lane in race.lanes]})


def lookout(runs: RunManager, races: Races, known: Race | None, training: Run | None) -> None:
    """Follow a race that starts in another tab, and runs: the button and the sidebar tell of them."""
    if races.newest is not known or runs.training is not training:
        st.rerun()


with page("Race") as runs:
    main(runs)
