"""The shared-model groups that there are: over the engine in this process, and over OpenAI's fine-tuning service."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from reinforge.adapters.local import LocalAdapter, LocalAdapterConfig
from reinforge.adapters.openai import OpenAIAdapter
from reinforge.adapters.openai_config import OpenAIAdapterConfig
from reinforge.algorithms.samples import balanced
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import StorageError
from reinforge.files import MANIFEST, damage
from reinforge.multiagent.agents import PureTextWholeAgent
from reinforge.multiagent.nip.adapter_group import ALGORITHMS, AdapterSharedModelGroup
from reinforge.multiagent.nip.job_files import JobRecord
from reinforge.multiagent.nip.parameters import (
    ExperimentSettings,
    HyperParameters,
    refuse_what_services_choose,
)
from reinforge.multiagent.protocol import ProtocolHandler
from reinforge.rollout.openai_config import endpoint_of
from reinforge.types.job import TrainingJobStatus
from reinforge.types.seeding import stable_seed
from reinforge.types.trajectory import Trajectory, TrajectoryCollection


class EmbeddedSharedModelGroup(AdapterSharedModelGroup):
    """A group whose model is trained and asked in this process.

    A job's model is a folder, which `switch_to_next_model` loads: until then the model before it serves, replies in
    flight included. With `lora_rank` the folder holds an adapter in PEFT's layout.

    Args:
        hyper_params: The experiment's.
        settings: Of its run.
        protocol_handler: What the agents talk by.
        agent_wholes: The agents.
        group_name: Names the group.
        finetuning: Further settings as in the `finetuning` section: `policy`, `device`, `deterministic`.
    """

    def __init__(
        self,
        hyper_params: HyperParameters,
        settings: ExperimentSettings,
        protocol_handler: ProtocolHandler,
        agent_wholes: Iterable[PureTextWholeAgent],
        group_name: str,
        *,
        finetuning: Mapping[str, Any] | None = None,
    ):
        self._finetuning = dict(finetuning or {})
        super().__init__(hyper_params, settings, protocol_handler, agent_wholes, group_name)

    def _make_adapter(self) -> tuple[LocalAdapter, FinetuneConfig]:
        params, given = self.shared_agent_params, dict(self._finetuning)
        policy = dict(given.pop("policy", {}))
        policy["optimizer"] = {"learning_rate": self.rl_learning_rate, **policy.get("optimizer", {})}
        policy["batch"] = {"passes": self.num_epochs, **policy.get("batch", {})}
        if params.lora_rank is not None:
            policy["lora"] = {"rank": params.lora_rank, "alpha": self.lora_alpha, **(policy.get("lora") or {})}
        policy["model"] = self.base_model_name
        seed = stable_seed(self.hyper_params.seed, self.group_name)
        config = FinetuneConfig(**{"seed": seed, **given, "policy": policy})
        adapter = LocalAdapterConfig(fine_tune_from_scratch=params.fine_tune_from_scratch)
        return LocalAdapter(adapter, ALGORITHMS["dpo"], folder_of=self._folder_of), config

    def _folder_of(self, job_key: str) -> Path:
        return self.files.jobs / job_key / "model"

    def _id_of(self, job: JobRecord) -> str:
        return job.name

    def _forgets(self, job: JobRecord) -> bool:
        begins_here = self.shared_agent_params.fine_tune_from_scratch or job.starts_from == self.model_name
        return begins_here or damage(self._folder_of(job.name)) is None

    def _made_by(self, job: JobRecord, status: TrainingJobStatus) -> str:
        return str(self._folder_of(job.name))

    async def _serve(self, model_name: str) -> None:
        version, folder = self._policy().version + 1, Path(model_name)
        if model_name == self.base_model_name:
            await self.adapter.reset(version)
            return
        if (folder / MANIFEST).is_file() and (reason := damage(folder)) is not None:
            raise StorageError(f"{folder} is damaged and not served: {reason}")
        await self.adapter.restore(folder, version)


class OpenAISharedModelGroup(AdapterSharedModelGroup):
    """A group whose model is trained and asked at a service that speaks OpenAI's API.

    The service takes no weights of rows, so rows of agents that have more than their share are left out of a job.

    Args:
        hyper_params: The experiment's.
        settings: Of its run.
        protocol_handler: What the agents talk by.
        agent_wholes: The agents.
        group_name: Names the group.
        service: Settings of the trainer adapter `_type: openai`, such as `base_url` and `api_key`; those of the
            environment by default.
    """

    def __init__(
        self,
        hyper_params: HyperParameters,
        settings: ExperimentSettings,
        protocol_handler: ProtocolHandler,
        agent_wholes: Iterable[PureTextWholeAgent],
        group_name: str,
        *,
        service: Mapping[str, Any] | None = None,
    ):
        self._service = dict(service or {})
        super().__init__(hyper_params, settings, protocol_handler, agent_wholes, group_name)

    def _make_adapter(self) -> tuple[OpenAIAdapter, FinetuneConfig]:
        refuse_what_services_choose(self.hyper_params.rl, self.shared_agent_params)
        config = OpenAIAdapterConfig(
            **{
                "n_epochs": self.num_epochs,
                "max_retries": self.settings.num_api_connection_errors,
                "fine_tune_from_scratch": self.shared_agent_params.fine_tune_from_scratch,
                **self._service,
                "base_model": self.base_model_name,
            }
        )
        run = FinetuneConfig(seed=stable_seed(self.hyper_params.seed, self.group_name))
        return OpenAIAdapter(config, ALGORITHMS["supervised"], *endpoint_of(config)), run

    def _prepare(self, job: JobRecord) -> None:
        super()._prepare(job)
        policy = self.adapter.policy()
        policy.stage(policy.served_model)  # a job begins with what serves, whatever was waited for before
        if job.job_name is not None:
            update = {"suffix": job.job_name[:64]}
            self.adapter.adapter_config = self.adapter.adapter_config.model_copy(update=update)

    def _id_of(self, job: JobRecord) -> str:
        return str(((job.ref or {}).get("metadata") or {}).get("job_id", job.name))

    def _forgets(self, job: JobRecord) -> bool:
        return False

    def _made_by(self, job: JobRecord, status: TrainingJobStatus) -> str:
        return str((status.metadata or {})["fine_tuned_model"])

    def _foreign(self, job_id: str) -> JobRecord | None:
        name = f"given-{hashlib.sha256(job_id.encode()).hexdigest()[:16]}"
        ref = {"run_id": self.settings.run_id, "backend": "openai", "metadata": {"job_id": job_id}}
        return JobRecord(name, "supervised", None, self.model_name, ref)

    async def _written(self, groups: Sequence[Sequence[Trajectory]]) -> TrajectoryCollection:
        kept = balanced(groups, self.hyper_params.seed)
        if len(kept) < len(groups):
            told = "%s: %d of %d rows are left out, so that each agent has its share"
            self.logger.info(told, self.group_name, len(groups) - len(kept), len(groups))
        return await super()._written(kept)

    async def _serve(self, model_name: str) -> None:
        policy = self.adapter.policy()
        policy.stage(model_name)
        await policy.publish(policy.version + 1)
