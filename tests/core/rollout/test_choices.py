"""Several choices of one request: what the agent gets, which one is the turn, and what happens to the others."""

import json

import pytest

from reinforge.algorithms.samples import count_tokens_of_other_choices, samples_from_groups
from reinforge.config.finetuning_blocks import SamplingConfig
from reinforge.config.policy import PolicyConfig
from reinforge.engine import Engine
from reinforge.errors import ContextOverflow
from reinforge.files import to_json
from reinforge.rollout.capture import AsyncLLM, Capture
from reinforge.rollout.episode import build_steps, build_trajectory
from reinforge.rollout.models.policy_llm import PolicyLLM
from reinforge.rollout.workflow import PolicyFailure
from reinforge.runs.journal.episode_json import dump_episode, parse_episode
from reinforge.types.request import ModelRequest, SamplingParams
from reinforge.types.trajectory import Outcome, TrajectoryGroup
from tests.doubles import PolicyModel, ScriptedPolicy
from tests.episodes import collect, make_evaluation, make_runner

ASKED = [{"role": "user", "content": "say something"}]


class FrozenModel(PolicyModel):
    is_policy = False


def by_seed(request):
    return f"reply {request.sampling.seed % 100_000}"


async def episode(workflow, policy, sampling=None):
    [record] = await collect(make_evaluation(make_runner(workflow, policy, sampling=sampling)))
    return record


def turns(record):
    trajectory = build_trajectory(record, 1.0, [True] * len(record.calls))
    return [(turn.content, turn.is_trained) for turn in trajectory.turns]


async def test_the_agent_gets_n_choices_with_different_seeds():
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


async def test_the_turn_is_the_choice_that_the_next_request_contains():
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
    """The prompt was summarized but contains the choice; an equal message of an earlier turn does not count."""
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


async def test_a_later_request_decides_if_the_next_one_contains_no_choice():
    """Best of n: another call judges before the agent continues with a choice."""

    async def agent(item, llm, context):
        several = await llm.chat.completions.create(messages=ASKED, n=3)
        await llm.chat.completions.create(messages=[{"role": "user", "content": "which is best?"}])
        await llm.chat.completions.create(messages=[*ASKED, several.choices[2].message, *ASKED])

    record = await episode(agent, ScriptedPolicy(by_seed))
    assert [call.choice for call in record.calls] == [2, 0, 0]


@pytest.mark.parametrize("fails", [False, True])
async def test_the_returned_choice_of_the_last_call_is_the_turn(fails):
    async def agent(item, llm, context):
        reply = await llm.chat.completions.create(messages=ASKED, n=3)
        text = reply.choices[1].message.content
        if fails:
            raise PolicyFailure("illegal", output=text)
        return text

    record = await episode(agent, ScriptedPolicy(by_seed))
    assert record.calls[0].choice == 1
    assert turns(record) == [(record.item.output_obj, True)]


async def test_if_no_choice_was_used_unchanged_the_first_is_the_turn():
    async def majority(item, llm, context):
        await llm.chat.completions.create(messages=ASKED, n=3)
        return "something else"

    record = await episode(majority, ScriptedPolicy(by_seed))
    assert (record.calls[0].choice, len(record.calls[0].others)) == (0, 2)


async def test_other_choices_are_counted_and_recorded_but_not_trained():
    async def agent(item, llm, context):
        reply = await llm.chat.completions.create(messages=ASKED, n=3)
        return reply.choices[2].message.content

    record = await episode(agent, ScriptedPolicy(by_seed))
    texts = [reply.message["content"] for reply in record.calls[0].choices]
    assert record.num_completion_tokens == sum(map(len, texts))
    assert record.num_prompt_tokens == len("say something")
    group = TrajectoryGroup(group_id="0", trajectories=[build_trajectory(record, 1.0, [True])])
    (sample,) = samples_from_groups([group])
    assert bytes(sample.token_ids[sample.loss_mask].tolist()).decode() == texts[2]
    assert count_tokens_of_other_choices([group]) == len(texts[0]) + len(texts[1])
    assert (
        count_tokens_of_other_choices(
            [TrajectoryGroup(group_id="0", trajectories=[build_trajectory(record, 1.0, [False])])]
        )
        == 0
    )
    ended = next(step for step in build_steps(record) if step.event_type == "LLM_END")
    assert [choice.message.content for choice in ended.data.payload.choices] == texts
    assert (ended.data.output, ended.metadata) == (texts[2], {"choice": 2})


