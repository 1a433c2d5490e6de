"""Which settings of a run OpenAI's fine-tuning service can honour; every other one is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from reinforge.adapters.openai_model import HOSTED_MODEL
from reinforge.algorithms.dpo import DPO, DPOConfig
from reinforge.algorithms.expert_iteration import ExpertIteration
from reinforge.algorithms.malt import MALT
from reinforge.algorithms.rejection_sampling import RejectionSampling
from reinforge.algorithms.sft import SFT
from reinforge.config.schema import FinetuneConfig, LimitsConfig, PolicyConfig, SamplingConfig
from reinforge.errors import Problem
from reinforge.interfaces import Algorithm

METHODS: dict[type[Algorithm], str] = {
    SFT: "supervised",
    RejectionSampling: "supervised",
    ExpertIteration: "supervised",
    DPO: "dpo",
    MALT: "dpo",
}
"""Algorithm -> the service's method. Exactly these classes: a subclass may give credit that no service knows of."""
MAX_TEMPERATURE = 2.0

LEAVE_OUT = "leave it out: the service decides it"
INSTEAD = {
    "optimizer.learning_rate": "set the trainer adapter's learning_rate_multiplier",
    "batch.batch_size": "set the trainer adapter's batch_size",
    "batch.passes": "set the trainer adapter's n_epochs",
    "batch.steps_per_job": "set the trainer adapter's n_epochs and batch_size (--smoke sets steps_per_job: two "
    "examples are fewer than the service takes)",
}


def refused_settings(config: FinetuneConfig, algorithm: Algorithm) -> list[Problem]:
    """Returns the settings that cannot be honoured, with what to write instead."""
    problems = [*_of_algorithm(config, algorithm)]
    for path, value in _changed(config.policy, PolicyConfig()):
        if path != "model":
            message = f"{_told(value)}: the fine-tuning service has no such setting"
            problems.append(Problem(f"finetuning.policy.{path}", message, INSTEAD.get(path, LEAVE_OUT)))
    if config.deterministic:
        message = "a hosted model gives no such promise"
        problems.append(Problem("finetuning.deterministic", message, "leave it out, or use `_type: local`"))
    if config.device != "auto":
        message = f"{config.device}: nothing is computed on this machine"
        problems.append(Problem("finetuning.device", message, "leave it out"))
    for path, value in _changed(config.sampling, SamplingConfig()):
        if path in ("top_k", "min_p"):
            message = f"{value}: OpenAI's chat completions have no such argument"
            problems.append(Problem(f"finetuning.sampling.{path}", message, "leave it out, or use top_p"))
    if config.sampling.temperature > MAX_TEMPERATURE:
        message = f"{config.sampling.temperature:g}: chat completions take at most {MAX_TEMPERATURE:g}"
        problems.append(Problem("finetuning.sampling.temperature", message, "lower it"))
    if config.limits.max_refused_steps != LimitsConfig().max_refused_steps:
        message = "the service does not tell its optimizer steps"
        problems.append(Problem("finetuning.limits.max_refused_steps", message, "leave it out"))
    return problems


def model_problems(base_model: str | None, config: FinetuneConfig) -> list[Problem]:
    """Returns what is wrong with the names of the model.

    Args:
        base_model: The trainer adapter's.
        config: The run's; `policy.model` may name a model that a run left in a folder.
    """
    path, named = "finetuning.policy.model", config.policy.model
    if named is None:
        fix = "name one of the service's there, or as the trainer adapter's base_model"
        return [] if base_model else [Problem(path, "no model is named", fix)]
    if (Path(named) / HOSTED_MODEL).is_file():
        return []
    if Path(named).is_dir() or named.startswith("bundled:"):
        return [Problem(path, f"{named} is a model on this machine", "name one of the service's, such as gpt-4.1-mini")]
    if base_model not in (None, named):
        return [Problem(path, f"is {named}, and the trainer adapter's base_model is {base_model}", "leave one out")]
    return []


def _of_algorithm(config: FinetuneConfig, algorithm: Algorithm) -> Iterator[Problem]:
    path, name = "finetuning.algorithm", type(algorithm).__name__
    if type(algorithm) not in METHODS:
        known = "sft, rejection_sampling, expert_iteration (supervised), dpo and malt"
        yield Problem(path, f"{name}: the fine-tuning service trains by {known}", f"use one of {known}")
    if isinstance(algorithm, ExpertIteration) and algorithm.draws:
        message = "weighted_sampling: what is drawn twice counts twice, and the service's rows have no weights"
        yield Problem(f"{path}.rollout_selection_method", message, "use threshold, or `_type: local`")
    if isinstance(algorithm, DPO):
        for name in ("label_smoothing", "sft_coef", "length_normalised"):
            value, default = getattr(algorithm.config, name), DPOConfig.model_fields[name].default
            if value != default:
                message = f"{value}: the service's DPO has no such setting"
                yield Problem(f"{path}.{name}", message, "leave it out")


def _changed(config: BaseModel, default: BaseModel, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the settings that differ from their defaults, by path."""
    for name in type(config).model_fields:
        value, usual = getattr(config, name), getattr(default, name)
        if value == usual:
            continue
        if isinstance(usual, BaseModel) and isinstance(value, BaseModel):
            yield from _changed(value, usual, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _told(value: Any) -> str:
    return "set" if isinstance(value, BaseModel) else str(value)
