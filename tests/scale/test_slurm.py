"""examples/cluster/slurm.sh under a stand-in of Slurm: its `srun` runs a command here, in the place of two nodes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reinforge.engine.packages import is_installed
from tests.scale.processes import MARK, wait_for_none

SCRIPT = Path(__file__).parents[2] / "examples" / "cluster" / "slurm.sh"
PROGRAMS = {
    "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
    "scontrol": 'if [ "$1" = show ]; then printf "one\\ntwo\\n"; else echo "$@" >> scontrol.log; fi',
    "hostname": "echo 127.0.0.1",
    "reinforge": f'exec "{sys.executable}" -m reinforge "$@"',
}
pytestmark = [
    pytest.mark.fault,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not is_installed("ray"), reason="needs the extra `ray`"),
]


@pytest.fixture
def sbatch(project, tmp_path):
    """Starts the script as Slurm does."""
    place = tmp_path / "bin"
    place.mkdir()
    for name, text in PROGRAMS.items():
        (place / name).write_text(f"#!/bin/bash\n{text}\n")
        (place / name).chmod(0o755)
    project.set("trainer_adapters.adapter", {"_type": "ray", "address": "${RAY_ADDRESS}"})
    project.set("finetuning.num_epochs", 8)
    project.write_files()

    def start(restarts):
        variables = {
            "PATH": os.pathsep.join([str(place), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_CPUS_PER_TASK": "1",
            "SLURM_RESTART_COUNT": str(restarts),
            MARK: str(tmp_path),
        }
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        command = ["bash", str(SCRIPT), "run.yml", "-o", "trainer_adapters.adapter.num_workers", "2"]
        return subprocess.Popen(command, env={**kept, **variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    return start


def test_a_job_near_its_time_limit_is_queued_again_and_resumes(sbatch, project, tmp_path):
    metrics = project.folder / "runs" / "slurm-4711" / "training_metrics.jsonl"
    job, deadline = sbatch(0), time.monotonic() + 300
    while not (metrics.exists() and metrics.read_text().count("\n") >= 1):
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=200)
    assert b"--resume" in output
    assert (tmp_path / "scontrol.log").read_text() == "requeue 4711\n"
    wait_for_none(tmp_path, 60)
    done = len(metrics.read_text().splitlines())
    assert 1 <= done < 8
    job = sbatch(1)
    output, _ = job.communicate(timeout=300)
    assert job.returncode in (0, 3), output
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["epoch"] for row in rows] == list(range(8))
    wait_for_none(tmp_path, 60)
