"""Settings of `_type: openpipe_art_trainer_adapter`: the backend, and the training settings under the server's names.

backend.ip, backend.port    an ART server started with `art run`                     protocol 1, as of ART 0.5.17
backend.base_url            the training service of ART's ServerlessBackend          protocol 2, as of ART 0.5.23
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, SecretStr, field_validator, model_validator

from reinforge.config.schema import Block, TrainerAdapterConfig
from reinforge.rollout.models.openai_config import validate_key, validate_url


class ARTBackendConfig(Block):
    """Address of the ART server and what it trains."""

    ip: str | None = Field(default=None, description="Address of a server that `art run` started; needs `port`.")
    port: int | None = Field(default=None, description="Port of that server.")
    base_url: str | None = Field(
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

    @field_validator("base_url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        return None if url is None else validate_url(url)

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
        """URL of the backend."""
        return self.base_url or f"http://{self.ip}:{self.port}"

    @property
    def protocol(self) -> Literal[1, 2]:
        """The protocol that the backend speaks."""
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
    def served_model(self) -> str | None:
        """The trained model's name: each step is served under it, or under a name made from it."""
        return self.backend.name
