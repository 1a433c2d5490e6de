"""The configuration of the embedded backend, and of another program that samples for it, such as a vLLM server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from pydantic import ConfigDict, Field, SecretStr, field_validator, model_validator

from reinforge.config.finetuning_blocks import Block
from reinforge.config.schema import TrainerAdapterConfig
from reinforge.interfaces import PolicyServer
from reinforge.types.sample import Sharding

if TYPE_CHECKING:
    from reinforge.rollout.models.endpoint_config import EndpointConfig

OWN_ARGUMENTS = frozenset(
    {
        *("api_key", "host", "middleware", "model", "port", "served_model_name", "uds", "worker_extension_cls"),
        *("dtype", "generation_config", "logprobs_mode", "max_model_len", "max_num_seqs", "seed"),
        *("enable_lora", "enable_scale_out", "max_lora_rank", "max_loras"),
    }
)
"""Arguments of vLLM that follow from the run's own settings."""
CUDA_DEVICES = "CUDA_VISIBLE_DEVICES"

Scalar = bool | int | float | str


class VLLMLaunchConfig(Block):
    """A vLLM server that starts and exits with the run."""

    python: Path = Field(
        description="The Python interpreter of the environment in which vLLM is installed, such as "
        ".venv-vllm/bin/python; a relative path starts at the project.",
    )
    arguments: dict[str, Scalar] = Field(
        default_factory=dict,
        description="Additional arguments of `vllm serve`, such as gpu_memory_utilization: 0.5 or enforce_eager: true.",
    )
    environment: dict[str, str] = Field(
        default_factory=dict,
        description="Additional environment variables of the server, such as CUDA_VISIBLE_DEVICES. From this "
        "process it inherits only those that programs need, and those of vLLM, CUDA and OpenMP.",
    )
    replicas: int = Field(
        default=1,
        ge=1,
        le=64,
        description="How many servers start, each with the whole model. A conversation stays with one of them, and one "
        "that dies is replaced.",
    )
    gpus: list[str] | None = Field(
        default=None,
        description='`CUDA_VISIBLE_DEVICES` of each replica, such as ["2", "3"]. Null: that of this process for all.',
    )
    ready_s: float = Field(default=600.0, gt=0, description="Seconds to wait until a server has loaded the model.")

    @model_validator(mode="after")
    def _check_gpus(self) -> Self:
        if self.gpus is not None and len(self.gpus) != self.replicas:
            raise ValueError(
                f"gpus has {len(self.gpus)} entries, one for each replica, but replicas is {self.replicas}"
            )
        if self.gpus is not None and CUDA_DEVICES in self.environment:
            raise ValueError(f"environment sets {CUDA_DEVICES}, which gpus sets for each replica; remove one of them")
        return self

    @field_validator("arguments")
    @classmethod
    def _check_arguments(cls, arguments: dict[str, Scalar]) -> dict[str, Scalar]:
        arguments = {name.lstrip("-").replace("-", "_"): value for name, value in arguments.items()}
        for name in arguments:
            if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
                raise ValueError(f"{name!r} is not the name of an argument, such as gpu_memory_utilization")
            if name in OWN_ARGUMENTS:
                raise ValueError(f"{name} follows from the run's own settings; remove it")
        return arguments


