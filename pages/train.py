"""The Train page: settings, one button, and the run as it learns."""

from typing import Any

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from mnist_trainer.charts import X_AXES, accuracy_figure, loss_figure
from mnist_trainer.config import OPTIMIZERS, PIPELINES, TrainConfig
from mnist_trainer.devices import all_devices, find_device
from mnist_trainer.errors import MnistTrainerError, RunBusyError
from mnist_trainer.runs import Run, RunManager
from mnist_trainer.store import RunState
from mnist_trainer.ui.frame import errors_shown, page, plain, settings_line, status_badge
from mnist_trainer.ui.live_chart import live_chart

REFRESH_SECONDS = 0.5
LOOKOUT_SECONDS = 5.0  # for a run that somebody else starts
DEFAULT_SMOOTHING = 0.9
MAX_ADDRESS_CHARACTERS = 200
KEPT: dict[str, Any] = {"bind": "query-params", "on_change": "ignore"}  # in the URL; sent with the next button
ADVICE = "train_advice"  # in the session: why the last start was refused

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
    st.header("Train")
    check_address()
    controls()
    newest = runs.latest()
    newest_id = newest.id if newest else None
    run = chosen_run(runs, newest)
    buttons(runs, run, newest)
    if problem := st.session_state.get(ADVICE):
        st.error(plain(problem), icon=":material/error:")
    if run is None:
        st.info("No run yet. Keep these settings, or change them, and press **Start training**.")
        st.fragment(lookout, run_every=LOOKOUT_SECONDS)(runs, newest_id)
        return
    st.fragment(live_panel, run_every=REFRESH_SECONDS if run.is_live else None)(run, run.state)
    chart_options()
    st.fragment(lookout, run_every=None if run.is_live else LOOKOUT_SECONDS)(runs, newest_id)


def check_address() -> None:
    """Say what is wrong with settings in the URL: Streamlit would drop some of them without a word."""
    for key, setting in SETTINGS.items():
        text = st.query_params.get(key)
        if text is None or key in st.session_state:  # once mounted, the control and the URL agree
            continue
        if len(text) > MAX_ADDRESS_CHARACTERS:  # a number of so many digits breaks the control itself
            st.error(f"The address has {len(text):,} characters for {key}. Shorten it, and open it again.")
            st.stop()
        try:
            value = getattr(TrainConfig.from_text({setting: text}), setting)
            if key == "device":
                value = find_device(value.partition(" ")[0]).name  # the control writes the GPU's own name behind it
        except MnistTrainerError as error:
            st.warning(plain(f"{error} (The address has {key}={text[:60]}.)"))
        else:
            if isinstance(value, str):
                st.session_state[key] = value  # a list takes its own spelling only


def controls() -> None:
    """The four settings that a class talks about. What is set is kept in the URL, and sent with the button."""
    devices = all_devices()
    with st.container(border=True):
        grid = st.grid(4, min_column_width=150)
        grid.selectbox(
            "Device",
            [device.name for device in devices if device.is_available],  # the fastest first
            format_func=lambda name: name if name == "cpu" else f"{name} · {find_device(name).label}",
            key="device",
            help="\n\n".join(f"{device.name}: {device}" for device in devices),
            **KEPT,
        )
        number_input(grid, "Epochs", "epochs", 1, "Passes over the 50,000 training images.")
        number_input(
            grid,
            "Learning rate",
            "lr",
            0.1,
            "How far each step goes. 0.5 suits SGD, 0.1 SGD-momentum, 0.001 Adam and AdamW.",
        )
        number_input(grid, "Hidden size", "hidden", 32, "Units in the hidden layer: 784 → hidden → 10.")


def more_settings() -> None:
    with st.popover("More settings", icon=":material/tune:"):
        number_input(st, "Batch size", "batch", 32, "Images per step.")
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
            1,
            "One seed, one run: it sets the split, the first weights and the order of images.",
        )
        st.selectbox(
            "Data pipeline",
            PIPELINES,
            key="pipeline",
            help="on-device: all images lie on the device, batches are cut there. DataLoader: the article's way, "
            "image by image, then copied. Both give the same batches; compare the speed.",
            **KEPT,
        )


