"""How a small model is trained where nothing says it: measured, not derived.

    parameters       weights                 examples of an epoch
    < 20 M           all, at 1e-3            64
    20 to 300 M      LoRA of rank 16, 3e-4   16

With one optimizer step an epoch, on all weights at the usual rate, SmolLM2-135M is after ten epochs what it was before;
an epoch of thousands of examples takes longer than most users wait for a whole run. Where the examples have expected
answers, these are imitated first (`_type: answers`), for a quarter as many epochs as follow. Needs no torch.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from reinforge.engine.learning_rate import count_parameters

LORA_FROM, LORA_TO = 20e6, 300e6
"""Parameters: smaller models train all weights as fast, and larger ones were not measured."""
EXAMPLES_PER_EPOCH, EXAMPLES_OF_LORA = 64, 16
NUM_EPOCHS, NUM_GENERATIONS = 12, 8
ALGORITHM = {"_type": "grpo", "clip_low": 0.2, "clip_high": 0.28, "loss_aggregation": "token"}
"""Clip-higher of DAPO (arXiv:2503.14476), since four steps on the same episodes need the clipping."""
STEPS = {"batch": {"steps_per_job": 4}}
LORA: dict[str, Any] = {"lora": {"r": 16, "lora_alpha": 32}, "optimizer": {"learning_rate": 3e-4}}
"""At 5e-4 some of the tasks of `docs/benchmarks.md` collapsed."""
LIMITS = {"min_groups": 0.5, "max_refills": 2}
"""Where fewer than half of the groups have signal, further ones are sampled."""
ANSWERS = "answers"  # the first stage, and its trajectory builder
EPOCHS_PER_ANSWERS = 4  # epochs after the first stage for each of its own; fewer have none
ANSWERS_PER_REPLY = 3  # rows of an epoch of the first stage for each reply of an epoch after it
ANSWERS_PER_STEP = 8  # or fewer, where the examples are
OWN = ("lora", "optimizer", "schedule", "batch", "init", "adapters")


def fill_in_training(
    finetuning: dict[str, Any], builder: dict[str, Any], num_answers: int | None = None
) -> dict[str, Any]:
    """Sets how a small model is trained, unless the configuration says any of it.

    Args:
        finetuning: The section of that name; what it has, or its `policy`, is kept.
        builder: Settings of its groups; `examples_per_epoch` is kept.
        num_answers: Epochs of the first stage, 0 for none; None: a share of all epochs.

    Returns:
        The trajectory builder of the first stage by its name; empty: there is one stage.
    """
    policy = finetuning.get("policy")
    if not isinstance(policy, dict) or not isinstance(policy.get("model"), str):
        return {}
    if finetuning.get("algorithm") or finetuning.get("pipeline") or any(policy.get(name) is not None for name in OWN):
        return {}
    count = 0 if policy["model"].startswith("bundled:") else count_parameters(policy["model"])
    if count is None or count >= LORA_TO:
        return {}
    uses_lora = count >= LORA_FROM
    finetuning["algorithm"] = dict(ALGORITHM)
    policy |= deepcopy(STEPS | (LORA if uses_lora else {}))
    limits = finetuning.get("limits") or {}
    if isinstance(limits, dict):
        finetuning["limits"] = {**LIMITS, **limits}
    if finetuning.get("num_epochs") is None:
        finetuning["num_epochs"] = NUM_EPOCHS
    if builder.get("examples_per_epoch") is None:
        builder["examples_per_epoch"] = EXAMPLES_OF_LORA if uses_lora else EXAMPLES_PER_EPOCH
    numbers = finetuning["num_epochs"], builder["examples_per_epoch"], builder.get("num_generations", NUM_GENERATIONS)
    if not isinstance(limits, dict) or not all(isinstance(number, int) for number in numbers):
        return {}  # the loader reports them
    total, examples, generations = numbers
    first = total // EPOCHS_PER_ANSWERS if num_answers is None else num_answers
    if first < 1 or limits.get("max_staleness"):
        return {}
    rows = ANSWERS_PER_REPLY * examples * generations
    del finetuning["num_epochs"]
    finetuning["pipeline"] = {
        ANSWERS: {"num_epochs": first, **build_answers_stage(rows)},
        "reinforce": {"num_epochs": total, "start_from": "best"},
    }
    return {ANSWERS: {"_type": ANSWERS, "examples_per_epoch": rows, "required": False}}


def build_answers_stage(num_rows: int) -> dict[str, Any]:
    """Returns the settings of a stage that imitates so many expected answers an epoch."""
    steps = {"batch": {"steps_per_job": max(1, num_rows // ANSWERS_PER_STEP)}}
    return {"algorithm": {"_type": "sft"}, "trajectory_builder": ANSWERS, "policy": steps}
