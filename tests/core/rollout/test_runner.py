"""Running episodes: outcomes, retries, isolation of failures, and counts that add up."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from reinforge.errors import BackendError, ConfigError, ContextOverflow, EngineError, MessagesRejected
from reinforge.rollout import capture
from reinforge.rollout.slots import EpisodeSlots
from reinforge.rollout.workflow import PolicyFailure, bind_workflow
from reinforge.types.episode import EpisodeKey
from reinforge.types.trajectory import Outcome
from tests.doubles import ScriptedPolicy, examples
from tests.episodes import collect, make_evaluation, make_runner
from tests.scripted_run import ask
from tests.virtual_clock import run_virtually


def evaluation_of(
    workflow, policy=None, *, timeout=5.0, retries=0, score=lambda item: 1.0, concurrency=8, count=4, **kw
):
    settings = {"timeout_s": timeout, "retries": retries, "concurrency": concurrency, "policy_error": -0.5}
    return make_evaluation(make_runner(bind_workflow(workflow, **kw), policy, **settings), examples(count), score)


async def test_a_call_is_recorded_exactly():
    policy = ScriptedPolicy(lambda request: "no")
    record = (await collect(evaluation_of(ask, policy, count=1)))[0]
    call = record.calls[0]
    assert call.request.messages == [{"role": "user", "content": "question 0"}]
    assert call.reply.tokens.token_ids == tuple(b"no")
    assert call.reply.tokens.prompt_token_ids == tuple(b"question 0")
    assert call.reply.tokens.policy_version == 0
    assert (record.outcome, record.reward, record.item.output_obj) == (Outcome.OK, 1.0, "no")


async def test_the_runs_sampling_settings_override_the_agents():
    async def cold(item, llm, context):
        await llm.chat.completions.create(
            messages=[{"role": "user", "content": "x"}], temperature=0, top_p=0.1, seed=7, max_tokens=3
        )

    policy = ScriptedPolicy()
    await collect(evaluation_of(cold, policy, count=1), generations=2)
    first, second = (request.sampling for request in policy.requests)
    assert (first.temperature, first.top_p, first.max_tokens) == (1.0, 1.0, 3)
    assert first.seed != second.seed, "siblings need different seeds"


async def test_siblings_share_the_environment_seed_and_other_examples_do_not():
    seeds = {}

    async def look(item, llm, context):
        seeds.setdefault(context.example_id, []).append(context.seed)

    await collect(evaluation_of(look, count=2), generations=3)
    assert len(set(seeds["0"])) == len(set(seeds["1"])) == 1
    assert seeds["0"][0] != seeds["1"][0]


async def test_siblings_have_different_environment_seeds_if_configured():
    seeds = []

    async def look(item, llm, context):
        seeds.append(context.seed)

    await collect(evaluation_of(look, count=1, share_environment_seed=False), generations=3)
    assert len(set(seeds)) == 3


@pytest.mark.parametrize(
    ("raised", "outcome"),
    [
        (PolicyFailure("illegal"), Outcome.POLICY_ERROR),
        (ValueError("the agent's own bug"), Outcome.TOOL_ERROR),
        (BackendError("no answer"), Outcome.BACKEND_ERROR),
        (EngineError("the engine is closed"), Outcome.BACKEND_ERROR),
        (MessagesRejected("roles must alternate"), Outcome.TOOL_ERROR),
        (ContextOverflow("too long"), Outcome.CONTEXT_OVERFLOW),
    ],
)
async def test_an_exception_in_a_workflow_affects_only_its_episode(raised, outcome):
    async def fails_on_two(item, llm, context):
        if item.id == "2":
            raise raised
        return await ask(item, llm, context)

    records = await collect(evaluation_of(fails_on_two))
    assert [record.outcome for record in records] == [Outcome.OK, Outcome.OK, outcome, Outcome.OK]
    assert str(raised) in records[2].reason


async def test_a_policy_failure_gets_its_penalty_and_an_environment_failure_no_reward():
    async def fails(item, llm, context):
        raise PolicyFailure("illegal move", output={"moves": 3}) if item.id == "0" else RuntimeError("a tool broke")

    policy_failed, environment_failed = await collect(evaluation_of(fails, count=2))
    assert (policy_failed.reward, policy_failed.item.output_obj) == (-0.5, {"moves": 3})
    assert (environment_failed.reward, environment_failed.scores) == (None, {})


async def test_a_policy_failure_after_a_cut_reply_is_overlong():
    async def parse(item, llm, context):
        reply = await llm.chat.completions.create(messages=[{"role": "user", "content": "x"}], max_tokens=2)
        raise PolicyFailure(f"cannot parse {reply.choices[0].message.content}")

    record = (await collect(evaluation_of(parse, ScriptedPolicy(lambda r: "a long answer"), count=1)))[0]
    assert record.outcome is Outcome.OVERLONG


async def test_a_context_overflow_is_detected_even_if_the_agent_hides_it():
    async def wraps(item, llm, context):
        try:
            await ask(item, llm, context)
        except ContextOverflow:
            raise RuntimeError("my framework hides causes") from None

    record = (await collect(evaluation_of(wraps, ScriptedPolicy(lambda r: ContextOverflow("300 > 256")), count=1)))[0]
    assert record.outcome is Outcome.CONTEXT_OVERFLOW


async def test_environment_failures_are_retried_and_policy_failures_are_not():
    seen = []

    async def flaky(item, llm, context):
        seen.append(item.id)
        if item.id == "0" and seen.count("0") < 3:
            raise ConnectionError("lost")
        if item.id == "1":
            raise PolicyFailure("bad")

    records = await collect(evaluation_of(flaky, retries=2, count=2))
    assert (seen.count("0"), records[0].outcome, records[0].attempt) == (3, Outcome.OK, 2)
    assert seen.count("1") == 1


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_a_workflow_that_hangs_is_abandoned_and_the_others_finish(kind):
    if kind == "async":

        async def hangs(item, llm, context):
            await asyncio.sleep(60 if item.id == "1" else 0)
    else:

        def hangs(item, llm, context):
            time.sleep(6 if item.id == "1" else 0)

    evaluation = evaluation_of(hangs, timeout=1.0, concurrency=1)
    records = await collect(evaluation)
    assert [record.outcome for record in records] == [Outcome.OK, Outcome.TIMEOUT, Outcome.OK, Outcome.OK]
    assert evaluation.runner.status.num_abandoned == (kind == "plain")
    assert evaluation.runner.status.num_running == 0


def test_a_timeout_during_replies_is_a_policy_timeout(monkeypatch):
    async def talks(item, llm, context):
        while True:
            await ask(item, llm, context)

    async def run():
        monkeypatch.setattr(capture, "time", SimpleNamespace(time=asyncio.get_running_loop().time))
        return await collect(evaluation_of(talks, ScriptedPolicy(lambda r: 0.05), timeout=0.4, count=1))

    (record,), _ = run_virtually(run())
    assert record.outcome is Outcome.POLICY_TIMEOUT


async def test_plain_workflows_run_concurrently_in_threads():
    def plain(item, llm, context):
        reply = llm.chat.completions.create(messages=[{"role": "user", "content": item.input_obj}])
        return reply.choices[0].message.content

    everyone = asyncio.Barrier(8)

    class Meeting(ScriptedPolicy):
        async def sample(self, request):
            await everyone.wait()  # only concurrent calls get past it
            return await super().sample(request)

    records = await collect(evaluation_of(plain, Meeting(), concurrency=8, count=8, timeout=60))
    assert [record.item.output_obj for record in records] == ["yes"] * 8


async def test_the_concurrency_limit_holds_over_several_collections():
    running, most = 0, 0

    async def count(item, llm, context):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1

    evaluation = evaluation_of(count, concurrency=3)
    await asyncio.gather(collect(evaluation), collect(evaluation), collect(evaluation))
    assert most == 3


async def test_an_episode_that_waits_for_its_turn_is_not_even_a_task():
    """Ten thousand of them cost next to nothing."""
    going, num_tasks = asyncio.Event(), []

    async def wait(item, llm, context):
        num_tasks.append(len(asyncio.all_tasks()))
        await going.wait()

    work = asyncio.create_task(collect(evaluation_of(wait, concurrency=2, count=1), generations=1000))
    while len(num_tasks) < 2:
        await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) < 10
    going.set()
    assert len(await work) == 1000
    assert max(num_tasks) < 10


async def test_a_collection_that_is_cancelled_gives_its_places_back():
    """Also those of episodes whose tasks never began."""

    async def wait(item, llm, context):
        await asyncio.sleep(60)

    evaluation = evaluation_of(wait, concurrency=4)
    work = asyncio.create_task(collect(evaluation))
    await asyncio.sleep(0)
    work.cancel()
    await asyncio.wait({work})
    assert evaluation.runner.status.num_running == 0
    evaluation.runner.workflow = bind_workflow(ask)
    async with asyncio.timeout(30):
        assert len(await collect(evaluation, generations=3)) == 12


async def test_a_model_handle_fails_after_its_episode():
    kept = []

    async def keeps(item, llm, context):
        kept.append(llm)
        return await ask(item, llm, context)

    record = (await collect(evaluation_of(keeps, count=1)))[0]
    with pytest.raises(Exception, match="episode has ended"):
        await kept[0].chat.completions.create(messages=[{"role": "user", "content": "late"}])
    assert len(record.calls) == 1


async def test_if_an_evaluator_fails_the_score_is_missing():
    def score(item):
        return {"0": 1.0, "1": None, "2": float("nan")}.get(item.id) if item.id != "3" else 1 / 0

    records = await collect(evaluation_of(ask, score=score))
    assert [record.outcome for record in records] == [Outcome.OK] + [Outcome.JUDGE_ERROR] * 3
    assert [record.reward for record in records] == [1.0, None, None, None]


async def test_run_eval_returns_steps_and_the_reasons_of_missing_scores():
    async def fails_on_one(item, llm, context):
        if item.id == "1":
            raise RuntimeError("a tool broke")
        context.mark(step_reward=0.25)
        return await ask(item, llm, context)

    output = await evaluation_of(fails_on_one, count=2).run_eval()
    (name, scores), items = output.evaluation_results[0], output.eval_input.eval_input_items
    assert (name, scores.average_score) == ("reward", 1.0)
    assert "a tool broke" in scores.eval_output_items[1].error
    kinds = [step.event_type.value for step in items[0].trajectory]
    assert kinds == ["CUSTOM_END", "LLM_START", "LLM_END"]
    completion = items[0].trajectory[2].data.payload
    assert completion.choices[0].logprobs.content[0].logprob == -0.5


@pytest.mark.parametrize("bad", [lambda item: 1, "not callable"])
def test_a_workflow_with_other_parameters_is_rejected(bad):
    with pytest.raises(ConfigError, match="workflow"):
        bind_workflow(bad)


async def test_generations_of_run_eval_are_siblings_within_an_epoch():
    """A user's builder calls run_eval once per generation: the environment seed changes only between epochs."""
    seeds = []

    async def look(item, llm, context):
        seeds.append(context.seed)

    evaluation = evaluation_of(look, count=1)
    keys = []
    evaluation.listener = lambda record: keys.append((record.key.epoch, record.key.generation))
    for epoch in (0, 1):
        evaluation.epoch = epoch
        await evaluation.run_eval()
        await evaluation.run_eval()
    assert keys == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]


