"""Agents in a few shared worker processes: the same episodes as in this process, and workers that end cost none."""

import asyncio
import os
from dataclasses import replace

import psutil
import pytest

from reinforge.rollout.isolation import isolated_agent
from reinforge.rollout.isolation.isolated_agent import LOADER, PlacedWorkflow
from reinforge.rollout.isolation.worker_pool import WorkerPool
from reinforge.types.trajectory import Outcome
from tests.core.rollout.test_isolation import (
    _forget_the_agents,  # noqa: F401  fixtures
    agents,  # noqa: F401
    collect,
    evaluation_of,
    facts,
    in_process,
    placed,
)
from tests.doubles import examples

OWN = """
import asyncio, os, pathlib, time

async def meet(item, llm, context):
    '''Ends once four episodes are here at the same time; returns what it sees of its calls.'''
    if "here" not in globals():
        globals()["here"], globals()["full"] = [], asyncio.Event()
    here.append(context.example_id)
    if len(here) == 4:
        full.set()
    await full.wait()
    reply = await llm.chat.completions.create(messages=[{"role": "user", "content": "a"}])
    (call,) = context.calls
    return [os.getpid(), context.epoch, call.call_id == reply.id, call.request.messages, call.reply.message["content"]]

def meet_in_threads(item, llm, context):
    import threading
    barrier = globals().setdefault("barrier", threading.Barrier(4))
    barrier.wait(60)
    return os.getpid()

async def die_once(item, llm, context):
    '''The first process in which an episode has called the model ends, with all that run in it.'''
    reply = await llm.chat.completions.create(messages=[{"role": "user", "content": item.input_obj}])
    if item.input_obj == "die" and claim("once"):
        os._exit(3)
    again = await llm.chat.completions.create(messages=[{"role": "user", "content": "again"}])
    return [reply.choices[0].message.content, again.choices[0].message.content]

async def die(item, llm, context):
    if item.input_obj == "die":
        pathlib.Path(f"died-{os.getpid()}").touch()
        os._exit(3)
    await asyncio.sleep(0.2)
    return os.getpid()

async def block(item, llm, context):
    if item.input_obj == "block":
        time.sleep(600)
    await asyncio.sleep(0.2)
    return os.getpid()

async def ignore(item, llm, context):
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            pass

async def flood(item, llm, context):
    if item.input_obj != "flood":
        return os.getpid()
    while True:
        for number in range(500):
            context.mark(step_reward=1.0)
        await asyncio.sleep(0)

async def notice(item, llm, context):
    pathlib.Path("begun").touch()
    try:
        await asyncio.sleep(600)
    finally:
        pathlib.Path("cancelled").touch()

def claim(name):
    try:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False
"""


@pytest.fixture
def folder(agents, monkeypatch):  # noqa: F811
    with (agents / "agents.py").open("a") as file:
        file.write(OWN)
    monkeypatch.chdir(agents)
    return agents


async def test_several_episodes_run_in_one_process_at_once_and_see_their_calls(folder):
    async with placed(folder, "meet", num_processes=1) as workflow:
        records = await collect(evaluation_of(workflow, kinds=[""] * 4, concurrency=4))
        (worker,) = workflow.pool.workers
    seen = [worker.transport.process.pid, 0, True, [{"role": "user", "content": "a"}]]
    assert [record.item.output_obj for record in records] == [
        [*seen, record.calls[0].reply.message["content"]] for record in records
    ]


async def test_several_plain_functions_run_in_one_process_at_once(folder):
    async with placed(folder, "meet_in_threads", num_processes=1) as workflow:
        records = await collect(evaluation_of(workflow, kinds=[""] * 4, concurrency=4))
        (worker,) = workflow.pool.workers
    assert {record.item.output_obj for record in records} == {worker.transport.process.pid}


@pytest.mark.slow
async def test_a_process_that_ends_costs_no_episode_and_no_token(folder):
    """Episodes in it run again with the same seeds, and not as another attempt."""
    kinds = ["die", *[""] * 3]
    async with placed(folder, "die_once", num_processes=1) as workflow:
        there = await collect(evaluation_of(workflow, kinds=kinds, concurrency=4))
    assert (folder / "once").exists()
    here = await collect(evaluation_of(in_process(folder, "die_once"), kinds=kinds))
    assert [facts(record) for record in there] == [facts(record) for record in here]
    assert {(record.outcome, record.attempt) for record in there} == {(Outcome.OK, 0)}


@pytest.mark.slow
async def test_an_agent_that_ends_its_process_costs_its_own_episode_alone(folder):
    async with placed(folder, "die", num_processes=1) as workflow:
        records = await collect(evaluation_of(workflow, kinds=["die", ""], concurrency=2))
        pids = [worker.transport.process.pid for worker in workflow.pool.workers]
    assert [record.outcome for record in records] == [Outcome.TOOL_ERROR, Outcome.OK]
    assert records[0].reason == "WorkerEnded: the process exited with code 3"
    assert len(list(folder.glob("died-*"))) == 3, "in two shared processes and in one of its own"
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)


@pytest.mark.slow
async def test_a_blocked_process_is_replaced_and_only_the_culprit_times_out(folder, monkeypatch):
    monkeypatch.setattr(isolated_agent, "REPLY_S", 0.2)
    monkeypatch.setattr(isolated_agent, "GRACE_S", 0.2)
    kinds = ["block", ""]
    async with placed(folder, "block", num_processes=1) as workflow:
        records = await collect(evaluation_of(workflow, kinds=kinds, timeout_s=2.0, concurrency=2))
    assert [record.outcome for record in records] == [Outcome.TIMEOUT, Outcome.OK]


@pytest.mark.slow
async def test_an_agent_that_ignores_its_cancellation_is_abandoned_and_counted(folder):
    async with placed(folder, "ignore", num_processes=1) as workflow:
        evaluation = evaluation_of(workflow, timeout_s=0.5)
        (record,) = await collect(evaluation)
        (worker,) = workflow.pool.workers
        assert (record.outcome, worker.is_alive) == (Outcome.TIMEOUT, True)
    assert evaluation.runner.status.num_abandoned == 1


@pytest.mark.slow
async def test_an_agent_that_floods_the_run_holds_up_no_other_for_longer_than_its_time(folder):
    async with placed(folder, "flood", num_processes=1) as workflow:
        kinds = ["flood", *[""] * 3]
        records = await collect(evaluation_of(workflow, kinds=kinds, timeout_s=1.0, concurrency=2))
    assert [record.outcome for record in records] == [Outcome.TIMEOUT, *[Outcome.OK] * 3]


@pytest.mark.slow
async def test_a_run_that_stops_cancels_its_episodes(folder):
    async with placed(folder, "notice", num_processes=1) as workflow:
        work = asyncio.create_task(collect(evaluation_of(workflow)))
        while not os.path.exists("begun"):
            await asyncio.sleep(0.01)
        work.cancel()
        await asyncio.wait({work})
        while not os.path.exists("cancelled"):  # or the test's time limit
            await asyncio.sleep(0.01)


async def test_problems_of_examples_are_found_before_any_episode(folder):
    workflow = in_process(folder, "meet")

    class Choosy:
        async def __call__(self, item, llm, context):
            return None

        def example_problems(self, items):
            return [f"{len(items)} examples"]

    pool = WorkerPool("agents:meet", folder, LOADER)
    placed_one = PlacedWorkflow.share(replace(workflow, function=Choosy()), pool)
    assert placed_one.example_problems(examples(3)) == ["3 examples"]
