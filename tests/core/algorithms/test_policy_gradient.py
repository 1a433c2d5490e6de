"""Advantages and samples of the policy-gradient algorithms, by hand."""

import math

import numpy as np
import pytest
from pydantic import ValidationError

from reinforge.algorithms.cispo import CISPO
from reinforge.algorithms.dapo import DAPO, DAPOConfig, compute_overlong_penalty
from reinforge.algorithms.dr_grpo import DrGRPO
from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.algorithms.gspo import GSPO
from reinforge.algorithms.policy_gradient import compute_returns, normalize_over_batch
from reinforge.algorithms.ppo import PPO
from reinforge.algorithms.reinforce_pp import ReinforcePP, ReinforcePPConfig
from reinforge.algorithms.rloo import RLOO, RLOOConfig
from reinforge.algorithms.sapo import SAPO, SAPOConfig
from reinforge.types.request import TokenLogprobs
from reinforge.types.trajectory import EpisodeItem, EpisodeItemRole, Outcome, Trajectory, TrajectoryGroup
from tests.core.algorithms.test_algorithms import advantages, group


def talk(reward, shaped, num_turns):
    ids, turns = [1, 2], []
    for index in range(num_turns):
        turns.append(TokenLogprobs(tuple(ids), (5 + index,), (-0.5,)))
        ids += [5 + index, 3]
    episode = [EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="x", logprobs=tokens) for tokens in turns]
    return Trajectory(episode=episode, reward=reward, shaped_rewards=shaped)


def with_reference(algorithm, groups, kls):
    samples = algorithm.build_samples(groups)
    for sample, values in zip(samples, kls, strict=True):
        sample.ref_logprobs = sample.sampling_logprobs.copy()
        sample.ref_logprobs[sample.loss_mask] -= np.array(values, np.float32)
    return [credit[s.loss_mask].tolist() for s, credit in zip(samples, algorithm.credit(samples), strict=True)]


def test_normalize_over_batch_by_hand():
    found = normalize_over_batch([np.array([1.0, 1.0]), np.array([0.0])])
    assert [values.tolist() for values in found] == [
        pytest.approx([math.sqrt(0.5)] * 2),
        pytest.approx([-math.sqrt(2)]),
    ]
    assert normalize_over_batch([np.array([2.0]), np.array([2.0])])[1].tolist() == [0]
    assert normalize_over_batch([]) == []


def test_compute_returns_by_hand():
    assert compute_returns([1, 0, 2], 0.5) == [1.5, 1, 2]
    assert compute_returns([1, 0, 2]) == [3, 2, 2]
    assert compute_returns([]) == []


def test_dr_grpo_centres_and_sums_by_a_constant():
    algorithm = DrGRPO()
    samples, found = advantages(algorithm, group(1, 0, 0, 1, lengths=[4, 1, 1, 1]))
    assert found == [[0.5] * 4, [-0.5], [-0.5], [0.5]]
    assert [sample.weight for sample in samples] == [1.0] * 4
    assert algorithm.loss.params["constant_length"] == 256
    assert "constant_length" not in GRPO().loss.params


def test_dapo_is_grpo_with_a_wider_upper_clip_and_a_mean_over_tokens():
    algorithm = DAPO()
    samples, found = advantages(algorithm, group(1, 0, lengths=[4, 1]))
    assert np.allclose(np.concatenate(found), [1] * 4 + [-1], atol=1e-3)
    assert [sample.weight for sample in samples] == [1.0, 1.0]
    assert (algorithm.loss.params["clip_low"], algorithm.loss.params["clip_high"]) == (0.2, 0.28)


def test_dapo_penalises_length_if_set():
    assert [compute_overlong_penalty(n, 10, 4) for n in (6, 7, 10, 50)] == [0, 0.25, 1, 1]
    algorithm = DAPO(DAPOConfig(max_length=4, length_buffer=2, scale_rewards=False))
    groups = [group(1, 1, lengths=[3, 1])]
    samples, found = advantages(algorithm, *groups)
    assert [sample.reward for sample in samples] == [0.5, 1.0]
    assert found == [[-0.25] * 3, [0.25]]
    assert groups[0].rewards == [1, 1], "the trajectories themselves keep their rewards"
    with pytest.raises(ValidationError, match="length_buffer 64 is more than max_length 10"):
        DAPOConfig(max_length=10)


