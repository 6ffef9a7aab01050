"""Work in the background: followed, stopped, failed, and joined as the process ends."""

import subprocess
import sys
import threading

import pytest
import torch

from mnist_trainer.errors import ConfigError, RunBusyError
from mnist_trainer.job import Job


def ended(job: Job) -> Job:
    assert job.ended.wait(60)
    return job


def test_a_job_reports_and_ends() -> None:
    job = ended(Job(lambda job: job.report(0.5, "Half"), "half"))
    assert job.progress == (0.5, "Half")
    assert not job.is_live
    assert (job.problem, job.was_stopped) == ("", False)


def test_a_stop_ends_it_at_its_next_check() -> None:
    def check(job: Job) -> None:
        while True:
            job.check()

    job = Job(check, "endless")
    assert job.is_live
    job.stop(wait_seconds=60)
    assert not job.is_live
    assert (job.problem, job.was_stopped) == ("", True)


def test_where_no_thread_can_be_had_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RunBusyError, match=r"no thread left for it \(can't start new thread\)\. Try again later"):
        Job(lambda job: None, "one too many")


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (ConfigError("Too large. Choose less."), "Too large. Choose less."),
        (torch.OutOfMemoryError("CUDA out of memory"), "not enough memory for it. Choose something smaller."),
        (ValueError("no such thing.\nmore"), "It failed: no such thing. The details are in the server's log."),
    ],
)
def test_a_failure_becomes_a_sentence(error: Exception, problem: str) -> None:
    def fail(job: Job) -> None:
        raise error

    job = ended(Job(fail, "failing"))
    assert problem in job.problem
    assert not job.was_stopped


def test_a_process_ends_although_a_job_goes_on() -> None:
    code = """
import torch
from mnist_trainer.job import Job

def work(job):
    while True:
        job.check()
        torch.rand(300, 300) @ torch.rand(300, 300)

Job(work, "endless")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
