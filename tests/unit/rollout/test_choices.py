"""Several choices of one request: what the agent gets, which one is the turn, and where the others stay."""

from __future__ import annotations

import json

import pytest

from reinforge.algorithms.samples import num_of_other_choices, samples_of_groups
from reinforge.config.schema import LimitsConfig, OutcomesConfig, PolicyConfig, SamplingConfig
from reinforge.engine import Engine
from reinforge.evaluation.run import DatasetEvaluation
from reinforge.files import to_json
from reinforge.interfaces import ContextOverflow
from reinforge.rollout.capture import AsyncLLM, Capture
from reinforge.rollout.episode import steps_of, trajectory_of
from reinforge.rollout.runner import EpisodeRunner
from reinforge.rollout.workflow import PolicyFailure, bind_workflow
from reinforge.runs.episode_json import episode_json, episode_of
from reinforge.types.episode import EpisodeKey
from reinforge.types.request import SamplingParams
from reinforge.types.trajectory import Outcome, TrajectoryGroup
from tests.doubles import PolicyModel, Scored, ScriptedPolicy, examples

ASKED = [{"role": "user", "content": "say something"}]


class FrozenModel(PolicyModel):
    """A model that is not trained: the agent's own arguments count."""

    is_policy = False


def by_seed(request):
    return f"reply {request.sampling.seed % 100_000}"


async def episode(workflow, policy, sampling=None):
    """Runs one episode and returns its record."""
    runner = EpisodeRunner(
        bind_workflow(workflow),
        {"agent": PolicyModel(policy)},
        sampling=sampling or SamplingConfig(),
        limits=LimitsConfig(),
        outcomes=OutcomesConfig(retries=0),
        run_seed=1,
        max_concurrency=4,
    )
    splits, scored = {"train": examples(1), "select": []}, {"reward": Scored(lambda item: 1.0)}
    evaluation = DatasetEvaluation(runner, splits, scored, reward_metric="reward", outcomes=runner.outcomes)
    (record,) = await evaluation.collect([EpisodeKey("collect", 0, "0", 0)])
    return record


def turns(record):
    """What the trajectory says: (text, whether it is trained) of each turn."""
    trajectory = trajectory_of(record, 1.0, [True] * len(record.calls))
    return [(turn.content, turn.is_trained) for turn in trajectory.turns]


async def test_the_agent_gets_n_choices_of_its_own_seeds():
    seen = {}

    async def agent(item, llm, context):
        first = await llm.chat.completions.create(messages=ASKED, n=4)
        seen["n"] = first

    policy = ScriptedPolicy(by_seed)
    await episode(agent, policy)
    texts = [choice.message.content for choice in seen["n"].choices]
    assert [choice.index for choice in seen["n"].choices] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert [bytes(choice.logprobs.token_ids).decode() for choice in seen["n"].choices] == texts
    assert seen["n"].usage.prompt_tokens == len(b"say something"), "the prompt counts once"
    assert seen["n"].usage.completion_tokens == sum(map(len, texts))

    async def single(item, llm, context):
        seen["one"] = await llm.chat.completions.create(messages=ASKED)

    await episode(single, ScriptedPolicy(by_seed))
    assert seen["one"].choices[0].message.content == texts[0], "choice 0 is the reply that n = 1 gives"
    again = ScriptedPolicy(by_seed)
    await episode(agent, again)
    assert [choice.message.content for choice in seen["n"].choices] == texts, "the same seed, the same choices"


async def test_the_turn_is_the_choice_that_the_next_request_holds():
    async def agent(item, llm, context):
        reply = await llm.chat.completions.create(messages=ASKED, n=3)
        taken = {"role": "assistant", "content": f" {reply.choices[1].message.content}\n"}  # rebuilt and padded
        await llm.chat.completions.create(messages=[*ASKED, taken, {"role": "user", "content": "go on"}])

    record = await episode(agent, ScriptedPolicy(by_seed))
    first, second = record.calls
    assert (first.choice, len(first.others), second.choice) == (1, 2, 0)
    texts = [reply.message["content"] for reply in first.choices]
    assert first.reply.message["content"] == texts[1]
    assert turns(record)[0] == (texts[1], True)
    assert len(texts) == len(set(texts)) == 3


async def test_a_choice_is_found_in_a_history_that_was_rewritten():
    """Summarised before, but the assistant's own message is there; one that was said before is not taken for it."""
    script = iter(["yes", "no", "yes", "end"])

    async def agent(item, llm, context):
        first = await llm.chat.completions.create(messages=ASKED)
        history = [*ASKED, first.choices[0].message]
        several = await llm.chat.completions.create(messages=history, n=2)
        assert [choice.message.content for choice in several.choices] == ["no", "yes"]
        shorter = [{"role": "system", "content": "summary"}, several.choices[0].message]
        await llm.chat.completions.create(messages=shorter)

    record = await episode(agent, ScriptedPolicy(lambda request: next(script)))
    assert record.calls[1].choice == 0
    assert record.calls[1].reply.message["content"] == "no"


async def test_a_later_request_decides_where_the_next_one_does_not_hold_a_choice():
    """Best of n: another call judges, and only then the agent goes on."""

    async def agent(item, llm, context):
        several = await llm.chat.completions.create(messages=ASKED, n=3)
        await llm.chat.completions.create(messages=[{"role": "user", "content": "which is best?"}])
        await llm.chat.completions.create(messages=[*ASKED, several.choices[2].message, *ASKED])

    record = await episode(agent, ScriptedPolicy(by_seed))
    assert [call.choice for call in record.calls] == [2, 0, 0]


