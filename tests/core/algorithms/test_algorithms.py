"""Advantages against arithmetic by hand."""

import numpy as np

from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.algorithms.sft import SFT, SFTConfig
from reinforge.types.request import TokenLogprobs
from reinforge.types.trajectory import EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryGroup


def turn(*ids):
    tokens = TokenLogprobs((1, 2), ids, (-0.5,) * len(ids))
    return EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="x", logprobs=tokens)


def group(*rewards, lengths=None, name="g"):
    lengths = lengths or [1] * len(rewards)
    trajectories = [
        Trajectory(episode=[turn(*range(5, 5 + n))], reward=r) for r, n in zip(rewards, lengths, strict=True)
    ]
    return TrajectoryGroup(group_id=name, trajectories=trajectories)


def advantages(algorithm, *groups):
    samples = algorithm.build_samples(groups)
    return samples, [a[s.loss_mask].tolist() for s, a in zip(samples, algorithm.credit(samples), strict=True)]


def test_grpo_scales_by_the_groups_deviation_as_the_paper_does():
    _, found = advantages(GRPO(), group(1, 0, 0, 1), group(3, 1), group(2, 2))
    assert np.allclose(np.concatenate(found), [1, -1, -1, 1, 1, -1, 0, 0], atol=1e-3)


def test_unscaled_advantages_are_an_option():
    _, found = advantages(GRPO(GRPOConfig(scale_rewards=False)), group(3, 1))
    assert found == [[1.0], [-1.0]]


def test_sequence_aggregation_weighs_every_trajectory_the_same():
    samples, _ = advantages(GRPO(), group(1, 0, lengths=[4, 1]))
    assert [sample.weight * sample.num_trained for sample in samples] == [1.0, 1.0]
    samples, _ = advantages(GRPO(GRPOConfig(loss_aggregation="token")), group(1, 0, lengths=[4, 1]))
    assert [sample.weight for sample in samples] == [1.0, 1.0]


def test_an_untrainable_sibling_still_counts_in_the_mean():
    siblings = group(1, 0, 0)
    siblings.trajectories[2].episode[0].logprobs = None
    samples, found = advantages(GRPO(GRPOConfig(scale_rewards=False)), siblings)
    assert len(samples) == 2
    assert np.allclose(np.concatenate(found), [2 / 3, -1 / 3])


def test_credit_is_zero_outside_the_mask():
    algorithm = GRPO()
    samples = algorithm.build_samples([group(1, 0)])
    assert not algorithm.credit(samples)[0][~samples[0].loss_mask].any()


def test_sft_trains_on_all_turns_or_the_good_ones():
    samples, found = advantages(SFT(), group(1, 0))
    assert found == [[1.0], [1.0]]
    samples, _ = advantages(SFT(SFTConfig(min_reward=0.5)), group(1, 0))
    assert [sample.reward for sample in samples] == [1.0]
