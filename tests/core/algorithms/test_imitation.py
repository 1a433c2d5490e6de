"""Rejection sampling, expert iteration and pairs, by hand."""

import pytest
from pydantic import ValidationError

from reinforge.algorithms.dpo import DPO, DPOConfig
from reinforge.algorithms.expert_iteration import ExpertIteration, ExpertIterationConfig, compute_sampling_probabilities
from reinforge.algorithms.ipo import IPO, IPOConfig
from reinforge.algorithms.malt import MALT, MALTConfig
from reinforge.algorithms.preference import make_pairs
from reinforge.algorithms.rejection_sampling import RejectionSampling, RejectionSamplingConfig
from reinforge.algorithms.samples import drop_duplicate_samples, weight_by_agent
from reinforge.errors import TrajectoryError
from reinforge.types.request import TokenLogprobs
from tests.core.algorithms.test_algorithms import advantages, group


def test_the_best_of_each_group_is_kept():
    samples, found = advantages(RejectionSampling(), group(0, 2, 1), group(3, 3, name="h"))
    assert [(sample.group_id, sample.reward) for sample in samples] == [("g", 2), ("h", 3)]
    assert found == [[1.0], [1.0]]
    assert RejectionSampling().needs_groups, "of equal siblings none is the best"


def test_best_k_and_min_reward_work_together():
    samples, _ = advantages(RejectionSampling(RejectionSamplingConfig(best_k=2, min_reward=1)), group(0, 2, 1, 3))
    assert [sample.reward for sample in samples] == [3, 2]
    samples, _ = advantages(RejectionSampling(RejectionSamplingConfig(best_k=2, min_reward=3)), group(0, 2, 1, 3))
    assert [sample.reward for sample in samples] == [3]


def test_a_sibling_without_tokens_is_not_the_best():
    siblings = group(0, 2, 1)
    siblings.trajectories[1].episode[0].logprobs = None
    assert [sample.reward for sample in RejectionSampling().build_samples([siblings])] == [1]


def test_expert_iteration_keeps_all_solved_trajectories():
    algorithm = ExpertIteration(ExpertIterationConfig(drop_duplicates=False))
    samples, _ = advantages(algorithm, group(1, 0.9, 0.8), group(1, 1, name="h"))
    assert [sample.reward for sample in samples] == [1, 0.9, 1, 1]
    assert not algorithm.needs_groups, "a group that is solved throughout is worth imitating"


def test_duplicate_samples_are_trained_once():
    """The replies of `group` are 5, or 5 6: three of five are duplicates."""
    groups = [group(1, 1, 0), group(1, 1, lengths=[1, 2], name="h")]
    samples, _ = advantages(ExpertIteration(), *groups)
    assert [(sample.group_id, sample.num_trained) for sample in samples] == [("g", 1), ("h", 2)]
    groups[1].trajectories[0].agent = groups[1].trajectories[1].agent = "prover"
    assert len(ExpertIteration().build_samples(groups)) == 3, "what another agent says is another row"


def test_sampling_probabilities_grow_with_the_reward():
    assert compute_sampling_probabilities([0, 1, 3], None, 0.0).tolist() == [0, 0.25, 0.75]
    assert compute_sampling_probabilities([0, 1, 3], 1.0, 0.0).tolist() == [0, 0, 1]
    assert compute_sampling_probabilities([2, 2], None, 0.0).tolist() == [0.5, 0.5], "no 0 / 0 where rewards are equal"
    assert compute_sampling_probabilities([0, 0], 1.0, 0.01).tolist() == [0.5, 0.5]
    assert compute_sampling_probabilities([0, 1, 3], None, 0.03) == pytest.approx(
        [0.01 / 1.03, 0.26 / 1.03, 0.76 / 1.03]
    )


def weighted_sampling(seed=0, **settings):
    return ExpertIteration(ExpertIterationConfig(rollout_selection_method="weighted_sampling", **settings), seed)


def two_agents(*rewards):
    """Two groups of equal size; each trajectory has its own reply and episode."""
    groups = [group(*rewards, lengths=range(1, len(rewards) + 1), name=name) for name in ("verifier", "prover")]
    for siblings in groups:
        for number, trajectory in enumerate(siblings.trajectories):
            trajectory.agent, trajectory.episode_id = siblings.group_id, f"collect/0/0/x/{number}"
    return groups


def test_half_of_each_agents_trajectories_are_sampled():
    groups = two_agents(0, 0, 1, 1)
    sampled = weighted_sampling(weighting_use_replacement=False, weighting_epsilon=0.0).sample_trajectories(groups)
    assert sampled == {"verifier": (2, {2: 1, 3: 1}), "prover": (2, {6: 1, 7: 1})}
    often = weighted_sampling(weighting_epsilon=0.0, weighting_sample_size_factor=2.0)
    samples = often.build_samples(groups)
    assert {sample.reward for sample in samples} == {1}
    for agent in ("verifier", "prover"):
        assert sum(sample.weight for sample in samples if sample.agent == agent) == 8, "sampled twice counts twice"


