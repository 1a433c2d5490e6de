"""`isolation: process`: the same run as in one process, and agents that nothing else can stop cost their episode."""

import os
import signal
import time

import psutil
import pytest

from tests.fault import mutations
from tests.fault.kit import KILLED, PATIENCE_S, differences
from tests.fault.test_hostile_agents import AGENT, EVALUATOR, attacked

BOTH = {"workflow.isolation": "process", "eval.evaluators.vowels.isolation": "process"}


def isolate(toy):
    for path, value in BOTH.items():
        toy.set(path, value)
    return toy


@pytest.mark.fault
def test_a_run_is_the_same_bit_for_bit(make_toy, whole):
    toy = isolate(make_toy())
    child = toy.start()
    assert (child.wait(PATIENCE_S), child.left_behind()) == (0, []), child.said
    assert differences(toy.run, whole.run) == []


@pytest.mark.slow
def test_a_run_with_agents_in_two_shared_processes_is_the_same_bit_for_bit(make_toy, whole):
    toy = make_toy({"workflow.placement": "processes", "workflow.num_processes": 2})
    child = toy.start()
    assert (child.wait(PATIENCE_S), child.left_behind()) == (0, []), child.said
    assert differences(toy.run, whole.run) == []


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("hold", marks=pytest.mark.slow),
        *(pytest.param(kind, marks=pytest.mark.fault) for kind in ("close", "spin", "ignore")),
    ],
)
def test_an_attack_costs_its_own_episode(make_toy, kind):
    """Each process attacks in its first held-out episode; those episodes fail, and the run ends by itself."""
    toy = isolate(attacked(make_toy, kind))
    toy.set("eval.general.max_concurrency", 1)
    toy.set("eval.evaluators.vowels.isolation", "thread")
    toy.write("task.py", (toy.folder / "task.py").read_text().replace("left.pop()", "claim()") + CLAIM)
    child = toy.start()
    assert (child.wait(PATIENCE_S), workers_of(toy)) == (0, []), child.said
    assert toy.summary["episodes"]["tool_error" if kind == "close" else "timeout"] == 1


CLAIM = """

def claim():
    try:
        os.close(os.open("claimed", os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False
"""


def workers_of(toy):
    found = []
    for process in psutil.process_iter(["cwd", "cmdline", "status"]):
        command = " ".join(process.info["cmdline"] or [])
        here = process.info["cwd"] == str(toy.folder) and process.info["status"] != psutil.STATUS_ZOMBIE
        if here and "reinforge.rollout.isolation.worker" in command:
            found.append(process.pid)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("where", [AGENT, EVALUATOR], ids=["agent", "evaluator"])
def test_a_signal_stops_the_run_and_its_workers(make_toy, where):
    toy = isolate(attacked(make_toy, "hold", where, timeout_s=3600))
    child = toy.start()
    child.wait_for(toy.folder / "attacked")
    child.send(signal.SIGTERM)
    assert (child.wait(seconds=10), workers_of(toy)) == (143, []), child.said
    assert "so the process exits" not in child.said, "it stops as any other run"


@pytest.mark.slow
def test_workers_end_with_a_run_that_is_killed(make_toy):
    toy = isolate(attacked(make_toy, "hold", timeout_s=3600))
    child = toy.start()
    child.wait_for(toy.folder / "attacked")
    child.send(signal.SIGKILL)
    assert child.wait() == KILLED
    while workers_of(toy):  # or the test's time limit
        time.sleep(0.05)


@pytest.mark.fault
def test_workers_that_do_not_watch_the_run_are_left_behind(make_toy):
    """Mutation check."""
    toy = isolate(attacked(make_toy, "hold", timeout_s=3600))
    child = toy.start(mutation=mutations.let_workers_live)
    child.wait_for(toy.folder / "attacked")
    child.send(signal.SIGKILL)
    assert child.wait() == KILLED
    left = workers_of(toy)
    assert left
    for pid in left:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.fault
def test_a_changed_agent_that_only_workers_import_is_refused(make_toy):
    toy = isolate(make_toy())
    assert toy.start("--max_tokens", "150").wait() == 5
    path = toy.folder / "task.py"
    path.write_text(path.read_text() + "\nLATER = 1\n")
    child = toy.resume()
    assert (child.wait(), "task.py" in child.said) == (2, True), child.said
