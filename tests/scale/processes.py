"""The processes of a run that is a program of its own: found by a mark in their environment."""

import contextlib
import os
import subprocess
import sys
import time

import psutil

from tests.processes import is_alive

MARK = "MARK_OF_TEST"


def list_marked(mark):
    """Returns the processes that carry a mark, and what they have started."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == str(mark) and is_alive(process):
                found.append(process)
    return found


def torchrun(project, *arguments, size=2):
    """Starts `reinforge` in several processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(size)]
    return run_alone(project, *arguments, launcher=launcher)


def run_alone(project, *arguments, launcher=()):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", MARK: str(project.folder)}
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "reinforge", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process, codes=(0,)):
    output, _ = process.communicate(timeout=600)
    assert process.returncode in codes, output
    return output


def wait_for_none(mark, seconds=15.0):
    deadline = time.monotonic() + seconds
    while left := list_marked(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def wait_for_metrics(project, process, seconds=150.0):
    """Returns the file of a run's metrics once it has the first epoch."""
    metrics, deadline = project.run / "training_metrics.jsonl", time.monotonic() + seconds
    while not metrics.exists() or not metrics.read_text().strip():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return metrics
