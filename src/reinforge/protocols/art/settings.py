"""The settings of a run as an ART backend reads them; each that it does not read is reported by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from reinforge.adapters.hosted_model import HOSTED_MODEL
from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import Problem, did_you_mean
from reinforge.interfaces import Algorithm
from reinforge.protocols.art.config import ARTTrainerAdapterConfig, ARTTrainingSettings
from reinforge.protocols.settings import find_unused_settings

ALIASES = {"beta": "kl_penalty_coef"}
"""Older names of settings, as files still have them."""
ONLY_PROTOCOL_2 = ("kl_penalty_source", "kl_penalty_reference_step", "kl_penalty_step_lag", "packed_sequence_length")
NEWER_SPELLINGS = ("loss_fn", "normalize_advantages")
"""Second names that only protocol 2 has, for `ppo` and `scale_rewards`."""
TRAIN_CONFIG = ("learning_rate", "kl_penalty_coef")
"""Protocol 1: these are in `config`, all others in `dev_config`."""
LEAVE_OUT = "leave it out; the server chooses it"
REPLACEMENTS = {
    "optimizer.learning_rate": "set the trainer adapter's training.learning_rate",
    "batch.steps_per_job": "the server takes one pass over a job's trajectories; run without --smoke",
}


def find_art_problems(config: ARTTrainerAdapterConfig, run: FinetuneConfig, algorithm: Algorithm) -> list[Problem]:
    """Returns every setting of a run that the backend does not read, with the fix for each.

    Args:
        config: The trainer adapter's settings.
        run: The run's settings.
        algorithm: The run's algorithm; the server has its own, group-relative one.
    """
    where = f"trainer_adapters.{run.trainer_adapter}" if run.trainer_adapter else "trainer_adapters"
    problems = [*_find_training_problems(config, f"{where}.training"), *_find_algorithm_problems(algorithm)]
    if config.backend.protocol == 2:
        for name in ("init_args", "engine_args", "server_config"):
            if getattr(config.backend, name) is not None:
                message = "the training service loads and serves the model itself, and reads no such setting"
                problems.append(Problem(f"{where}.backend.{name}", message, "leave it out"))
    named = run.policy.model
    if named not in (None, config.backend.base_model) and not (Path(str(named)) / HOSTED_MODEL).is_file():
        message = f"is {named}, but the trainer adapter's backend.base_model is {config.backend.base_model}"
        problems.append(Problem("finetuning.policy.model", message, "remove one of the two"))
    return problems + find_unused_settings(run, REPLACEMENTS, LEAVE_OUT, "the ART server")


def build_training_settings(config: ARTTrainerAdapterConfig) -> dict[str, Any]:
    """Returns the settings that are sent, under the names of protocol 2; what is not set is left out.

    The loss and the scaling of rewards have two names each there, and its clients send both.

    Example: {"loss_fn": "ppo", "scale_rewards": false}
        -> {"loss_fn": "ppo", "ppo": true, "scale_rewards": false, "normalize_advantages": false}.
    """
    given = {ALIASES.get(name, name): value for name, value in (config.training or {}).items()}
    settings = ARTTrainingSettings.model_validate(given).model_dump(exclude_none=True)
    if "loss_fn" in settings or "ppo" in settings:
        is_ppo = settings.get("loss_fn") == "ppo" or bool(settings.get("ppo"))
        settings |= {"loss_fn": "ppo" if is_ppo else "cispo", "ppo": is_ppo}
    if "scale_rewards" in settings:
        settings["normalize_advantages"] = settings["scale_rewards"]
    return settings


def split_settings(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the `config` and the `dev_config` of protocol 1."""
    config = {name: value for name, value in settings.items() if name in TRAIN_CONFIG}
    return config, {name: value for name, value in settings.items() if name not in (*TRAIN_CONFIG, *NEWER_SPELLINGS)}


def _find_training_problems(config: ARTTrainerAdapterConfig, path: str) -> Iterator[Problem]:
    given = dict(config.training or {})
    for old, new in ALIASES.items():
        if old in given and new in given:
            yield Problem(f"{path}.{old}", f"is an older name of {new}, and both are set", "remove one of the two")
    if {"loss_fn", "ppo"} <= set(given) and bool(given["ppo"]) != (given["loss_fn"] == "ppo"):
        message = f"is {given['ppo']}, but loss_fn is {given['loss_fn']}"
        yield Problem(f"{path}.ppo", message, "remove it; loss_fn is its newer name")
    known = [*ARTTrainingSettings.model_fields, *ALIASES]
    if config.backend.protocol == 1:
        known = [name for name in known if name not in ONLY_PROTOCOL_2]
    for name in given:
        if name not in known:
            where = "an ART server" if config.backend.protocol == 1 else "ART's training service"
            message = f"{where} reads no setting of this name{did_you_mean(name, known)}"
            yield Problem(f"{path}.{name}", message, f"use one of: {', '.join(sorted(known))}")
    for name, value in given.items():
        try:
            ARTTrainingSettings.model_validate({ALIASES.get(name, name): value} if name in known else {})
        except ValidationError as error:
            yield Problem(f"{path}.{name}", f"{error.errors()[0]['msg']}, found {value!r}", "")


def _find_algorithm_problems(algorithm: Algorithm) -> Iterator[Problem]:
    path, name = "finetuning.algorithm", type(algorithm).__name__
    if type(algorithm) is not GRPO:
        message = f"the ART server trains with its own group-relative algorithm, not with {name}"
        yield Problem(path, message, "leave finetuning.algorithm out, or use `_type: local`")
        return
    for field, default in GRPOConfig().model_dump().items():
        value = getattr(algorithm.config, field)
        if value != default:
            message = f"is {value}, but the ART server has its own settings"
            yield Problem(f"{path}.{field}", message, "set it under the trainer adapter's training, by ART's name")
