"""Rows of a dataset and the algorithms that can learn from them: what is refused, and what a group is."""

import math

import numpy as np
import pytest

from reinforge.algorithms.dpo import DPO
from reinforge.algorithms.expert_iteration import ExpertIteration, ExpertIterationConfig
from reinforge.algorithms.kto import KTO
from reinforge.algorithms.rejection_sampling import RejectionSampling, RejectionSamplingConfig
from reinforge.algorithms.sft import SFT, SFTConfig
from reinforge.config.schema import Config, FinetuneConfig
from reinforge.errors import BackendError
from reinforge.evaluation import demonstrations
from reinforge.evaluation.datasets import RowDataset
from reinforge.trainer.builders.dataset import DatasetTrajectoryBuilder, DatasetTrajectoryBuilderConfig
from reinforge.trainer.held_out_replies import HeldOutEvaluator, HeldOutReplies
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.request import TokenLogprobs
from tests.doubles import ScriptedPolicy, ids_of

GOOD = SFT(SFTConfig(min_reward=0.5))
BEST = RejectionSampling()
FLOOR = RejectionSampling(RejectionSamplingConfig(best_k=None, min_reward=0.5))
SOLVED = ExpertIteration(ExpertIterationConfig())
WEIGHTED = ExpertIteration(ExpertIterationConfig(rollout_selection_method="weighted_sampling"))


def row(prompt, **columns):
    return {"prompt": prompt, "completion": "a", **columns}


def scored(*pairs):
    return [row(prompt, score=score) for prompt, score in pairs]


PLAIN = [row("q"), row("q"), row("r")]
SINGLE = scored(("q", 0.0), ("r", 1.0))
EQUAL = scored(("q", 1.0), ("q", 1.0), ("r", 1.0))
SIBLINGS = scored(("q", 0.0), ("q", 1.0), ("r", 1.0))


def validate(algorithm, rows, **settings):
    dataset = RowDataset(rows)
    items = dataset.load()
    builder = DatasetTrajectoryBuilder(DatasetTrajectoryBuilderConfig(**settings))
    return builder.validate(Config(), algorithm, items, dataset.row_locations), builder.take_notes()


REFUSED = [
    (GOOD, PLAIN, "finetuning.algorithm.min_reward", "the rows carry no reward to compare with it"),
    (FLOOR, PLAIN, "finetuning.algorithm.min_reward", "the rows carry no reward to compare with it"),
    (SOLVED, PLAIN, "finetuning.algorithm.reward_threshold", "the rows carry no reward to compare with it"),
    (BEST, PLAIN, "finetuning.algorithm", "RejectionSampling keeps the best replies by their rewards"),
    (WEIGHTED, PLAIN, "finetuning.algorithm", "ExpertIteration keeps the best replies by their rewards"),
    (DPO(), PLAIN, "finetuning.algorithm", "DPO learns from pairs of a better and a worse reply, but each row has one"),
    (DPO(), SINGLE, "finetuning.algorithm", "with different rewards, but each of the 2 prompts has one reply"),
    (DPO(), EQUAL, "finetuning.algorithm", "1 of 2 prompts have several replies, and none of them different rewards"),
    (BEST, SINGLE, "finetuning.algorithm", "RejectionSampling compares several replies to the same prompt"),
    (GOOD, [row("q", score=0.4)], "finetuning.algorithm.min_reward", "no row reaches 0.5; the highest reward is 0.4"),
    (KTO(), PLAIN, "finetuning.algorithm", "KTO learns from good and bad replies, but the rows do not say which"),
    (KTO(), [row("q", label=False)], "finetuning.algorithm.threshold", "no row is good: the highest reward is 0"),
    (GOOD, [row("q", score=1, reward=1)], "reward_key", "the rows have numbers in reward and score"),
    (GOOD, [row("q", score=1), row("r")], "", 'no number in the field "score"; other rows have one'),
    (GOOD, [row("q", label=False)], "finetuning.algorithm.min_reward", "the highest reward is 0"),
]


