"""What runs take of the machine's memory, in a process of its own."""

import json
from pathlib import Path

from tests.test_imports import python

MEGABYTE = 1_000_000


def test_a_run_takes_little_and_a_hundred_runs_no_more(module_home: Path) -> None:
    code = f"""
import gc, json, pathlib, psutil, threading, time
import torch
size = psutil.Process().memory_info
start = size().rss
from mnist_trainer.config import TrainConfig
from mnist_trainer.runs import RunManager

runs, peak, sizes = RunManager(pathlib.Path({str(module_home)!r})), 0, []
run = runs.start(TrainConfig(epochs=2))
while not run.ended.wait(0.01):
    peak = max(peak, size().rss)
for number in range(100):
    run = runs.start(TrainConfig(epochs=1, batch_size=10_000))
    run.ended.wait()
    assert run.state.status == "finished", run.state
    sizes.append(size().rss)
runs.shutdown()
print(json.dumps([start, peak, sizes]))
"""
    start, peak, sizes = json.loads(python(code))
    assert peak - start < 300 * MEGABYTE
    # The first ones fill the caches of what was looked at. What the allocator gives back at times comes and goes.
    assert min(sizes[-20:]) - min(sizes[20:40]) < 20 * MEGABYTE, [size // MEGABYTE for size in sizes]
