"""The Train page: settings, one button, and the run as it learns."""

import time
from collections.abc import Callable
from typing import Any

import streamlit as st

from mnist_trainer.charts import accuracy_figure, loss_figure, machine_figure
from mnist_trainer.config import OPTIMIZERS, TrainConfig, check_learning_rate
from mnist_trainer.control import Control
from mnist_trainer.errors import MnistTrainerError
from mnist_trainer.machine import recent_use
from mnist_trainer.run import Run
from mnist_trainer.runs import RunManager
from mnist_trainer.ui.frame import errors_shown, page, plain, settings_line, status_badge
from mnist_trainer.ui.live import (
    Panel,
    Tile,
    chart_looks,
    chart_options,
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
    KEPT,
    batch_size_input,
    check_address,
    device_input,
    hidden_size_input,
    number_input,
    pipeline_input,
    whole,
)

LOOKOUT_SECONDS = 5.0  # for a run that somebody else starts
ADVICE, STARTED = "train_advice", "train_started"  # in the session: why the last start was refused; what it was
DOUBLE_CLICK_SECONDS = 1.0
SETTLE_SECONDS = 2.0  # a step takes milliseconds
LEARNING_RATES = tuple(float(f"{digit}e{power}") for power in range(-4, 2) for digit in (1, 2, 5))  # 0.0001 to 50

# A control's key, which is its name in the URL too → the setting.
SETTINGS = {
    "device": "device",
    "epochs": "epochs",
    "lr": "learning_rate",
    "hidden": "hidden_size",
    "batch": "batch_size",
    "optimizer": "optimizer",
    "seed": "seed",
    "pipeline": "pipeline",
}


def main(runs: RunManager) -> None:
    with st.container(horizontal=True, vertical_alignment="center", horizontal_alignment="distribute"):
        st.header("Train", width="content")
        more_settings_place = st.container(width="content")
    check_address(SETTINGS)
    with more_settings_place:
        more_settings()
    controls()
    current = runs.current()
    current_id = current.id if current else None
    run = chosen_run(runs, current)
    busy = runs.training
    shown = facts(run) if run else ()  # before anything is shown of it: what changes meanwhile is seen by the panel
    buttons(runs, run, current, is_busy=busy is not None)
    if problem := st.session_state.get(ADVICE):
        st.error(plain(problem), icon=":material/error:")
    if run is None:
        st.info("No run yet. Keep these settings, or change them, and press **Start training**.")
        st.fragment(lookout, run_every=LOOKOUT_SECONDS)(runs, current_id, busy)
        return
    head(run)
    interval = page_interval()
    panel = st.fragment(live_panel, run_every=interval if run.is_live else None)
    panel(runs, run.id, shown, interval)
    st.caption(
        "Training: the last 50 batches. Validation: 10,000 images kept out of training, after each epoch. "
        "Test: 10,000 others, measured once, when the run has ended; nothing is chosen by them."
    )
    chart_options()
    st.fragment(lookout, run_every=None if run.is_live else LOOKOUT_SECONDS)(runs, current_id, busy)


def controls() -> None:
    """The four settings that a class talks about. What is set is kept in the URL, and sent with the button."""
    with st.container(border=True):
        grid = st.grid(4, min_column_width=150)
        device_input(grid, "device")
        number_input(grid, "Epochs", "epochs", ARTICLE.epochs, 1, "Passes over the 50,000 training images.")
        number_input(
            grid,
            "Learning rate",
            "lr",
            ARTICLE.learning_rate,
            0.1,
            "How far each step goes. 0.5 suits SGD, 0.1 SGD-momentum, 0.001 Adam and AdamW.",
        )
        hidden_size_input(grid, "hidden")


def more_settings() -> None:
    with st.popover("More settings", icon=":material/tune:"):
        batch_size_input(st, "batch")
        st.selectbox(
            "Optimizer",
            OPTIMIZERS,
            key="optimizer",
            help="SGD-momentum has momentum 0.9. With Adam or AdamW, choose a learning rate near 0.001.",
            **KEPT,
        )
        number_input(
            st,
            "Seed",
            "seed",
            ARTICLE.seed,
            1,
            "One seed, one run: it sets the split, the first weights and the order of images.",
        )
        pipeline_input(st, "pipeline")


