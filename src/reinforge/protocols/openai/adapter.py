"""OpenAI's fine-tuning API as a trainer adapter: upload a file, create a job, poll it, serve the fine-tuned model.

Each collection has one file and one job, even if it is submitted again or the process dies.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, SecretStr

from reinforge.adapters.hosted_model import BACKEND, HOSTED_MODEL, HostedModel
from reinforge.algorithms.dpo import DPO
from reinforge.algorithms.preference import Preference
from reinforge.algorithms.rejection_sampling import RejectionSampling
from reinforge.algorithms.sft import SFT
from reinforge.config.schema import FinetuneConfig, TrainerAdapterConfig
from reinforge.errors import JobFailed, Problem
from reinforge.files import to_json
from reinforge.interfaces import Algorithm, Builder
from reinforge.protocols.adapter import HostedAdapter
from reinforge.protocols.openai.rows import TrainingFile, build_preference_file, build_supervised_file
from reinforge.protocols.openai.settings import METHODS, find_model_problems, find_unsupported_settings
from reinforge.registry import register_trainer_adapter
from reinforge.rollout.models.endpoint_config import (
    EndpointConfig,
    find_entry_name,
    resolve_endpoint,
    warn_about_api_key,
)
from reinforge.rollout.models.openai_client import OpenAILLMConfig
from reinforge.types.job import TrainingJobRef, TrainingJobStatus
from reinforge.types.seeding import stable_seed
from reinforge.types.trajectory import TrajectoryCollection

if TYPE_CHECKING:
    from reinforge.protocols.hosted_policy import HostedPolicy  # noqa: F401  a type argument
    from reinforge.protocols.openai.service import FineTuningService  # noqa: F401  a type argument
    from reinforge.protocols.service import HostedJob


Auto = Literal["auto"]
Count = Annotated[int, Field(ge=1)]


class OpenAIAdapterConfig(EndpointConfig, TrainerAdapterConfig, name="openai"):
    """Trains through OpenAI's fine-tuning API, or another service with the same API."""

    base_model: str | None = Field(
        default=None, min_length=1, description="The model to fine-tune; null: finetuning.policy.model."
    )
    n_epochs: Auto | Count = Field(default="auto", description="Hyperparameter: passes over the training file.")
    batch_size: Auto | Count = Field(default="auto", description="Hyperparameter: rows per optimizer step.")
    learning_rate_multiplier: Auto | Annotated[float, Field(gt=0)] = Field(
        default="auto", description="Hyperparameter: multiplies the learning rate that the service chooses."
    )
    seed: int | None = Field(default=None, description="Seed of the jobs; null: derived from finetuning.seed.")
    suffix: str | None = Field(
        default=None, min_length=1, max_length=64, description="Suffix in the names of the fine-tuned models."
    )
    fine_tune_from_scratch: bool = Field(
        default=False, description="Start each job from the base model; false: from the previous job's model."
    )
    min_examples: int = Field(
        default=10,
        ge=1,
        description="Minimum number of rows in a training file; with fewer, the job fails and nothing is sent.",
    )
    poll_interval_s: float = Field(default=10.0, gt=0, description="Seconds between two polls of a job.")
    max_wait_s: float = Field(
        default=86400.0, gt=0, description="Seconds to wait for a job, queue included; then it is cancelled."
    )
    ready_s: float = Field(default=600.0, gt=0, description="Seconds to wait until a new model is available.")
    cancel_on_stop: bool = Field(
        default=False,
        description="Cancel the running job when the run is stopped; false: it keeps running, and --resume uses it.",
    )
    extra_body: dict[str, Any] = Field(
        default_factory=dict, description="Other arguments to send with each chat completion."
    )


MAX_METADATA_LENGTH = 512


