"""Devices: which are offered, why others are not, and how data gets there."""

import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from mnist_trainer import devices
from mnist_trainer.config import TrainConfig
from mnist_trainer.devices import Device, DeviceDataLoader, find_device, get_default_device, problem_with, to_device
from mnist_trainer.errors import ConfigError, DeviceUnavailableError
from mnist_trainer.model import MnistModel

META, CPU = torch.device("meta"), torch.device("cpu")
Offer = Callable[..., None]


class Pair(NamedTuple):
    """A named batch."""

    images: Tensor
    labels: Tensor


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Offer:
    """Makes these the machine's devices."""

    def replace(*found: Device) -> None:
        monkeypatch.setattr(devices, "all_devices", lambda: found)

    return replace


@pytest.fixture
def cuda_reason(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Why CUDA is not offered, on a PyTorch that is built for `version` and warns of `warning` when asked."""

    def reason(version: str | None, warning: str = "") -> str:
        def is_available() -> bool:
            if warning:
                warnings.warn(warning, stacklevel=2)
            return False

        monkeypatch.setattr(torch.version, "cuda", version)
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "is_available", is_available)
        (cuda,) = [device for device in devices._all_devices.__wrapped__() if device.name.startswith("cuda")]
        assert not cuda.is_available
        return cuda.problem

    return reason


@pytest.mark.skipif(torch.cuda.is_available() or torch.backends.mps.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_default_is_the_cpu_and_the_others_have_a_reason() -> None:
    assert get_default_device() == CPU
    assert [device.name for device in devices.all_devices() if device.is_available] == ["cpu"]
    assert all(device.problem.endswith(".") for device in devices.all_devices() if device.name != "cpu")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_cuda_device_is_offered_and_takes_batches() -> None:
    assert get_default_device() == torch.device("cuda:0")
    assert find_device("cuda").name == "cuda:0"
    moved = to_device([torch.arange(3), {"model": MnistModel()}], "cuda")
    assert moved[0].device == torch.device("cuda:0")
    assert moved[0].tolist() == [0, 1, 2]
    assert all(weights.is_cuda for weights in moved[1]["model"].parameters())
    assert 0 < devices.free_memory("cuda:0") <= torch.cuda.get_device_properties(0).total_memory


def test_nothing_nested_is_left_behind() -> None:
    data: dict[str, Any] = {
        "pair": Pair(torch.ones(2), torch.zeros(3)),
        "list": [torch.ones(1), (torch.ones(4), 7)],
        "text": "a",
    }
    moved = to_device(data, META)
    assert isinstance(moved["pair"], Pair)
    assert isinstance(moved["list"][1], tuple)
    tensors = [*moved["pair"], moved["list"][0], moved["list"][1][0]]
    assert [(tensor.device, len(tensor)) for tensor in tensors] == [(META, 2), (META, 3), (META, 1), (META, 4)]
    assert (moved["list"][1][1], moved["text"]) == (7, "a")
    assert data["list"][0].device == CPU


def test_a_module_is_moved_in_place() -> None:
    model = MnistModel()
    assert to_device(model, "meta") is model
    assert {weights.device for weights in model.parameters()} == {META}


@pytest.mark.parametrize("value", [3, 2.5, "text", None, [], (), {}])
def test_what_cannot_be_moved_comes_back_as_it_is(value: object) -> None:
    assert to_device(value, "cpu") == value
    assert type(to_device(value, "cpu")) is type(value)


def test_a_loaders_batches_arrive_on_the_device_each_time() -> None:
    loader = DeviceDataLoader(DataLoader(TensorDataset(torch.ones(10, 2), torch.ones(10)), batch_size=4), META)
    assert len(loader) == 3
    for _ in range(2):
        assert [[part.device for part in batch] for batch in loader] == [[META, META]] * 3
    values = DeviceDataLoader([(torch.arange(3), torch.arange(2))], "cpu")
    assert [part.tolist() for part in next(iter(values))] == [[0, 1, 2], [0, 1]]


def test_training_on_another_device_leaves_nothing_on_the_cpu() -> None:
    model = to_device(MnistModel(), META)
    images, labels = to_device((torch.rand(4, 1, 28, 28), torch.zeros(4, dtype=torch.int64)), META)
    loss = model.training_step((images, labels))
    loss.backward()
    assert {part.device for part in (loss, model.train_acc, *[w.grad for w in model.parameters()])} == {META}


@pytest.mark.parametrize("name", ["cpu", "CPU", " cpu "])
def test_a_device_is_found_in_any_case(name: str) -> None:
    assert find_device(name).name == "cpu"


def test_auto_is_the_first_that_works(offer: Offer) -> None:
    offer(Device("cuda:0", "old", "its driver is too old."), Device("cuda:1", "new"), Device("cpu", "CPU"))
    assert find_device("auto").name == find_device("Auto").name == "cuda:1"
    assert get_default_device() == torch.device("cuda:1")


def test_a_broken_device_is_never_silently_replaced(offer: Offer) -> None:
    offer(Device("cuda:0", "GPU", "its driver is too old."), Device("cuda:1", "GPU"), Device("cpu", "CPU"))
    for name in ("cuda", "cuda:0"):
        with pytest.raises(DeviceUnavailableError) as caught:
            find_device(name)
        told = f"Device '{name}' is not available: its driver is too old. Choose 'cuda:1' or 'cpu'."
        assert str(caught.value) == told


def test_cuda_is_the_first_gpu(offer: Offer) -> None:
    offer(Device("cuda:0", "one"), Device("cuda:1", "two"), Device("cpu", "CPU"))
    assert find_device("cuda").label == "one"
    assert find_device("CUDA:1").label == "two"


@pytest.mark.parametrize("name", ["tpu", "", "cuda:7", "cpu:0:0"])
def test_an_unknown_device_is_refused_with_the_choices(name: str, offer: Offer) -> None:
    offer(Device("cuda:0", "GPU"), Device("mps", "GPU", "broken."), Device("cpu", "CPU"))
    with pytest.raises(DeviceUnavailableError) as caught:
        find_device(name)
    assert str(caught.value) == f"There is no device '{name}' here. Choose 'cuda:0' or 'cpu'."


def test_the_cpu_agrees_with_itself() -> None:
    assert problem_with("cpu") == ""


@pytest.mark.parametrize(("factor", "is_off"), [(1.02, True), (0.98, True), (1.002, False), (float("nan"), True)])
def test_arithmetic_that_is_off_is_told(factor: float, is_off: bool) -> None:
    loss = devices._loss_after_steps("cpu")
    problem = problem_with("cpu", reference_loss=lambda: loss * factor)
    told = f"its arithmetic is off (loss {loss:.4f} where the CPU has {loss * factor:.4f})."
    assert problem == (told if is_off else "")


@pytest.mark.parametrize("name", ["meta", "nonsense", "cuda:99"])
def test_a_device_that_fails_says_why(name: str) -> None:
    assert re.fullmatch(r"it failed when tried \([^\n]{10,}\)\.", problem_with(name))


def test_trying_a_device_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    problem_with("cpu")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_cpu_build_of_pytorch_is_told(cuda_reason: Callable[..., str]) -> None:
    assert cuda_reason(None) == "this is a CPU build of PyTorch."


def test_a_missing_gpu_is_told(cuda_reason: Callable[..., str]) -> None:
    assert cuda_reason("13.0") == "PyTorch sees no NVIDIA GPU or no driver for it."


def test_an_old_driver_is_told_in_pytorchs_words(cuda_reason: Callable[..., str]) -> None:
    warning = "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). Please update"
    assert cuda_reason("13.0", warning) == f"{warning.partition('. ')[0]}."


def test_a_gpu_that_fails_at_its_first_call_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def asleep(_: object) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure\nCUDA kernel errors might be reported later.")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", asleep)
    first = devices._all_devices.__wrapped__()[0]
    assert first.name == "cuda:0"
    assert first.problem == "it failed when tried (CUDA error: unspecified launch failure)."


def test_a_network_that_does_not_fit_is_refused_with_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "free_memory", lambda device: 100_000_000)
    with pytest.raises(ConfigError, match=r"^Hidden size 100,000 needs about \d.* GB .* cpu has 90 MB to spare\."):
        devices.check_fits(TrainConfig(hidden_size=100_000), "cpu")
    monkeypatch.setattr(devices, "free_memory", lambda device: 1_000)
    with pytest.raises(ConfigError, match=r"has 900 bytes to spare\. Choose a smaller batch"):
        devices.check_fits(TrainConfig(), "cpu")


@pytest.mark.parametrize("free", [2_000_000, 100_000_000, 1_000_000_000])
def test_the_hidden_size_proposed_instead_fits(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "free_memory", lambda device: free)
    with pytest.raises(ConfigError, match="Choose at most") as caught:
        devices.check_fits(TrainConfig(hidden_size=100_000), "cpu")
    proposed = int(str(caught.value).rpartition("at most ")[2].strip(".").replace(",", ""))
    assert proposed > 1
    devices.check_fits(TrainConfig(hidden_size=proposed), "cpu")


def test_a_small_network_fits_in_what_is_really_free() -> None:
    assert devices.free_memory("cpu") > TrainConfig().memory_bytes
    devices.check_fits(TrainConfig(), "cpu")
