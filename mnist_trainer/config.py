"""The settings of a run, checked in one place for the page, the URL, the command line and Python."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from .errors import ConfigError

HOME_VARIABLE = "MNIST_TRAINER_HOME"  # names the folder with runs and data
AT_ONCE_VARIABLE = "MNIST_TRAINER_RUNS_AT_ONCE"  # how many runs train at a time

TRAIN_SIZE, VAL_SIZE = 50_000, 10_000
IMAGE_PIXELS, CLASSES = 28 * 28, 10

# One spelling everywhere: pages, URLs, command line and config.json; upper and lower case are alike.
OPTIMIZERS = ("SGD", "SGD-momentum", "Adam", "AdamW")
PIPELINES = ("on-device", "DataLoader")

MAX_EPOCHS = 1_000
MAX_LEARNING_RATE = 1e9  # 1e8 gives NaN within an epoch; there is nothing to see beyond it
MAX_HIDDEN_SIZE = 100_000  # a step takes seconds on a laptop; what is learnt at 1,024 is no worse
MAX_STEPS = 2_000_000  # each step is kept: 12 bytes in memory, some 40 on disk
MAX_SEED = 2**32 - 1


def check_epochs(value: object) -> int:
    """Return `value` if it is a whole number of epochs from 1 to `MAX_EPOCHS`.

    Raises:
        ConfigError: it is not.
    """
    return _whole("Epochs", value, 1, MAX_EPOCHS, "5 is a good start.")


def check_learning_rate(value: object) -> float:
    """Return `value` as a float if it is a usable learning rate.

    Raises:
        ConfigError: not a number, not finite, not above 0, or above `MAX_LEARNING_RATE`.
    """
    what = f"Learning rate must be a number above 0 and up to {MAX_LEARNING_RATE:g}"
    hint = "Try 0.5 with SGD, 0.001 with Adam."
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{what}; {_shown(value)} is not a number. {hint}")
    if not 0 < value <= MAX_LEARNING_RATE:  # NaN fails this too
        raise ConfigError(f"{what}; {_shown(value)} is not. {hint}")
    return float(value)


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Settings of one run, fixed once it starts. The defaults are the article's.

    Attributes:
        device: "auto" (the fastest available), or a PyTorch name such as "cpu" or "cuda:0".
        epochs: passes over the 50,000 training images, 1 to 1,000.
        learning_rate: above 0.
        hidden_size: units in the hidden layer, 1 to 100,000.
        batch_size: images per training step, 1 to 50,000; validation uses twice as many.
        optimizer: one of `OPTIMIZERS`.
        seed: of the split, the first weights and the order of the images, 0 to 2³² − 1.
        pipeline: one of `PIPELINES`; both give the same batches.

    Raises:
        ConfigError: a setting is outside its range; the message says which, and what to choose.
    """

    device: str = "auto"
    epochs: int = 5
    learning_rate: float = 0.5
    hidden_size: int = 32
    batch_size: int = 128
    optimizer: str = "SGD"
    seed: int = 0
    pipeline: str = "on-device"

    def __post_init__(self) -> None:
        check_epochs(self.epochs)
        object.__setattr__(self, "learning_rate", check_learning_rate(self.learning_rate))
        _whole("Hidden size", self.hidden_size, 1, MAX_HIDDEN_SIZE, self._hidden_size_hint())
        _whole("Batch size", self.batch_size, 1, TRAIN_SIZE, "There are 50,000 training images; try 128.")
        _whole("Seed", self.seed, 0, MAX_SEED, "Any number will do; 0 is the default.")
        object.__setattr__(self, "optimizer", _choice("Optimizer", self.optimizer, OPTIMIZERS))
        object.__setattr__(self, "pipeline", _choice("Pipeline", self.pipeline, PIPELINES))
        if not isinstance(self.device, str) or not self.device.strip():
            raise ConfigError(f"Device must be a name such as 'cpu'; {_shown(self.device)} is not.")
        if self.total_steps > MAX_STEPS:
            raise ConfigError(
                f"{self.epochs:,} epochs in batches of {self.batch_size:,} make {self.total_steps:,} steps, "
                f"more than {MAX_STEPS:,}. Choose fewer epochs or larger batches."
            )

    @classmethod
    def from_text(cls, texts: Mapping[str, str]) -> Self:
        """Read settings written by a person: a URL's or a command line's.

        Args:
            texts: field name → text; fields that are missing keep their defaults.

        Raises:
            ConfigError: a text is not a number where one is needed, or out of range.
        """
        values: dict[str, Any] = {name: parse(name, text) for name, text in texts.items()}
        return cls(**values)

    @classmethod
    def from_json(cls, values: object) -> Self:
        """Rebuild what `to_json` gave; unknown names are refused."""
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or not set(values) <= names:
            raise ConfigError(f"Settings must be an object with some of the names {', '.join(sorted(names))}.")
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """All settings as plain values."""
        return asdict(self)

    @property
    def steps_per_epoch(self) -> int:
        """Batches in the training set, the last one often smaller."""
        return math.ceil(TRAIN_SIZE / self.batch_size)

    @property
    def total_steps(self) -> int:
        """Optimizer updates in the whole run."""
        return self.epochs * self.steps_per_epoch

    @property
    def memory_bytes(self) -> int:
        """Estimate of what training takes: parameters in float32, and activations.

        Counted: weights, gradients, the optimizer's moments, two copies for whoever watches, weights and
        moments again while they are written to disk; for the largest batch its images, as bytes and as
        numbers, hidden units before and after the ReLU, and their gradients.
        """
        moments = {"SGD": 0, "SGD-momentum": 1}.get(self.optimizer, 2)
        images = max(self.batch_size, min(2 * self.batch_size, VAL_SIZE))
        activations = images * (5 * IMAGE_PIXELS + 12 * self.hidden_size)
        return 4 * parameter_count(self.hidden_size) * (5 + 2 * moments) + activations

    def _hidden_size_hint(self) -> str:
        if isinstance(self.hidden_size, int) and MAX_HIDDEN_SIZE < self.hidden_size < 10**15:
            size = 4 * parameter_count(self.hidden_size)
            return f"Its weights alone would take {readable_bytes(size)}. Try 32 to 1,024."
        return "Try 32 to 1,024."


