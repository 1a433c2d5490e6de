"""Programs that misbehave cost one episode, and nothing of them outlives the run, however it ends."""

import json
import signal
import sys

import pytest

from tests.fault.kit import PATIENCE_S
from tests.outside_agents import PYTHON_AGENT
from tests.processes import find_survivors

ATTACK = """
import subprocess, threading, time

def attack(kind):
    try:
        os.close(os.open("attacked", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return
    children = [subprocess.Popen(["sleep", "3600"]), subprocess.Popen(["sleep", "3600"], start_new_session=True)]
    with open("pids.new", "w") as file:
        json.dump([os.getpid(), *(child.pid for child in children)], file)
    os.rename("pids.new", "pids")
    if kind == "exit":
        sys.exit("nothing works")
    if kind == "abort":
        os.abort()
    if kind == "hang":
        time.sleep(3600)
    if kind == "thread":
        threading.Thread(target=time.sleep, args=(3600,)).start()
        sys.exit(0)
    if kind == "flood":
        while True:
            sys.stdout.write("x" * 65536)
    if kind == "fork":
        while True:
            subprocess.Popen(["sleep", "3600"])

if os.environ["REINFORGE_IS_TRAINING"] == "0":
    attack("{kind}")
print(ask(sys.stdin.read(), max_tokens=4))
"""

REASONS = {
    "exit": "exited with code 1:\nnothing works",
    "abort": "was killed by SIGABRT",
    "hang": "not finished after 5 s",
    "thread": "not finished after 5 s",
    "flood": "it wrote more than 16 MiB to its standard output",
    "fork": "processes, more than max_processes (64)",
}


pytestmark = pytest.mark.slow


@pytest.fixture
def attacked(make_toy):
    def make(kind, timeout_s=5):
        toy = make_toy()
        toy.write("agent.py", PYTHON_AGENT + ATTACK.replace("{kind}", kind))
        toy.set("workflow", {"_type": "command", "command": [sys.executable, "agent.py"], "max_processes": 64})
        toy.rows = toy.rows[:24]  # each episode is a process
        toy.set("trajectory_builders.builder", {"_type": "group", "num_generations": 2, "examples_per_epoch": 2})
        toy.set("finetuning.num_epochs", 1).set("finetuning.limits", {"episode_timeout_s": timeout_s})
        toy.set("finetuning.outcomes", {"retries": 0, "max_missing": 0.5})
        return toy

    return make


def list_survivors(toy):
    return [each.name() for each in find_survivors(json.loads((toy.folder / "pids").read_text()))]


@pytest.mark.parametrize(
    "kind", [kind if kind == "exit" else pytest.param(kind, marks=pytest.mark.fault) for kind in REASONS]
)
def test_a_program_that_attacks_costs_its_own_episode(attacked, kind):
    toy = attacked(kind, timeout_s=5 if kind in ("hang", "thread") else 60)
    child = toy.start()
    assert (child.wait(PATIENCE_S), child.left_behind(), list_survivors(toy)) == (0, [], []), child.said
    failed = toy.rows_of("SELECT reason FROM episodes WHERE reason <> ''")
    reasons = [reason for (reason,) in failed if REASONS[kind] in reason]
    assert len(reasons) == 1, failed


def test_a_stopped_run_kills_its_programs_and_resumes(attacked):
    toy = attacked("hang", timeout_s=3600)
    child = toy.start()
    child.wait_for(toy.folder / "pids")
    child.send(signal.SIGTERM)
    assert (child.wait(seconds=30), child.left_behind(), list_survivors(toy)) == (143, [], []), child.said
    resumed = toy.resume()
    assert resumed.wait(100) == 0, resumed.said
    assert toy.summary["status"] == "completed"
