"""KTO's labels, weights and mismatched replies, and the credit of pairs without a reference, by hand."""

import numpy as np
import pytest
from pydantic import ValidationError

from reinforge.algorithms.kto import KTO, KTOConfig, find_mismatched
from reinforge.algorithms.orpo import ORPO, ORPOConfig
from reinforge.algorithms.samples import weight_by_agent
from reinforge.algorithms.simpo import SimPO, SimPOConfig
from reinforge.types.request import TokenLogprobs
from reinforge.types.sample import Needs, add_mismatched_samples
from reinforge.types.trajectory import EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryGroup
from tests.core.algorithms.test_algorithms import advantages, group


def reply(prompt, ids, reward=1.0, **metadata):
    tokens = TokenLogprobs(tuple(prompt), tuple(ids), (-0.5,) * len(ids), temperature=0.7)
    turn = EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="x", logprobs=tokens)
    return Trajectory(episode=[turn], reward=reward, metadata=metadata or None)


def groups_of(*trajectories):
    return [TrajectoryGroup(group_id=str(n), trajectories=[each]) for n, each in enumerate(trajectories)]


def test_kto_trains_good_and_bad_replies_by_their_label_or_reward():
    good, bad = reply([1, 2], [5], 1.0, label=True), reply([1, 3], [6], 0.0, label=False)
    samples, found = advantages(KTO(), *groups_of(good, bad))
    assert found == [[1.0], [-1.0]]
    assert [sample.reward for sample in samples] == [1.0, 0.0]
    _, found = advantages(KTO(KTOConfig(threshold=2)), *groups_of(good, bad), group(2, 1.9))
    assert found == [[1.0], [-1.0], [1.0], [-1.0]], "a label comes before the threshold"
    assert (KTO.needs, KTO.needs_groups, KTO.offline) == (Needs(ref_logprobs=True), False, True)


def test_a_label_that_is_no_truth_value_is_not_one():
    assert KTO().is_desirable(reply([1], [5], 0.9, label="no")), "some other column that happens to be called label"


def test_weights_and_balance():
    config = {"desirable_weight": 1.5, "undesirable_weight": 0.5}
    _, found = advantages(KTO(KTOConfig(**config)), group(1, 1, 1, 0))
    assert found == [[1.5], [1.5], [1.5], [-0.5]]
    _, found = advantages(KTO(KTOConfig(balance=True)), group(1, 1, 1, 0))
    assert np.allclose(np.concatenate(found), [2 / 3, 2 / 3, 2 / 3, -2]), "three of 2/3, one of 2"
    _, found = advantages(KTO(KTOConfig(balance=True, **config)), group(1, 1, 1, 0))
    assert np.allclose(np.concatenate(found), [1, 1, 1, -1])
    _, found = advantages(KTO(KTOConfig(balance=True)), group(1, 1))
    assert found == [[1.0], [1.0]], "there is nothing to balance"
    with pytest.raises(ValidationError, match="undesirable_weight"):
        KTOConfig(undesirable_weight=0)


def test_each_prompt_gets_the_reply_to_another_one():
    a, b, c = [1, 2], [1, 3, 4], [9]
    group_a = TrajectoryGroup(group_id="a", trajectories=[reply(a, [11]), reply(a, [12, 13])])
    group_b = TrajectoryGroup(group_id="b", trajectories=[reply(b, [14]), reply(b, [15])])
    samples = KTO().build_samples([group_a, group_b, *groups_of(reply(c, [16]))])
    assert find_mismatched(samples) == [2, 3, 4, 4, 0]
    found = [sample.mismatched for sample in samples]
    assert [each.token_ids.tolist() for each in found] == [
        [1, 2, 14], [1, 2, 15], [1, 3, 4, 16], [1, 3, 4, 16], [9, 11]
    ]  # fmt: skip
    assert [each.loss_mask.tolist() for each in found[2:]] == [[False] * 3 + [True]] * 2 + [[False, True]]
    assert found[0].temperatures.tolist() == [1.0, 1.0, pytest.approx(0.7)]
    assert np.isnan(found[0].sampling_logprobs).tolist() == [False, False, True], "these tokens were not sampled"
    assert add_mismatched_samples(samples) == [*samples, *found]