def number_input(place: Any, label: str, key: str, step: float, explained: str) -> None:
    # A float to Streamlit, whole or not: of "1e9" typed into a whole-number control it would take the 1.
    default = float(getattr(TrainConfig(), SETTINGS[key]))
    place.number_input(label, value=default, step=float(step), format="%g", key=key, help=explained, **KEPT)


def chosen_run(runs: RunManager, newest: Run | None) -> Run | None:
    """The run in the URL, or the newest: a reload or a second tab finds it again."""
    run_id = st.query_params.get("run")
    if run_id:
        try:
            return runs.get(run_id)
        except MnistTrainerError as error:
            st.warning(plain(f"{error} The newest run is shown instead."))
            del st.query_params["run"]
    return newest


def buttons(runs: RunManager, run: Run | None, newest: Run | None) -> None:
    training = runs.training
    with st.container(horizontal=True, vertical_alignment="center"):
        st.button(
            "Start training",
            type="primary",
            icon=":material/play_arrow:",
            shortcut="Ctrl+Shift+S",
            disabled=training is not None,
            on_click=start,
            args=(runs,),
        )
        st.button("Stop", icon=":material/stop:", disabled=training is None, on_click=stop, args=(runs,))
        more_settings()
        if newest and run and newest.is_live and newest.id != run.id:
            st.button("Show the run that is training", on_click=show, args=(newest.id,))
        has_ended = run and not run.is_live and run.has_weights
        if run and has_ended and st.button("Draw a digit", icon=":material/draw:"):
            st.switch_page("pages/draw.py", query_params={"run": run.id})
        if run and run.state.suggested_learning_rate:
            rate = run.state.suggested_learning_rate
            st.button(
                f"Try learning rate {rate:g}", icon=":material/replay:", on_click=retry, args=(runs, run.id, rate)
            )


def start(runs: RunManager) -> None:
    """Callback of Start training: the controls' values have come with the click."""
    begin(runs, {setting: st.session_state[key] for key, setting in SETTINGS.items()})


def retry(runs: RunManager, run_id: str, learning_rate: float) -> None:
    """Callback of "Try learning rate …": the same settings again, with that one."""
    stop(runs)
    try:
        settings = {**runs.get(run_id).config.to_json(), "learning_rate": learning_rate}
        find_device(settings["device"])  # a run of another machine may name one that is not here
    except MnistTrainerError as error:
        st.session_state[ADVICE] = str(error)
        return
    for key, setting in SETTINGS.items():
        st.session_state[key] = settings[setting]  # the controls show what is trained
    begin(runs, settings)


def begin(runs: RunManager, settings: dict[str, Any]) -> None:
    for name, value in settings.items():  # the controls give floats; what is not whole is refused in words
        if name != "learning_rate" and isinstance(value, float) and value.is_integer():
            settings[name] = int(value)
    try:
        run = runs.start(TrainConfig.from_json(settings))
    except RunBusyError:  # a double click, or somebody else was faster: their run is what there is to see
        st.query_params.pop("run", None)
    except MnistTrainerError as error:
        st.session_state[ADVICE] = str(error)
    else:
        st.session_state.pop(ADVICE, None)
        show(run.id)


def stop(runs: RunManager) -> None:
    if training := runs.training:
        training.request_stop()
        training.ended.wait(2)  # a step takes milliseconds: the page then shows the end at once


def show(run_id: str) -> None:
    st.query_params["run"] = run_id


def live_panel(run: Run, shown_state: RunState) -> None:
    """The run's progress, figures and charts: the only part of the page that refreshes by itself."""
    with errors_shown():
        run.refresh()
        if run.state != shown_state:
            st.rerun()  # the buttons above depend on it, and an ended run is not refreshed any more
        with st.container(horizontal=True, vertical_alignment="center"):
            status_badge(run)
            st.caption(f"{run.id} · {settings_line(run)}")
        if run.state.message:
            show_message = st.error if run.state.status in ("failed", "diverged") else st.warning
            show_message(plain(run.state.message))
        if run.is_live:
            if not run.is_trained_here:
                st.caption("Another program trains it; it is stopped there.")
            st.progress(run.snapshot().steps / run.config.total_steps, text=progress_text(run))
        figures(run)
        charts(run)
        st.caption(
            "Training: the last 50 batches. Validation: 10,000 images kept out of training, after each epoch. "
            "Test: 10,000 others, measured once, when the run has ended; nothing is chosen by them."
        )


