"""Settings: what is refused, in which words, and what is read back as it was written."""

from typing import Any

import pytest

from mnist_trainer.config import OPTIMIZERS, PIPELINES, TrainConfig, parameter_count
from mnist_trainer.errors import ConfigError
from mnist_trainer.model import MnistModel

REFUSED: list[tuple[str, object, str]] = [
    ("epochs", 0, "Epochs must be a whole number from 1 to 1,000; 0 is not."),
    ("epochs", -1, "-1 is not"),
    ("epochs", 10**9, "1,000,000,000 is not"),
    ("epochs", "abc", "'abc' is not"),
    ("epochs", True, "True is not"),
    ("epochs", 2.5, "2.5 is not"),
    ("epochs", None, "None is not"),
    ("learning_rate", 0, "Learning rate must be a number above 0 and up to 1e+09; 0 is not."),
    ("learning_rate", -1, "-1 is not"),
    ("learning_rate", float("nan"), "nan is not"),
    ("learning_rate", float("inf"), "inf is not"),
    ("learning_rate", 1e30, "1e+30 is not"),
    ("learning_rate", "x", "'x' is not a number"),
    ("learning_rate", True, "True is not a number"),
    ("learning_rate", 10**400, "a number of more than 15 digits is not"),
    ("hidden_size", 0, "Hidden size must be a whole number from 1 to 100,000; 0 is not."),
    ("hidden_size", 10**12, "1,000,000,000,000 is not. Its weights alone would take 3,180 TB."),
    ("batch_size", 0, "Batch size must be a whole number from 1 to 50,000; 0 is not."),
    ("batch_size", 50_001, "50,001 is not"),
    ("seed", -1, "Seed must be a whole number from 0 to 4,294,967,295; -1 is not."),
    ("seed", 2**32, "4,294,967,296 is not"),
    ("optimizer", "Lion", "Optimizer must be one of SGD, SGD-momentum, Adam, AdamW; 'Lion' is not."),
    ("optimizer", None, "None is not"),
    ("pipeline", "tape", "Pipeline must be one of on-device, DataLoader; 'tape' is not."),
    ("device", "", "Device must be a name such as 'cpu'; '' is not."),
    ("device", "  ", "'  ' is not"),
    ("device", 0, "0 is not"),
]


@pytest.mark.parametrize(("field", "value", "told"), REFUSED)
def test_a_bad_setting_is_refused_in_a_short_line_that_names_the_value(field: str, value: Any, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**{field: value})
    message = str(caught.value)
    assert told in message
    assert message.startswith(field.replace("_", " ").capitalize())
    assert message.endswith(".")
    assert "\n" not in message
    assert len(message) < 200


@pytest.mark.parametrize("digits", [200, 400])
def test_an_astronomic_hidden_size_is_refused_in_a_short_line_too(digits: int) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.from_text({"hidden_size": "1" + "0" * digits})
    assert len(str(caught.value)) < 200


def test_too_many_steps_are_refused_with_their_number() -> None:
    with pytest.raises(ConfigError, match=r"^1,000 epochs in batches of 1 make 50,000,000 steps.*Choose fewer epochs"):
        TrainConfig(epochs=1_000, batch_size=1)


@pytest.mark.parametrize(
    "value",
    [
        {"epochs": 1, "learning_rate": 1e9},
        {"epochs": 1_000, "learning_rate": 1},
        {"hidden_size": 1, "batch_size": 50_000, "seed": 2**32 - 1},
        {"hidden_size": 100_000, "batch_size": 1, "seed": 0},
    ],
)
def test_the_bounds_themselves_are_allowed(value: dict[str, Any]) -> None:
    config = TrainConfig(**value)
    assert {name: config.to_json()[name] for name in value} == value
    assert isinstance(config.learning_rate, float)


def test_the_defaults_are_the_articles() -> None:
    config = TrainConfig()
    assert (config.hidden_size, config.batch_size, config.optimizer) == (32, 128, "SGD")
    assert (config.steps_per_epoch, config.total_steps) == (391, 1955)


def test_settings_are_read_from_text() -> None:
    texts = {"epochs": "3", "learning_rate": " 1e-3 ", "optimizer": "adam", "device": " cpu ", "seed": "7"}
    assert TrainConfig.from_text(texts) == TrainConfig("cpu", 3, 0.001, optimizer="Adam", seed=7)
    assert TrainConfig.from_text({}) == TrainConfig()


@pytest.mark.parametrize(
    ("field", "text", "told"),
    [
        ("epochs", "many", "Epochs must be a whole number; 'many' is not."),
        ("epochs", "2.5", "'2.5' is not"),
        ("epochs", "", "'' is not"),
        ("epochs", "9" * 5_000, "Epochs must be a whole number"),
        ("epochs", "0", "; 0 is not."),
        ("learning_rate", "fast", "Learning rate must be a number; 'fast' is not."),
        ("learning_rate", "nan", "nan is not"),
        ("batch_size", "1e3", "Batch size must be a whole number; '1e3' is not."),
        ("optimizer", "", "'' is not"),
        ("device", " ", "'' is not"),
        ("colour", "red", "There is no setting 'colour'. The settings are device, epochs, learning_rate,"),
    ],
)
def test_bad_text_is_refused_with_the_text(field: str, text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.from_text({field: text})
    assert told in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("spelling", [str.upper, str.lower, str.title])
def test_upper_and_lower_case_of_an_optimizer_are_alike(name: str, spelling: Any) -> None:
    assert TrainConfig(optimizer=spelling(name)).optimizer == name


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("spelling", [str.upper, str.lower, str.title])
def test_upper_and_lower_case_of_a_pipeline_are_alike(name: str, spelling: Any) -> None:
    assert TrainConfig(pipeline=spelling(name)).pipeline == name


def test_json_gives_the_settings_back() -> None:
    config = TrainConfig("cuda:0", 2, 0.1, 64, 32, "AdamW", 9, "DataLoader")
    assert TrainConfig.from_json(config.to_json()) == config
    assert TrainConfig.from_json({"epochs": 2}) == TrainConfig(epochs=2)


@pytest.mark.parametrize("values", [{"epochs": 1, "colour": "red"}, [1, 2], None, "epochs", {3: 4}])
def test_json_with_an_unknown_name_or_no_object_is_refused(values: object) -> None:
    with pytest.raises(ConfigError, match="Settings must be an object with some of the names batch_size"):
        TrainConfig.from_json(values)


def test_parameters_are_counted_as_pytorch_counts_them() -> None:
    assert parameter_count(32) == 25_450
    for size in (1, 32, 100):
        assert parameter_count(size) == sum(weights.numel() for weights in MnistModel(hidden_size=size).parameters())


def test_memory_grows_with_the_hidden_size_the_batch_and_the_optimizers_moments() -> None:
    sizes = [TrainConfig(hidden_size=size).memory_bytes for size in (1, 32, 1_024, 100_000)]
    moments = [TrainConfig(optimizer=name).memory_bytes for name in ("SGD", "SGD-momentum", "Adam")]
    batches = [TrainConfig(batch_size=size).memory_bytes for size in (1, 128, 5_000)]
    for growing in (sizes, moments, batches):
        assert growing == sorted(set(growing))
