"""On-policy distillation: the policy's own tokens, each rewarded by how likely a teacher finds it.

    A_t = kl_coef sum_{s >= t} discount^(s - t) (log p_teacher(s) - log p_sampler(s))  +  reward_coef A_reward

with s over the trained tokens of the sample. On the policy's own samples log p_sampler - log p_teacher is the k1
estimate of the reverse KL(policy, teacher) at a token, so with discount 0 each token is an episode of one step whose
reward is minus its own divergence (GKD, arXiv:2306.13649; MiniLLM, arXiv:2306.08543; "On-Policy Distillation", Thinking
Machines Lab, 2025).

    log p_teacher [-1, -3], log p_sampler [-2, -1]  =>  A = [1, -2]; with discount 0.5: [0, -2]

Differs from the papers: the sampled token's estimate, not the sum over the vocabulary; all samples are the policy's
own. The reward's part is GRPO's: the reward minus the mean of its group.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence

import numpy as np
from pydantic import Field

from reinforge.algorithms.policy_gradient import ClipHigh, ClipLow, Scale, TisCap, group_relative_advantage
from reinforge.algorithms.samples import samples_from_groups
from reinforge.config.schema import AlgorithmConfig
from reinforge.errors import ConfigError, Problem
from reinforge.interfaces import Algorithm, Builder, Teacher
from reinforge.registry import register_algorithm
from reinforge.types.sample import FloatArray, LossSpec, Needs, TrainingSample
from reinforge.types.trajectory import TrajectoryGroup


class DistillConfig(AlgorithmConfig, name="distill"):
    """Settings of on-policy distillation."""

    teacher: str = Field(
        min_length=1,
        description="Entry of llms with the teacher: `_type: local` for a model in this process, or `_type: openai` "
        "for an endpoint whose completions return the log-probs of a given prompt (`echo`), as vLLM's do. It must have "
        "the policy's tokenizer.",
    )
    kl_coef: float = Field(default=1.0, gt=0, description="Weight of the reverse KL to the teacher.")
    discount: float = Field(
        default=0.0, ge=0, le=1, description="Weight per token of the divergence of later tokens; 0: only its own."
    )
    reward_coef: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the reward, as its difference from the mean of the group; 0: only the teacher counts.",
    )
    scale_rewards: Scale = False
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    tis_cap: TisCap = 2.0
    entropy_coef: float = Field(default=0.0, ge=0, description="Weight of the entropy bonus.")


class Distill(Algorithm):
    """Moves the policy toward a teacher on what the policy itself says; every episode counts, whatever its reward."""

    def __init__(self, config: DistillConfig, teacher: Teacher):
        self.config, self.teacher = config, teacher
        self.needs = Needs(old_logprobs="inexact")
        names = ("clip_low", "clip_high", "tis_cap", "entropy_coef")
        self.loss = LossSpec("distill", {name: getattr(config, name) for name in names})

    def build_samples(self, groups: Sequence[TrajectoryGroup]) -> list[TrainingSample]:
        return samples_from_groups(groups)

    def credit(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        return [self._credit_sample(sample) for sample in samples]

    def _credit_sample(self, sample: TrainingSample) -> FloatArray:
        if sample.ref_logprobs is None:
            raise ValueError("distillation needs the teacher's log-probs of every sample, in ref_logprobs")
        config, mask = self.config, sample.loss_mask
        gains = (sample.ref_logprobs - sample.sampling_logprobs)[mask].astype(np.float64)
        if config.discount:
            for place in range(len(gains) - 2, -1, -1):
                gains[place] += config.discount * gains[place + 1]
        gains *= config.kl_coef
        if config.reward_coef:
            reward = group_relative_advantage(sample.reward, sample.group_rewards, scale=config.scale_rewards)
            gains += config.reward_coef * reward
        advantages = np.zeros(len(sample), np.float32)
        advantages[mask] = gains
        return advantages


@register_algorithm(config_type=DistillConfig)
async def distill(config: DistillConfig, builder: Builder) -> AsyncIterator[Distill]:
    entries = builder.config.llms
    if config.teacher not in entries:
        message = f'llms has no entry "{config.teacher}"; it has {", ".join(entries) or "none"}'
        fix = "add the teacher there: `_type: local` with its model, or `_type: openai` with its base_url"
        raise ConfigError(Problem("teacher", message, fix))
    run = builder.config.finetuning
    stages = [each for each in run.pipeline.values() if (each.algorithm or run.algorithm) is config]
    samplings = [each.sampling or run.sampling for each in stages] or [run.sampling]
    if entries[config.teacher].static_type == "openai" and any(each != type(each)() for each in samplings):
        message = (
            f"the teacher {config.teacher} scores at temperature 1 over all tokens, which the policy must sample from"
        )
        raise ConfigError(Problem("finetuning.sampling", message, "remove it, or use a teacher of `_type: local`"))
    teacher = await builder.get_llm(config.teacher)
    if teacher.is_policy or not isinstance(teacher, Teacher):
        kind = entries[config.teacher].static_type
        message = f"{config.teacher} is `_type: {kind}`, which cannot score the policy's tokens as a teacher"
        raise ConfigError(Problem("teacher", message, "name an entry of `_type: local` or `_type: openai`"))
    own = next((each.trajectory_builder for each in stages), None) or run.trajectory_builder
    siblings = getattr(builder.config.trajectory_builders.get(str(own)), "num_generations", math.inf)
    if config.reward_coef and siblings < 2:
        message = "the reward counts as its difference from the mean of the group, but each group has one episode"
        fix = "set num_generations of the trajectory builder to 2 or more (8 is usual), or remove reward_coef"
        raise ConfigError(Problem("reward_coef", message, fix))
    yield Distill(config, teacher)
