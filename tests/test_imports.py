"""Imports point one way: pages → mnist_trainer.ui → mnist_trainer, which knows nothing of Streamlit."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mnist_trainer

ROOT = Path(mnist_trainer.__file__).parents[1]
PACKAGE = sorted((ROOT / "mnist_trainer").rglob("*.py"))
DOMAIN = [path for path in PACKAGE if "ui" not in path.relative_to(ROOT).parts]


def imported(path: Path) -> Iterator[str]:
    """Full names of all that a source file imports, wherever in it, `mnist_trainer.ui` for `from . import ui`."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def offenders(paths: list[Path], *forbidden: str) -> list[str]:
    """Which of the files import one of these packages, or anything inside it."""
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in paths
        for name in imported(path)
        if any(f"{name}.".startswith(f"{package}.") for package in forbidden)
    ]


def python(code: str) -> str:
    """What `python -c` prints in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_domain_imports_neither_streamlit_nor_the_dashboard() -> None:
    assert {"data.py", "runs.py", "cli.py", "__init__.py", "__main__.py"} <= {path.name for path in DOMAIN}
    assert offenders(DOMAIN, "streamlit", "mnist_trainer.ui") == []


def test_the_package_imports_no_page() -> None:
    assert offenders(PACKAGE, "app", "pages") == []


def test_streamlit_is_imported_by_app_pages_ui_and_tests_only() -> None:
    ignored = ("app.py", "pages", "tests")
    others = [
        path
        for path in ROOT.rglob("*.py")
        if not any(part.startswith(".") or part in ("venv", "build") for part in path.relative_to(ROOT).parts)
        and path.relative_to(ROOT).parts[0] not in ignored
        and path.relative_to(ROOT).parts[:2] != ("mnist_trainer", "ui")
    ]
    assert set(DOMAIN) <= set(others)
    assert offenders(others, "streamlit") == []


def test_the_check_sees_an_import_in_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "mnist_trainer" / "module.py"
    source.parent.mkdir()
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    for line in ("import streamlit as st", "from streamlit.runtime import get_instance", "def f(): import streamlit"):
        source.write_text(line)
        assert len(offenders([source], "streamlit")) == 1
    for line in ("from . import ui", "from .ui import frame", "from .ui.frame import page", "import mnist_trainer.ui"):
        source.write_text(line)
        assert len(offenders([source], "mnist_trainer.ui")) == 1
    source.write_text("import streamlit_extras, appdirs")
    assert offenders([source], "streamlit", "app") == []


def test_all_public_names_resolve() -> None:
    assert [name for name in mnist_trainer.__all__ if getattr(mnist_trainer, name).__name__ != name] == []
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = mnist_trainer.nonsense


def test_everything_public_works_without_streamlit() -> None:
    code = """
import importlib, pkgutil, sys, tempfile
from pathlib import Path
import mnist_trainer
from mnist_trainer import *

for module in pkgutil.iter_modules(mnist_trainer.__path__):
    if module.name not in ("ui", "__main__"):
        importlib.import_module(f"mnist_trainer.{module.name}")
with tempfile.TemporaryDirectory() as folder:
    mnist = load_mnist(Path(folder))
    RunManager(Path(folder)).shutdown()
batches = [(mnist.test_images[:100].float() / 255, mnist.test_labels[:100])]
device = get_default_device()
loader = DeviceDataLoader(batches, device)
model = to_device(MnistModel(), device)
fit(TrainConfig(epochs=1).epochs, 0.5, model, loader, loader)
images, labels = next(iter(loader))
assert evaluate(model, loader)["val_acc"] == round(accuracy(model(images), labels).item(), 6)
assert issubclass(mnist_trainer.errors.ConfigError, MnistTrainerError)
print("streamlit" in sys.modules)
"""
    assert python(code).splitlines()[-1] == "False"


def test_the_bare_import_does_not_wait_for_pytorch() -> None:
    loaded = python("import mnist_trainer, sys; print(sorted({'torch', 'streamlit', 'plotly'} & set(sys.modules)))")
    assert loaded == "[]"
