"""The benchmark measures what it says, and can be stopped. How fast anything is, is not asserted."""

import json

import pytest
import torch

from mnist_trainer import bench as bench_module
from mnist_trainer import step_times
from mnist_trainer.bench import CONTENDERS, bench
from mnist_trainer.cli import main
from mnist_trainer.config import PIPELINES, TRAIN_SIZE
from mnist_trainer.devices import threads_for


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "REPEATS", 1)
    monkeypatch.setattr(step_times, "MAX_SECONDS", 0.05)


def test_each_way_is_measured_and_set_against_the_others() -> None:
    reports: list[tuple[float, str]] = []
    threads = torch.get_num_threads()
    rows, parts = bench(["cpu"], [8], 1, lambda share, text: reports.append((share, text)))
    assert [share for share, _ in reports] == [0, 0.25, 0.5, 0.75, 1, 1]
    assert reports[3][1] == "cpu, hidden size 8: products"
    assert [(row.hidden_size, row.pipeline) for row in parts] == [(8, pipeline) for pipeline in PIPELINES]
    assert all(row.times.data > 0 for row in parts)
    assert [(row.hidden_size, row.way) for row in rows] == [(8, way) for way in CONTENDERS]
    seconds = {row.way: row.seconds for row in rows}
    for row in rows:
        assert row.images_per_second == TRAIN_SIZE / row.seconds
        assert row.times_article == seconds["article"] / row.seconds
        assert row.of_products == seconds["products"] / row.seconds
    assert torch.get_num_threads() == threads


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cpu", "--hidden", "8"]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split()[:3] == ["device", "hidden", "threads"]
    assert [line.split()[2] for line in lines[:4]] == [str(threads_for(100_000)), "1", "1", "1"]
    assert lines[5].split()[3:] == ["data", "copying", "forward", "backward", "optimizer"]
    assert [line.split()[2] for line in lines[6:]] == list(PIPELINES)
    assert main(["bench", "--device", "cpu", "--hidden", "8", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["way"] for row in result["rows"]] == list(CONTENDERS)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--hidden", "32,x"], "Hidden size must be a whole number; 'x' is not."),
        (["--hidden", "0"], "Hidden size must be a whole number from 1 to 100,000; 0 is not."),
        (["--device", "abacus"], "There is no device 'abacus' here."),
    ],
)
def test_bad_arguments_get_a_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert sentence in capsys.readouterr().err
