"""Kahneman-Tversky optimization (KTO, arXiv:2402.01306, eq. 8): single replies, each of which is good or bad.

    loss = lambda_y (1 - sigma(beta (r - z)))  of a desirable reply,    r = log p(y | x) / p_ref(y | x)
    loss = lambda_y (1 - sigma(beta (z - r)))  of an undesirable one

z estimates how far the policy is from the reference: max(0, the mean of log p(y' | x) / p_ref(y' | x)) over the step,
where y' is the reply to another prompt. It has no gradient.

    prompts a a b b with replies 1 2 3 4  =>  for z: a 3, a 4, b 1, b 2

A trajectory is labeled by `metadata["label"]`, or else by its reward: desirable from `threshold` on. So thumbs of a
log are enough, and so are the scores of any group.

Differs from the paper: y' comes from the whole job instead of the same micro-batch, cut to the length of the job's
longest sample; in a run the replies are the policy's own samples; log-probs use the sampling temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from pydantic import Field

from reinforge.algorithms.samples import fill_trained_tokens, samples_from_groups
from reinforge.config.schema import AlgorithmConfig
from reinforge.interfaces import Algorithm
from reinforge.registry import register_algorithm
from reinforge.types.sample import FloatArray, LossSpec, Needs, TrainingSample
from reinforge.types.trajectory import Trajectory, TrajectoryGroup

LABEL = "label"  # key of a trajectory's metadata: True for a desirable reply, False for an undesirable one


class KTOConfig(AlgorithmConfig, name="kto"):
    """Settings of KTO."""

    beta: float = Field(
        default=0.1, gt=0, description="Strength of the pull toward the reference model; 0.01 to 0.5 is usual."
    )
    desirable_weight: float = Field(default=1.0, gt=0, description="Weight of each desirable reply's loss.")
    undesirable_weight: float = Field(default=1.0, gt=0, description="Weight of each undesirable reply's loss.")
    balance: bool = Field(
        default=False,
        description="Scale both weights so that, before them, the desirable replies of a job count as much as the "
        "undesirable ones; for data with far more of one kind.",
    )
    threshold: float = Field(
        default=0.5, description="A reply without a label is desirable if its reward is at least this."
    )


@register_algorithm(config_type=KTOConfig)
class KTO(Algorithm):
    """Makes desirable replies more likely and undesirable ones less; the advantage is the reply's weight, signed."""

    needs = Needs(ref_logprobs=True)
    offline = True

    def __init__(self, config: KTOConfig | None = None):
        self.config = config or KTOConfig()
        self.loss = LossSpec("kto", {"beta": self.config.beta})

    def is_desirable(self, trajectory: Trajectory) -> bool:
        label = (trajectory.metadata or {}).get(LABEL)
        return label if isinstance(label, bool) else trajectory.reward >= self.config.threshold

    def has_signal(self, group: TrajectoryGroup) -> bool:
        return any(trajectory.is_trainable for trajectory in group.trajectories)

    def skip_reason(self, groups: Sequence[TrajectoryGroup]) -> str | None:
        """Returns a reason if there is no desirable reply, or nothing to estimate the KL with."""
        labels = [self.is_desirable(each) for group in groups for each in group.trajectories if each.is_trainable]
        if len(labels) < 2:
            return f"{len(labels)} reply can be trained, but KTO compares each with the reply to another prompt"
        if not any(labels):
            return (
                f"none of {len(labels)} replies is desirable (labeled true, or with a reward of at least "
                f"{self.config.threshold:g}, finetuning.algorithm.threshold), so KTO would only unlearn"
            )
        return None

    def build_samples(self, groups: Sequence[TrajectoryGroup]) -> list[TrainingSample]:
        """Returns the samples of all trajectories, with reward 1 if desirable, else 0, and what estimates the KL."""
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        samples = samples_from_groups(groups)
        for sample in samples:
            sample.reward = float(self.is_desirable(trajectories[sample.trajectory_index]))
        add_mismatched(samples)
        return samples

    def credit(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Returns the weight of each desirable sample and minus the weight of each undesirable one, `[T]`."""
        config, count = self.config, len(samples)
        num_desirable = sum(sample.reward > 0 for sample in samples)
        weights = {True: config.desirable_weight, False: -config.undesirable_weight}
        if config.balance and 0 < num_desirable < count:
            weights[True] *= count / (2 * num_desirable)
            weights[False] *= count / (2 * (count - num_desirable))
        return [fill_trained_tokens(sample, weights[sample.reward > 0]) for sample in samples]


def add_mismatched(samples: Sequence[TrainingSample]) -> None:
    longest = max(map(len, samples), default=0)
    for sample, index in zip(samples, find_mismatched(samples), strict=True):
        sample.mismatched = _join(sample, samples[index], longest)


def find_mismatched(samples: Sequence[TrainingSample]) -> list[int]:
    """Returns for each sample the index of one that answers another prompt; if there is no other, of the next one.

    The samples of one prompt stand together. Example: prompts a a b b c -> [2, 3, 4, 4, 0]; a a a -> [1, 2, 0]
    """
    prompts = [sample.token_ids[: _find_reply(sample)].tobytes() for sample in samples]
    runs = [list(run) for _, run in groupby(range(len(samples)), key=prompts.__getitem__)]
    found = []
    for number, run in enumerate(runs):
        following = (runs[(number + step) % len(runs)] for step in range(1, len(runs)))
        others = next((other for other in following if prompts[other[0]] != prompts[run[0]]), None)
        shifted = [(index + 1) % len(samples) for index in run]
        found += shifted if others is None else [others[place % len(others)] for place in range(len(run))]
    return found


def _join(sample: TrainingSample, other: TrainingSample, longest: int) -> TrainingSample:
    """Returns the sample's prompt with the other's reply, of at most `longest` tokens."""
    start, begin = _find_reply(sample), _find_reply(other)
    reply = slice(begin, begin + longest - start)
    mask = np.concatenate((np.zeros(start, np.bool_), other.loss_mask[reply]))
    return TrainingSample(
        token_ids=np.concatenate((sample.token_ids[:start], other.token_ids[reply])),
        loss_mask=mask,
        sampling_logprobs=np.where(mask, np.nan, 0).astype(np.float32),
        temperatures=np.concatenate((sample.temperatures[:start], other.temperatures[reply])),
        policy_versions=np.full(len(mask), -1, np.int64),
        turn_ids=np.full(len(mask), -1, np.int64),
    )


def _find_reply(sample: TrainingSample) -> int:
    return int(sample.loss_mask.argmax())
