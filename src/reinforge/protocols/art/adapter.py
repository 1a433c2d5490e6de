"""`_type: openpipe_art_trainer_adapter`: trains through OpenPipe ART, over both protocols that its clients publish.

A job whose id was lost is found by the step that it makes.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from reinforge.adapters.hosted_model import HOSTED_MODEL, HostedModel
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import BackendError, JobFailed, Problem
from reinforge.files import to_json
from reinforge.interfaces import Algorithm, Builder
from reinforge.protocols.adapter import HostedAdapter
from reinforge.protocols.art.config import (
    AFTER_STEP,
    ARTTrainerAdapterConfig,
    adopt_sampling,
    build_training_settings,
    find_art_problems,
    find_entry_problems,
    parse_step,
)
from reinforge.protocols.art.config import ARTBackendConfig as ARTBackendConfig
from reinforge.protocols.art.groups import ARTGroups, build_groups
from reinforge.registry import register_trainer_adapter
from reinforge.rollout.models.openai_client import OpenAILLMConfig
from reinforge.rollout.models.policy_llm import find_served_entries
from reinforge.types.job import TrainingJobRef, TrainingJobStatus
from reinforge.types.trajectory import TrajectoryCollection

if TYPE_CHECKING:
    from reinforge.protocols.art.client import ARTClient, ARTPolicy, Serving

logger = logging.getLogger(__name__)

BACKEND = "openpipe_art"


class ARTTrainerAdapter(HostedAdapter["ARTClient", "ARTPolicy"]):
    """Trains on each collection with one job of an ART backend.

    Args:
        algorithm: The run's algorithm; the server has its own, so only its default settings are accepted.
        llms: The entries of `llms` that name the model: its defaults, and where an ART server serves it. Empty: the
            backend says where.
    """

    serves_policy = True
    keeps_jobs = True
    backend = BACKEND
    title = "ART"
    adapter_config: ARTTrainerAdapterConfig

    def __init__(
        self,
        adapter_config: ARTTrainerAdapterConfig,
        algorithm: Algorithm,
        llms: Mapping[str, OpenAILLMConfig] = MappingProxyType({}),
    ):
        super().__init__(adapter_config, algorithm)
        self.llms = llms
        self._interrupted: set[str] = set()
        self._checkpoints: Path | None = None

    async def _connect(self, run_config: FinetuneConfig) -> None:
        from reinforge.protocols.art.client import Serving
        from reinforge.protocols.art.local_server import ARTServer
        from reinforge.protocols.art.service import ARTTrainingService
        from reinforge.protocols.jobs import HostedJobs

        config, llm = self.adapter_config, self._entry
        inference = None if llm.base_url is None else Serving(llm.base_url, llm.api_key)
        is_service = config.backend.protocol == 2
        client: ARTClient = ARTTrainingService(config) if is_service else ARTServer(config, inference)
        self._jobs = HostedJobs(client, config, run_config.seed)
        self._policy = await self._make_policy(client, await client.connect(), run_config)

    def validate(self, run_config: FinetuneConfig) -> list[Problem]:
        problems = find_art_problems(self.adapter_config, run_config, self.algorithm)
        return [*problems, *find_entry_problems(self.llms, run_config)]

    @property
    def _entry(self) -> OpenAILLMConfig:
        return next(iter(self.llms.values()), OpenAILLMConfig(model_name=self.adapter_config.backend.name))

    def effective_settings(self, run_config: FinetuneConfig) -> list[tuple[str, str]]:
        config = self.adapter_config
        backend = config.backend
        settings = ", ".join(f"{name} {value}" for name, value in build_training_settings(config).items())
        what = "all prompts of the agent and the trajectories"
        return [
            ("service", f"ART at {backend.url}, protocol {backend.protocol} (receives {what})"),
            ("model", f"{backend.project}/{backend.name}, from {backend.base_model}"),
            ("job", f"ART's own algorithm, {settings or 'with its defaults'}; at most {config.max_wait_s:g} s"),
        ]

    async def resubmit(self, trajectories: TrajectoryCollection, known: TrainingJobRef | None) -> TrainingJobRef:
        """Returns the job that an earlier process started, or may have started; starts it if there is none.

        A job whose id was lost is looked for during `settle_s`, by the step that it makes.
        """
        id_ = (known.metadata or {}).get("job_id") if known is not None else None
        if known is not None and (id_ is None or not str(id_).startswith(AFTER_STEP)):
            return known
        self._interrupted.add(trajectories.resolve_job_key())
        return await self.submit(trajectories)

    async def _submit(self, trajectories: TrajectoryCollection, metadata: dict[str, Any]) -> None:
        key = metadata["job_key"]
        digest = hashlib.sha256(to_json([trajectories.run_id, key]).encode()).hexdigest()
        settings = build_training_settings(self.adapter_config)
        allows = bool(settings.get("allow_training_without_logprobs"))
        built = build_groups(trajectories.groups, digest, allow_without_logprobs=allows)
        if not built.groups:
            raise JobFailed(_explain_nothing(built))
        client, base = self._require_jobs().service, self._require_policy().newest_step
        was_interrupted = key in self._interrupted
        id_ = await client.find_or_start(base, built.groups, settings, was_interrupted=was_interrupted)
        client.remember_base(id_, base)
        metadata |= {"job_id": id_, "base_step": base, "reinforge_job": digest, "num_rows": built.num_trained}
        if built.num_without_logprobs and not allows:
            metadata["left_out"] = {"replies without log-probs": built.num_without_logprobs}

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        self._remember(ref)
        return await super().status(ref)

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float | None = None) -> TrainingJobStatus:
        self._remember(ref)
        return await super().wait_until_complete(ref, poll_interval)

    async def _adopt(self, metadata: dict[str, Any]) -> None:
        if "art_step" in metadata:
            self._require_policy().stage_step(metadata["fine_tuned_model"], metadata["art_step"])
            if self.adapter_config.backend.delete_old_checkpoints:
                await self._delete_old(metadata["art_step"])

    def _remember(self, ref: TrainingJobRef) -> None:
        metadata = ref.metadata or {}
        if isinstance(metadata.get("job_id"), str) and isinstance(metadata.get("base_step"), int):
            self._require_jobs().service.remember_base(metadata["job_id"], metadata["base_step"])

    async def _delete_old(self, step: int) -> None:
        """Deletes the steps that no checkpoint of the run names; a failure costs disk space, not the run."""
        files = [] if self._checkpoints is None else self._checkpoints.glob(f"*/{HOSTED_MODEL}")
        steps = {parse_step(HostedModel.read(file.parent).model) for file in files}
        try:
            await self._require_jobs().service.keep_steps(sorted({step, *(each for each in steps if each is not None)}))
        except BackendError as error:
            logger.warning("could not delete old checkpoints: %s", error)

    async def save(self, folder: Path, version: int) -> bool:
        """Writes the name of the newest step; its weights stay at the backend. False: it serves only the newest."""
        client, policy = self._require_jobs().service, self._require_policy()
        name = client.name_step(policy.newest_step)
        if not client.serves_steps:
            return False
        self._checkpoints = folder.parent
        HostedModel(name, policy.base_model, self.adapter_config.backend.url).write(folder)
        return True

    async def restore(self, folder: Path, version: int) -> bool:
        model = HostedModel.read(folder).model
        step = parse_step(model)
        if step is None:
            raise BackendError(f"{folder / HOSTED_MODEL}: {model} names no step of an ART model")
        policy = self._require_policy()
        policy.stage_step(model, step)
        await policy.publish(version)
        self._checkpoints = folder.parent
        return True

    async def _make_policy(self, client: ARTClient, serving: Serving, run_config: FinetuneConfig) -> ARTPolicy:
        from reinforge.protocols.art.client import ARTPolicy
        from reinforge.rollout.models.openai_client import OpenAIChat
        from reinforge.rollout.models.openai_http import OpenAIEndpoint

        backend = self.adapter_config.backend
        folder = Path(run_config.policy.model or "")
        named = parse_step(HostedModel.read(folder).model) if (folder / HOSTED_MODEL).is_file() else None
        step = await client.endpoint.retry(client.get_step) if named is None else named
        asked = {"return_token_ids": True, "return_tokens_as_token_ids": True} if backend.protocol == 2 else {}
        entry = self._entry
        extra = {**asked, **entry.extra_body, **self.adapter_config.extra_body}
        chat = entry.model_copy(update={"model_name": client.name_step(step), "logprobs": True, "extra_body": extra})
        own = entry.model_dump(include={"timeout_s", "max_retries", "max_connections"}, exclude_unset=True)
        endpoint = OpenAIEndpoint(self.adapter_config.endpoint.model_copy(update=own), serving.url, serving.key)
        served = OpenAIChat(chat, serving.url, endpoint=endpoint, verify_model_name=True)
        return ARTPolicy(served, backend.base_model, backend.name, step, ready_s=self.adapter_config.ready_s)


def _explain_nothing(built: ARTGroups) -> str:
    if built.num_without_logprobs:
        return (
            f"nothing to train: the inference endpoint returned no log-probs with any of {built.num_without_logprobs} "
            "replies, and ART trains only replies with log-probs; check the server, or set "
            "training.allow_training_without_logprobs: true"
        )
    return f"nothing to train: none of the replies of {built.num_empty} trajectories is trained"


@register_trainer_adapter(config_type=ARTTrainerAdapterConfig)
async def art_trainer_adapter(config: ARTTrainerAdapterConfig, builder: Builder) -> AsyncIterator[ARTTrainerAdapter]:
    named = {entry: builder.config.llms[entry] for entry in find_served_entries(builder.config)}
    llms = {entry: llm for entry, llm in named.items() if isinstance(llm, OpenAILLMConfig)}
    run = builder.config.finetuning
    run.sampling = adopt_sampling(llms.values(), run.sampling)
    adapter = ARTTrainerAdapter(config, await builder.get_algorithm(), llms)
    try:
        yield adapter
    finally:
        await adapter.cleanup()
