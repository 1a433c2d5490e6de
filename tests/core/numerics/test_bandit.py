"""A bandit that each algorithm learns: one prompt, replies of two tokens, reward is the share of even tokens.

The whole way from trajectories to moved weights, with two steps a job, so that every second step is off policy.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from reinforge.config.policy import BatchConfig, OptimizerConfig, PolicyConfig, ScheduleConfig
from reinforge.config.schema import Config
from reinforge.engine.model.causal_model import CausalModel
from reinforge.engine.model.loading import load_module
from reinforge.engine.training.learner import JobProgress, Learner
from reinforge.engine.training.logprobs import sample_logprobs
from reinforge.registry import REGISTRY
from reinforge.types.request import TokenLogprobs
from reinforge.types.sample import add_mismatched_samples
from reinforge.types.trajectory import EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryGroup

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
    """Samples groups of replies from the model, with their log-probs and rewards."""
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


def make_learner(folder):
    config = PolicyConfig(
        optimizer=OptimizerConfig(learning_rate=3e-3),
        schedule=ScheduleConfig(warmup_steps=0),
        batch=BatchConfig(steps_per_job=2),
    )
    return Learner(CausalModel(load_module(folder, torch.float32)), config, seed=0)


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


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
async def test_every_algorithm_learns_a_bandit(tiny_model_dir, name):
    algorithm, learner, rng = await make(name, ALGORITHMS[name]), make_learner(tiny_model_dir), np.random.default_rng(0)
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


async def margins_of(folder, name, settings):
    """Trains on the pairs of one epoch repeatedly; returns the margin of each iteration."""
    algorithm, learner = await make(name, settings), make_learner(folder)
    reference = learner.model.make_frozen_copy()
    samples = credited(algorithm, play(learner.model, np.random.default_rng(0)), reference)
    assert len(samples) == 2 * GROUPS
    return [learner.update(samples, algorithm.loss, JobProgress(0, 0, n)).metrics["margin"] for n in range(40)]


async def test_dpos_margin_keeps_growing(tiny_model_dir):
    margins = await margins_of(tiny_model_dir, "dpo", {"beta": 0.5})
    assert abs(margins[0]) < 1
    assert margins[10] > 4
    assert margins[-1] > margins[20] > margins[10]


async def test_ipos_margin_grows_to_its_target(tiny_model_dir):
    margins = await margins_of(tiny_model_dir, "ipo", {"beta": 0.25})
    assert abs(margins[0]) < 1
    assert margins[-1] == pytest.approx(1 / (2 * 0.25), abs=0.2)
