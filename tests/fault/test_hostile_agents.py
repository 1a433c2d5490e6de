"""What an agent or an evaluator does to the run's process costs its own episode, and a stop always ends in time.

Each agent attacks in one episode of the baseline, once; the run must end as if that episode had failed.
"""

import os
import signal
import textwrap

import pytest

from tests.fault import mutations
from tests.fault.kit import PATIENCE_S
from tests.fault.test_kill_anywhere import SPARSE

ATTACK = """
import asyncio, itertools, os, signal, subprocess, sys, threading, time
from pathlib import Path

class Odd(BaseException):
    pass

class Leaves(Exception):
    def __str__(self):
        sys.exit(3)

class Hangs(Exception):
    def __str__(self):
        time.sleep(3600)

async def ignore():
    Path("attacked").write_text("")
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

async def leave():
    sys.exit(7)

async def attack(kind, scope={}):
    loop = asyncio.get_running_loop()
    if kind == "generator exit":
        raise GeneratorExit
    if kind == "keyboard interrupt":
        raise KeyboardInterrupt
    if kind == "odd":
        raise Odd("strange")
    if kind == "leave where it is read":
        raise Leaves
    if kind == "hang where it is read":
        raise Hangs
    if kind == "stop":
        loop.stop()
        await asyncio.sleep(0)
        raise ValueError("after the stop")
    if kind == "cancel all":
        for task in asyncio.all_tasks():
            task.cancel()
        await asyncio.sleep(1)
    if kind == "leave":
        scope["task"] = asyncio.create_task(leave())
        await asyncio.sleep(0.01)
        raise ValueError("after the exit")
    if kind == "leave in a callback":
        loop.call_soon(sys.exit, 7)
        await asyncio.sleep(0.01)
        raise ValueError("after the exit")
    if kind == "ignore":
        await ignore()
    if kind == "leak":
        scope["task"] = asyncio.create_task(ignore())
        await asyncio.sleep(0.01)
        raise ValueError("after the leak")
    if kind == "block":
        Path("attacked").write_text("")
        time.sleep(3600)
    if kind == "spin":
        Path("attacked").write_text("")
        while True:
            try:
                time.sleep(0.01)
            except Exception:
                pass
    if kind == "hold":
        Path("attacked").write_text("")
        while True:
            try:
                time.sleep(0.01)
            except BaseException:
                pass
    if kind == "hold the lock":
        Path("attacked").write_text("")
        sum(itertools.repeat(1))
    if kind == "ignore signals":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGURG):
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        await asyncio.sleep(1)
        await ignore()
    if kind == "leak a thread":
        threading.Thread(target=time.sleep, args=(3600,)).start()
        raise ValueError("after the thread")
    if kind == "leak an executor":
        scope["future"] = asyncio.ensure_future(asyncio.to_thread(time.sleep, 3600))
        await asyncio.sleep(0.01)
        raise ValueError("after the executor")
    if kind == "leak a process":
        subprocess.Popen(["sleep", "3600"])
        subprocess.Popen(["sh", "-c", "sleep 3600 & wait"], start_new_session=True)
        raise ValueError("after the process")
    if kind == "close":
        Path("attacked").write_text("")
        os.closerange(3, 256)
        await asyncio.sleep(3600)
"""

TASK = """
KIND, left = "{kind}", [1]

async def agent(item, llm, context):
    {in_agent}
    reply = await llm.chat.completions.create(messages=[{{"role": "user", "content": item.input_obj}}], max_tokens=4)
    return reply.choices[0].message.content

async def vowels(output, expected):
    {in_evaluator}
    return sum(letter in "aeiou" for letter in output) / max(1, len(output))
"""
AGENT = {"in_agent": "if left and not context.is_training and left.pop(): await attack(KIND)", "in_evaluator": ""}
EVALUATOR = {"in_agent": "", "in_evaluator": "if left and left.pop(): await attack(KIND)"}
"""Where it attacks."""

REASONS = {
    "generator exit": "tool_error: RuntimeError: GeneratorExit()",
    "keyboard interrupt": "tool_error: RuntimeError: KeyboardInterrupt()",
    "odd": "tool_error: RuntimeError: Odd('strange')",
    "leave where it is read": "tool_error: Leaves: an object of type Leaves, whose str() raised SystemExit",
    "hang where it is read": "tool_error: Hangs: an object of type Hangs, whose str() raised LoopBlocked",
    "stop": "tool_error: ValueError: after the stop",
    "cancel all": "cancelled: the agent raised CancelledError",
    "leave": "tool_error: ValueError: after the exit",
    "leave in a callback": "tool_error: ValueError: after the exit",
    "ignore": "timeout: not finished after 1 s",
    "leak": "tool_error: ValueError: after the leak",
    "block": "timeout: blocked the event loop",
    "spin": "timeout: blocked the event loop",
    "leak a thread": "tool_error: ValueError: after the thread",
    "leak an executor": "tool_error: ValueError: after the executor",
    "leak a process": "tool_error: ValueError: after the process",
}
"""What each attack costs: its own episode, with this outcome and reason."""
QUICK = ("odd", "stop", "leave in a callback", "ignore", "block", "leak a process")
STUCK = ("ignore", "ignore signals", "block", "spin", "hold")
"""Attacks that never end; only the last cannot be interrupted."""


