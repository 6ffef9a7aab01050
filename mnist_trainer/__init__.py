"""Train a digit classifier on MNIST and watch it learn: the tutorial's names, tidied.

    from mnist_trainer import MnistModel, fit, evaluate, get_default_device, to_device, DeviceDataLoader

Knows nothing of Streamlit; the dashboard's side is `mnist_trainer.ui`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import TrainConfig
    from .data import load_mnist
    from .devices import DeviceDataLoader, get_default_device, to_device
    from .errors import MnistTrainerError
    from .model import MnistModel, accuracy
    from .runs import RunManager
    from .training import evaluate, fit

__all__ = [
    "DeviceDataLoader",
    "MnistModel",
    "MnistTrainerError",
    "RunManager",
    "TrainConfig",
    "accuracy",
    "evaluate",
    "fit",
    "get_default_device",
    "load_mnist",
    "to_device",
]

_HOMES = {
    "config": ["TrainConfig"],
    "data": ["load_mnist"],
    "devices": ["DeviceDataLoader", "get_default_device", "to_device"],
    "errors": ["MnistTrainerError"],
    "model": ["MnistModel", "accuracy"],
    "runs": ["RunManager"],
    "training": ["evaluate", "fit"],
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    # Imported when first used: PyTorch takes seconds, which `--help` and a page's frame need not wait for.
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
