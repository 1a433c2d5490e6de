"""The settings of a run that OpenAI's fine-tuning API does not support: each is reported by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from reinforge.adapters.hosted_model import HOSTED_MODEL
from reinforge.algorithms.dpo import DPO, DPOConfig
from reinforge.algorithms.expert_iteration import ExpertIteration
from reinforge.algorithms.malt import MALT
from reinforge.algorithms.rejection_sampling import RejectionSampling
from reinforge.algorithms.sft import SFT
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import Problem
from reinforge.interfaces import Algorithm
from reinforge.protocols.unused_settings import find_unused_settings

METHODS: dict[type[Algorithm], str] = {
    SFT: "supervised",
    RejectionSampling: "supervised",
    ExpertIteration: "supervised",
    DPO: "dpo",
    MALT: "dpo",
}
"""Algorithm -> method of the fine-tuning API. Only these exact classes: a subclass may assign credit differently."""
LEAVE_OUT = "leave it out; the service chooses it"
REPLACEMENTS = {
    "optimizer.learning_rate": "set the trainer adapter's learning_rate_multiplier",
    "batch.batch_size": "set the trainer adapter's batch_size",
    "batch.num_iterations": "set the trainer adapter's n_epochs",
    "batch.steps_per_job": "set the trainer adapter's n_epochs and batch_size; run without --smoke, which sets "
    "steps_per_job and collects fewer rows than the service accepts",
}


def find_unsupported_settings(config: FinetuneConfig, algorithm: Algorithm) -> list[Problem]:
    """Returns the settings that the API does not support, with the fix for each."""
    unused = find_unused_settings(config, REPLACEMENTS, LEAVE_OUT, "the fine-tuning API")
    return [*_find_algorithm_problems(config, algorithm), *unused]


def find_model_problems(base_model: str | None, config: FinetuneConfig) -> list[Problem]:
    """Returns what is wrong with the names of the model."""
    path, named = "finetuning.policy.model", config.policy.model
    if named is None:
        fix = "set it, or the trainer adapter's base_model, to a model of the service, such as gpt-4.1-mini"
        return [] if base_model else [Problem(path, "no model is named", fix)]
    if (Path(named) / HOSTED_MODEL).is_file():
        return []
    if Path(named).is_dir() or named.startswith("bundled:"):
        message = f"{named} is a model on this machine, which the service cannot train"
        return [Problem(path, message, "name a model of the service, such as gpt-4.1-mini, or use `_type: local`")]
    if base_model not in (None, named):
        message = f"is {named}, but the trainer adapter's base_model is {base_model}"
        return [Problem(path, message, "remove one of the two")]
    return []


def _find_algorithm_problems(
    config: FinetuneConfig, algorithm: Algorithm, path: str = "finetuning.algorithm"
) -> Iterator[Problem]:
    name = type(algorithm).__name__
    if type(algorithm) not in METHODS:
        supported = "sft, rejection_sampling, expert_iteration, dpo or malt"
        yield Problem(path, f"the fine-tuning API does not support {name}", f"use {supported}, or `_type: local`")
    if isinstance(algorithm, ExpertIteration) and algorithm.is_weighted:
        message = "weighted_sampling repeats trajectories, but a training file lists each row once"
        yield Problem(f"{path}.rollout_selection_method", message, "set it to threshold, or use `_type: local`")
    if (first := algorithm.for_epoch(0)) is not algorithm:
        yield from _find_algorithm_problems(config, first, f"{path}.initial_ei")
    if isinstance(algorithm, DPO):
        for name in ("label_smoothing", "sft_coef", "length_normalized"):
            value, default = getattr(algorithm.config, name), DPOConfig.model_fields[name].default
            if value != default:
                message = f"is {value}, but the fine-tuning API's DPO has no such setting"
                is_own_default = value == type(algorithm.config).model_fields[name].default
                yield Problem(f"{path}.{name}", message, f"set it to {default}" if is_own_default else "leave it out")