@pytest.mark.parametrize(("algorithm", "rows", "path", "message"), REFUSED)
def test_an_algorithm_that_would_learn_something_else_is_refused_with_a_fix(algorithm, rows, path, message):
    [problem], _ = validate(algorithm, rows)
    assert (problem.path, message in problem.message) == (path, True), problem
    assert problem.fix or problem.location == "row 2"


@pytest.mark.parametrize(
    ("algorithm", "rows"),
    [
        (SFT(), PLAIN),
        (SFT(), [row("q", score=1), row("r")]),
        (SFT(), [row("q", score=1, reward=1)]),
        (GOOD, SINGLE),
        (FLOOR, SINGLE),
        (SOLVED, SINGLE),
        (WEIGHTED, SINGLE),
        (BEST, SIBLINGS),
        (DPO(), SIBLINGS),
        (DPO(), [row("q", label=True), row("q", label=False)]),
        (KTO(), [row("q", label=True), row("r", label=False)]),
        (KTO(), SINGLE),
    ],
)
def test_rows_that_an_algorithm_can_learn_from_are_accepted(algorithm, rows):
    assert validate(algorithm, rows)[0] == []


def test_a_configured_column_must_hold_numbers_and_no_pairs():
    [problem], _ = validate(GOOD, [row("q", grade=1), row("r", grade="A")], reward_key="grade")
    assert (problem.location, problem.message) == (
        "row 2",
        'grade: expected the row\'s reward, a number of at most 1e+09, found "A"',
    )
    [problem], _ = validate(DPO(), [{"prompt": "q", "chosen": "a", "rejected": "b", "grade": 1}], reward_key="grade")
    assert (problem.path, problem.fix) == ("reward_key", "remove reward_key")


def test_sft_on_scored_rows_without_min_reward_says_that_it_trains_on_all_of_them():
    note = "the rows have rewards (score), but every row is trained: no min_reward is set"
    assert validate(SFT(), SINGLE) == ([], [note])
    assert validate(SFT(), PLAIN) == ([], [])


class Tokenizes:
    """A policy whose every reply is one token."""

    version, chat_template = 0, None

    async def encode(self, request, message):
        return TokenLogprobs((1, 2), (len(message["content"]),), (math.nan,), -1, "stop")


class HoldsExamples:
    def __init__(self, items):
        self.items = items

    def examples(self, split):
        return self.items


async def build(rows, **settings):
    builder = DatasetTrajectoryBuilder(DatasetTrajectoryBuilderConfig(**settings), Tokenizes)
    builder.evaluation = HoldsExamples(RowDataset(rows).load())
    await builder.initialize(FinetuneConfig())
    await builder.start_run("r", {"epoch": 0})
    collection = await builder.finalize("r", {"epoch": 0})
    return sorted(collection.groups, key=lambda group: group.group_id)


async def test_the_replies_to_a_prompt_are_one_group_with_their_rewards():
    groups = await build(SIBLINGS)
    assert [(group.group_id, group.rewards) for group in groups] == [("1", [0.0, 1.0]), ("3", [1.0])]
    assert [each.episode_id for each in groups[0].trajectories] == ["dataset/1/0", "dataset/2/0"]
    assert [group.rewards for group in await build(PLAIN)] == [[1.0], [1.0], [1.0]]
    [group] = await build(SIBLINGS, examples_per_epoch=1)
    assert group.group_id in ("1", "3"), "prompts are counted, not rows"


async def test_without_their_rewards_all_rows_would_be_trained(monkeypatch):
    """The mutation: the column is not read, so that `min_reward` leaves nothing out."""
    assert [len(GOOD.select_trajectories(group.trajectories)) for group in await build(SIBLINGS)] == [1, 1]
    monkeypatch.setattr(demonstrations, "_read_reward", lambda row, key: 1.0)
    assert [len(GOOD.select_trajectories(group.trajectories)) for group in await build(SIBLINGS)] == [2, 1]


def thumbed(prompt, **columns):
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": "a"}], **columns}


THUMBS = [thumbed("q", label=True), thumbed("r", label=False), thumbed("q", label=False)]