def attacked(make_toy, kind, where=AGENT, timeout_s=1):
    toy = make_toy()
    toy.write("task.py", textwrap.dedent(ATTACK) + TASK.format(kind=kind, **where))
    toy.set("finetuning.num_epochs", 1)
    toy.set("finetuning.limits", {"episode_timeout_s": timeout_s, "evaluator_timeout_s": timeout_s})
    toy.set("finetuning.outcomes", {"retries": 0, "max_missing": 0.5})
    return toy


def test_attacks_cost_their_own_episodes_and_a_score_and_the_run_ends_with_nothing_left_behind(make_toy):
    """One attack in each of the first training episodes, one after the other, and one in an evaluator."""
    where = {
        "in_agent": "if KINDS and context.is_training: await attack(KINDS.pop())",
        "in_evaluator": "if left and left.pop(): await attack(KIND)",
    }
    toy = attacked(make_toy, "odd", where)
    with open(toy.folder / "task.py", "a") as file:
        file.write(f"\nKINDS = {list(QUICK)}\n")
    toy.set("eval.general.max_concurrency", 1)
    child = toy.start()
    assert (child.wait(PATIENCE_S), child.left_behind()) == (0, []), child.said
    assert toy.summary["status"] == "completed"
    assert toy.summary["episodes"]["reward_error"] == 1
    failed = toy.rows_of("SELECT outcome || ': ' || reason FROM episodes WHERE outcome NOT IN ('ok', 'overlong')")
    reasons = [reason for (reason,) in failed if not reason.startswith("reward_error")]
    assert len(reasons) == len(QUICK), failed
    assert all(any(each.startswith(REASONS[kind]) for each in reasons) for kind in QUICK), failed


@pytest.mark.fault
@pytest.mark.parametrize("kind", REASONS)
def test_an_attack_costs_its_own_episode_and_the_run_ends_with_nothing_left_behind(make_toy, kind):
    toy = attacked(make_toy, kind)
    child = toy.start()
    assert (child.wait(PATIENCE_S), child.left_behind()) == (0, []), child.said
    assert toy.summary["status"] == "completed"
    failed = toy.rows_of("SELECT outcome || ': ' || reason FROM episodes WHERE outcome NOT IN ('ok', 'overlong')")
    assert len(failed) == 1, failed
    assert failed[0][0].startswith(REASONS[kind])


@pytest.mark.fault
@pytest.mark.parametrize("kind", ["odd", "cancel all", "ignore", "block"])
def test_an_evaluator_that_attacks_loses_its_score_and_the_run_ends(make_toy, kind):
    toy = attacked(make_toy, kind, EVALUATOR)
    child = toy.start()
    assert (child.wait(PATIENCE_S), child.left_behind()) == (0, []), child.said
    assert toy.summary["episodes"]["reward_error"] == 1


@pytest.mark.parametrize("where", [AGENT, pytest.param(EVALUATOR, marks=pytest.mark.fault)], ids=["agent", "evaluator"])
@pytest.mark.parametrize(
    "kind", [kind if kind == "hold" else pytest.param(kind, marks=pytest.mark.fault) for kind in STUCK]
)
def test_a_signal_ends_a_run_in_time_whatever_runs(make_toy, kind, where):
    toy = attacked(make_toy, kind, where, timeout_s=3600)
    child = toy.start(mutation=mutations.stop_soon if kind == "hold" else None)
    child.wait_for(toy.folder / "attacked")
    child.send(signal.SIGTERM)
    assert (child.wait(seconds=30), child.left_behind()) == (143, []), child.said
    assert toy.summary["status"] == "stopped"
    assert ("so the process exits in stage BASELINE" in child.said) == (kind == "hold")
    assert f"resume with: reinforge finetune --resume {toy.run.relative_to(toy.folder)}" in child.said


LATE = {**AGENT, "in_agent": "if context.is_training and next(left) == 30: await attack(KIND)"}
"""Attacks in the second epoch, whose first 24 training episodes are over."""


@pytest.mark.fault
def test_a_forced_end_says_that_jobs_since_the_last_checkpoint_are_not_saved(make_toy):
    toy = attacked(make_toy, "hold", LATE, timeout_s=3600)
    toy.write(
        "task.py", "import itertools\n" + (toy.folder / "task.py").read_text().replace("[1]", "itertools.count()")
    )
    for path, value in {**SPARSE, "finetuning.num_epochs": 4}.items():
        toy.set(path, value)
    child = toy.start(mutation=mutations.stop_soon)
    child.wait_for(toy.folder / "attacked")
    child.send(signal.SIGTERM)
    assert (child.wait(seconds=10), child.left_behind()) == (143, [])
    assert "process exits in stage COLLECT of epoch 1" in child.said
    assert "the jobs since the last checkpoint are not saved; the next --resume trains them again" in child.said
    assert toy.rows_of("SELECT max(epoch) FROM snapshots") == [(-1,)]