@pytest.mark.parametrize("fails", [False, True])
async def test_of_the_last_call_the_choice_that_was_returned_is_the_turn(fails):
    async def agent(item, llm, context):
        reply = await llm.chat.completions.create(messages=ASKED, n=3)
        text = reply.choices[1].message.content
        if fails:
            raise PolicyFailure("illegal", output=text)
        return text

    record = await episode(agent, ScriptedPolicy(by_seed))
    assert record.calls[0].choice == 1
    assert turns(record) == [(record.item.output_obj, True)]


async def test_where_nobody_can_tell_the_first_choice_is_the_turn():
    async def majority(item, llm, context):
        await llm.chat.completions.create(messages=ASKED, n=3)
        return "something else"

    record = await episode(majority, ScriptedPolicy(by_seed))
    assert (record.calls[0].choice, len(record.calls[0].others)) == (0, 2)


async def test_other_choices_are_counted_shown_and_never_trained():
    async def agent(item, llm, context):
        reply = await llm.chat.completions.create(messages=ASKED, n=3)
        return reply.choices[2].message.content

    record = await episode(agent, ScriptedPolicy(by_seed))
    texts = [reply.message["content"] for reply in record.calls[0].choices]
    assert record.num_completion_tokens == sum(map(len, texts))
    assert record.num_prompt_tokens == len("say something")
    group = TrajectoryGroup(group_id="0", trajectories=[trajectory_of(record, 1.0, [True])])
    (sample,) = samples_of_groups([group])
    assert bytes(sample.token_ids[sample.loss_mask].tolist()).decode() == texts[2]
    assert num_of_other_choices([group]) == len(texts[0]) + len(texts[1])
    assert (
        num_of_other_choices([TrajectoryGroup(group_id="0", trajectories=[trajectory_of(record, 1.0, [False])])]) == 0
    )
    ended = next(step for step in steps_of(record) if step.event_type == "LLM_END")
    assert [choice.message.content for choice in ended.data.payload.choices] == texts
    assert (ended.data.output, ended.metadata) == (texts[2], {"choice": 2})


async def test_the_journal_keeps_every_choice():
    async def agent(item, llm, context):
        reply = await llm.chat.completions.create(messages=ASKED, n=3)
        return reply.choices[1].message.content

    record = await episode(agent, ScriptedPolicy(by_seed))
    again = episode_of(json.loads(to_json(episode_json(record))), record.item)
    assert again.calls[0].choice == 1
    assert again.calls[0].choices == record.calls[0].choices
    assert again.num_completion_tokens == record.num_completion_tokens


async def test_one_choice_that_fails_fails_the_call():
    counter = iter(range(9))

    async def agent(item, llm, context):
        await llm.chat.completions.create(messages=ASKED, n=3)

    policy = ScriptedPolicy(lambda request: ContextOverflow("too long") if next(counter) == 1 else "x")
    assert (await episode(agent, policy)).outcome is Outcome.CONTEXT_OVERFLOW


@pytest.mark.parametrize("n", [0, -1, 129])
async def test_a_number_of_choices_that_cannot_be_is_refused(n):
    async def agent(item, llm, context):
        await llm.chat.completions.create(messages=ASKED, n=n)

    record = await episode(agent, ScriptedPolicy())
    assert f"takes n from 1 to 128, not {n}" in record.reason


async def test_a_plain_workflow_gets_choices_too():
    def agent(item, llm, context):
        return llm.chat.completions.create(messages=ASKED, n=2).choices[1].message.content

    record = await episode(agent, ScriptedPolicy(by_seed))
    assert record.calls[0].choice == 1


async def test_the_engine_reads_the_prompt_once_and_trains_the_choice_taken(tiny_model_dir):
    async def agent(item, llm, context):
        reply = await llm.chat.completions.create(messages=ASKED, n=4, max_tokens=6)
        return reply.choices[1].message.content

    with Engine.load(PolicyConfig(model=str(tiny_model_dir)), seed=0, device="cpu") as engine:
        record = await episode(agent, engine.policy, SamplingConfig(top_p=0.9, min_p=0.01))
        stats, call = engine.policy.stats(), record.calls[0]
        assert stats.prefilled_tokens == call.reply.num_prompt_tokens
        assert stats.prompt_tokens == 4 * stats.prefilled_tokens
        assert len({reply.tokens.token_ids for reply in call.choices}) > 1
        assert call.choice == 1
        again = episode_of(json.loads(to_json(episode_json(record))), record.item)
        group, other = (
            TrajectoryGroup(group_id="0", trajectories=[trajectory_of(r, 1.0, [True])]) for r in (record, again)
        )
        (sample,), (copy,) = samples_of_groups([group]), samples_of_groups([other])
        assert sample.supports == copy.supports
        assert (sample.sampling_logprobs == copy.sampling_logprobs).all()
        assert tuple(sample.token_ids[sample.loss_mask]) == call.choices[1].tokens.token_ids


async def test_agents_of_other_servers_bring_top_k_and_min_p():
    """A policy's are the run's; what stands in `extra_body` is read, and what nobody knows is refused by name."""
    policy, runs = ScriptedPolicy(), SamplingParams(top_k=7)
    trained, frozen = (AsyncLLM("agent", kind(policy), Capture(seed=1), runs) for kind in (PolicyModel, FrozenModel))
    await trained.chat.completions.create(messages=ASKED, extra_body={"top_k": 2, "min_p": 0.5})
    await frozen.chat.completions.create(messages=ASKED, top_k=3, extra_body={"min_p": 0.5})
    assert [(asked.sampling.top_k, asked.sampling.min_p) for asked in policy.requests] == [(7, 0.0), (3, 0.5)]
    with pytest.raises(TypeError, match="cannot honour: beam"):
        await trained.chat.completions.create(messages=ASKED, extra_body={"beam": 2})
