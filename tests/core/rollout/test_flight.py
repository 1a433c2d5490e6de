"""Episodes in flight: what each one costs, its time limit, and how a batch of them ends."""

import asyncio
import copy
import gc
import time
import tracemalloc
import weakref
from functools import partial
from unittest import mock

import pytest

from reinforge.errors import InvalidCall, StorageError
from reinforge.rollout.capture import AsyncLLM, Capture
from reinforge.rollout.isolation.containment import (
    GRACE_S,
    BlockedTime,
    ContainedTask,
    TimedOut,
    TimeLimit,
    create_loop,
)
from reinforge.rollout.workflow import bind_workflow
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from reinforge.types.trajectory import Outcome
from tests.doubles import PolicyModel, ScriptedPolicy, examples
from tests.episodes import make_runner
from tests.scripted_run import ask
from tests.virtual_clock import run_virtually

EPOCH = 4711
MAX_BYTES = 4_500
"""Of an episode that waits for its reply, with the agent's own coroutine, task and messages."""


class Silent(ScriptedPolicy):
    def __init__(self):
        super().__init__()
        self.num_waiting, self.answering = 0, asyncio.Event()

    async def sample(self, request):
        self.num_waiting += 1
        await self.answering.wait()
        return await super().sample(request)


async def score(record):
    record.reward = 1.0


def skip(record):
    pass


def runner_of(workflow, policy=None, *, timeout_s=10.0, concurrency=2):
    return make_runner(workflow, policy, timeout_s=timeout_s, concurrency=concurrency)


def episodes_of(count):
    return [(EpisodeKey("collect", 0, item.id), item) for item in examples(count)]


async def run_timed(workflow, count, concurrency=2):
    runner, at_s = runner_of(workflow, concurrency=concurrency), {}

    def done(record):
        at_s[record.key.example_id] = asyncio.get_running_loop().time()

    return runner, await runner.run(episodes_of(count), score, done), at_s


def measure_flight(count):
    async def measure():
        policy = Silent()
        runner = runner_of(ask, policy, timeout_s=3600.0, concurrency=count)
        episodes, tasks = episodes_of(count), len(asyncio.all_tasks())
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        work = asyncio.create_task(runner.run(episodes, score, lambda record: None))
        while policy.num_waiting < count:
            await asyncio.sleep(0)
        gc.collect()
        found = tracemalloc.get_traced_memory()[0] - before, len(asyncio.all_tasks()) - tasks
        policy.answering.set()
        await work
        return found

    loop = create_loop()
    tracemalloc.start()
    try:
        size, tasks = loop.run_until_complete(measure())
    finally:
        tracemalloc.stop()
        loop.close()
    return size / count, tasks / count


def test_an_episode_in_flight_is_one_task_and_a_few_kibibytes():
    measure_flight(20)  # what is made once
    size, tasks = measure_flight(300)
    assert size < MAX_BYTES
    assert 1 <= tasks < 1.1


def test_each_episode_has_its_own_time_although_one_timer_counts():
    """
    0   0 ======= 8
    1   0 ========= 10 timed out
    2            8 ========= 18 timed out
    3              10 ======== 19
    """
    seconds = {"0": 8, "1": 60, "2": 60, "3": 9}

    async def wait(item, llm, context):
        await asyncio.sleep(seconds[item.id])

    (_, records, at_s), _ = run_virtually(run_timed(wait, 4))
    assert [record.outcome for record in records] == [Outcome.OK, Outcome.TIMEOUT, Outcome.TIMEOUT, Outcome.OK]
    assert at_s == pytest.approx({"0": 8, "1": 10, "2": 18, "3": 19}, abs=0.01)


async def block(item, llm, context):
    """Blocks the loop for 5 s after 1 s, as its guard measures it, or waits for a minute."""
    if item.id == "0":
        await asyncio.sleep(1)
        BlockedTime.total_s += 5
        await asyncio.sleep(60)
    await asyncio.sleep(60)


def test_time_for_which_the_loop_was_blocked_does_not_count(monkeypatch):
    monkeypatch.setattr(BlockedTime, "total_s", 0.0)
    (_, records, at_s), _ = run_virtually(run_timed(block, 2))
    assert [record.outcome for record in records] == [Outcome.TIMEOUT] * 2
    assert at_s == pytest.approx({"0": 15, "1": 15}, abs=0.01)


async def ignore(item, llm, context):
    if item.id == "1":
        return
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        await asyncio.Event().wait()


def test_an_agent_that_ignores_its_cancellation_is_abandoned():
    (runner, records, at_s), _ = run_virtually(run_timed(ignore, 3))
    assert [record.outcome for record in records] == [Outcome.TIMEOUT, Outcome.OK, Outcome.TIMEOUT]
    assert at_s["0"] == pytest.approx(10 + GRACE_S, abs=0.01)
    assert (runner.status.num_abandoned, runner.status.num_running) == (2, 0)


class Probe(ContainedTask):
    """A contained task whose ends can be awaited."""

    __slots__ = ("ended", "work")

    def __init__(self, limit, work):
        super().__init__(limit)
        self.work, self.ended = work, asyncio.Event()

    def call(self):
        return self.work()

    def on_end(self):
        self.ended.set()


async def cancel_oneself():
    raise asyncio.CancelledError


