"""The controls of a run's settings, on each page that starts runs. What is set is kept in the address."""

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from mnist_trainer import devices
from mnist_trainer.config import PIPELINES, TrainConfig
from mnist_trainer.errors import MnistTrainerError
from mnist_trainer.ui.frame import plain

ARTICLE = TrainConfig()
MAX_ADDRESS_CHARACTERS = 200
KEPT: dict[str, Any] = {"bind": "query-params", "on_change": "ignore"}  # in the URL; sent with the next button


def check_address(settings: Mapping[str, str]) -> None:
    """Say what is wrong with settings in the URL: Streamlit would drop some of them without a word.

    Args:
        settings: a control's key, which is its name in the URL too → the setting.
    """
    for key, setting in settings.items():
        text = st.query_params.get(key)
        if text is None or key in st.session_state:  # once mounted, the control and the URL agree
            continue
        if len(text) > MAX_ADDRESS_CHARACTERS:  # a number of so many digits breaks the control itself
            st.error(f"The address has {len(text):,} characters for {key}. Shorten it, and open it again.")
            st.stop()
        try:
            # Of the page that was left and is come back to, Streamlit writes 5 as 5.0.
            value = getattr(TrainConfig.from_text({setting: text.removesuffix(".0")}), setting)
            if setting == "device":
                name = value.partition(" ")[0]  # the control writes the GPU's own name behind it
                value = devices.find_device(name).name
        except MnistTrainerError as error:
            st.warning(plain(f"{error} (The address has {key}={text[:60]}.)"))
        else:
            if isinstance(value, str):
                st.session_state[key] = value  # a list takes its own spelling only


def device_text(name: str) -> str:
    """A device in a list of them: PyTorch's name, and what a person calls it."""
    return name if name == "cpu" else f"{name} · {devices.find_device(name).label}"


def device_input(place: Any, key: str, default: str = "auto") -> None:
    """A list of the devices that work, the fastest first."""
    known = devices.all_devices()
    names = [device.name for device in known if device.is_available]
    place.selectbox(
        "Device",
        names,
        index=0 if default == "auto" else _index(names, default, key),
        format_func=device_text,
        key=key,
        help="\n\n".join(f"{device.name}: {device}" for device in known),
        **KEPT,
    )


def pipeline_input(place: Any, key: str, default: str = ARTICLE.pipeline) -> None:
    place.selectbox(
        "Data pipeline",
        PIPELINES,
        index=_index(PIPELINES, default, key),
        key=key,
        help="on-device: all images lie on the device, batches are cut there. DataLoader: the article's way, "
        "image by image, then copied. Both give the same batches; compare the speed.",
        **KEPT,
    )


def _index(choices: Sequence[str], default: str, key: str) -> int:
    """Where the default stands. Beside a value from the address Streamlit wants no other one."""
    return 0 if key in st.session_state else choices.index(default)


def hidden_size_input(place: Any, key: str, default: float = ARTICLE.hidden_size) -> None:
    number_input(place, "Hidden size", key, default, 32, "Units in the hidden layer: 784 → hidden → 10.")


def batch_size_input(place: Any, key: str) -> None:
    number_input(place, "Batch size", key, ARTICLE.batch_size, 32, "Images per step.")


def number_input(place: Any, label: str, key: str, default: float, step: float, explained: str, **look: Any) -> None:
    # A float to Streamlit, whole or not: of "1e9" typed into a whole-number control it would take the 1.
    place.number_input(
        label, value=float(default), step=float(step), format="%g", key=key, help=explained, **look, **KEPT
    )


def whole(value: Any, setting: str) -> Any:
    """The controls give floats; what is not whole is refused in words, later."""
    return int(value) if setting != "learning_rate" and isinstance(value, float) and value.is_integer() else value
