"""Settings of `_type: openpipe_art_trainer_adapter`: the backend, and the training settings under the server's names.

backend.ip, backend.port    an ART server started with `art run`                     protocol 1, as of ART 0.5.17
backend.base_url            the training service of ART's ServerlessBackend          protocol 2, as of ART 0.5.23
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator

from reinforge.adapters.hosted_model import HOSTED_MODEL
from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.config.finetuning_blocks import SamplingConfig
from reinforge.config.schema import Block, FinetuneConfig, TrainerAdapterConfig
from reinforge.errors import Problem, did_you_mean
from reinforge.interfaces import Algorithm
from reinforge.protocols.unused_settings import find_unused_settings
from reinforge.rollout.models.endpoint_config import EndpointConfig, Url, validate_key, validate_url
from reinforge.rollout.models.openai_client import OpenAILLMConfig

AFTER_STEP = "after-step-"  # start of the id of a job that is only known by the step it started from


class ARTBackendConfig(Block):
    """Address of the ART server and what it trains."""

    ip: str | None = Field(default=None, description="Address of a server that `art run` started; needs `port`.")
    port: int | None = Field(default=None, description="Port of that server.")
    base_url: Url | None = Field(
        default=None,
        description="URL up to /v1 of ART's training service, such as https://api.training.wandb.ai/v1; instead of "
        "`ip` and `port`.",
    )
    entity: str | None = Field(default=None, description="Team at the training service; null: the key's own.")
    name: str = Field(default="trainer_run", min_length=1, description="Name of the trained model.")
    project: str = Field(default="trainer_project", min_length=1, description="Project that the model belongs to.")
    base_model: str = Field(default="Qwen/Qwen2.5-7B-Instruct", min_length=1, description="Hub id of the base model.")
    api_key: str = Field(
        default="default",
        repr=False,
        description="API key: of the training service, or of the server's inference endpoint. Write ${VAR}, not the "
        "key itself.",
    )
    delete_old_checkpoints: bool = Field(
        default=False, description="Delete the server's checkpoints that the run folder no longer names."
    )
    init_args: dict[str, Any] | None = Field(default=None, description="Arguments for loading the model.")
    engine_args: dict[str, Any] | None = Field(default=None, description="Arguments for the inference engine.")
    server_config: dict[str, Any] | None = Field(default=None, description="Arguments for the inference server.")

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    @field_validator("api_key")
    @classmethod
    def _check_key(cls, key: str) -> str:
        valid = validate_key(SecretStr(key))
        return valid.get_secret_value() if valid is not None else ""

    @field_validator("ip")
    @classmethod
    def _check_ip(cls, ip: str | None) -> str | None:
        if ip is not None:
            validate_url(f"http://{ip}:1")
        return ip

    @model_validator(mode="after")
    def _check_address(self) -> Self:
        if self.base_url is not None and (self.ip is not None or self.port is not None):
            raise ValueError(
                "base_url names a training service, ip and port a server of your own: remove one of the two"
            )
        if self.base_url is None and (self.ip is None or self.port is None):
            raise ValueError("needs the address of a server, ip and port, or of the training service, base_url")
        if self.entity is not None and self.base_url is None:
            raise ValueError("entity is a team at the training service, so it needs base_url instead of ip and port")
        return self

    @property
    def url(self) -> str:
        return self.base_url or f"http://{self.ip}:{self.port}"

    @property
    def protocol(self) -> Literal[1, 2]:
        return 1 if self.base_url is None else 2


class ARTTrainingSettings(Block):
    """What an ART backend reads of `training`; settings that are left out keep the server's defaults."""

    learning_rate: float | None = Field(default=None, gt=0)
    kl_penalty_coef: float | None = Field(default=None, ge=0)
    kl_penalty_source: Literal["current_learner", "sample"] | None = None
    kl_penalty_reference_step: int | None = Field(default=None, ge=0)
    kl_penalty_step_lag: int | None = Field(default=None, ge=1)
    kl_ref_adapter_path: str | None = None
    loss_fn: Literal["cispo", "ppo"] | None = None
    ppo: bool | None = None
    epsilon: float | None = Field(default=None, ge=0)
    epsilon_high: float | None = Field(default=None, ge=0)
    advantage_balance: float | None = Field(default=None, ge=-1, le=1)
    scale_rewards: bool | None = None
    importance_sampling_level: Literal["token", "sequence", "average", "geometric_average"] | None = None
    max_negative_advantage_importance_sampling_weight: float | None = Field(default=None, ge=0)
    mask_prob_ratio: bool | None = None
    kimi_k2_tau: float | None = None
    precalculate_logprobs: bool | None = None
    allow_training_without_logprobs: bool | None = None
    truncated_importance_sampling: float | None = Field(default=None, gt=0)
    scale_learning_rate_by_reward_std_dev: bool | None = None
    num_trajectories_learning_rate_multiplier_power: float | None = None
    logprob_calculation_chunk_size: int | None = Field(default=None, ge=1)
    packed_sequence_length: int | None = Field(default=None, ge=1)