async def test_a_long_step_of_the_loop_times_out_only_who_had_a_turn_before_it():
    limit = TimeLimit(0.5)
    first, second, third = Probe(limit, asyncio.Event().wait), Probe(limit, cancel_oneself), Probe(limit, answer_later)
    first.start()
    await asyncio.sleep(0)  # its turn: from here to the end of the long step the loop has no other
    time.sleep(0.2)
    second.start()
    third.start()
    time.sleep(1.0)
    for each in (first, second, third):
        await each.ended.wait()
    with pytest.raises(TimedOut):
        first.get()
    with pytest.raises(asyncio.CancelledError):  # its own, not that of the limit
        second.get()
    assert third.get() == "answer"


async def answer_later():
    await asyncio.sleep(0)
    return "answer"


async def test_a_task_that_was_cancelled_before_it_began_has_timed_out():
    limit = TimeLimit(60)
    probe = Probe(limit, cancel_oneself)
    probe.start()
    probe.has_timed_out = True
    probe.task.cancel()
    await probe.ended.wait()
    with pytest.raises(TimedOut):
        probe.get()


async def test_an_error_of_the_run_ends_the_agents_in_flight_and_gives_their_places_back():
    cancelled, both = [], asyncio.Barrier(2)

    async def wait(item, llm, context):
        await both.wait()
        if item.id == "0":
            return
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(item.id)
            raise

    def fail(record):
        raise StorageError("the disk is full")

    runner = runner_of(wait)
    with pytest.raises(ExceptionGroup) as raised:
        await runner.run(episodes_of(2), score, fail)
    assert [str(error) for error in raised.value.exceptions] == ["the disk is full"]
    assert (cancelled, runner.status.num_running) == (["1"], 0)
    runner.workflow = bind_workflow(ask)
    async with asyncio.timeout(30):
        assert len(await runner.run(episodes_of(4), score, lambda record: None)) == 4


async def test_a_call_begins_when_it_is_awaited():
    policy, capture = ScriptedPolicy(), Capture(seed=1)
    create = AsyncLLM("agent", PolicyModel(policy), capture, None).chat.completions.create
    bad = create(messages=[])  # as with OpenAI's client, nothing is raised here
    calls = [create(messages=[{"role": "user", "content": "x"}]) for _ in range(2)]
    assert capture.num_started == 0
    await asyncio.gather(*calls)
    assert len({request.sampling.seed for request in policy.requests}) == 2
    with pytest.raises(InvalidCall, match="at least one message"):
        await bad


async def test_an_agent_can_wrap_its_calls_and_keep_things_at_its_handle_and_context():
    """Although the objects of an episode have slots."""

    async def wrap(item, llm, context):
        create, context.seen = llm.chat.completions.create, []

        async def noting(**arguments):
            context.seen.append(arguments["messages"][0]["content"])
            return await create(**arguments)

        llm.chat.completions.create, llm.note = noting, "kept"
        await ask(item, llm, context)
        return [llm.note, *context.seen]

    records = await runner_of(wrap).run(episodes_of(1), score, lambda record: None)
    assert records[0].item.output_obj == ["kept", "question 0"]


@pytest.mark.parametrize("raising", ["score", "complete", "done"])
def test_a_cancelled_error_of_the_scoring_is_no_endless_wait(raising):
    """Such as `compute_reward` of a user's builder raises that awaits a task which was cancelled."""
    recorded = []

    async def score_or_raise(record):
        if (raising, record.key.example_id) == ("score", "0"):
            raise asyncio.CancelledError
        await score(record)

    async def complete(record):
        if (raising, record.key.example_id) == ("complete", "0"):
            raise asyncio.CancelledError
        if record.key.example_id == "2":
            await asyncio.Event().wait()  # as for the sibling that was cancelled

    def done(record):
        if (raising, record.key.example_id) == ("done", "0"):
            raise asyncio.CancelledError
        recorded.append(record.key.example_id)

    runner = runner_of(ask)
    with pytest.raises(asyncio.CancelledError, match="while it was scored"):
        run_virtually(runner.run(episodes_of(3), score_or_raise, done, complete))
    assert (recorded, runner.status.num_running) == (["1"], 0)


async def test_a_task_that_an_agent_leaves_running_keeps_no_other_episode():
    left, ended = [], asyncio.Event()

    async def leave(item, llm, context):
        if item.id == "0":
            left.append(asyncio.create_task(ended.wait()))
        return item.id

    async def note(records, record):  # as the groups of siblings, which know their records
        records.append(record)

    def find_kept():
        gc.collect()
        return [each for each in gc.get_objects() if isinstance(each, EpisodeRecord) and each.key.epoch == EPOCH]

    complete = partial(note, [])
    records = await runner_of(leave).run([(EpisodeKey("collect", EPOCH, "0"), examples(1)[0])], score, skip, complete)
    del complete
    assert len(find_kept()) == len(records) == 1
    del records
    assert find_kept() == []
    ended.set()
    await left[0]


async def test_libraries_find_the_objects_of_an_episode_as_those_without_slots():
    async def look(item, llm, context):
        found = [weakref.ref(each)() is each for each in (llm, llm.chat, llm.chat.completions, context)]
        copied = copy.deepcopy(context)
        reply = await copied.llm("agent").chat.completions.create(messages=[{"role": "user", "content": "x"}])
        create = llm.chat.completions.create
        with mock.patch.object(llm.chat.completions, "create", return_value="mocked") as mocked:
            return [*found, bool(reply.id), asyncio.iscoroutinefunction(create), await mocked(messages=[]) == "mocked"]

    [record] = await runner_of(look).run(episodes_of(1), score, lambda record: None)
    assert record.reason is None
    assert (record.item.output_obj, len(record.calls)) == ([True] * 7, 1)
