"""Stages of a pipeline over doubles: held-out prompts, passes over the examples, the curriculum."""

import pytest

from reinforge.algorithms.sft import SFT
from reinforge.config.pipeline import PipelineStage
from reinforge.config.schema import FinetuneConfig, StageConfig
from reinforge.trainer.builders.group import GroupTrajectoryBuilder, GroupTrajectoryBuilderConfig
from reinforge.trainer.builders.staged import StagedTrajectoryBuilder, StageParts
from reinforge.trainer.setup.pipeline import HeldOutPrompts
from reinforge.types.evaluation import EvalInputItem
from tests.core.trainer.test_loop import loop
from tests.doubles import examples

__all__ = ["loop"]


def item(input_obj, **row):
    return EvalInputItem(id="1", input_obj=input_obj, expected_output_obj=None, full_dataset_entry=row)


def user(text):
    return {"role": "user", "content": text}


HELD_OUT = HeldOutPrompts([item("What is 2 + 2?", conversation="a"), item([user("Name a color.")])], "conversation")
RULE = {"role": "system", "content": "Be brief."}
REPLY = {"role": "assistant", "content": "4"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (item("What is 2 + 2?"), True),
        (item([user("What is 2 + 2?")]), True),
        (item([RULE, user("what is  2 + 2")]), True),
        (item("Name a color."), True),
        (item([user("What is 2 + 2?"), REPLY, user("Why?")]), True),
        (item("Another question", conversation="a"), True),
        (item("Another question", conversation="b"), False),
        (item("What is 2 + 3?"), False),
        (item([user("Why?"), REPLY, user("Name a number.")]), False),
    ],
    ids=[
        "the same text",
        "as a message",
        "with a system prompt, case and spaces",
        "a message as text",
        "an earlier turn",
        "its conversation",
        "another conversation",
        "another number",
        "other turns",
    ],
)
def test_a_row_with_a_held_out_prompt_is_found_in_whatever_shape(row, expected):
    assert HELD_OUT.match(row) == expected


def test_a_question_that_many_held_out_examples_share_is_that_of_none():
    """A game has the same rule for each of its examples; what makes one is elsewhere, here in the system prompt."""
    games = [item([{"role": "system", "content": f"You play {side}."}, user("Play.")]) for side in "NESW"]
    assert not HeldOutPrompts(games, None).match(item([user("Play.")]))
    assert HeldOutPrompts(games[:3], None).match(item([user("Play.")]))


class Examples:
    def __init__(self, **counts):
        self.splits = {name.replace("_", " "): examples(count) for name, count in counts.items()}

    def example_ids(self, split):
        return [str(each.id) for each in self.splits[split]]


async def make_builder(second):
    config = GroupTrajectoryBuilderConfig(examples_per_epoch=10)
    stages = [PipelineStage("a", 0, StageConfig()), PipelineStage("b", 1, StageConfig(num_epochs=2, **second))]
    builder = StagedTrajectoryBuilder(
        [StageParts(each, SFT(), GroupTrajectoryBuilder(config, ["p"])) for each in stages]
    )
    evaluation = Examples(train=20)
    evaluation.splits["train (b)"] = examples(20)
    builder.evaluation = evaluation
    await builder.initialize(FinetuneConfig())
    return builder


async def test_a_stage_on_its_own_examples_begins_with_a_new_pass():
    """Two epochs of 10 of its 20 examples: each is trained once, and none twice."""
    builder = await make_builder({"dataset": "b.jsonl"})
    used = [id_ for epoch in (1, 2) for id_ in builder.plan(epoch).example_ids]
    assert sorted(used, key=int) == [str(number) for number in range(20)]


async def test_stages_on_the_same_examples_share_a_pass():
    builder = await make_builder({})
    used = [id_ for epoch in (0, 1) for id_ in builder.plan(epoch).example_ids]
    assert sorted(used, key=int) == [str(number) for number in range(20)]


@pytest.mark.parametrize(("scores", "num_groups"), [(True, 2), (False, 5)])
async def test_the_curriculum_leaves_a_stage_on_rows_alone(loop, scores, num_groups):
    """Two of five groups are in a share of 0.4; rows without scores are all trained, and rank no example."""
    curriculum = {"enabled": True, "initial_percentile": 0.4, "min_reward_diff": 0, "collect_only_included": True}
    it = loop(pipeline={"only": {}}, curriculum_learning=curriculum, limits={"max_refills": 0}, num_epochs=1)
    it.builder.rewards_are_scores = scores
    await it.run(1)
    assert len(it.adapter.jobs[0].groups) == num_groups
    assert len(it.trainer.get_curriculum_state()["mean_rewards"]) == (5 if scores else 0)
