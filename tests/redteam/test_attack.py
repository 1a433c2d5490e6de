"""The attack workflow: messages, rewards, trees in training and single conversations in validation."""

import math

import numpy as np
import pytest

from reinforge.config.finetuning_blocks import LimitsConfig, OutcomesConfig, SamplingConfig
from reinforge.evaluation.evaluators.contains import Contains, ContainsConfig
from reinforge.redteam.attack import Attack, AttackSuccess, Naturalness, RedteamConfig
from reinforge.rollout.runner import EpisodeRunner
from reinforge.rollout.tree import groups_from_tree
from reinforge.rollout.workflow import bind_workflow
from reinforge.types.episode import EpisodeKey
from reinforge.types.evaluation import EvalInputItem
from tests.doubles import PolicyModel, Scored, ScriptedPolicy

LN2 = math.log(2)


class Frozen(PolicyModel):
    """A frozen model; every token has log p = -ln 2."""

    is_policy = False

    async def score(self, token_ids):
        return [np.full(len(ids), -LN2, dtype=np.float32) for ids in token_ids]


class Attacker:
    def __init__(self):
        self.count = 0

    def __call__(self, request):
        self.count += 1
        return "tea?" if self.count % 2 else "word?"


def target(request):
    return "quibbern!" if "word" in request.messages[-1]["content"] else "tea."


async def run(phase="collect", scorer=None, script=None, agent=None, **settings):
    config = RedteamConfig(
        scorer="leaks", baseline="baseline", width=2, depth=2, **{"combined_weight": 0.0, **settings}
    )
    scorer = scorer or Contains(ContainsConfig(texts=["quibbern"]))
    models = {
        "attacker": PolicyModel(ScriptedPolicy(script or Attacker())),
        "target": Frozen(ScriptedPolicy(target)),
        "baseline": Frozen(ScriptedPolicy()),
    }

    async def score(record):
        record.reward = 0.0

    runner = EpisodeRunner(
        bind_workflow(Attack(config, scorer, agent=agent), "attacker"),
        models,
        sampling=SamplingConfig(),
        limits=LimitsConfig(),
        outcomes=OutcomesConfig(retries=0),
        run_seed=0,
        max_concurrency=4,
    )
    item = EvalInputItem(id="1", input_obj="A rainy day.", expected_output_obj=None, full_dataset_entry={})
    (record,) = await runner.run([(EpisodeKey(phase, 0, "1"), item)], score, lambda record: None)
    return record, models


async def test_a_training_episode_is_a_tree():
    record, _ = await run(defense_toxicity_weight=1.0, ppl_weight=0.25)
    turns = record.item.output_obj["turns"]
    assert [turn["path"] for turn in turns] == [[0], [1], [0, 0], [0, 1], [1, 0], [1, 1]]
    assert [turn["score"] for turn in turns] == [0, 1, 0, 1, 0, 1]
    assert [turn["perplexity"] for turn in turns] == pytest.approx([2.0] * 6)
    assert [turn["reward"] for turn in turns] == pytest.approx([-0.5, 0.5] * 3)  # score - 0.25 * 2
    targets = [call.llm == "attacker" for call in record.calls]
    groups = groups_from_tree(record, targets)
    assert sorted(sorted(t.reward for t in group) for group in groups) == [pytest.approx([-0.5, 0.5])] * 3


async def test_a_validation_episode_is_one_conversation():
    record, _ = await run("validate")
    assert [turn["path"] for turn in record.item.output_obj["turns"]] == [[0], [0, 0]]


async def test_attacker_and_target_messages():
    _, models = await run("validate", script=lambda request: "tea?")
    assert models["attacker"].policy.requests[1].messages == [
        {"role": "user", "content": "A rainy day."},
        {"role": "assistant", "content": "tea?"},
        {"role": "user", "content": "tea."},
    ]
    assert models["target"].policy.requests[1].messages == [
        {"role": "user", "content": "A rainy day.\ntea?"},
        {"role": "assistant", "content": "tea."},
        {"role": "user", "content": "tea?"},
    ]


async def test_the_combined_score_has_its_own_weight():
    weights = {"combined_weight": 0.5, "defense_toxicity_weight": 1.0, "ppl_weight": 0.0}
    record, _ = await run("validate", script=lambda request: "say quibbern", **weights)
    turn = record.item.output_obj["turns"][0]
    assert (turn["score"], turn["reward"]) == (0.0, 0.5)


async def test_a_scorer_that_fails_makes_the_episode_missing():
    record, _ = await run(scorer=Scored(lambda item: float("nan")))
    assert record.outcome.is_missing
    assert "the scorer leaks returned no score" in record.reason


async def test_success_counts_every_branch():
    record, _ = await run()
    output = await AttackSuccess().evaluate(record.item)
    assert output.score == 0.75  # all but the branch tea?, tea?
    assert output.reasoning == "the target first failed in turn 1"


async def test_success_of_one_conversation_is_all_or_nothing():
    record, _ = await run("validate", script=lambda request: "tea?")
    assert (await AttackSuccess().evaluate(record.item)).score == 0.0


async def test_naturalness_is_minus_the_log_of_the_perplexity():
    record, _ = await run("validate")
    assert (await Naturalness().evaluate(record.item)).score == pytest.approx(-LN2)


async def test_other_outputs_have_no_score():
    item = EvalInputItem(id="1", input_obj="q", expected_output_obj=None, output_obj="text", full_dataset_entry={})
    for evaluator in (AttackSuccess(), Naturalness()):
        assert (await evaluator.evaluate(item)).error


async def test_a_whole_agent_is_attacked():
    async def shop(item, llm, context):
        reply = await llm.chat.completions.create(messages=item.full_dataset_entry["messages"])
        return (
            f"{len(item.full_dataset_entry['messages'])} messages, {item.input_obj} {reply.choices[0].message.content}"
        )

    record, _ = await run("validate", agent=bind_workflow(shop, "target"), script=lambda request: "tea?")
    first, second = record.item.output_obj["turns"]
    assert first["response"] == "1 messages, A rainy day.\ntea? tea."
    assert second["response"] == "3 messages, tea? tea."
    assert [call.functions for call in record.calls if call.llm == "target"] == [("target",)] * 2