def chosen_run(runs: RunManager, current: Run | None) -> Run | None:
    """The run in the URL, or the one that trains, or the newest: a reload or a second tab finds it again."""
    run_id = st.query_params.get("run")
    if run_id:
        try:
            return runs.get(run_id)
        except MnistTrainerError as error:
            st.warning(plain(f"{error} The newest run is shown instead."))
            del st.query_params["run"]
    return current


def buttons(runs: RunManager, run: Run | None, current: Run | None, *, is_busy: bool) -> None:
    """Start a run, and steer the one that is shown. They keep their places, whatever its state."""
    status = run.state.status if run and run.is_trained_here else ""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.button(
            "Queue it" if is_busy else "Start training",
            type="primary",
            icon=":material/playlist_add:" if is_busy else ":material/play_arrow:",
            shortcut="Ctrl+Shift+S",
            key="start",
            on_click=start,
            args=(runs,),
        )
        shown = (runs, run.id if run else "")
        steering: dict[str, Any] = {"args": shown, "disabled": status not in ("running", "paused")}
        if status == "paused":
            st.button("Go on", icon=":material/resume:", key="pause", on_click=go_on, **steering)
        else:
            st.button("Pause", icon=":material/pause:", key="pause", on_click=pause, **steering)
        st.button("Step", icon=":material/step:", on_click=step, help="Pause, and take one step.", **steering)
        is_waiting = status == "queued"
        st.button(
            "Withdraw" if is_waiting else "Stop",
            icon=":material/stop:",
            key="stop",
            disabled=not status,
            on_click=stop,
            args=shown,
        )
        if run and status in ("running", "paused"):
            learning_rate_slider(runs, run)
        if run and not run.is_live:
            after_the_end(runs, run)
        if current and run and current.is_live and current.id != run.id:
            st.button("Show the run that is training", on_click=show, args=(current.id,))


def learning_rate_slider(runs: RunManager, run: Run) -> None:
    """Move the learning rate while it trains. It has the value that is in force, whoever moved it."""
    now = run.learning_rate
    key = f"rate {run.id} {now!r}"
    st.select_slider(
        "Learning rate now",
        sorted({*LEARNING_RATES, now}),
        now,
        format_func=lambda rate: f"{rate:g}",
        key=key,
        on_change=move_learning_rate,
        args=(runs, run.id, key),
        width=230,
    )


def after_the_end(runs: RunManager, run: Run) -> None:
    """What can be done with a run that is over."""
    if not runs.problem_with_resuming(run):
        st.button(
            "Resume",
            icon=":material/resume:",
            on_click=resume,
            args=(runs, run.id),
            help="Goes on from its last checkpoint, as if it had never stopped.",
        )
    if run.has_weights:
        continue_settings(runs, run)
        if st.button("Draw a digit", icon=":material/draw:"):
            st.switch_page("pages/draw.py", query_params={"run": run.id})
    if rate := run.state.suggested_learning_rate:
        st.button(f"Try learning rate {rate:g}", icon=":material/replay:", on_click=retry, args=(runs, run.id, rate))


def continue_settings(runs: RunManager, run: Run) -> None:
    with st.popover("Continue", icon=":material/fast_forward:"):
        st.caption("Trains this network further, as a new run; this one stays as it is.")
        epochs, rate = f"more epochs {run.id}", f"more rate {run.id}"
        st.number_input("Epochs more", value=5.0, step=1.0, format="%g", key=epochs)
        suggested = float(run.state.suggested_learning_rate or run.learning_rate)
        st.number_input("Learning rate", value=suggested, step=0.1, format="%g", key=rate)
        st.button(
            "Continue training",
            type="primary",
            key="continue",
            on_click=continue_run,
            args=(runs, run.id, epochs, rate),
        )