@pytest.mark.slow
def test_a_second_signal_ends_a_process_whose_main_thread_is_held(make_toy):
    toy = attacked(make_toy, "hold", timeout_s=3600)
    child = toy.start()
    child.wait_for(toy.folder / "attacked")
    child.send(signal.SIGTERM)
    child.send(signal.SIGTERM, 1.5)  # not the same signal again, even if the first is taken late
    assert (child.wait(seconds=5), child.left_behind()) == (143, [])
    assert "stopped by SIGTERM; a second signal, so the process exits in stage BASELINE" in child.said


@pytest.mark.slow
def test_closed_descriptors_end_the_run_with_the_reason(make_toy):
    toy = attacked(make_toy, "close")
    child = toy.start()
    assert (child.wait(PATIENCE_S), child.left_behind()) == (4, []), child.said
    assert "has closed file descriptors that are not its own" in child.said
    assert "isolation: process" in child.said
    assert "Traceback" not in child.said


def hold_the_lock(make_toy, *, times, mutation=None):
    """Returns a run that was sent a signal so many times while no thread of it can move."""
    toy = attacked(make_toy, "hold the lock", timeout_s=3600)
    child = toy.start(mutation=mutation)
    child.wait_for(toy.folder / "attacked")
    for _ in range(times):
        child.send(signal.SIGTERM, 0.5)
    return toy, child


@pytest.mark.parametrize("times", [pytest.param(2, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.fault)])
def test_signals_end_a_run_in_which_no_thread_can_move(make_toy, times):
    toy, child = hold_the_lock(make_toy, times=times)
    assert (child.wait(seconds=20), child.left_behind()) == (-signal.SIGKILL, []), child.said
    assert "holds Python's interpreter lock, so the process was killed" in child.said
    assert f"resume with: reinforge finetune --resume {toy.run.relative_to(toy.folder)}" in child.said


SAFETIES = {
    "stop": (mutations.leave_the_loop_stopped, 1, "Event loop stopped before Future completed"),
    "leave": (mutations.leave_the_loop_stopped, 7, ""),
    "cancel all": (mutations.let_anyone_cancel, 1, "CancelledError"),
    "generator exit": (mutations.contain_nothing, 1, "GeneratorExit"),
    "leave where it is read": (mutations.read_what_raises, 3, ""),
}
"""Attack -> a mutation that removes the safety against it, and then the exit code and a part of what is printed."""


@pytest.mark.fault
@pytest.mark.parametrize("kind", SAFETIES)
def test_an_attack_without_its_safety_ends_the_run(make_toy, kind):
    """Mutation check."""
    mutation, code, said = SAFETIES[kind]
    child = attacked(make_toy, kind).start(mutation=mutation)
    assert child.wait(PATIENCE_S) == code, child.said
    assert said in child.said


HANGS = {
    "ignore": mutations.contain_nothing,
    "block": mutations.interrupt_nobody,
    "leak": mutations.close_the_loop_on_this_thread,
    "leak a thread": mutations.wait_for_every_thread,
}


@pytest.mark.fault
@pytest.mark.parametrize("kind", HANGS)
def test_an_attack_without_its_safety_hangs_the_run(make_toy, kind):
    """Mutation check: long after the attack the process is still there, and a signal has to end it."""
    toy = attacked(make_toy, kind)
    child = toy.start(mutation=HANGS[kind])
    child.process.join(8)
    assert child.process.is_alive(), child.said
    child.send(signal.SIGKILL)


DEAF = {
    "hold": mutations.wait_for_the_stop,
    "hold the lock": mutations.start_no_observer,
    "ignore signals": mutations.leave_the_handlers,
}


@pytest.mark.fault
@pytest.mark.parametrize("kind", DEAF)
def test_a_stop_without_its_safety_hangs(make_toy, kind):
    """Mutation check."""
    toy = attacked(make_toy, kind, timeout_s=3600)
    child = toy.start(mutation=DEAF[kind])
    child.wait_for(toy.folder / "attacked")
    child.send(signal.SIGTERM)
    child.process.join(6)
    assert child.process.is_alive(), child.said
    child.send(signal.SIGKILL)


@pytest.mark.fault
def test_processes_that_are_not_killed_are_left_behind(make_toy):
    """Mutation check."""
    child = attacked(make_toy, "leak a process").start(mutation=mutations.leave_processes_behind)
    assert child.wait(PATIENCE_S) == 0, child.said
    for left in (found := child.left_behind()):
        os.kill(left, signal.SIGKILL)
    assert found
