"""Rejection sampling, expert iteration and pairs, by hand."""

import pytest
from pydantic import ValidationError

from reinforge.algorithms.dpo import DPO, DPOConfig
from reinforge.algorithms.ipo import IPO, IPOConfig
from reinforge.algorithms.preference import make_pairs
from reinforge.algorithms.rejection_sampling import ExpertIterationConfig, RejectionSampling, RejectionSamplingConfig
from reinforge.errors import TrajectoryError
from reinforge.types.request import TokenLogprobs
from tests.unit.algorithms.test_algorithms import advantages, group


def test_the_best_of_each_group_is_kept():
    samples, found = advantages(RejectionSampling(), group(0, 2, 1), group(3, 3, name="h"))
    assert [(sample.group_id, sample.reward) for sample in samples] == [("g", 2), ("h", 3)]
    assert found == [[1.0], [1.0]]
    assert RejectionSampling().needs_groups, "of equal siblings none is the best"


def test_best_k_and_a_least_reward_hold_together():
    samples, _ = advantages(RejectionSampling(RejectionSamplingConfig(best_k=2, min_reward=1)), group(0, 2, 1, 3))
    assert [sample.reward for sample in samples] == [3, 2]
    samples, _ = advantages(RejectionSampling(RejectionSamplingConfig(best_k=2, min_reward=3)), group(0, 2, 1, 3))
    assert [sample.reward for sample in samples] == [3]


def test_a_sibling_without_tokens_is_not_the_best():
    siblings = group(0, 2, 1)
    siblings.trajectories[1].episode[0].logprobs = None
    assert [sample.reward for sample in RejectionSampling().build_samples([siblings])] == [1]


def test_expert_iteration_keeps_whatever_was_solved():
    algorithm = RejectionSampling(ExpertIterationConfig())
    samples, _ = advantages(algorithm, group(1, 1, 0), group(1, 1, name="h"))
    assert [sample.reward for sample in samples] == [1, 1, 1, 1]
    assert not algorithm.needs_groups, "a group that is solved throughout is worth imitating"


def test_something_must_be_rejected():
    with pytest.raises(ValidationError, match="use _type: sft"):
        RejectionSamplingConfig(best_k=None)


def test_pairs_by_hand():
    assert make_pairs([0, 1, 0.5]) == [(1, 0)]
    assert make_pairs([0, 1, 0.5], "all") == [(1, 0), (1, 2), (2, 0)]
    assert make_pairs([0, 1, 0.5], "all", min_margin=1) == [(1, 0)]
    assert make_pairs([0, 1, 0.5], min_margin=1.1) == []
    assert make_pairs([1, 1]) == make_pairs([1]) == make_pairs([]) == []
    assert make_pairs([1, 0, 1, 0]) == [(0, 1)]


@pytest.mark.parametrize("algorithm", [DPO(), IPO()])
def test_best_and_worst_make_a_pair_that_moves_apart(algorithm):
    samples, found = advantages(algorithm, group(0, 2, 1), group(1, 1, name="h"), group(5, 4, name="i"))
    assert [(sample.pair_id, sample.reward) for sample in samples] == [("1>0", 2), ("1>0", 0), ("5>6", 5), ("5>6", 4)]
    assert found == [[1.0], [-1.0], [1.0], [-1.0]]
    assert algorithm.needs.ref_logprobs
    assert algorithm.needs_groups


def test_all_pairs_repeat_a_trajectory_as_a_sample_of_each():
    samples, _ = advantages(DPO(DPOConfig(pairs="all", min_margin=1)), group(0, 2, 1))
    assert [(sample.pair_id, sample.reward) for sample in samples] == [
        ("1>0", 2), ("1>0", 0), ("1>2", 2), ("1>2", 1), ("2>0", 1), ("2>0", 0)
    ]  # fmt: skip
    assert len({id(sample) for sample in samples}) == 6


def test_settings_reach_the_loss():
    config = DPOConfig(beta=0.2, label_smoothing=0.1, sft_coef=1.0, length_normalised=True)
    assert DPO(config).loss.params == {"beta": 0.2, "label_smoothing": 0.1, "sft_coef": 1.0, "length_normalised": True}
    assert IPO(IPOConfig(beta=0.3)).loss.params == {"beta": 0.3, "length_normalised": False}


def test_a_sibling_without_tokens_is_in_no_pair():
    siblings = group(0, 2, 1)
    siblings.trajectories[1].episode[0].logprobs = None
    assert [sample.reward for sample in DPO().build_samples([siblings])] == [1, 0]


def test_a_pair_of_different_prompts_is_refused():
    siblings = group(0, 1)
    siblings.trajectories[0].episode[0].logprobs = TokenLogprobs((1, 9, 2), (5,), (-0.5,))
    with pytest.raises(TrajectoryError, match="different prompts, of 2 and 3 tokens of which the first 1 are the same"):
        DPO().build_samples([siblings])


def test_a_pair_with_a_rewritten_history_is_refused():
    siblings = group(0, 1)
    other = siblings.trajectories[1].episode[0].model_copy(update={"logprobs": TokenLogprobs((7,), (5,), (-0.5,))})
    siblings.trajectories[1].episode.append(other)
    with pytest.raises(TrajectoryError, match="are 3 rows, since a history was rewritten"):
        DPO().build_samples([siblings])
