"""A run that is killed and resumed has each of its points on a dashboard once, and can be resumed from its copy."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from reinforge.crash import VARIABLE
from reinforge.interfaces import Tracker
from reinforge.trackers.mirror import fetch_run
from tests.fault.kit import KILLED, ROOT, TASK, differences
from tests.trackers.trackers import read_mlflow, read_tensorboard, read_trackio, read_wandb

SITES = ("batch.sealed:3", "export.mid")
REAL = {"tensorboard": "tensorboardX", "mlflow": "mlflow", "trackio": "trackio", "wandb": "wandb"}


def settings(name, folder):
    if name == "mlflow":
        return {"_type": name, "tracking_uri": (folder / "mlruns").as_uri()}
    return {"_type": name, **({"mode": "offline"} if name == "wandb" else {})}


def read(name, toy):
    [[key]] = toy.rows_of("SELECT value FROM run WHERE key = 'tracking_key'")
    if name == "tensorboard":
        return read_tensorboard(toy.run / "tensorboard")
    if name == "wandb":
        return read_wandb(toy.run / "wandb")
    if name == "trackio":
        with pytest.MonkeyPatch.context() as patch:  # the module may have been imported before
            patch.setattr("trackio.sqlite_storage.TRACKIO_DIR", toy.folder / "trackio")
            return read_trackio("reinforge", json.loads(key))
    return read_mlflow((toy.folder / "mlruns").as_uri(), json.loads(key))


def expected_rewards(toy):
    """Returns the reward of each epoch as its points should show it; each epoch makes two optimizer steps."""
    rows = json.loads((toy.run / "reward_history.json").read_text())
    return {2 * (row["epoch"] + 1): pytest.approx(row["avg_reward"], abs=1e-6) for row in rows}


@pytest.fixture
def tracked(make_toy, monkeypatch):
    """Returns a toy with one tracker; what it kept outside the run folder is in the toy's folder."""

    def make(name):
        pytest.importorskip(REAL[name])
        toy = make_toy()
        toy.set("finetuning.trackers", {"board": settings(name, toy.folder)})
        variables = {"TRACKIO_DIR": str(toy.folder / "trackio"), "MLFLOW_ALLOW_FILE_STORE": "true"}
        toy.write(
            "task.py", TASK + f"os.environ.update({variables})\n"
        )  # for the processes of the toy, and for this one
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value)
        return toy

    return make


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name == "tensorboard" else pytest.mark.fault) for name in REAL],
)
def test_a_killed_run_has_each_point_once(tracked, name):
    toy = tracked(name).end_after(*SITES)
    points = read(name, toy)
    assert len({(metric, step) for metric, step, _ in points}) == len(points)
    rewards, expected = (
        {step: value for metric, step, value in points if metric == "reward/mean"},
        expected_rewards(toy),
    )
    if name == "wandb":  # its own process writes, so it may lose what was sent just before the kill
        expected = {step: expected[step] for step in rewards}
    assert rewards == expected


@pytest.mark.parametrize(
    "site",
    [
        pytest.param("publish.mid:3", marks=pytest.mark.slow),
        *(
            pytest.param(site, marks=pytest.mark.fault)
            for site in ("batch.sealed:2", "export.mid", "step.after_optim:6")
        ),
    ],
)
def test_a_run_whose_machine_is_lost_resumes_from_its_copy(make_toy, finished, site):
    toy = make_toy()
    toy.set("finetuning.trackers", {"there": {"_type": "mirror", "location": str(toy.folder / "bucket")}})
    assert toy.start(crash_at=site).wait() == KILLED
    toy.run.rename(toy.folder / "lost")
    fetch_run(str(toy.folder / "bucket" / "r"), toy.run.parent)
    child = toy.resume()
    assert child.wait() == 0, child.said
    assert differences(toy.run, finished({}).run) == []
    fetched = fetch_run(str(toy.folder / "bucket" / "r"), toy.folder / "again")
    assert differences(fetched, toy.run) == []


@pytest.mark.fault
def test_the_script_of_a_cluster_starts_resumes_and_fetches_a_run(make_toy, finished):
    """By one line: at first, after a kill that left the folder, after one that did not, and when all is done."""
    grpo = {"finetuning.algorithm": {"_type": "grpo"}}
    toy = make_toy({**grpo, "finetuning.output_dir": ".reinforge/runs"})
    toy.write_files()
    toy.write("reinforge", f'#!/bin/bash\nexec "{sys.executable}" -m reinforge "$@"\n')
    (toy.folder / "reinforge").chmod(0o755)
    run, script = toy.folder / ".reinforge" / "runs" / "r", ROOT / "examples" / "cluster" / "resume.sh"

    def restart(crash_at=""):
        path = os.pathsep.join([str(toy.folder), os.environ["PATH"]])
        variables = {**os.environ, "PATH": path, "PYTHONPATH": str(toy.folder), VARIABLE: crash_at}
        command = ["bash", str(script), "r", str(toy.folder / "bucket"), "run.yml"]
        found = subprocess.run(command, cwd=toy.folder, env=variables, capture_output=True, text=True, check=False)
        return found.returncode, found.stdout + found.stderr

    for _ in range(2):
        code, output = restart("publish.mid:1")
        assert code == KILLED, output
    shutil.rmtree(run)
    code, output = restart("publish.mid:1")
    assert (code, "fetched" in output) == (KILLED, True)
    code, output = restart()
    assert code == 0, output
    assert differences(run, finished(grpo).run) == []
    code, output = restart()
    assert (code, "promoted" in output) == (0, True)


SLOW = """
import fsspec, time
from fsspec.implementations.local import LocalFileSystem

class SlowStorage(LocalFileSystem):
    protocol = "slow"

    def pipe_file(self, path, value, **options):
        if os.path.exists("stopped") and "manifests" in path:
            time.sleep(8)
        super().pipe_file(path, value)

fsspec.register_implementation("slow", SlowStorage, clobber=True)
"""


def forget_that_a_copy_takes_time():
    Tracker.stop_s = 60.0  # as long as a mirror waits, so that it is no exception


@pytest.mark.slow
@pytest.mark.parametrize("mutation", [None, forget_that_a_copy_takes_time])
def test_a_run_that_is_stopped_waits_for_its_copy(make_toy, mutation):
    toy = make_toy({"finetuning.num_epochs": 1000})
    toy.write("task.py", TASK + SLOW)
    toy.set("finetuning.trackers", {"there": {"_type": "mirror", "location": f"slow://{toy.folder}/bucket"}})
    child = toy.start(mutation=mutation)
    child.wait_for(toy.folder / "bucket" / "r" / "manifests" / "000002.json")
    toy.write("stopped", "")
    child.send(signal.SIGTERM)
    assert child.wait() == 143, child.said
    fetched = fetch_run(str(toy.folder / "bucket" / "r"), toy.folder / "fetched")
    assert (fetched / "summary.json").exists() == (mutation is None)
