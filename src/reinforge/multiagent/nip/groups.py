"""The shared-model groups: one trains with the engine in this process, one with OpenAI's fine-tuning API."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from reinforge.adapters.local import LocalAdapter
from reinforge.adapters.local_config import LocalAdapterConfig
from reinforge.algorithms.samples import balance_agents
from reinforge.config.loader import resolve_aliases
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import StorageError
from reinforge.files import MANIFEST, find_damage
from reinforge.multiagent.agents import PureTextWholeAgent
from reinforge.multiagent.nip.adapter_group import ALGORITHMS, AdapterSharedModelGroup
from reinforge.multiagent.nip.experiment import ExperimentSettings, HyperParameters, reject_service_chosen_fields
from reinforge.multiagent.nip.job_files import GroupFiles, JobRecord
from reinforge.multiagent.protocol import ProtocolHandler
from reinforge.registry import REGISTRY, load_named
from reinforge.rollout.models.endpoint_config import resolve_endpoint
from reinforge.types.job import TrainingJobStatus
from reinforge.types.seeding import stable_seed
from reinforge.types.trajectory import Trajectory, TrajectoryCollection

OPENAI_ADAPTER = "reinforge.protocols.openai.adapter:OpenAIAdapter"

JOB_SETTINGS = ("base_url", "n_epochs", "batch_size", "learning_rate_multiplier", "seed", "suffix")
"""Settings of a service that a job's model depends on."""


class EmbeddedSharedModelGroup(AdapterSharedModelGroup):
    """A group whose model is trained and served in this process.

    A job's model is a folder. `switch_to_next_model` loads it; until then the previous model is served, also for
    replies in flight. With `lora_rank` the folder holds an adapter in PEFT's layout.

    Args:
        finetuning: Further keys of the `finetuning` section: `policy`, `device`, `deterministic`.
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
        params, section = self.shared_agent_params, dict(self._finetuning)
        policy = resolve_aliases({"finetuning": {"policy": section.pop("policy", {})}})["finetuning"]["policy"]
        policy["optimizer"] = {"learning_rate": self.rl_learning_rate, **policy.get("optimizer", {})}
        policy["batch"] = {"num_iterations": self.num_epochs, **policy.get("batch", {})}
        if params.lora_rank is not None:
            policy["lora"] = {"r": params.lora_rank, "lora_alpha": self.lora_alpha, **(policy.get("lora") or {})}
        policy["model"] = self.base_model_name
        seed = stable_seed(self.hyper_params.seed, self.group_name)
        config = FinetuneConfig(**{"seed": seed, **section, "policy": policy})
        adapter = LocalAdapterConfig(fine_tune_from_scratch=params.fine_tune_from_scratch)
        return LocalAdapter(adapter, ALGORITHMS["dpo"], job_folder=self._model_folder), config

    @property
    def _job_settings(self) -> dict[str, Any]:
        return {name: value for name, value in self._finetuning.items() if name != "device"}

    def _model_folder(self, job_key: str) -> Path:
        return self.files.jobs / job_key / "model"

    def _backend_job_id(self, job: JobRecord) -> str:
        return job.name

    def _needs_resubmission(self, job: JobRecord) -> bool:
        can_restart = self.shared_agent_params.fine_tune_from_scratch or job.starts_from == self.model_name
        return can_restart or find_damage(self._model_folder(job.name)) is None

    def _trained_model_name(self, job: JobRecord, status: TrainingJobStatus) -> str:
        return str(self._model_folder(job.name))

    def _adopt_job(self, job_id: str) -> JobRecord | None:
        if Path(job_id).name != job_id:
            return None
        for place in sorted(Path(self.settings.groups_dir).glob("*")):
            if (job := GroupFiles(place / self.group_name).read_job(job_id)) is not None:
                self.files.copy_job(place / self.group_name / "jobs" / job_id)
                return job
        return None

    async def _serve(self, model_name: str) -> None:
        version, folder = self._policy().version + 1, Path(model_name)
        if model_name == self.base_model_name:
            await self.adapter.reset(version)
            return
        if (folder / MANIFEST).is_file() and (reason := find_damage(folder)) is not None:
            raise StorageError(f"cannot serve {folder}, it is damaged: {reason}")
        await self.adapter.restore(folder, version)


class OpenAISharedModelGroup(AdapterSharedModelGroup):
    """A group whose model is trained and served by a service with OpenAI's API.

    The service does not support row weights, so rows of agents with more than their share are left out of a job.

    Args:
        service: Settings of the trainer adapter `_type: openai`, such as `base_url` and `api_key`; default: those of
            the environment.
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

    def _make_adapter(self) -> tuple[Any, FinetuneConfig]:
        reject_service_chosen_fields(self.hyper_params.rl, self.shared_agent_params)
        config: Any = REGISTRY.get("trainer_adapter", "openai").config_type(
            **{
                "n_epochs": self.num_epochs,
                "max_retries": self.settings.num_api_connection_errors,
                "fine_tune_from_scratch": self.shared_agent_params.fine_tune_from_scratch,
                **self._service,
                "base_model": self.base_model_name,
            }
        )
        run = FinetuneConfig(seed=stable_seed(self.hyper_params.seed, self.group_name))
        return load_named(OPENAI_ADAPTER)(config, ALGORITHMS["supervised"], *resolve_endpoint(config)), run

    @property
    def _job_settings(self) -> dict[str, Any]:
        return {name: value for name, value in self._service.items() if name in JOB_SETTINGS}

    def _configure_adapter(self, job: JobRecord) -> None:
        super()._configure_adapter(job)
        policy = self.adapter.policy()
        policy.stage(policy.served_model)  # a job starts from the served model, whatever was staged before
        if job.job_name is not None:
            update = {"suffix": job.job_name[:64]}
            self.adapter.adapter_config = self.adapter.adapter_config.model_copy(update=update)

    def _backend_job_id(self, job: JobRecord) -> str:
        return str(((job.ref or {}).get("metadata") or {}).get("job_id", job.name))

    def _needs_resubmission(self, job: JobRecord) -> bool:
        return False

    def _trained_model_name(self, job: JobRecord, status: TrainingJobStatus) -> str:
        return str((status.metadata or {})["fine_tuned_model"])

    def _adopt_job(self, job_id: str) -> JobRecord | None:
        name = f"given-{hashlib.sha256(job_id.encode()).hexdigest()[:16]}"
        ref = {"run_id": self.settings.run_id, "backend": "openai", "metadata": {"job_id": job_id}}
        return JobRecord(name, "supervised", None, self.model_name, ref)

    async def _build_collection(self, groups: Sequence[Sequence[Trajectory]]) -> TrajectoryCollection:
        kept = balance_agents(groups, self.hyper_params.seed)
        if len(kept) < len(groups):
            message = "%s: %d of %d rows are left out, so that each agent has its share"
            self.logger.info(message, self.group_name, len(groups) - len(kept), len(groups))
        return await super()._build_collection(kept)

    async def _serve(self, model_name: str) -> None:
        policy = self.adapter.policy()
        policy.stage(model_name)
        await policy.publish(policy.version + 1)