async def test_if_one_choice_fails_the_call_fails():
    counter = iter(range(9))

    async def agent(item, llm, context):
        await llm.chat.completions.create(messages=ASKED, n=3)

    policy = ScriptedPolicy(lambda request: ContextOverflow("too long") if next(counter) == 1 else "x")
    assert (await episode(agent, policy)).outcome is Outcome.CONTEXT_OVERFLOW


async def test_the_engine_prefills_the_prompt_once_and_trains_the_selected_choice(tiny_model_dir):
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
        again = parse_episode(json.loads(to_json(dump_episode(record))), record.item)
        kept, made = ([each.tokens.token_ids for each in c.choices] for c in (again.calls[0], call))
        assert (again.calls[0].choice, kept) == (1, made), "the journal records every choice"
        group, other = (
            TrajectoryGroup(group_id="0", trajectories=[build_trajectory(r, 1.0, [True])]) for r in (record, again)
        )
        (sample,), (copy,) = samples_from_groups([group]), samples_from_groups([other])
        assert sample.supports == copy.supports
        assert (sample.sampling_logprobs == copy.sampling_logprobs).all()
        assert tuple(sample.token_ids[sample.loss_mask]) == call.choices[1].tokens.token_ids


async def test_what_extra_body_sets_is_used():
    """A trained policy uses the run's values instead."""
    policy, runs = ScriptedPolicy(), SamplingParams(top_k=7)
    trained, frozen = (AsyncLLM("agent", kind(policy), Capture(seed=1), runs) for kind in (PolicyModel, FrozenModel))
    await trained.chat.completions.create(messages=ASKED, extra_body={"top_k": 2, "min_p": 0.5})
    await frozen.chat.completions.create(messages=ASKED, top_k=3, extra_body={"min_p": 0.5})
    await frozen.chat.completions.create(messages=ASKED, top_k=3, extra_body={"top_k": 4, "max_tokens": 5})
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    await trained.chat.completions.create(messages=ASKED, response_format=None, extra_body=kwargs)
    assert [(asked.sampling.top_k, asked.sampling.min_p) for asked in policy.requests] == [
        (7, 0.0), (3, 0.5), (4, 0.0), (7, 0.0),
    ]  # fmt: skip
    assert policy.requests[2].sampling.max_tokens == 5
    assert policy.requests[3].template_kwargs == {"enable_thinking": False, "thinking": False}


async def test_the_user_is_told_once_that_the_run_decides_how_the_policy_is_sampled(caplog):
    async def agent(item, llm, context):
        for _ in range(3):
            await llm.chat.completions.create(messages=ASKED, temperature=0, extra_body={"top_k": 5}, max_tokens=9)

    await episode(agent, ScriptedPolicy(), SamplingConfig(temperature=0.7))
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "the agent asks the policy for temperature=0, but the run samples it with 0.7; set "
        "finetuning.sampling.temperature to change that",
        "the agent asks the policy for top_k=5, but the run samples it with 0; set finetuning.sampling.top_k to change "
        "that",
    ]


async def test_the_user_is_told_once_that_tool_calls_are_not_parsed(caplog):
    class Unknown(ScriptedPolicy):
        chat_template = "{{ tools }}<calls>"

    llm = PolicyLLM(lambda: Unknown())
    for _ in range(2):
        await llm.sample(ModelRequest(ASKED, tools=[{"type": "function", "function": {"name": "f"}}]))
    (told,) = [record.getMessage() for record in caplog.records]
    assert "shows no known format of tool calls (known: hermes, llama3, " in told
