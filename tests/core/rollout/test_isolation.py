"""Agents in worker processes: the same episodes as in this process, and failures that cost one episode."""

import os
import sys
import textwrap
from contextlib import asynccontextmanager
from functools import partial

import psutil
import pytest

from reinforge.config.imports import import_object
from reinforge.errors import BackendUnavailable, ConfigError, ContextOverflow
from reinforge.rollout.isolation.isolated_agent import LOADER, PlacedWorkflow, open_isolated
from reinforge.rollout.isolation.worker_pool import WorkerPool
from reinforge.rollout.workflow import bind_workflow
from reinforge.types.steps import TTCEventData
from reinforge.types.trajectory import Outcome
from tests.doubles import ScriptedPolicy, examples
from tests.episodes import collect, make_evaluation, make_runner
from tests.processes import find_survivors, is_alive

AGENTS = """
import asyncio, os, signal, subprocess, sys, threading, time
from pydantic import BaseModel
from reinforge.errors import BackendError, CaptureError, ContextOverflow
from reinforge.finetuning import PolicyFailure, TTCEventData

def prompt(item, *more):
    return [{"role": "user", "content": item.input_obj}, *more]

async def talk(item, llm, context):
    with context.function("plan"):
        first = await llm.chat.completions.create(messages=prompt(item), max_tokens=9)
    context.mark(step_reward=0.5)
    said = first.choices[0].message
    others = await asyncio.gather(*(
        context.llm("agent").chat.completions.create(messages=prompt(item, said, {"role": "user", "content": str(i)}))
        for i in range(2)
    ))
    context.mark({"note": [1, "two"]}, call_id=others[1].id)
    context.mark(TTCEventData(turn_id="t", score=0.25))
    words = [reply.choices[0].message.content for reply in (first, *others)]
    tokens = [[each.token, each.logprob] for each in first.choices[0].logprobs.content]
    return {"words": words, "tokens": tokens, "seed": context.seed, "id": context.example_id,
            "training": context.is_training, "random": context.random("dice").random(), "usage": first.usage,
            "model": llm.model_name}

def plain(item, llm, context):
    reply = llm.chat.completions.create(messages=prompt(item), n=2)
    return reply.choices[1].message.content

class Answer(BaseModel):
    a: int

class Wrong(Answer):
    b: int

async def use_idioms(item, llm):
    create, parse = llm.chat.completions.create, llm.chat.completions.parse
    extra = {"return_token_ids": True, "top_k": 5}
    stream = await create(messages=prompt(item), stream=True, stop=("x",), extra_body=extra)
    chunks = [chunk async for chunk in stream]
    tool = {"type": "function", "function": {"name": "add"}}
    settings = {"tools": [tool], "tool_choice": "required", "logit_bias": {5: -1}, "frequency_penalty": 0.5}
    await create(messages=prompt(item), **settings)
    parsed = (await parse(messages=prompt(item), response_format=Answer)).choices[0].message.parsed
    try:
        await create(messages=prompt(item), extra_body={"beam": 2})
    except TypeError as error:
        refused = [type(error).__name__, error.param, str(error)[:70]]
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks]
    return {"deltas": deltas, "ids": chunks[1].choices[0].token_ids, "a": parsed.a, "refused": refused}

class Odd(ConnectionError):
    pass

RAISED = {
    "policy": PolicyFailure("illegal", output={"moves": 3}), "backend": BackendError("no answer"),
    "connection": Odd("lost"), "overflow": ContextOverflow("too long"), "timeout": TimeoutError("mine"),
    "cancelled": asyncio.CancelledError(), "exit": SystemExit(3), "generator exit": GeneratorExit(),
}

async def fail(item, llm, context):
    kind = item.input_obj
    if kind in RAISED:
        raise RAISED[kind]
    if kind == "bug":
        return 1 / 0
    if kind == "idioms":
        return await use_idioms(item, llm)
    if kind == "parse":
        await llm.chat.completions.parse(messages=prompt(item), response_format=Wrong)
    if kind.startswith("model"):
        await llm.chat.completions.create(messages=prompt(item))
    if kind == "argument":
        await llm.chat.completions.create(messages=prompt(item), audio={"voice": "alloy"})
    if kind == "no such model":
        context.llm("other")
    if kind == "no such call":
        context.mark(step_reward=1.0, call_id="call-x")
    if kind == "coroutine":
        return llm.chat.completions.create(messages=prompt(item))

async def attack(item, llm, context):
    kind = item.input_obj
    if kind == "exit":
        os._exit(3)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "close":
        os.closerange(3, 256)
        await asyncio.sleep(60)
    if kind == "hang":
        time.sleep(60)
    if kind == "fork":
        if os.fork() == 0:
            time.sleep(60)
        os._exit(4)
    if kind == "children":
        subprocess.Popen(["sleep", "60"])
        subprocess.Popen(["sleep", "60"], start_new_session=True)
        time.sleep(60)
    if kind == "object":
        return object()
    if kind == "keys":
        return {1: "one"}
    if kind == "deep":
        value = []
        for _ in range(100_000):
            value = [value]
        return value
    if kind == "garbage":
        for number in range(3, 256):
            try:
                os.write(number, b"garbage\\n")
            except OSError:
                pass
        await asyncio.sleep(60)
    return os.getpid()

def wrong(item):
    return 1
"""