def test_dapo_filters_overlong_trajectories_if_set():
    """Rewards 1, 0, 0, the last one overlong: it has weight 0, but still counts in the group's mean."""
    cut = group(1, 0, 0, lengths=[2, 1, 3])
    cut.trajectories[2].outcome = Outcome.OVERLONG
    for filtering, weights in ((False, [1, 1, 1, 1]), (True, [1, 1, 1, 0])):
        algorithm = DAPO(DAPOConfig(overlong_filtering=filtering, scale_rewards=False))
        samples, found = advantages(algorithm, group(1), cut)
        assert [sample.weight for sample in samples] == weights
        assert found[1:] == [pytest.approx([2 / 3] * 2), pytest.approx([-1 / 3]), pytest.approx([-1 / 3] * 3)]
        assert algorithm.has_signal(cut)
        assert algorithm.has_signal(TrajectoryGroup(group_id="c", trajectories=cut.trajectories[2:])) != filtering
    by_trajectory = DAPO(DAPOConfig(overlong_filtering=True, loss_aggregation="sequence"))
    assert [sample.weight for sample in by_trajectory.build_samples([cut])] == [0.5, 1, 0]


def test_policy_gradients_need_old_logprobs_where_the_samplers_are_inexact():
    for algorithm in (GRPO(), DAPO(), GSPO(), CISPO(), SAPO(), RLOO(), ReinforcePP(), PPO()):
        assert algorithm.needs.old_logprobs == "inexact"
        assert algorithm.loss.params["tis_cap"] == 2.0
    assert GRPO(GRPOConfig(tis_cap=None)).loss.params["tis_cap"] is None
    with pytest.raises(ValidationError, match="tis_cap"):
        GRPOConfig(tis_cap=0.9)


def test_the_kl_uses_the_learners_logprobs_if_computed():
    algorithm = RLOO(RLOOConfig(kl_coef=0.5))
    samples = algorithm.build_samples([group(1, 0, lengths=[2, 1])])
    for sample, kl in zip(samples, (0.2, 0.0), strict=True):
        sample.ref_logprobs = sample.sampling_logprobs + 9
        sample.old_logprobs = sample.ref_logprobs + np.where(sample.loss_mask, kl, 0).astype(np.float32)
    found = [c[s.loss_mask].tolist() for s, c in zip(samples, algorithm.credit(samples), strict=True)]
    assert found == [pytest.approx([0.8, 0.8], abs=1e-5), pytest.approx([-0.8], abs=1e-5)]


def test_gspo_cispo_and_sapo_scale_and_name_their_losses():
    cases = ((GSPO(), "gspo", [0.25, 1]), (CISPO(), "cispo", [1, 1]), (SAPO(), "sapo", [0.25, 1]))
    for algorithm, name, weights in cases:
        samples, found = advantages(algorithm, group(1, 0, lengths=[4, 1]))
        assert np.allclose(np.concatenate(found), [1] * 4 + [-1], atol=1e-3)
        assert algorithm.loss.name == name
        assert [sample.weight for sample in samples] == weights
    assert (GSPO().loss.params["clip_low"], GSPO().loss.params["clip_high"]) == (3e-4, 4e-4)
    params = SAPO(SAPOConfig(tau_neg=1.2, kl_coef=0.1)).loss.params
    assert (params["tau_pos"], params["tau_neg"], params["kl_coef"]) == (1.0, 1.2, 0.1)


def test_rloo_leaves_one_out():
    _, found = advantages(RLOO(), group(1, 0, 0, 1), group(3))
    assert np.allclose(np.concatenate(found), [2 / 3, -2 / 3, -2 / 3, 2 / 3, 0])


