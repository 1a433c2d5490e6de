"""A bandit that each algorithm learns: one prompt, replies of two tokens, reward is the share of even tokens.

The whole way from trajectories to moved weights, with two steps a job, so that every second step is off policy.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from reinforge.config.schema import Config
from reinforge.engine.training.learner import JobProgress
from reinforge.engine.training.logprobs import sample_logprobs
from reinforge.registry import REGISTRY
from reinforge.types.request import TokenLogprobs
from reinforge.types.sample import add_mismatched_samples
from reinforge.types.trajectory import EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryGroup
from tests.engines import make_learner

PROMPT = (7, 8, 9)
GROUPS, SIBLINGS = 4, 8
ALGORITHMS = {
    "grpo": {},
    "dr_grpo": {"constant_length": 2},
    "dapo": {"dual_clip": 3.0},
    "gspo": {"clip_low": 0.05, "clip_high": 0.05},
    "cispo": {},
    "rloo": {"constant_length": 2, "kl_coef": 0.01},
    "reinforce_pp": {"kl_coef": 0.01},
    "rejection_sampling": {"best_k": 2},
    "expert_iteration": {},
    "sft": {"min_reward": 1.0},
    "dpo": {"sft_coef": 0.1},
    "ipo": {"beta": 0.03},
    "kto": {"threshold": 1.0, "beta": 0.3, "balance": True},
    "malt": {},
    "orpo": {"odds_ratio_coef": 0.5},
    "sapo": {},
    "simpo": {},
}


@torch.no_grad()
def play(model, rng) -> list[TrajectoryGroup]:
    ids = torch.tensor([PROMPT] * (GROUPS * SIBLINGS))
    logprobs = []
    for _ in range(2):
        logp = torch.log_softmax(model.logits(model.features(ids)[:, -1]), -1)
        sampled = torch.tensor([rng.choice(logp.shape[1], p=p) for p in _normalized(logp)])
        logprobs.append(logp.gather(1, sampled[:, None])[:, 0])
        ids = torch.cat((ids, sampled[:, None]), dim=1)
    trajectories = []
    for row, logp in zip(ids[:, len(PROMPT) :].tolist(), torch.stack(logprobs, 1).tolist(), strict=True):
        turn = EpisodeItem(
            role=EpisodeItemRole.ASSISTANT, content="", logprobs=TokenLogprobs(PROMPT, tuple(row), tuple(logp))
        )
        trajectories.append(Trajectory(episode=[turn], reward=sum(token % 2 == 0 for token in row) / 2))
    parts = (trajectories[start : start + SIBLINGS] for start in range(0, len(trajectories), SIBLINGS))
    return [TrajectoryGroup(group_id=f"g{n}", trajectories=siblings) for n, siblings in enumerate(parts)]


def _normalized(logp):
    p = logp.double().exp().numpy()
    return p / p.sum(axis=1, keepdims=True)


def mean_reward(groups):
    return float(np.mean([group.rewards for group in groups]))


async def make(name, settings):
    component = REGISTRY.get("algorithm", name)
    return await anext(component.factory(component.config_type(**settings), SimpleNamespace(config=Config())))


def credited(algorithm, groups, reference):
    """The work of an adapter between trajectories and the learner."""
    samples = algorithm.build_samples([g for g in groups if g.reward_range > 0 or not algorithm.needs_groups])
    if algorithm.needs.ref_logprobs:
        scored = add_mismatched_samples(samples)
        for sample, logprobs in zip(scored, sample_logprobs(reference, scored, 4096), strict=True):
            sample.ref_logprobs = logprobs
    for sample, credit in zip(samples, algorithm.credit(samples), strict=True):
        sample.advantages = credit
    return samples


@pytest.mark.parametrize(
    "name", [name if name == "grpo" else pytest.param(name, marks=pytest.mark.slow) for name in ALGORITHMS]
)
async def test_every_algorithm_learns_a_bandit(tiny_model_dir, name):
    algorithm, rng = await make(name, ALGORITHMS[name]), np.random.default_rng(0)
    learner = make_learner(tiny_model_dir, optimizer={"learning_rate": 3e-3}, batch={"steps_per_job": 2})
    reference = learner.model.make_frozen_copy()
    rewards = []
    for epoch in range(30):
        groups = play(learner.model, rng)
        rewards.append(mean_reward(groups))
        if rewards[-1] == 1:
            break
        samples = credited(algorithm, groups, reference)
        assert learner.update(samples, algorithm.loss, JobProgress(0, 0, epoch)).num_updates >= 1
    assert 0.3 < rewards[0] < 0.7
    assert max(rewards[-3:]) > 0.9, rewards


async def test_every_algorithm_is_listed():
    """Add new algorithms to the bandit; ppo needs a critic and distill a teacher, so they have tests of their own."""
    names = {c.name for c in REGISTRY.components("algorithm") if c.origin.startswith("reinforge.algorithms")}
    assert names - {"ppo", "distill"} == set(ALGORITHMS)