def differing(configs: Sequence[TrainConfig]) -> list[str]:
    """Names of the settings that are not the same in all of these."""
    return [field.name for field in fields(TrainConfig) if len({getattr(config, field.name) for config in configs}) > 1]


def parse(name: str, text: str) -> int | float | str:
    """Turn the text of one setting into its type, without checking its range.

    Raises:
        ConfigError: the text is not a number where one is needed, or there is no such setting.
    """
    types = {field.name: field.type for field in fields(TrainConfig)}
    if name not in types:
        raise ConfigError(f"There is no setting '{name}'. The settings are {', '.join(types)}.")
    if types[name] is str:
        return text.strip()
    try:
        digits = "" if "_" in text else text  # Python would read 1_0 as 10, as nobody else does
        return int(digits) if types[name] is int else float(digits)
    except ValueError:
        kind = "a whole number" if types[name] is int else "a number"
        label = name.replace("_", " ").capitalize()
        raise ConfigError(f"{label} must be {kind}; {_shown(text)} is not.") from None


def parameter_count(hidden_size: int) -> int:
    """Weights and biases of the 784 → hidden → 10 network: 25,450 at hidden size 32."""
    return hidden_size * (IMAGE_PIXELS + 1) + CLASSES * (hidden_size + 1)


def readable_bytes(count: float) -> str:
    """`count` bytes as a person writes it: '3.2 GB' (powers of 1,000)."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1_000:
            return f"{count:.3g} {unit}"
        count /= 1_000
    return f"{count:,.3g} TB" if count < 1_000 else f"{count:,.0f} TB"


def _whole(label: str, value: object, low: int, high: int, hint: str) -> int:
    what = f"{label} must be a whole number from {low:,} to {high:,}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{what}; {_shown(value)} is not. {hint}")
    if not low <= value <= high:
        raise ConfigError(f"{what}; {_shown(value)} is not. {hint}")
    return value


def _choice(label: str, value: object, choices: tuple[str, ...]) -> str:
    for choice in choices:
        if isinstance(value, str) and value.casefold() == choice.casefold():
            return choice
    raise ConfigError(f"{label} must be one of {', '.join(choices)}; {_shown(value)} is not.")


def _shown(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        # Python refuses to write out an int of more than 4,300 digits.
        return f"{value:,}" if abs(value) < 10**15 else "a number of more than 15 digits"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "…"