@pytest.mark.parametrize("algorithm", [GOOD, FLOOR, BEST, KTO(), DPO()])
def test_thumbs_of_conversations_are_enough_for(algorithm):
    assert validate(algorithm, THUMBS) == ([], [])


@pytest.mark.parametrize("rows", [THUMBS, [thumbed("q", label=False), thumbed("r")]])
def test_sft_would_train_on_replies_with_thumbs_down(rows):
    [problem], _ = validate(SFT(), rows)
    assert problem.path == "finetuning.algorithm.min_reward"
    assert "so sft would also train on the replies with the label false" in problem.message


@pytest.mark.parametrize("algorithm", [GOOD, FLOOR, KTO(), DPO()])
def test_a_row_without_a_thumb_is_named_where_thumbs_are_the_reward(algorithm):
    [problem], _ = validate(algorithm, [*THUMBS, thumbed("s")])
    assert problem.location == "row 4"
    assert problem.message == 'no true or false in the field "label"; other rows have one, so every row needs it'
    assert "reinforge data import --rated" in problem.fix


async def test_the_label_reaches_the_trajectory():
    builder = DatasetTrajectoryBuilder(DatasetTrajectoryBuilderConfig(), lambda: Tokenizes())
    row_format = demonstrations.detect_format(THUMBS)
    group = await builder._build_group("g", {"0": THUMBS[0], "1": THUMBS[1]}, row_format)
    assert [(each.reward, each.metadata["label"]) for each in group] == [(1.0, True), (0.0, False)]
    [plain] = await builder._build_group("g", {"0": thumbed("q")}, demonstrations.RowFormat("messages"))
    assert plain.metadata == {"generation": 0}


class Reader(ScriptedPolicy):
    """Finds each token of a reply as likely as its first letter says: log-prob -1 for a, -2 for b, ..."""

    async def encode(self, request, reply):
        ids = ids_of(reply["content"])
        return TokenLogprobs(ids_of("prompt"), ids, (0.0,) * len(ids), -1)

    async def score(self, token_ids):
        prompt = len(ids_of("prompt"))
        return [
            np.array([9.0] * prompt + [-float(id_ - ids_of("a")[0] + 1) for id_ in ids[prompt:]]) for ids in token_ids
        ]


def item(row):
    return EvalInputItem(id="1", input_obj="q", expected_output_obj=None, full_dataset_entry=row)


def conversation(*replies, **last):
    messages = [{"role": "user", "content": "q"}]
    for reply in replies:
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "more"}]
    return {"messages": messages[:-1]} | last


async def score(row, policy=None):
    workflow = HeldOutReplies(lambda: policy or Reader())
    found = item(row).copy_with_updates(output_obj=await workflow(item(row), None, None))
    return await HeldOutEvaluator().evaluate(found)


async def test_a_reply_scores_the_mean_log_prob_of_its_tokens():
    assert (await score(conversation("aab"))).score == pytest.approx(-4 / 3)
    assert (await score(conversation("a", "bb"))).score == pytest.approx(-5 / 3), "over the tokens of all replies"
    row = conversation("a", "bb")
    row["messages"][1]["weight"] = 0
    assert (await score(row)).score == pytest.approx(-2.0), "a reply that is only context does not count"


@pytest.mark.parametrize(("preferred", "other", "expected"), [("a", "b", 1.0), ("b", "aa", 0.0), ("ab", "ba", 0.5)])
async def test_of_a_pair_the_preferred_reply_should_be_the_more_likely_one(preferred, other, expected):
    row = {
        "input": {"messages": [{"role": "user", "content": "q"}]},
        "preferred_output": [{"role": "assistant", "content": preferred}],
        "non_preferred_output": [{"role": "assistant", "content": other}],
    }
    assert (await score(row)).score == expected


async def test_what_has_no_replies_has_no_score():
    with pytest.raises(BackendError, match="no replies to score"):
        await score({"question": "q", "answer": "a"})
    with pytest.raises(BackendError, match="serves no policy"):
        await HeldOutReplies(lambda: None)(item(conversation("a")), None, None)
    missing = await HeldOutEvaluator().evaluate(item(conversation("a")))
    assert missing.score is None
    assert "held_out_replies" in missing.error