def test_rloo_subtracts_the_kl_of_the_whole_reply_from_the_reward():
    """Rewards 1 and 0, KL 0.1 + 0.3 and 0.2 at weight 0.5: 0.8 and -0.1, minus each other."""
    algorithm = RLOO(RLOOConfig(kl_coef=0.5))
    assert algorithm.needs.ref_logprobs
    assert algorithm.loss.params["kl_coef"] == 0
    found = with_reference(algorithm, [group(1, 0, lengths=[2, 1])], [[0.1, 0.3], [0.2]])
    assert found == [pytest.approx([0.9, 0.9]), pytest.approx([-0.9])]


def test_reinforce_pp_normalises_over_the_tokens_of_the_batch():
    """Rewards 1 (two tokens), 0, 3: mean 1.25 of 1, 1, 0, 3; variance 1.1875. No group is needed."""
    algorithm = ReinforcePP()
    _, found = advantages(algorithm, group(1, lengths=[2]), group(0), group(3, name="h"))
    std = math.sqrt(1.1875)
    assert np.allclose(np.concatenate(found), [-0.25 / std, -0.25 / std, -1.25 / std, 1.75 / std])
    assert not algorithm.needs_groups


def test_reinforce_pp_subtracts_later_kl_from_each_token():
    """KL 0.1 then 0.3 at weight 1: 1 - 0.4, 1 - 0.3 and, of the other reply, 0 - 0.2."""
    algorithm = ReinforcePP(ReinforcePPConfig(kl_coef=1.0))
    [first, second] = with_reference(algorithm, [group(1, 0, lengths=[2, 1])], [[0.1, 0.3], [0.2]])
    raw = np.array([0.6, 0.7, -0.2])
    expected = (raw - raw.mean()) / raw.std()
    assert np.allclose([*first, *second], expected, atol=1e-5)
    assert algorithm.loss.params["kl_coef"] == 0


def test_reinforce_pp_with_baseline_centres_each_group_first():
    algorithm = ReinforcePP(ReinforcePPConfig(baseline="group", kl_coef=0.1))
    _, found = advantages(algorithm, group(1, 0), group(3, 1, name="h"))
    raw = np.array([0.5, -0.5, 1, -1])
    assert np.allclose(np.concatenate(found), raw / raw.std(), atol=1e-5)
    assert algorithm.needs_groups
    assert (algorithm.loss.params["kl_coef"], algorithm.loss.params["kl_estimator"]) == (0.1, "k2")


def test_credit_by_turn_compares_returns_of_the_same_turn():
    """Shaped [1, 0] and [0, 2]; outcomes 1 and 0 at the last turn: returns [2, 1] and [2, 2], centered by turn."""
    siblings = TrajectoryGroup(group_id="g", trajectories=[talk(1, [1, 0], 2), talk(0, [0, 2], 2)])
    config = GRPOConfig(credit="turn", scale_rewards=False)
    assert advantages(GRPO(config), siblings)[1] == [[0, -0.5], [0, 0.5]]
    without = config.model_copy(update={"add_outcome": False, "turn_discount": 0.5})
    assert advantages(GRPO(without), siblings)[1] == [[0, -1], [0, 1]], "returns [1, 0] and [1, 2]"


def test_a_turn_is_compared_with_the_siblings_that_reached_it():
    siblings = TrajectoryGroup(group_id="g", trajectories=[talk(1, None, 1), talk(0, None, 2), talk(3, None, 2)])
    config = GRPOConfig(credit="turn", scale_rewards=False)
    found = advantages(GRPO(config), siblings)[1]
    assert np.allclose(np.concatenate(found), [1 - 4 / 3, 0 - 4 / 3, -1.5, 3 - 4 / 3, 1.5])


def test_leave_one_out_works_by_turn_too():
    siblings = TrajectoryGroup(group_id="g", trajectories=[talk(1, [1, 0], 2), talk(0, [0, 2], 2)])
    assert advantages(RLOO(RLOOConfig(credit="turn")), siblings)[1] == [[0, -1], [0, 1]]