def key(epoch, name="a", phase="collect"):
    return EpisodeKey(phase, epoch, name, 0)


class Queue:
    def __init__(self, num_slots):
        self.slots, self.begun, self.ends, self.tasks = EpisodeSlots(num_slots), [], {}, {}

    async def add(self, *keys):
        for each in keys:
            self.ends[each] = asyncio.Event()
            self.tasks[each] = asyncio.create_task(self._run(each))
            await asyncio.sleep(0)

    async def _run(self, each):
        await self.slots.acquire(each)
        self.begun.append(each)
        await self.ends[each].wait()
        self.slots.release()

    async def end(self, each):
        self.ends[each].set()
        await self.tasks[each]
        await asyncio.sleep(0)


async def test_validations_come_before_epochs_and_earlier_epochs_before_later_ones():
    queue = Queue(1)
    order = [key(5, "first"), key(7), key(6, "x"), key(6, "y"), key(6, phase="validate"), key(5, "again")]
    await queue.add(*order)
    for each in (order[0], order[4], order[5], order[2], order[3], order[1]):
        assert queue.begun[-1] == each
        await queue.end(each)
    assert len(queue.begun) == len(order)


@pytest.mark.parametrize("was_given", [False, True], ids=["while it waits", "as it is given the slot"])
async def test_a_cancelled_episode_leaves_its_slot_to_the_next(was_given):
    queue, first, second = Queue(1), key(0, "first"), key(0, "second")
    await queue.slots.acquire(key(0))
    await queue.add(first, second)
    if was_given:
        queue.slots.release()
    queue.tasks[first].cancel()
    await asyncio.gather(queue.tasks[first], return_exceptions=True)
    if not was_given:
        queue.slots.release()
    await asyncio.sleep(0)
    assert queue.begun == [second]
    await queue.end(second)
    await queue.add(key(1))
    assert queue.begun == [second, key(1)], "the slot is free again"
    await queue.end(key(1))