def test_replies_to_a_single_prompt_are_shifted_by_one():
    samples = KTO().build_samples([group(1, 0, 0, lengths=[1, 2, 3])])
    assert find_mismatched(samples) == [1, 2, 0]
    assert [len(sample.mismatched) for sample in samples] == [4, 5, 3]


def test_a_mismatched_reply_is_cut_to_the_longest_sample():
    samples = KTO().build_samples(groups_of(reply(range(1, 9), [20]), reply([1], range(30, 36))))
    assert [sample.mismatched.token_ids.tolist() for sample in samples] == [[*range(1, 9), 30], [1, 20]]


def test_turns_between_trained_ones_stay_context_in_a_mismatched_reply():
    first, second = TokenLogprobs((1,), (5,), (-0.5,)), TokenLogprobs((1, 5, 7), (8,), (-0.5,))
    turns = [EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="x", logprobs=each) for each in (first, second)]
    dialogue = Trajectory(episode=turns, reward=1.0)
    samples = KTO().build_samples(groups_of(reply([2, 3], [9]), dialogue))
    assert samples[0].mismatched.token_ids.tolist() == [2, 3, 5, 7]
    assert samples[0].mismatched.loss_mask.tolist() == [False, False, True, False]


def test_epochs_that_kto_cannot_learn_from_are_skipped():
    assert KTO().skip_reason([group(1, 0)]) is None
    assert KTO().skip_reason([group(1, 1)]) is None
    reason = KTO(KTOConfig(threshold=0.75)).skip_reason([group(0.5, 0.2), group(0.1)])
    assert reason == (
        "none of 3 replies is desirable (labeled true, or with a reward of at least 0.75, "
        "finetuning.algorithm.threshold), so KTO would only unlearn"
    )
    untrainable = group(1, 0)
    untrainable.trajectories[1].episode[0].logprobs = None
    assert "1 reply can be trained" in KTO().skip_reason([untrainable])
    assert KTO().has_signal(untrainable)
    untrainable.trajectories[0].episode[0].logprobs = None
    assert not KTO().has_signal(untrainable)


def test_agents_share_kto_by_replies_and_not_by_tokens():
    """Two replies of the prover, one long; one of the verifier: 3 samples, 1.5 for each agent."""
    groups = groups_of(reply([1], [5]), reply([2], range(5, 55)), reply([3], [5]))
    for number, siblings in enumerate(groups):
        siblings.trajectories[0].agent = "verifier" if number == 2 else "prover"
    samples = KTO().build_samples(groups)
    weight_by_agent(samples)
    assert [sample.weight for sample in samples] == [0.75, 0.75, 1.5]


@pytest.mark.parametrize("algorithm", [ORPO(), SimPO()])
def test_pairs_without_a_reference_need_none(algorithm):
    samples, _ = advantages(algorithm, group(0, 2, 1), group(1, 1, name="h"))
    assert [(sample.pair_id, sample.reward) for sample in samples] == [("1>0", 2), ("1>0", 0)]
    assert algorithm.needs == Needs()
    assert algorithm.needs_groups
    assert algorithm.offline


def test_the_credit_is_the_mean_logprobs():
    """A reply of 4 tokens is preferred to one of 2: each counts once, whatever its length."""
    _, found = advantages(SimPO(), group(1, 0, lengths=[4, 2]))
    assert found == [[0.25] * 4, [-0.5] * 2]
    _, found = advantages(ORPO(ORPOConfig(odds_ratio_coef=0.2)), group(1, 0, lengths=[4, 2]))
    assert found == [[0.25] * 4, pytest.approx([-0.1] * 2)]


def test_settings_reach_the_loss():
    assert KTO(KTOConfig(beta=0.3)).loss.params == {"beta": 0.3}
    assert ORPO(ORPOConfig(odds_ratio_coef=0.25)).loss.params == {"odds_ratio_coef": 0.25}
    assert SimPO(SimPOConfig(gamma=0.5)).loss.params == {"beta": 2.0, "gamma": 0.5, "sft_coef": 0.0}