def test_weighted_sampling_depends_on_seed_and_episodes():
    groups = two_agents(*[0.1 * n for n in range(20)])
    first, again, other = (weighted_sampling(seed).sample_trajectories(groups) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert {index - 20 for index in first["prover"][1]} != set(first["verifier"][1])


def test_too_few_trajectories_give_a_skip_reason():
    """Four trajectories per agent, two with a weight; three quarters of four are three samples."""
    groups = two_agents(0, 0, 1, 1)
    fewer = weighted_sampling(weighting_use_replacement=False, weighting_epsilon=0.0, weighting_sample_size_factor=0.75)
    assert fewer.skip_reason(groups) == (
        "2 trajectories of verifier can be sampled, but weighting_sample_size_factor requires 3"
    )
    assert weighted_sampling().skip_reason(groups) is None
    assert "min_examples is 9" in str(weighted_sampling(min_examples=9).skip_reason(groups))
    solved = ExpertIteration(ExpertIterationConfig(min_examples=5))
    assert solved.skip_reason(groups) == "4 trajectories reach reward_threshold, but min_examples is 5"
    assert ExpertIteration().skip_reason(groups) is None


def test_agents_have_equal_weight_whatever_their_number_of_tokens():
    """A verifier with rows of 1 and 2 tokens, a prover with one of 9: 12 in all, 6 each, or 3 and 9."""
    verifier, prover = group(1, 1, lengths=[1, 2]), group(1, lengths=[9], name="h")
    for siblings, name in ((verifier, "verifier"), (prover, "prover")):
        for trajectory in siblings.trajectories:
            trajectory.agent = name
    samples = ExpertIteration().build_samples([verifier, prover])
    weight_by_agent(samples)
    assert [sample.weight for sample in samples] == [pytest.approx(2), pytest.approx(2), pytest.approx(2 / 3)]
    prover.trajectories[0].agent_weight = 3.0
    samples = ExpertIteration().build_samples([verifier, prover])
    weight_by_agent(samples)
    assert [sample.weight for sample in samples] == [pytest.approx(1), pytest.approx(1), pytest.approx(1)]
    prover.trajectories[0].agent_weight = 0.0
    samples = ExpertIteration().build_samples([verifier, prover])
    weight_by_agent(samples)
    assert [sample.weight for sample in samples] == [4, 4, 0]
    alone = ExpertIteration().build_samples([verifier])
    weight_by_agent(alone)
    assert [sample.weight for sample in alone] == [1, 1]


def test_pairs_count_by_pairs_and_not_by_tokens():
    """Three pairs of the verifier, one of the prover with long replies: 8 samples, 4 for each."""
    groups = [group(1, 0, lengths=[1, n], name=f"g{n}") for n in (2, 3, 4)] + [group(1, 0, lengths=[50, 60], name="h")]
    for siblings in groups:
        for trajectory in siblings.trajectories:
            trajectory.agent = "prover" if siblings.group_id == "h" else "verifier"
    samples = MALT().build_samples(groups)
    weight_by_agent(samples)
    assert [sample.weight for sample in samples] == [pytest.approx(4 / 6)] * 6 + [2, 2]


def test_equal_pairs_are_trained_once():
    groups = [group(1, 0, lengths=[1, 2], name=name) for name in ("g", "h")] + [group(1, 0, lengths=[1, 3], name="i")]
    samples = MALT().build_samples(groups)
    assert [sample.group_id for sample in samples] == ["g", "g", "i", "i"]
    assert len(MALT(MALTConfig(drop_duplicates=False)).build_samples(groups)) == 6
    assert len(DPO().build_samples(groups)) == 6
    again = drop_duplicate_samples(DPO().build_samples(groups), add_up=True)
    assert [sample.weight for sample in again] == [2, 2, 1, 1]


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
def test_best_and_worst_make_a_pair_with_opposite_advantages(algorithm):
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
    config = DPOConfig(beta=0.2, label_smoothing=0.1, sft_coef=1.0, length_normalized=True)
    assert DPO(config).loss.params == {"beta": 0.2, "label_smoothing": 0.1, "sft_coef": 1.0, "length_normalized": True}
    assert IPO(IPOConfig(beta=0.3)).loss.params == {"beta": 0.3, "length_normalized": False}


def test_a_sibling_without_tokens_is_in_no_pair():
    siblings = group(0, 2, 1)
    siblings.trajectories[1].episode[0].logprobs = None
    assert [sample.reward for sample in DPO().build_samples([siblings])] == [1, 0]


def test_a_pair_of_different_prompts_is_refused():
    siblings = group(0, 1)
    siblings.trajectories[0].episode[0].logprobs = TokenLogprobs((1, 9, 2), (5,), (-0.5,))
    with pytest.raises(TrajectoryError, match="different prompts, of 2 and 3 tokens with the first 1 in common"):
        DPO().build_samples([siblings])


def rewrite_history(trajectory):
    other = trajectory.episode[0].model_copy(update={"logprobs": TokenLogprobs((7,), (5,), (-0.5,))})
    trajectory.episode.append(other)


def test_a_sibling_with_a_rewritten_history_is_in_no_pair():
    siblings = group(0, 2, 1)
    rewrite_history(siblings.trajectories[1])
    assert [sample.reward for sample in DPO().build_samples([siblings])] == [1, 0]


def test_without_any_pair_a_rewritten_history_is_told():
    siblings = group(0, 1)
    rewrite_history(siblings.trajectories[1])
    message = "one sample per trajectory, but there are several, because the agent rewrites its history"
    with pytest.raises(TrajectoryError, match=f"group {siblings.group_id}: .*{message}"):
        DPO().build_samples([group(1, 1), siblings])
