"""Trees from episodes: replies to equal prompts are siblings, and everything above a reply is context."""

from dataclasses import replace

import pytest

from reinforge.algorithms.samples import samples_from_trajectory
from reinforge.errors import CaptureError
from reinforge.rollout.tree import build_tree, groups_from_tree
from reinforge.types.episode import EpisodeKey
from tests.doubles import ScriptedPolicy, examples
from tests.episodes import make_runner
from tests.replies import assistant, user

REWARDS = {"go": {"a": 0.0, "b": 1.0}, "a": {"c": 1.0, "d": 0.0}, "b": {"e": 0.25, "f": 0.5}}
"""The reward of each reply to a message; the policy gives them in this order."""


class NextReply:
    def __init__(self):
        self.counts = {}

    def __call__(self, request):
        last = request.messages[-1]["content"].removeprefix("after ")
        number = self.counts[last] = self.counts.get(last, -1) + 1
        return list(REWARDS[last])[number]


async def grow(item, llm, context):
    """Two replies to the first prompt and two to the prompt after each of them; marked out of order."""
    level = [[user("go")]]
    for _ in range(2):
        made = []
        for messages in level:
            for _ in range(2):
                made.append((messages, await llm.chat.completions.create(messages=messages)))
        for messages, reply in reversed(made):
            last = messages[-1]["content"].removeprefix("after ")
            text = reply.choices[0].message.content
            context.mark(step_reward=REWARDS[last][text], call_id=reply.id)
        level = [
            [*messages, assistant(reply.choices[0].message.content), user(f"after {reply.choices[0].message.content}")]
            for messages, reply in made
        ]


async def run(workflow, phase="collect"):
    async def score(record):
        record.reward = 0.0

    runner = make_runner(workflow, ScriptedPolicy(NextReply()), seed=0, concurrency=4)
    (record,) = await runner.run([(EpisodeKey(phase, 0, "7", 2), examples(1)[0])], score, lambda record: None)
    return record


def texts(group):
    return [(turn.content, trajectory.reward) for trajectory in group for turn in trajectory.turns[-1:]]


async def test_each_branching_point_is_a_group_and_replies_have_their_marked_rewards():
    record = await run(grow)
    groups = groups_from_tree(record, [True] * len(record.calls))
    found = {frozenset(texts(group)) for group in groups}
    assert found == {
        frozenset({("a", 0.0), ("b", 1.0)}),
        frozenset({("c", 1.0), ("d", 0.0)}),
        frozenset({("e", 0.25), ("f", 0.5)}),
    }
    assert len({group[0].group_id for group in groups}) == 3
    assert {group[0].group_id for group in groups} == {"7/2/", "7/2/0", "7/2/1"}


async def test_rewards_of_following_replies_are_backed_up():
    record = await run(grow)
    targets = [True] * len(record.calls)
    (root, *_) = groups_from_tree(record, targets, "mean")
    assert dict(texts(root)) == {"a": 0.0 + 0.5, "b": 1.0 + 0.375}
    (root, *_) = groups_from_tree(record, targets, "max")
    assert dict(texts(root)) == {"a": 0.0 + 1.0, "b": 1.0 + 0.5}


async def test_the_path_above_a_reply_is_context_and_each_reply_is_trained_once():
    record = await run(grow)
    groups = groups_from_tree(record, [True] * len(record.calls))
    samples = [sample for group in groups for trajectory in group for sample in samples_from_trajectory(trajectory)]
    assert len(samples) == len(record.calls) == 6
    for sample, call in zip(
        sorted(samples, key=lambda s: s.token_ids.tolist()),
        sorted(record.calls, key=lambda c: [*c.reply.tokens.prompt_token_ids, *c.reply.tokens.token_ids]),
        strict=True,
    ):
        tokens = call.reply.tokens
        assert sample.token_ids.tolist() == [*tokens.prompt_token_ids, *tokens.token_ids]
        assert sample.num_trained == len(tokens.token_ids)
        assert not sample.loss_mask[: len(tokens.prompt_token_ids)].any()


async def test_replies_of_a_remote_model_have_what_its_endpoint_returned_and_their_prompts():
    record = await run(grow)
    for call in record.calls:
        call.reply = replace(call.reply, tokens=None, logprobs={"content": []})
    turns = [t.turns[-1] for group in groups_from_tree(record, [True] * len(record.calls)) for t in group]
    assert len(turns) == 6
    assert all(turn.logprobs == {"content": []} and turn.is_trained for turn in turns)
    prompts = [call.request.messages for call in record.calls]
    assert all(list(turn.prompt.messages) in prompts for turn in turns)


async def test_calls_that_are_not_trained_are_not_branches():
    record = await run(grow)
    own = [call.request.messages == [user("go")] for call in record.calls]
    (group,) = groups_from_tree(record, own)
    assert {text for text, _ in texts(group)} == {"a", "b"}


async def test_groups_do_not_depend_on_the_order_in_which_calls_ended():
    record = await run(grow)
    expected = [texts(group) for group in groups_from_tree(record, [True] * 6, "mean")]
    record.calls.reverse()
    assert [texts(group) for group in groups_from_tree(record, [True] * 6, "mean")] == expected


async def test_equal_replies_share_their_children():
    async def twins(item, llm, context):
        for _ in range(2):
            await llm.chat.completions.create(messages=[user("go")])
        follow = [user("go"), assistant("a"), user("after a")]
        await llm.chat.completions.create(messages=follow)

    record = await run(twins)
    for call in record.calls[:2]:
        call.reply.message["content"] = "a"
    root, follow = build_tree(record, [True] * 3)
    assert root.children == [[follow], [follow]]


async def test_a_mark_on_an_unknown_call_is_rejected():
    async def marks(item, llm, context):
        await llm.chat.completions.create(messages=[user("go")])
        with pytest.raises(CaptureError, match='this episode has no call with the id "call-x"'):
            context.mark(step_reward=1.0, call_id="call-x")

    assert (await run(marks)).outcome == "ok"


@pytest.mark.parametrize(("phase", "is_training"), [("collect", True), ("validate", False), ("confirm_base", False)])
async def test_an_agent_can_tell_training_from_validation(phase, is_training):
    seen = []

    async def looks(item, llm, context):
        seen.append(context.is_training)

    await run(looks, phase)
    assert seen == [is_training]
