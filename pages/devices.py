"""The Devices page: what this machine is, and what it can do, measured while a class looks on."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import psutil
import streamlit as st

from mnist_trainer.charts import copy_figure, layer_figure, product_figure
from mnist_trainer.config import readable_bytes
from mnist_trainer.devices import Device, all_devices, find_device, free_memory
from mnist_trainer.errors import MnistTrainerError
from mnist_trainer.machine import this_machine
from mnist_trainer.measurements import Measure, Measurement
from mnist_trainer.rates import Rate, copy_rates, product_rates
from mnist_trainer.ui.frame import errors_shown, measurements, page, plain
from mnist_trainer.ui.live import Panel, has_wrong_interval, live, live_data, page_interval, shared
from mnist_trainer.ui.settings import device_text
from mnist_trainer.vgg import LayerTime, Step, check_vgg_fits, vgg_memory, vgg_step

LOOKOUT_SECONDS = 5.0  # for what somebody else begins
MAX_BUSY = 0.25  # share of the CPU that others may use without much harm to a measurement
SETTLE_SECONDS = 2.0  # a stop is heeded within a product of matrices, or a layer
REFUSED = "devices_refused"  # in the session: which measurement was not begun, and why
PRODUCTS, COPIES, VGG = "Matrix multiplication", "Copying to a device", "A step of VGG16"
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CPU_BATCH_SIZES = BATCH_SIZES[:5]  # a layer of more takes too long to be stopped
CPU_BATCH_SIZE, GPU_BATCH_SIZE = 2, 32  # a step on the CPU of a small laptop takes some five seconds


def main() -> None:
    st.header("Devices")
    known = stand()  # before anything is shown of it: what begins meanwhile is seen by the lookout
    with st.spinner("Trying the devices …"):
        devices = all_devices()
    works = [device for device in devices if device.is_available]
    facts(devices, default=works[0])
    names, has_others = ", ".join(device.name for device in works), len(works) > 1
    with section(PRODUCTS):
        st.caption(
            "Training is made of products of matrices. Small ones are over before a device gets going; "
            "with large ones each shows its full speed, and a GPU leaves the CPU far behind."
        )
        buttons(PRODUCTS, "Measure multiplication", lambda: (names, partial(product_rates, works)))
    with section(COPIES):
        st.caption(
            "What a GPU computes with has to be in its own memory first. From pinned memory, which the system may "
            "not move, it is copied faster; a small piece takes as long as a larger one."
            if has_others
            else "There is nothing to copy to here: no device but the CPU works. What is measured instead is a copy "
            "within this machine's memory."
        )
        about = names if has_others else "within the memory"
        buttons(COPIES, "Measure copying", lambda: (about, partial(copy_rates, works)))
    with section(VGG):
        st.caption(
            "A well-known network of 2014, with 138 million parameters: its convolutions take most of the time, its "
            "last three layers hold most of the weights. The step is a real one, on made-up images."
        )
        vgg_controls(works)
    st.fragment(lookout, run_every=None if measurements().live else LOOKOUT_SECONDS)(known)


def facts(devices: Sequence[Device], default: Device) -> None:
    """What this machine is, and each device, with why one cannot be used."""
    machine, free = this_machine(), psutil.virtual_memory().available
    cores = f"{machine.cores} physical, {machine.logical_cores} logical" if machine.cores else machine.logical_cores
    rows = {
        "Processor": machine.processor,
        "Cores": f"{cores}; instructions up to {machine.instruction_set}",
        "Memory": f"{readable_bytes(machine.memory_bytes)}, {readable_bytes(free)} of it free",
        "PyTorch": f"{machine.torch_version}, built for {machine.torch_build}",
        "NVIDIA driver": machine.driver_version,
        "System": machine.system,
    }
    left, right = st.columns(2)
    with left, st.container(border=True, height="stretch"):
        st.subheader("This machine")
        st.markdown("  \n".join(f"**{name}** · {plain(value)}" for name, value in rows.items() if value))
    with right, st.container(border=True, height="stretch"):
        st.subheader("What PyTorch can use")
        for device in devices:
            if device.is_available:
                badge, text = ":green-badge[:material/check:", device.label + ", the default" * (device == default)
            else:
                badge, text = ":gray-badge[:material/close:", f"{device.label}: {device.problem}"
            st.markdown(f"{badge} {device.name}] {plain(text)}")


@contextmanager
def section(kind: str) -> Iterator[None]:
    """What can be measured, with its controls inside, and below them what came of the newest measurement."""
    with st.container(border=True):
        st.subheader(kind)
        yield
        if st.session_state.get(REFUSED, ("", ""))[0] == kind:
            st.error(plain(st.session_state.pop(REFUSED)[1]), icon=":material/error:")
        if measurement := measurements().newest(kind):
            if measurement.job.problem:
                st.error(plain(measurement.job.problem), icon=":material/error:")
            is_live, interval = measurement.job.is_live, page_interval()
            panel = st.fragment(live_panel, run_every=interval if is_live else None)
            panel(measurement, is_live, interval)
            if steps := [row for row in measurement.rows if isinstance(row, Step)]:
                st.markdown(comparison(steps))


def buttons(kind: str, label: str, wanted: Callable[[], tuple[str, Measure]]) -> None:
    """Begin and stop; `wanted` gives what is measured, and how."""
    measurement = measurements().newest(kind)
    is_live = measurement is not None and measurement.job.is_live
    with st.container(horizontal=True):
        st.button(
            label,
            icon=":material/speed:",
            type="primary",
            disabled=is_live,
            key=f"begin {kind}",
            on_click=begin,
            args=(kind, wanted),
        )
        st.button("Stop", icon=":material/stop:", disabled=not is_live, key=f"stop {kind}", on_click=stop, args=(kind,))


def vgg_controls(works: Sequence[Device]) -> None:
    with st.container(horizontal=True):
        name = st.selectbox(
            "Device",
            [device.name for device in works],
            format_func=device_text,
            key="vgg_device",
            width=280,
            persist_state="session",
        )
        sizes, usual = (CPU_BATCH_SIZES, CPU_BATCH_SIZE) if name == "cpu" else (BATCH_SIZES, GPU_BATCH_SIZE)
        images = st.selectbox(
            "Batch size", sizes, sizes.index(usual), key=f"vgg_batch {name}", width=130, persist_state="session"
        )
    with st.spinner("Estimating …"):  # once in a process this takes a second or two
        need = vgg_memory(images)
    st.caption(
        f"It will take about **{readable_bytes(need.total)}** of {name}'s memory: weights "
        f"{readable_bytes(need.weights)}, gradients {readable_bytes(need.gradients)}, what the forward pass keeps for "
        f"the backward pass {readable_bytes(need.activations)}, workspace {readable_bytes(need.workspace)}. "
        f"{readable_bytes(free_memory(name))} is free."
    )

    def wanted() -> tuple[str, Measure]:
        device = find_device(name)
        check_vgg_fits(images, device.name)
        return f"{images} image{'s' * (images != 1)} on {name}", partial(vgg_step, device, images)

    buttons(VGG, "Take one step", wanted)


def begin(kind: str, wanted: Callable[[], tuple[str, Measure]]) -> None:
    """Callback of a section's first button: begin, or say why not."""
    try:
        measurements().start(kind, *wanted())
    except MnistTrainerError as error:
        st.session_state[REFUSED] = kind, str(error)