def progress_text(run: Run) -> str:
    steps, config = run.snapshot().steps, run.config
    if run.is_testing:
        return "Trained. Measuring on the 10,000 test images …"
    if run.stop.is_set():
        return "Stopping after this step …"
    if not steps:
        return "Loading MNIST …"
    epoch = min(steps // config.steps_per_epoch + 1, config.epochs)
    return (
        f"Epoch {epoch:,} of {config.epochs:,} · step {steps:,} of {config.total_steps:,} · "
        f"{duration(run.seconds_left or 0)} left"
    )


def figures(run: Run) -> None:
    """The run in numbers, each with the set it is from. The tiles are the same from start to end."""
    history, state = run.snapshot(), run.state
    last, right, speed = history.last_epoch, history.recent(history.accuracies), run.images_per_second
    grid = st.grid(4, min_column_width=150)
    tile(grid, "Training accuracy", number(right, ".2%"), loss_text(history.recent(history.losses)))
    tile(
        grid,
        "Validation accuracy",
        number(last.val_accuracy if last else None, ".2%"),
        loss_text(last.val_loss if last else None),
    )
    tile(
        grid,
        "Test accuracy",
        number(state.test_accuracy, ".2%"),
        "when it ends" if run.is_live else loss_text(state.test_loss),
    )
    tile(
        grid,
        "Time so far" if run.is_live else "Total time",
        duration(run.seconds),
        f"{speed:,.0f} images/s" if speed else None,
    )


def tile(grid: DeltaGenerator, label: str, value: str, below: str | None) -> None:
    """A figure with a second line, which is no change for better or worse."""
    grid.metric(label, value, below, delta_color="off", delta_arrow="off", border=True, height="stretch")


def charts(run: Run) -> None:
    history, options = run.snapshot(), st.session_state
    x_axis, smoothing = options.get("x_axis", X_AXES[0]), options.get("smoothing", DEFAULT_SMOOTHING)
    revision = f"{run.id} {x_axis}"  # zoom is kept until another run or axis is shown
    left, right = st.columns(2)
    with left:
        figure = loss_figure(history, run.config, x_axis, smoothing, bool(options.get("log_scale")))
        live_chart("loss", figure, revision=revision, description=described("Loss", history.recent(history.losses)))
    with right:
        figure = accuracy_figure(history, run.config, x_axis, smoothing)
        shown = described("Accuracy", history.recent(history.accuracies))
        live_chart("accuracy", figure, revision=revision, description=shown)


def chart_options() -> None:
    with st.container(horizontal=True, gap="large"):
        st.segmented_control("X axis", X_AXES, default=X_AXES[0], required=True, key="x_axis", persist_state="session")
        st.slider("Smoothing", 0.0, 0.99, DEFAULT_SMOOTHING, key="smoothing", width=240, persist_state="session")
        st.toggle("Log scale for loss", key="log_scale", persist_state="session")


def lookout(runs: RunManager, known: str | None) -> None:
    """Follow a run that starts in another tab or program: a class has its pages open before the teacher begins."""
    newest = runs.latest()
    if (newest.id if newest else None) != known:
        st.rerun()


def described(what: str, value: float | None) -> str:
    return f"{what} over the run. Training, last 50 batches: {number(value, '.3f')}."


def number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def loss_text(value: float | None) -> str | None:
    return None if value is None else f"loss {value:.3f}" if value < 1000 else f"loss {value:.1e}"


def duration(seconds: float) -> str:
    """12.3 s, 4 min 05 s, 2 h 10 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds) // 60
    return f"{minutes} min {int(seconds) % 60:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


with page("Train") as runs:
    main(runs)
