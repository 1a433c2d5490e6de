"""What a run of a small pretrained model does where nothing is configured: measured, not derived.

With all weights at the usual rate and one optimizer step an epoch, SmolLM2-135M is after ten epochs what it was before;
so it trains LoRA adapters, four steps on the episodes of an epoch. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reinforge.engine.learning_rate import count_parameters

MEASURED = (20e6, 300e6)
"""Parameters of the models for which this holds: smaller ones train all weights as fast."""
EXAMPLES_PER_EPOCH, NUM_EPOCHS = 16, 12
FINETUNING: Mapping[str, Any] = {
    "algorithm": {"_type": "grpo", "clip_low": 0.2, "clip_high": 0.28, "loss_aggregation": "token"},
    "policy": {
        "lora": {"r": 16, "lora_alpha": 32},
        "optimizer": {"learning_rate": 3e-4},
        "batch": {"steps_per_job": 4},
    },
    "limits": {"min_groups": 0.5, "max_refills": 2},
}
"""Clip-higher of DAPO (arXiv:2503.14476), since four steps on the same episodes need the clipping. At 5e-4 some of
the tasks of `docs/benchmarks.md` collapsed. Where fewer than half of the groups have signal, further ones are sampled."""
OWN = ("lora", "optimizer", "schedule", "batch", "init", "adapters")


def fill_in_training(finetuning: dict[str, Any], builder: dict[str, Any]) -> None:
    """Sets how a small pretrained model is trained, unless the configuration says any of it.

    Args:
        finetuning: The section of that name; what it has, or its `policy`, is kept.
        builder: Settings of its groups; `examples_per_epoch` is kept.
    """
    policy = finetuning.get("policy")
    if not isinstance(policy, dict) or not isinstance(policy.get("model"), str):
        return
    if finetuning.get("algorithm") or finetuning.get("pipeline") or any(policy.get(name) is not None for name in OWN):
        return
    count = count_parameters(policy["model"])
    if count is None or not MEASURED[0] <= count < MEASURED[1]:
        return
    finetuning["algorithm"] = dict(FINETUNING["algorithm"])
    policy |= {name: dict(value) for name, value in FINETUNING["policy"].items()}
    limits = finetuning.get("limits") or {}
    if isinstance(limits, dict):
        finetuning["limits"] = {**FINETUNING["limits"], **limits}
    if finetuning.get("num_epochs") is None:
        finetuning["num_epochs"] = NUM_EPOCHS
    if builder.get("examples_per_epoch") is None:
        builder["examples_per_epoch"] = EXAMPLES_PER_EPOCH