@pytest.fixture
def agents(tmp_path):
    (tmp_path / "agents.py").write_text(textwrap.dedent(AGENTS))
    return tmp_path


def evaluation_of(
    workflow, script=lambda request: f"{request.sampling.seed % 1000}", *, kinds=(), timeout_s=60.0, concurrency=2
):
    items = examples(max(1, len(kinds)))
    for item, kind in zip(items, kinds, strict=False):
        item.input_obj = kind
    runner = make_runner(workflow, ScriptedPolicy(script), timeout_s=timeout_s, concurrency=concurrency)
    return make_evaluation(runner, items)


@asynccontextmanager
async def isolated(folder, name):
    async with open_isolated(f"agents:{name}", folder, None, share_environment_seed=True) as workflow:
        yield workflow


@asynccontextmanager
async def placed(folder, name, num_processes=2):
    """Agents in a few shared processes; their own tests are in test_placement.py."""
    pool = WorkerPool(f"agents:{name}", folder, LOADER, num_shared=num_processes)
    try:
        yield PlacedWorkflow.share(in_process(folder, name), pool)
    finally:
        await pool.close()


def in_process(folder, name):
    return bind_workflow(import_object(f"agents:{name}", folder))


def facts(record):
    calls = [
        (call.call_id, call.request, call.reply, call.others, call.choice, call.functions) for call in record.calls
    ]
    marks = [(mark.after_call, mark.step_reward, mark.data, mark.functions, mark.call_id) for mark in record.marks]
    return record.outcome, record.reason, record.item.output_obj, calls, marks