class ARTTrainerAdapterConfig(TrainerAdapterConfig, name="openpipe_art_trainer_adapter"):
    """Trains through OpenPipe ART: a server of your own, or its training service."""

    backend: ARTBackendConfig = Field(description="The server or the service, and the model that it trains.")
    training: dict[str, Any] | None = Field(
        default=None,
        description="Settings of the backend's training under ART's names: learning_rate, kl_penalty_coef (or beta), "
        "loss_fn (cispo or ppo), epsilon and others; one that the backend does not read is refused.",
    )
    timeout_s: float = Field(default=60.0, gt=0, description="Time limit of one call in seconds.")
    max_retries: int = Field(default=2, ge=0, description="Retries of calls that change nothing.")
    max_connections: int = Field(default=64, ge=1, description="Maximum number of concurrent calls.")
    poll_interval_s: float = Field(default=2.0, gt=0, description="Seconds between two polls of a job.")
    max_wait_s: float = Field(default=86400.0, gt=0, description="Seconds to wait for a job; then it counts as failed.")
    ready_s: float = Field(default=600.0, gt=0, description="Seconds to wait until a new checkpoint is served.")
    settle_s: float = Field(
        default=600.0,
        ge=0,
        description="Seconds to look for a job whose submission was interrupted, by the model's newest checkpoint; "
        "after that it is submitted again.",
    )
    extra_body: dict[str, Any] = Field(
        default_factory=dict, description="Other arguments to send with each chat completion."
    )

    @property
    def served_models(self) -> tuple[str, ...]:
        """The trained model's name, or that of the model it starts from, as files of NeMo Agent Toolkit have it."""
        return (self.backend.name, self.backend.base_model)

    @property
    def endpoint(self) -> EndpointConfig:
        return EndpointConfig(
            timeout_s=self.timeout_s, max_retries=self.max_retries, max_connections=self.max_connections
        )

    @property
    def cancel_on_stop(self) -> None:
        """None: ART cannot cancel a job."""


def parse_step(name: str) -> int | None:
    """Returns the step in the name of served weights; None: the name has none.

    Example: "run@3" -> 3; "wandb-artifact:///team/project/run:step12" -> 12; "run" -> None.
    """
    found = re.search(r"(?:@|:step)(\d+)$", name)
    return int(found[1]) if found else None


ALIASES = {"beta": "kl_penalty_coef"}  # older names of settings, as files still have them
ONLY_PROTOCOL_2 = ("kl_penalty_source", "kl_penalty_reference_step", "kl_penalty_step_lag", "packed_sequence_length")
NEWER_SPELLINGS = ("loss_fn", "normalize_advantages")
"""Second names that only protocol 2 has, for `ppo` and `scale_rewards`."""
TRAIN_CONFIG = ("learning_rate", "kl_penalty_coef")  # protocol 1: these are in `config`, all others in `dev_config`
SAMPLING = ("temperature", "top_p")
SHARED = ("base_url", "api_key", "max_tokens", "extra_body", "timeout_s", "max_retries", "max_connections")
"""What the trained model has once, although each entry of `llms` may set it."""
LEAVE_OUT = "leave it out; the server chooses it"
REPLACEMENTS = {
    "optimizer.learning_rate": "set the trainer adapter's training.learning_rate",
    "batch.steps_per_job": "the server takes one pass over a job's trajectories; run without --smoke",
}


def find_art_problems(config: ARTTrainerAdapterConfig, run: FinetuneConfig, algorithm: Algorithm) -> list[Problem]:
    """Returns every setting of a run that the backend does not read, with the fix for each."""
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


def adopt_sampling(llms: Iterable[OpenAILLMConfig], sampling: SamplingConfig) -> SamplingConfig:
    """Returns a run's sampling with what the trained model's entries of `llms` say, where the run itself says nothing.

    Example: temperature 0.4 in `llms`, `finetuning.sampling: {top_p: 0.9}` -> temperature 0.4, top_p 0.9.
    """
    asked: dict[str, float] = {}
    for llm in llms:
        asked = llm.model_dump(include=set(SAMPLING), exclude_none=True) | asked
    return SamplingConfig.model_validate(asked | sampling.model_dump(exclude_unset=True))


def find_entry_problems(llms: Mapping[str, OpenAILLMConfig], run: FinetuneConfig) -> Iterator[Problem]:
    for entry, llm in llms.items():
        first = next(iter(llms))
        used = [("seed", None, "a seed of its own for each episode")]
        used += [(name, getattr(run.sampling, name), f"{getattr(run.sampling, name):g}") for name in SAMPLING]
        used += [(name, getattr(llms[first], name), f"that of llms.{first}") for name in SHARED]
        for name, value, what in used:
            if name in llm.model_fields_set and getattr(llm, name) not in (None, value):
                message = f"has no effect: the run samples the trained model with {what}"
                yield Problem(f"llms.{entry}.{name}", message, "leave it out, or give both the same")


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