def stop(kind: str) -> None:
    if measurement := measurements().newest(kind):
        measurement.job.stop(SETTLE_SECONDS)


def stand() -> tuple[object, ...]:
    """What the page around the panels depends on."""
    return tuple((each, each.job.is_live) for each in map(measurements().newest, (PRODUCTS, COPIES, VGG)) if each)


def lookout(known: tuple[object, ...]) -> None:
    """Follow a measurement that begins on another phone."""
    if stand() != known:
        st.rerun()


def live_panel(measurement: Measurement, is_live: bool, interval: float) -> None:
    """Progress and chart of a measurement: only this refreshes, and only while it is going on."""
    with errors_shown():
        job = measurement.job
        if job.is_live != is_live or (is_live and has_wrong_interval(interval)):
            st.rerun()
        version = (is_live, job.progress, len(measurement.rows))
        data = shared(measurement, version, lambda: panel_data(measurement), is_moving=is_live)
        live(f"panel {measurement.kind}", data)


def panel_data(measurement: Measurement) -> dict[str, Any]:
    """What the panel shows, the same for all pages."""
    job, rows, kind = measurement.job, measurement.rows, measurement.kind
    progress = (job.progress.share, f"{job.progress.text} …") if job.is_live else None
    title = measurement.about + " · stopped" * job.was_stopped
    if measurement.busy_before > MAX_BUSY:
        title += f" · too low, perhaps: something else kept {measurement.busy_before:.0%} of the CPU busy"
    panel = Panel(title=title, progress=progress)
    names = [device.name for device in all_devices()]
    if kind == VGG:
        laps = [row for row in rows if isinstance(row, LayerTime)]
        figure, said = layer_figure(laps), f"seconds of each layer; {len(laps)} are measured."
    else:
        figure = (product_figure if kind == PRODUCTS else copy_figure)(rows, names)
        said = f"rate by size on {measurement.about}; the highest is {highest(kind, rows)}."
    return live_data([(figure, f"{kind}, {said}")], kind, [panel])


def highest(kind: str, rates: Sequence[Rate]) -> str:
    per_second = max((rate.per_second for rate in rates), default=0.0) / 1e9
    return f"{rounded(per_second)} {'GFLOP/s' if kind == PRODUCTS else 'GB/s'}"


def comparison(steps: Sequence[Step]) -> str:
    """The networks' steps beside each other, as a table in Markdown."""
    rows = {
        "": [step.network for step in steps],
        "Parameters": [f"{step.parameters:,}" for step in steps],
        "Forward pass": [duration(step.forward_seconds) for step in steps],
        "Backward pass": [duration(step.backward_seconds) for step in steps],
        "Update of the weights": [duration(step.optimizer_seconds) for step in steps],
        "Images per second": [rounded(step.images_per_second) for step in steps],
        "Memory at its highest": [memory_text(step) for step in steps],
    }
    lines = [" | ".join([name, *values]) for name, values in rows.items()]
    return "\n".join([f"| {line} |" for line in (lines[0], "|".join(["---"] * (len(steps) + 1)), *lines[1:])])


def memory_text(step: Step) -> str:
    if step.memory_bytes is None:
        return "–"
    return f"{readable_bytes(step.memory_bytes)}, estimated {readable_bytes(vgg_memory(step.images).total)}"


def duration(seconds: float) -> str:
    """4.81 s, 350 ms, 0.35 ms."""
    return f"{rounded(seconds)} s" if seconds >= 1 else f"{rounded(1000 * seconds)} ms"


def rounded(value: float) -> str:
    """Three digits, or as many as are before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


with page("Devices"):
    main()
