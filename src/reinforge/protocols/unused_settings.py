"""The settings of a run that mean nothing where a service trains and serves the model: each is reported by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from reinforge.config.finetuning_blocks import LimitsConfig, SamplingConfig
from reinforge.config.policy import PolicyConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import Problem

MAX_TEMPERATURE = 2.0


def find_unused_settings(
    config: FinetuneConfig, replacements: Mapping[str, str], leave_out: str, service: str
) -> list[Problem]:
    """Returns the settings of a run that mean nothing where a service trains and serves the model."""
    problems = list[Problem]()
    for path, value in _iterate_changed(config.policy, PolicyConfig()):
        if path != "model":
            message = f"is {_format_value(value)}, but {service} has no such setting"
            problems.append(Problem(f"finetuning.policy.{path}", message, replacements.get(path, leave_out)))
    if config.deterministic:
        message = "is true, but a hosted model's replies are not reproducible"
        problems.append(Problem("finetuning.deterministic", message, "leave it out, or use `_type: local`"))
    if config.device != "auto":
        message = f"is {config.device}, but the model runs at the service, not on this machine"
        problems.append(Problem("finetuning.device", message, "leave it out"))
    for path, value in _iterate_changed(config.sampling, SamplingConfig()):
        if path in ("top_k", "min_p"):
            message = f"is {value}, but the chat completions API has no such argument"
            problems.append(Problem(f"finetuning.sampling.{path}", message, "leave it out, or use top_p"))
    if config.sampling.temperature > MAX_TEMPERATURE:
        message = f"is {config.sampling.temperature:g}, but the chat completions API allows 0 to {MAX_TEMPERATURE:g}"
        problems.append(Problem("finetuning.sampling.temperature", message, f"set it to {MAX_TEMPERATURE:g} or less"))
    if config.limits.max_skipped_steps != LimitsConfig().max_skipped_steps:
        message = f"is {config.limits.max_skipped_steps}, but the service does not report its optimizer steps"
        problems.append(Problem("finetuning.limits.max_skipped_steps", message, "leave it out"))
    return problems


def _iterate_changed(config: BaseModel, default: BaseModel, path: str = "") -> Iterator[tuple[str, Any]]:
    for name in type(config).model_fields:
        value, default_value = getattr(config, name), getattr(default, name)
        if value == default_value:
            continue
        if isinstance(default_value, BaseModel) and isinstance(value, BaseModel):
            yield from _iterate_changed(value, default_value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _format_value(value: Any) -> str:
    return "set" if isinstance(value, BaseModel) else str(value)