class OpenAIAdapter(HostedAdapter["FineTuningService", "HostedPolicy"]):
    """Trains on each collection with one fine-tuning job.

    Args:
        algorithm: Selects what to train on: SFT, RejectionSampling, Preference; may be replaced between jobs.
        url: URL of the service up to /v1.
    """

    serves_policy = True
    backend = BACKEND
    title = "OpenAI"
    adapter_config: OpenAIAdapterConfig

    def __init__(
        self, adapter_config: OpenAIAdapterConfig, algorithm: Algorithm, url: str, key: SecretStr | None = None
    ):
        super().__init__(adapter_config, algorithm)
        self.url, self._key = url, key

    async def _connect(self, run_config: FinetuneConfig) -> None:
        from reinforge.protocols.hosted_policy import HostedPolicy
        from reinforge.protocols.jobs import HostedJobs
        from reinforge.protocols.openai.service import FineTuningService
        from reinforge.rollout.models.openai_client import OpenAIChat
        from reinforge.rollout.models.openai_http import OpenAIEndpoint

        config = self.adapter_config
        endpoint = OpenAIEndpoint(config, self.url, self._key)
        base, model = self._resolve_models(run_config)
        chat = OpenAILLMConfig(model_name=model, extra_body=config.extra_body)
        self._jobs = HostedJobs(FineTuningService(endpoint), config, run_config.seed)
        self._policy = HostedPolicy(
            OpenAIChat(chat, self.url, endpoint=endpoint, verify_model_name=True), base, ready_s=config.ready_s
        )
        await self._jobs.service.check_access()

    def validate(self, run_config: FinetuneConfig) -> list[Problem]:
        return [
            *find_model_problems(self.adapter_config.base_model, run_config),
            *find_unsupported_settings(run_config, self.algorithm),
        ]

    def effective_settings(self, run_config: FinetuneConfig) -> list[tuple[str, str]]:
        config, (base, model) = self.adapter_config, self._resolve_models(run_config)
        first = base if model == base else f"{model}, fine-tuned from {base}"
        start = "the base model" if config.fine_tune_from_scratch else "the previous job's model"
        settings = self._get_hyperparameters(self.algorithm)
        methods = dict.fromkeys(METHODS[type(each)] for each in (self.algorithm.for_epoch(0), self.algorithm))
        hyperparameters = ", ".join(f"{name} {value}" for name, value in settings.items())
        return [
            ("service", f"{self.url} (receives all prompts of the agent and the training files)"),
            ("model", f"{first}; each job starts from {start}"),
            ("job", f"{', then '.join(methods)}, {hyperparameters}; at most {config.max_wait_s:g} s"),
        ]

    async def _submit(self, trajectories: TrajectoryCollection, metadata: dict[str, Any]) -> HostedJob:
        key, service = metadata["job_key"], self._require_jobs().service
        file = self._build_training_file(trajectories)
        self._check_min_examples(file)
        body, content = self._build_request(key, self.algorithm.for_epoch(trajectories.epoch)), file.content
        identity = [trajectories.run_id, key, hashlib.sha256(content).hexdigest(), body]
        job_metadata = {
            "reinforge_run": trajectories.run_id[:MAX_METADATA_LENGTH],
            "reinforge_job": hashlib.sha256(to_json(identity).encode()).hexdigest(),
            "reinforge_model_group": (trajectories.model_group or "")[:MAX_METADATA_LENGTH],
        }
        request = {
            **body,
            "training_file": await service.upload_once(content),
            "metadata": {name: value for name, value in job_metadata.items() if value},
        }
        job = await service.create_job_once(job_metadata["reinforge_job"], request)
        metadata |= {"job_id": job.id, "num_rows": len(file.lines), "training_file": request["training_file"]}
        if file.left_out:
            metadata["left_out"] = file.left_out
        return job

    def _build_training_file(self, trajectories: TrajectoryCollection) -> TrainingFile:
        algorithm, groups = self.algorithm.for_epoch(trajectories.epoch), trajectories.groups
        if isinstance(algorithm, Preference):
            return build_preference_file(groups, algorithm)
        assert isinstance(algorithm, SFT | RejectionSampling)  # `validate` reports every other algorithm
        selected = (algorithm.select_trajectories(group.trajectories) for group in groups)
        return build_supervised_file(chain.from_iterable(selected))

    def _check_min_examples(self, file: TrainingFile) -> None:
        least, count = self.adapter_config.min_examples, len(file.lines)
        if count >= least:
            return
        left_out = "".join(f", {number} left out ({reason})" for reason, number in file.left_out.items())
        raise JobFailed(
            f"not enough training data: found {count} rows{left_out}, but a job needs at least {least} (min_examples); "
            "nothing was sent. Collect more (examples_per_epoch, num_generations), or keep more (min_reward, best_k, "
            "pairs)"
        )

    def _get_hyperparameters(self, algorithm: Algorithm) -> dict[str, Any]:
        config = self.adapter_config
        hyperparameters: dict[str, Any] = {
            "n_epochs": config.n_epochs,
            "batch_size": config.batch_size,
            "learning_rate_multiplier": config.learning_rate_multiplier,
        }
        if isinstance(algorithm, DPO):
            hyperparameters["beta"] = algorithm.config.beta
        return hyperparameters

    def _build_request(self, key: str, algorithm: Algorithm) -> dict[str, Any]:
        config, policy = self.adapter_config, self._require_policy()
        method = METHODS[type(algorithm)]
        seed = config.seed if config.seed is not None else stable_seed(self.run_config.seed, "job", key) % 2**31
        return {
            "model": policy.base_model if config.fine_tune_from_scratch else policy.newest_model,
            "method": {"type": method, method: {"hyperparameters": self._get_hyperparameters(algorithm)}},
            "seed": seed,
            **({"suffix": config.suffix} if config.suffix else {}),
        }

    async def cancel(self, ref: TrainingJobRef) -> TrainingJobStatus:
        return await self._require_jobs().cancel(ref)

    async def save(self, folder: Path, version: int) -> bool:
        """Writes the name of the newest model; its weights stay at the service."""
        policy = self._require_policy()
        HostedModel(policy.newest_model, policy.base_model, self.url).write(folder)
        return True

    async def restore(self, folder: Path, version: int) -> bool:
        policy = self._require_policy()
        policy.stage(HostedModel.read(folder).model)
        await policy.publish(version)
        return True

    def _resolve_models(self, run_config: FinetuneConfig) -> tuple[str, str]:
        """Returns the base model and the first model; they differ if `policy.model` is the folder of a hosted model."""
        named = run_config.policy.model
        if named is not None and (Path(named) / HOSTED_MODEL).is_file():
            hosted = HostedModel.read(Path(named))
            return hosted.base_model, hosted.model
        base = self.adapter_config.base_model or named
        assert base is not None  # checked by `validate`
        return base, base


@register_trainer_adapter(config_type=OpenAIAdapterConfig)
async def openai_adapter(config: OpenAIAdapterConfig, builder: Builder) -> AsyncIterator[OpenAIAdapter]:
    url, key = resolve_endpoint(config)
    path = ("trainer_adapters", find_entry_name(builder.config.trainer_adapters, config))
    warn_about_api_key(config, url, path, builder)
    adapter = OpenAIAdapter(config, await builder.get_algorithm(), url, key)
    try:
        yield adapter
    finally:
        await adapter.cleanup()
