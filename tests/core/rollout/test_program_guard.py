"""Programs of a run that is killed (`kill -9`) end too, and their folders are removed."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from reinforge.rollout.workflows import program_runner

RUN = """
import asyncio, json, os, sys
from pathlib import Path
from reinforge.rollout.workflows import program_runner
from reinforge.rollout.workflows.program_runner import ProgramLimits, ProgramWatch, run_program

program_runner.GUARD = {guard} or program_runner.GUARD
program_runner.SUPERVISOR = Path({supervisor} or program_runner.SUPERVISOR)
AGENT = '''
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True, env={{}})
open("pids", "w").write(f"{{os.getpid()}} {{child.pid}}")
os.rename("pids", "ready")
child.wait()
'''

async def main():
    guard = program_runner.ProgramGuard()
    async with guard.open(), ProgramWatch().open() as watch, guard.open_folder() as folder:
        env = {{**os.environ, **guard.environment()}}
        command = [sys.executable, "-c", AGENT]
        work = run_program(command, cwd=folder, env=env, limits=ProgramLimits(), watch=watch)
        task = asyncio.create_task(work)
        while not (folder / "ready").exists():
            await asyncio.sleep(0.02)
        pids = [int(pid) for pid in (folder / "ready").read_text().split()]
        print(json.dumps([guard.pid, str(guard.folder), pids]), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        task.cancel()
        await asyncio.wait([task])

asyncio.run(main())
"""


def start(guard=None, supervisor=None):
    """Starts a run with one program and a child in a session of its own; returns the run and what it has started."""
    code = RUN.format(guard=repr(guard), supervisor=repr(supervisor))
    run = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    guard_pid, folder, pids = json.loads(run.stdout.readline())
    run.stdout.close()
    return run, psutil.Process(guard_pid), Path(folder), [psutil.Process(pid) for pid in pids]


def kill_run(guard=None, supervisor=None):
    run, guarding, folder, programs = start(guard, supervisor)
    run.kill()
    run.communicate()
    assert not psutil.wait_procs([guarding], timeout=30)[1]
    return psutil.wait_procs(programs, timeout=5 if supervisor else 30)[1], folder


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="the environment of a process cannot be read here")
def test_nothing_outlives_a_run_that_is_killed():
    left, folder = kill_run()
    assert not left
    assert not folder.exists()


@pytest.mark.slow
def test_without_the_guard_its_folder_outlives_the_run():
    """Mutation check; the programs end with their supervisors."""
    left, folder = kill_run(guard="import sys; sys.stdin.buffer.read()")
    assert not left
    assert folder.exists()
    shutil.rmtree(folder)


@pytest.mark.slow
def test_without_the_supervisors_ear_a_process_with_a_clean_environment_outlives_the_run(tmp_path):
    """Mutation check."""
    code = program_runner.SUPERVISOR.read_text().replace("SET_PARENT_DEATH_SIGNAL, signal.SIGTERM", "0, 0")
    (tmp_path / "supervisor.py").write_text(code)
    left, _ = kill_run(supervisor=str(tmp_path / "supervisor.py"))
    for process in left:
        process.kill()
    assert len(left) == 1


def test_the_guard_ends_with_its_run():
    run, guarding, folder, programs = start()
    run.communicate(timeout=60)
    assert run.returncode == 0
    assert not guarding.is_running()
    assert not folder.exists()
    assert not psutil.wait_procs(programs, timeout=30)[1]
