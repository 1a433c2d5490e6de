"""The settings of a training call under ART's names, as an algorithm and a learning rate.

    loss_fn cispo (the default)  => CISPO: epsilon -> clip_low (from 1 on: not clipped below), epsilon_high -> clip_high
    loss_fn ppo                  => GRPO: epsilon -> clip_low, epsilon_high -> clip_high
    importance_sampling_level sequence, with loss_fn ppo => GSPO

What says how something is computed, such as packed_sequence_length, changes nothing here. What would change the result
and is not there is refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from reinforge.algorithms.cispo import CISPO, CISPOConfig
from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.algorithms.gspo import GSPO, GSPOConfig
from reinforge.algorithms.policy_gradient import PolicyGradient
from reinforge.protocols.art.config import ARTTrainingSettings
from reinforge.serving.routes import ApiError, refuse_invalid

DEFAULT_LEARNING_RATE = 5e-6
"""That of ART's clients."""
REQUIRED: dict[str, Any] = {
    "advantage_balance": 0.0,
    "allow_training_without_logprobs": False,
    "kimi_k2_tau": None,
    "kl_penalty_reference_step": 0,
    "kl_penalty_step_lag": None,
    "kl_ref_adapter_path": None,
    "mask_prob_ratio": False,
    "max_negative_advantage_importance_sampling_weight": None,
    "num_trajectories_learning_rate_multiplier_power": 0.0,
    "scale_learning_rate_by_reward_std_dev": False,
}
"""Settings that this server does not have, with the value that asks for nothing."""


class ServedSettings(ARTTrainingSettings):
    """Every setting that the clients of both protocols send."""

    normalize_advantages: bool | None = None
    plot_tensors: bool | None = None


@dataclass(frozen=True, slots=True)
class ARTTraining:
    algorithm: PolicyGradient
    learning_rate: float


def read_settings(given: Mapping[str, Any]) -> ARTTraining:
    """Returns how a job trains; null is the default."""
    try:
        settings = ServedSettings.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise refuse_invalid(error) from None
    for name, neutral in REQUIRED.items():
        value = getattr(settings, name)
        if value is not None and value != neutral:
            message = f"{name} is {value!r}, which this server does not do; leave it out"
            raise ApiError(422, message, param=name, code="unsupported_setting")
    if settings.kl_penalty_coef and settings.kl_penalty_source == "sample":
        message = "kl_penalty_source is 'sample', which this server does not do; leave it out, or use current_learner"
        raise ApiError(422, message, param="kl_penalty_source", code="unsupported_setting")
    return ARTTraining(_choose_algorithm(settings), settings.learning_rate or DEFAULT_LEARNING_RATE)


def _choose_algorithm(settings: ServedSettings) -> PolicyGradient:
    if settings.loss_fn is not None and settings.ppo is not None and settings.ppo != (settings.loss_fn == "ppo"):
        message = f"loss_fn is {settings.loss_fn}, but ppo is {settings.ppo}"
        raise ApiError(422, message, param="ppo")
    shared: dict[str, Any] = {
        "kl_coef": settings.kl_penalty_coef or 0.0,
        "scale_rewards": settings.scale_rewards is not False and settings.normalize_advantages is not False,
    }
    if settings.truncated_importance_sampling is not None:
        shared["tis_cap"] = settings.truncated_importance_sampling
    low, level = settings.epsilon, settings.importance_sampling_level or "token"
    high = settings.epsilon_high if settings.epsilon_high is not None else low
    clips = {name: value for name, value in (("clip_low", low), ("clip_high", high)) if value is not None}
    try:
        if not (settings.ppo or settings.loss_fn == "ppo"):
            _require_level(level, ("token",), "cispo")
            if settings.epsilon_high is None:
                clips.pop("clip_high", None)
            if low is not None and low >= 1:
                del clips["clip_low"]  # a weight is never below 0
            return CISPO(CISPOConfig(**shared, **clips))
        _require_level(level, ("token", "sequence"), "ppo")
        if level == "sequence":
            return GSPO(GSPOConfig(**shared, **clips))
        return GRPO(GRPOConfig(**shared, **clips, loss_aggregation="token"))
    except ValidationError as error:
        names = {"clip_low": "epsilon", "clip_high": "epsilon_high", "tis_cap": "truncated_importance_sampling"}
        raise refuse_invalid(error, names=names) from None


def _require_level(level: str, known: tuple[str, ...], loss: str) -> None:
    if level not in known:
        name = "importance_sampling_level"
        message = f"{name} {level} does not exist for loss_fn {loss} here; expected {' or '.join(known)}"
        raise ApiError(422, message, param=name, code="unsupported_setting")
