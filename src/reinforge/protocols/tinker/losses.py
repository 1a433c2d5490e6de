"""The losses of our algorithms as those of Tinker's service, which sums over tokens where ours is a mean.

sum_t w_s l_t / sum_t w_s   =   the service's sum, with each advantage times w_s / sum_t w_s
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reinforge.errors import ConfigError, Problem
from reinforge.protocols.tinker.service import ServiceDatum
from reinforge.types.sample import FloatArray, LossSpec, TrainingSample

ALGORITHM = "finetuning.algorithm"
UNUSED: dict[str, tuple[Any, ...]] = {
    "dual_clip": (None,),
    "constant_length": (None,),
    "kl_coef": (0, 0.0),
    "entropy_coef": (0, 0.0),
}
"""Settings of our losses that the service does not have, with the values at which they do nothing."""
IGNORED = ("tis_cap", "kl_estimator")
"""Settings that matter only for what the service does not do."""
CLIPPED = {"clipped_pg": ("ppo", 0.2, 0.2), "cispo": ("cispo", None, 4.0), "gspo": ("gspo", 3e-4, 4e-4)}
"""Our name -> the service's, and our defaults of `clip_low` and `clip_high`."""


def translate_loss(spec: LossSpec) -> tuple[str, dict[str, float]]:
    """Returns the service's name and settings of a loss.

    Example: clipped_pg with clip_low 0.2 and clip_high 0.3 -> ppo with thresholds 0.8 and 1.3.

    Raises:
        ConfigError: The service has no such loss, or the loss no such setting.
    """
    if spec.name == "cross_entropy":
        return spec.name, {}
    if spec.name not in CLIPPED:
        message = f"Tinker's service has no loss like {spec.name}"
        fix = "use an algorithm with clipped_pg, cispo, gspo or cross_entropy, such as grpo, or _type: local"
        raise ConfigError(Problem(ALGORITHM, message, fix))
    for name, value in spec.params.items():
        if name in UNUSED and value not in UNUSED[name]:
            message = f"{name} is {value}, which the losses of Tinker's service do not have"
            raise ConfigError(Problem(f"{ALGORITHM}.{name}", message, "remove it, or use _type: local"))
    name, default_low, default_high = CLIPPED[spec.name]
    low, high = spec.params.get("clip_low", default_low), spec.params.get("clip_high", default_high)
    if math.isinf(high):
        return "importance_sampling", {}
    return name, {"clip_low_threshold": 1 - (1.0 if low is None else low), "clip_high_threshold": 1 + high}


def build_data(samples: Sequence[TrainingSample], loss: str) -> list[ServiceDatum]:
    """Returns the samples of one optimizer step for the service.

    Args:
        samples: Samples with advantages.
        loss: The service's name of the loss.
    """
    total = sum(sample.weight * sample.num_trained for sample in samples)
    data = []
    for sample in samples:
        share = np.float32(sample.weight / total)
        advantages = sample.loss_mask if sample.advantages is None else sample.advantages
        scaled = np.where(sample.loss_mask, advantages, 0).astype(np.float32) * share
        old = sample.sampling_logprobs if sample.old_logprobs is None else sample.old_logprobs
        numbers: dict[str, FloatArray] = {"logprobs": np.where(sample.loss_mask, old, 0)[1:], "advantages": scaled[1:]}
        if loss == "cross_entropy":
            numbers = {"weights": (sample.loss_mask * share).astype(np.float32)[1:]}
        elif loss == "gspo":
            numbers["sequence_ratio_mask"] = sample.loss_mask[1:].astype(np.float32)
        data.append(make_datum(sample, numbers))
    return data


def make_datum(sample: TrainingSample, numbers: Mapping[str, FloatArray] | None = None) -> ServiceDatum:
    """Returns a sample in the service's form: the input without its last token, the targets without the first."""
    tokens = sample.token_ids.tolist()
    return ServiceDatum(tokens[:-1], tokens[1:], dict(numbers or {}))