@pytest.fixture(autouse=True)
def _forget_the_agents(monkeypatch):
    monkeypatch.delitem(sys.modules, "agents", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize(
    ("workers", "name"),
    [
        (isolated, "talk"),
        pytest.param(isolated, "plain", marks=pytest.mark.slow),
        pytest.param(placed, "talk", marks=pytest.mark.slow),
    ],
)
async def test_episodes_are_those_of_this_process(agents, name, workers):
    async with workers(agents, name) as workflow:
        there = await collect(evaluation_of(workflow, concurrency=1 if workers is isolated else 3), generations=3)
        assert workers is isolated or len(workflow.pool.workers) == 2, "three episodes at once share two processes"
    here = await collect(evaluation_of(in_process(agents, name)), generations=3)
    assert [facts(record) for record in there] == [facts(record) for record in here]
    assert [record.outcome for record in here] == [Outcome.OK] * 3
    if name == "talk":
        assert isinstance(there[0].marks[2].data, TTCEventData)
        assert there[0].calls[0].functions == ("plan",)


MODEL_ERRORS = {"model": BackendUnavailable("503"), "model too": ContextOverflow("300 > 256")}
FAILURES = [
    "policy", "bug", "backend", "connection", "overflow", "timeout", "cancelled", "exit", "generator exit", "argument",
    "no such model", "no such call", "coroutine", "parse", *MODEL_ERRORS,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("workers", [isolated, partial(placed, num_processes=1)], ids=["isolated", "placed"])
@pytest.mark.filterwarnings("ignore:coroutine")
async def test_exceptions_and_every_way_to_call_are_those_of_this_process(agents, workers):
    def answer(request):
        return MODEL_ERRORS.get(request.messages[0]["content"], '{"a": 1}')

    kinds = [*FAILURES, "idioms"]
    async with workers(agents, "fail") as workflow:
        there = await collect(evaluation_of(workflow, answer, kinds=kinds, concurrency=1))
        assert len(workflow.pool.workers) == 1, "a worker whose agent raised is used again"
    here = await collect(evaluation_of(in_process(agents, "fail"), answer, kinds=kinds))
    assert [facts(record) for record in there] == [facts(record) for record in here]
    *failed, idioms = there
    assert Outcome.OK not in [record.outcome for record in failed]
    parsed = failed[FAILURES.index("parse")]
    assert (parsed.outcome, len(parsed.calls)) == (Outcome.POLICY_ERROR, 1)
    assert parsed.reason.startswith("the reply is not the JSON of a Wrong: Field required; the agent then failed: ")
    output, asked = idioms.item.output_obj, idioms.calls[1].request
    assert ("".join(output["deltas"]), output["a"], len(idioms.calls)) == ('{"a": 1}', 1, 3)
    assert output["refused"][:2] == ["InvalidCall", "extra_body.beam"]
    assert (asked.tool_choice, asked.sampling.logit_bias) == ("required", ((5, -1),))


ENDS = {
    "exit": "WorkerEnded: the process exited with code 3",
    "fork": "WorkerEnded: the process exited with code 4",
    "garbage": "WorkerEnded: the process sent an unreadable message",
    "object": "TypeError: the result cannot leave the process: Object of type object is not JSON serializable",
    "keys": "TypeError: the result cannot leave the process: the key 1 is a int; keys must be strings",
    "deep": "TypeError: the result cannot leave the process: it is nested too deeply",
}
MORE_ENDS = {
    "kill": "WorkerEnded: the process was killed by SIGKILL",
    "close": "WorkerEnded: the process ",  # it closed its connection, or ended because of that
}


@pytest.mark.slow
@pytest.mark.parametrize("ends", [ENDS, MORE_ENDS], ids=["exit", "kill"])
async def test_a_process_that_ends_costs_its_episode_and_is_replaced(agents, tmp_path, ends):
    kinds = [kind for each in ends for kind in (each, "")]
    with (tmp_path / "lock").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        async with isolated(agents, "attack") as workflow:
            folder = f"/proc/{workflow.pool.workers[0].transport.process.pid}/fd"
            opened = {os.path.realpath(f"{folder}/{fd}") for fd in os.listdir(folder)}
            records = await collect(evaluation_of(workflow, kinds=kinds, concurrency=1))
            alive = [worker.transport.process.pid for worker in workflow.pool.workers]
    assert str(tmp_path / "lock") not in opened, "it inherits no file of the run"
    attacked, others = records[::2], records[1::2]
    assert [record.outcome for record in others] == [Outcome.OK] * len(ends)
    for record, reason in zip(attacked, ends.values(), strict=True):
        assert (record.outcome, record.reason[: len(reason)]) == (Outcome.TOOL_ERROR, reason)
    assert not any(map(is_alive, alive)), "closing the pool kills its processes"


def sleepers():
    """Returns the processes that the attacks have started."""
    found = psutil.process_iter(["cmdline", "status"])
    return {each.pid for each in found if each.info["cmdline"] == ["sleep", "60"] and each.info["status"] != "zombie"}


@pytest.mark.slow
async def test_a_process_that_hangs_is_killed_with_everything_that_it_has_started(agents):
    before = sleepers()
    async with isolated(agents, "attack") as workflow:
        records = await collect(evaluation_of(workflow, kinds=["hang", "children"], timeout_s=1.0, concurrency=1))
        assert [record.outcome for record in records] == [Outcome.TIMEOUT] * 2
        assert find_survivors(sleepers() - before) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("agents:wrong", "cannot be called as"),
        (lambda item, llm, context: 1, "`process` needs the function's name"),
    ],
)
async def test_a_function_that_cannot_run_in_a_process_is_refused(agents, function, message):
    with pytest.raises(ConfigError, match=message):
        async with open_isolated(function, agents, None, share_environment_seed=True):
            pass


@pytest.mark.slow
async def test_a_module_that_ends_its_process_is_refused(agents):
    (agents / "bad.py").write_text("import os\nos._exit(9)\n")
    with pytest.raises(ConfigError, match="the process exited with code 9"):
        async with open_isolated("bad:agent", agents, None, share_environment_seed=True):
            pass
