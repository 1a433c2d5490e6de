"""Kills during a change of the promoted version: it is one of the two, whole, and the log has every change once."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from reinforge.files import MANIFEST
from reinforge.serving.version_folder import VersionFolder
from tests.fault.sizes import scaled

CHANGE = """
import sys
from pathlib import Path
from reinforge.serving import version_folder
from reinforge.serving.version_folder import Cause, VersionFolder
{mutation}
folder = VersionFolder(Path(sys.argv[1]))
print("ready", flush=True)
while True:
    folder.promote(2, Cause(evidence={{"scores": [0.5] * 5000}}))
    folder.rollback()
    {add}
"""
WRITE_IN_PLACE = """
import json
def write(path, value):
    with open(path, "w") as file:
        file.write(json.dumps(value))
version_folder.write_json = write
"""
FORGET_THE_EVENT = "VersionFolder._append = lambda folder, event, rows=[]: None"
ADD = 'folder.add(folder.path(1), {"data": "more"}) if len(folder.numbers()) < 40 else None'


@pytest.fixture
def folder(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(bytes(1 << 20))
    versions = VersionFolder(tmp_path / "support")
    for _ in range(2):
        versions.add(model, {})
    return versions


def start(folder, mutation="", add="", **variables):
    program = CHANGE.format(mutation=mutation, add=add)
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(folder.folder)],
        stdout=subprocess.PIPE,
        env={**os.environ, **variables},
        text=True,
    )
    process.stdout.readline()
    return process


def find_problems(folder):
    """Returns what a reader finds wrong after a kill; empty: all is whole."""
    try:
        state, log = folder.read(), folder.read_log()
    except (ValueError, OSError) as error:
        return [str(error)]
    problems = [] if state.promoted in (1, 2) else [f"{state.promoted} is promoted"]
    if [each.number for each in log] != list(range(1, len(log) + 1)):
        problems.append("the log has a gap, or a change twice")
    moved = [each.version for each in log if each.action in ("promote", "rollback")]
    if moved and moved[-1] != state.promoted:
        problems.append("the log ends with another version")
    previous = None
    for each in log:
        if each.previous != previous:
            problems.append(f"change {each.number} does not follow the one before")
        previous = each.version if each.action in ("promote", "rollback") or previous is None else previous
    listed = [path for path in folder.folder.glob("v*/") if not (path / MANIFEST).is_file()]
    return problems + [f"{path.name} is partly written" for path in listed]


@pytest.mark.fault
@pytest.mark.parametrize("site", ["publish.before:1", "publish.before:4", "publish.mid:1", "publish.mid:4"])
def test_a_change_killed_at_a_crash_point_happened_or_did_not(folder, site):
    process = start(folder, REINFORGE_CRASH_AT=site)
    assert process.wait(60) == -signal.SIGKILL
    assert find_problems(folder) == []
    count = int(site[-1])
    assert len(folder.read_log()) == 2 + count - (site.startswith("publish.before"))
    folder.promote(1)
    assert find_problems(folder) == []


def kill_at_random(folder, num_kills, **settings):
    rng, found = random.Random(0), []
    for _ in range(num_kills):
        process = start(folder, **settings)
        time.sleep(rng.uniform(0, 0.05))
        process.kill()
        process.wait()
        found += find_problems(folder)
        if found:
            break
    return found


@pytest.mark.fault
def test_kills_at_random_times(folder):
    assert kill_at_random(folder, scaled(50), add=ADD) == []
    folder.add(folder.path(1), {})
    assert find_problems(folder) == []
    assert not list(folder.folder.glob(".tmp-*")), "what killed processes left is removed"


@pytest.mark.fault
@pytest.mark.parametrize("mutation", [WRITE_IN_PLACE, FORGET_THE_EVENT], ids=["written in place", "no log"])
def test_without_the_atomic_write_or_the_log_a_kill_shows(folder, mutation):
    """Mutation check."""
    assert kill_at_random(folder, 100, mutation=mutation) != []