def start(runs: RunManager) -> None:
    """Callback of Start training: the controls' values have come with the click."""
    settings = {setting: whole(st.session_state[key], setting) for key, setting in SETTINGS.items()}
    before, at, earlier = st.session_state.get(STARTED, ({}, 0.0, None))
    is_double_click = settings == before and time.monotonic() - at < DOUBLE_CLICK_SECONDS
    if is_double_click and earlier.is_live:  # one wish; another one, once that run is over
        return
    if run := begin(lambda: runs.start(TrainConfig.from_json(settings))):
        st.session_state[STARTED] = settings, time.monotonic(), run


def retry(runs: RunManager, run_id: str, learning_rate: float) -> None:
    """Callback of "Try learning rate …": the same settings again, with that one."""

    def again() -> Run:
        settings = {**runs.get(run_id).config.to_json(), "learning_rate": learning_rate}
        run = runs.start(TrainConfig.from_json(settings))
        for key, setting in SETTINGS.items():
            st.session_state[key] = settings[setting]  # the controls show what is trained
        return run

    begin(again)


def resume(runs: RunManager, run_id: str) -> None:
    begin(lambda: runs.resume(run_id))


def continue_run(runs: RunManager, run_id: str, epochs_key: str, rate_key: str) -> None:
    epochs, learning_rate = whole(st.session_state[epochs_key], "epochs"), st.session_state[rate_key]
    begin(lambda: runs.continue_run(run_id, epochs, check_learning_rate(learning_rate)))


def begin(make: Callable[[], Run]) -> Run | None:
    """Show the run that `make` gives, or say why there is none."""
    try:
        run = make()
    except MnistTrainerError as error:
        st.session_state[ADVICE] = str(error)
        return None
    st.session_state.pop(ADVICE, None)
    show(run.id)
    return run


def steered(runs: RunManager, run_id: str, ask: Callable[[Control], None], is_done: Callable[[Run], bool]) -> None:
    """Ask something of the run that is shown, and wait a moment for it: the page then shows it at once."""
    try:
        run = runs.get(run_id)
        if not run.is_trained_here or run.control is None:
            return
        ask(run.control)
    except MnistTrainerError as error:
        st.session_state[ADVICE] = str(error)
        return
    deadline = time.monotonic() + SETTLE_SECONDS
    while run.is_live and not is_done(run) and time.monotonic() < deadline:
        run.ended.wait(0.01)


def pause(runs: RunManager, run_id: str) -> None:
    steered(runs, run_id, Control.pause, lambda run: run.state.status == "paused")


def go_on(runs: RunManager, run_id: str) -> None:
    steered(runs, run_id, Control.go_on, lambda run: run.state.status == "running")


def step(runs: RunManager, run_id: str) -> None:
    before = list[int]()

    def ask(control: Control) -> None:
        before.append(runs.get(run_id).snapshot().steps)
        control.step()

    steered(runs, run_id, ask, lambda run: run.state.status == "paused" and run.snapshot().steps > before[0])


def move_learning_rate(runs: RunManager, run_id: str, key: str) -> None:
    rate = st.session_state[key]
    steered(runs, run_id, lambda control: control.set_learning_rate(rate), lambda run: run.learning_rate == rate)


def stop(runs: RunManager, run_id: str) -> None:
    steered(runs, run_id, lambda _: runs.stop(runs.get(run_id)), lambda run: run.ended.is_set())


def show(run_id: str) -> None:
    st.query_params["run"] = run_id


def head(run: Run) -> None:
    """What is shown and how it stands: all that stays the same until the state changes."""
    with st.container(horizontal=True, vertical_alignment="center"):
        status_badge(run)
        st.caption(f"{plain(run.name)} · {settings_line(run)}")
    for message in filter(None, (run.state.message, run.problem)):
        show_message = st.error if run.state.status in ("failed", "diverged") else st.warning
        show_message(plain(message))
    if run.is_live and not run.is_trained_here:
        st.caption("Another program trains it; it is steered there.")