class VLLMSamplerConfig(Block):
    """vLLM servers sample the replies, and get the weights of the embedded engine after each job."""

    model_config = ConfigDict(hide_input_in_errors=True)  # a key with a line break must not end up in a message

    kind: Literal["vllm"] = Field(alias="_type", default="vllm", description="The program that samples.")
    launch: VLLMLaunchConfig | None = Field(
        default=None, description="Start a server on this machine that exits with the run; or set `url`."
    )
    url: str | list[str] | None = Field(
        default=None, description="URL of a running server, such as http://127.0.0.1:8000, or a list; or set `launch`."
    )
    api_key: SecretStr | None = Field(
        default=None,
        description="Key of the server at `url`, which must require it. Write ${VLLM_API_KEY}, not the key itself.",
    )
    folder: Path | None = Field(
        default=None, description="Folder for new weights, at the same path on both machines. Null: see `listen`."
    )
    listen: str | None = Field(
        default=None,
        description="HOST:PORT where servers elsewhere fetch new weights. Null: an address that they reach.",
    )
    timeout_s: float = Field(default=600.0, gt=0, description="Time limit of one reply in seconds.")
    max_retries: int = Field(default=2, ge=0, description="Retries after lost connections and 5xx.")
    max_connections: int = Field(default=256, ge=1, description="Maximum number of concurrent requests.")

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str | list[str] | None) -> str | list[str] | None:
        if url is None:
            return None
        from reinforge.rollout.models.endpoint_config import validate_url

        urls = [validate_url(each) for each in ([url] if isinstance(url, str) else url)]
        if any(each.endswith("/v1") for each in urls):
            raise ValueError("write the address without /v1: weights are sent to other paths of the same server")
        if not urls or len(set(urls)) < len(urls):
            raise ValueError("expected one URL or several different ones")
        return urls[0] if isinstance(url, str) else urls

    @field_validator("api_key")
    @classmethod
    def _check_key(cls, key: SecretStr | None) -> SecretStr | None:
        from reinforge.rollout.models.endpoint_config import validate_key

        return None if key is None else validate_key(key)

    @model_validator(mode="after")
    def _check_server(self) -> Self:
        if (self.url is None) == (self.launch is None):
            raise ValueError(
                "set either launch (a server that starts and exits with the run) or url (one that is running), not "
                f"{'both' if self.url else 'neither'}"
            )
        if self.url is not None and self.api_key is None:
            raise ValueError(
                "url needs api_key: ${VLLM_API_KEY}, since anyone who reaches a server without a key can change its "
                "weights; start the server with the same variable"
            )
        if self.launch is not None and self.api_key is not None:
            raise ValueError("api_key belongs to a server at `url`; a launched one is reached over a private socket")
        return self

    @property
    def urls(self) -> list[str]:
        """The running servers; none if the run starts its own."""
        return [self.url] if isinstance(self.url, str) else self.url or []

    def build_endpoint_config(self) -> EndpointConfig:
        settings: dict[str, Any] = {
            "timeout_s": self.timeout_s,
            "max_retries": self.max_retries,
            "max_connections": self.max_connections,
        }
        from reinforge.rollout.models.endpoint_config import EndpointConfig

        return EndpointConfig(**settings)


SAMPLERS = {"vllm": "reinforge.scale.vllm.sampler:VLLMSampler"}  # the class of each `sampler`, by its `_type`


class OutsideSampler(Protocol):
    """Another program that samples the weights that the engine trains."""

    policy: PolicyServer

    async def start(self, seed: int) -> None:
        """Serves the engine's weights from now on."""

    async def close(self) -> None:
        """Stops what `start` started."""


class LocalAdapterConfig(TrainerAdapterConfig, name="local"):
    """Trains in this process; model, optimizer and batches are configured in `finetuning.policy`."""

    model_config = ConfigDict(hide_input_in_errors=True)  # the key of a sampler must not end up in a message

    fine_tune_from_scratch: bool = Field(
        default=False,
        description="Start each job from the run's first weights instead of the previous job's; for algorithms that "
        "imitate samples or compare pairs, such as expert_iteration and malt.",
    )
    sampler: VLLMSamplerConfig | None = Field(
        default=None,
        description="`_type: vllm`: vLLM servers sample the replies, and get the weights after each job. Null: the "
        "embedded sampler, in this process.",
    )
    sharding: Sharding = Field(
        default="auto",
        description="How several processes (of torchrun, or of `_type: ray`) hold the model while they train. "
        "replicate: each holds a whole copy. full: weights, gradients and optimizer state are sharded across them. "
        "auto: full only if one of them has too little memory for a whole copy.",
    )
    peer_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="Seconds that a process waits for the others before it considers them dead; must be longer than "
        "the slowest one needs for its part of an optimizer step.",
    )