def live_panel(runs: RunManager, run_id: str, shown: tuple[object, ...], interval: float) -> None:
    """The run's progress, figures and charts: the only part of the page that refreshes by itself."""
    with errors_shown():
        try:
            run = runs.get(run_id)
        except MnistTrainerError:  # somebody has taken its folder away: the page says so, and shows another
            st.rerun()
        is_wrong = run.is_live and has_wrong_interval(interval)
        if facts(run) != shown or is_wrong:
            st.rerun()  # the page around it depends on them
        looks = chart_looks()
        history = run.snapshot()
        version = (run.state, history.steps, len(history.epochs), history.rates, run.is_testing, place(runs, run))
        is_moving = run.state.status == "running"
        key = (run.folder.path, run.state.status, run.is_testing, *looks)
        live("panel", shared(key, version, lambda: panel_data(runs, run, *looks), is_moving=is_moving))


def facts(run: Run) -> tuple[object, ...]:
    """What the page says of the run outside the panel."""
    run.snapshot()  # finds what is wrong with its history
    return run.state, run.is_trained_here, run.learning_rate, run.problem, run.name


def panel_data(runs: RunManager, run: Run, x_axis: str, smoothing: float, is_log: bool) -> dict[str, Any]:
    """What the panel shows, the same for all pages that show this run in this way."""
    history = run.snapshot()
    loss = loss_figure(history, run.config, x_axis, smoothing, is_log)
    right = accuracy_figure(history, run.config, x_axis, smoothing)
    charts = [
        (loss, described("Loss", history.recent(history.losses))),
        (right, described("Accuracy", history.recent(history.accuracies))),
    ]
    if run.is_live:
        charts.append((machine_figure(recent_use(), run.config.device), "How busy this machine was."))
    progress = (history.steps / run.config.total_steps, progress_text(runs, run)) if run.is_live else None
    # Zoom is kept until another run or axis is shown.
    return live_data(charts, f"{run.id} {x_axis}", [Panel(tiles(run), progress)])


def place(runs: RunManager, run: Run) -> str:
    """Where it stands in the queue, if it waits here."""
    if run.state.status != "queued":
        return ""
    waiting = [other.id for other in runs.waiting]
    return f": place {waiting.index(run.id) + 1} of {len(waiting)} in the queue" if run.id in waiting else ""


def progress_text(runs: RunManager, run: Run) -> str:
    steps, config, status = run.snapshot().steps, run.config, run.state.status
    if status == "queued":
        return f"Waiting for its turn{place(runs, run)}."
    if run.is_testing:
        return "Trained. Measuring on the 10,000 test images …"
    if run.control and run.control.stop.is_set():
        return "Stopping after this step …"
    if run.control and run.control.is_paused and status != "paused":
        return "Pausing after this step …"
    if not steps:
        return "Loading MNIST …"
    epoch = min(steps // config.steps_per_epoch + 1, config.epochs)
    return f"Epoch {epoch:,} of {config.epochs:,} · step {steps:,} of {config.total_steps:,}" + (
        " · paused" if status == "paused" else f" · {duration(run.seconds_left or 0)} left"
    )


def tiles(run: Run) -> list[Tile]:
    """The run in numbers, each with the set it is from. They are the same from start to end."""
    history, state = run.snapshot(), run.state
    last, right, speed = history.last_epoch, history.recent(history.accuracies), run.images_per_second
    return [
        Tile("Training accuracy", number(right, ".2%"), loss_text(history.recent(history.losses))),
        Tile(
            "Validation accuracy",
            number(last.val_accuracy if last else None, ".2%"),
            loss_text(last.val_loss if last else None),
        ),
        Tile(
            "Test accuracy",
            number(state.test_accuracy, ".2%"),
            "when it ends" if run.is_live else loss_text(state.test_loss),
        ),
        Tile(
            "Time so far" if run.is_live else "Total time",
            duration(run.seconds),
            f"{speed:,.0f} images/s" if speed else "",
        ),
    ]


def lookout(runs: RunManager, known: str | None, busy: Run | None) -> None:
    """Follow a run that starts in another tab or program: a class has its pages open before the teacher begins."""
    current = runs.current()
    if (current.id if current else None) != known or runs.training is not busy:
        st.rerun()


def described(what: str, value: float | None) -> str:
    return f"{what} over the run. Training, last 50 batches: {number(value, '.3f')}."


def loss_text(value: float | None) -> str:
    return "" if value is None else f"loss {value:.3f}" if value < 1000 else f"loss {value:.1e}"


with page("Train") as runs:
    main(runs)
