"""`_type: openpipe_art_trainer_adapter`: trains through OpenPipe ART, over both protocols that its clients publish.

initialize           registers the model and finds where, and under which name, each step is served
submit, resubmit     one job per collection; a job whose id was lost is found by the step that it makes
wait_until_complete  polls; a failed poll does not fail the job, and `max_wait_s` ends the wait
policy()             samples, with log-probs, from the step that the last adopted job made
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from reinforge.adapters.hosted_model import HOSTED_MODEL, HostedModel
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import BackendError, BackendUnavailable, ConfigError, Problem
from reinforge.files import to_json
from reinforge.interfaces import Algorithm, Builder, TrainerAdapter
from reinforge.protocols.art.config import ARTBackendConfig as ARTBackendConfig
from reinforge.protocols.art.config import ARTTrainerAdapterConfig
from reinforge.protocols.art.groups import ARTGroups, build_groups
from reinforge.protocols.art.settings import build_training_settings, find_art_problems
from reinforge.registry import register_trainer_adapter
from reinforge.rollout.models.llms import find_served_entries
from reinforge.rollout.models.openai_config import EndpointConfig, OpenAILLMConfig
from reinforge.types.job import TrainingJobRef, TrainingJobStatus
from reinforge.types.trajectory import TrajectoryCollection

if TYPE_CHECKING:
    from reinforge.protocols.art.client import ARTClient, Serving
    from reinforge.protocols.art.policy import ARTPolicy
    from reinforge.protocols.jobs import HostedJobs

logger = logging.getLogger(__name__)

BACKEND = "openpipe_art"


@dataclass(frozen=True, slots=True)
class ARTJobLimits:
    """How long to wait for a job; ART cannot cancel one."""

    poll_interval_s: float
    max_wait_s: float
    cancel_on_stop: bool | None = None


class ARTTrainerAdapter(TrainerAdapter):
    """Trains on each collection with one job of an ART backend.

    Args:
        adapter_config: The configuration.
        algorithm: The run's algorithm; the server has its own, so only its default settings are accepted.
        llm: The entry of `llms` that names the model: its defaults, and where an ART server serves it; None: there is
            none, so the backend says where.
    """

    trains_on = "messages"
    serves_policy = True
    keeps_jobs = True
    adapter_config: ARTTrainerAdapterConfig

    def __init__(
        self, adapter_config: ARTTrainerAdapterConfig, algorithm: Algorithm, llm: OpenAILLMConfig | None = None
    ):
        super().__init__(adapter_config)
        self.algorithm, self.llm = algorithm, llm
        self._client: ARTClient | None = None
        self._policy: ARTPolicy | None = None
        self._jobs: HostedJobs[ARTClient] | None = None
        self._refs: dict[str, TrainingJobRef] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._checkpoints: Path | None = None

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Registers the model and connects to its inference endpoint, on the first call.

        Raises:
            ConfigError: The run has settings that the backend does not read; every one is named.
            BackendError: The backend does not answer, or refuses.
        """
        await super().initialize(run_config)
        if self._jobs is not None:
            return
        if problems := self.validate(run_config):
            raise ConfigError(problems)
        from reinforge.protocols.jobs import HostedJobs  # imports aiohttp, which nothing before this needs

        config = self.adapter_config
        self._client = self._make_client()
        try:
            serving = await self._client.connect()
            self._policy = await self._make_policy(serving, run_config)
        except BaseException:
            await self.cleanup()
            raise
        limits = ARTJobLimits(config.poll_interval_s, config.max_wait_s)
        self._jobs = HostedJobs(self._client, limits, run_config.seed)

    def validate(self, run_config: FinetuneConfig) -> list[Problem]:
        """Returns every setting that the backend does not read; makes no request."""
        return find_art_problems(self.adapter_config, run_config, self.algorithm)

    def effective_settings(self, run_config: FinetuneConfig) -> list[tuple[str, str]]:
        """Returns the settings that take effect, as (name, value) to display."""
        config = self.adapter_config
        backend = config.backend
        settings = ", ".join(f"{name} {value}" for name, value in build_training_settings(config).items())
        what = "all prompts of the agent and the trajectories"
        return [
            ("service", f"ART at {backend.url}, protocol {backend.protocol} (receives {what})"),
            ("model", f"{backend.project}/{backend.name}, from {backend.base_model}"),
            ("job", f"ART's own algorithm, {settings or 'with its defaults'}; at most {config.max_wait_s:g} s"),
        ]

    def policy(self) -> ARTPolicy | None:
        """Returns the served model; None before `initialize`."""
        return self._policy

    async def is_healthy(self) -> bool:
        """Returns True if the backend answers."""
        try:
            await self._require_client().check_access()
        except BackendError:
            return False
        return True

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Starts a job; in one process, the same job key returns the same job.

        Raises:
            BackendError: The backend rejects the job, or another program trains the model.
        """
        return await self._submit_once(trajectories, was_interrupted=False)

    async def resubmit(self, trajectories: TrajectoryCollection, known: TrainingJobRef | None) -> TrainingJobRef:
        """Returns the job that an earlier process started, or may have started; starts it if there is none.

        A job whose id was lost is looked for during `settle_s`, by the step that it makes.

        Raises:
            BackendError: The backend rejects the job.
        """
        from reinforge.protocols.art.client import AFTER_STEP

        id_ = (known.metadata or {}).get("job_id") if known is not None else None
        if known is not None and (id_ is None or not str(id_).startswith(AFTER_STEP)):
            return known
        return await self._submit_once(trajectories, was_interrupted=True)

    async def _submit_once(self, trajectories: TrajectoryCollection, *, was_interrupted: bool) -> TrainingJobRef:
        key = trajectories.resolve_job_key()
        async with self._locks.setdefault(key, asyncio.Lock()):
            if key not in self._refs:
                self._refs[key] = await self._submit(key, trajectories, was_interrupted)
            return self._refs[key]

    async def _submit(self, key: str, trajectories: TrajectoryCollection, was_interrupted: bool) -> TrainingJobRef:
        digest = hashlib.sha256(to_json([trajectories.run_id, key]).encode()).hexdigest()
        metadata: dict[str, Any] = {"job_key": key, "epoch": trajectories.epoch}
        settings = build_training_settings(self.adapter_config)
        allows = bool(settings.get("allow_training_without_logprobs"))
        built = build_groups(trajectories.groups, digest, allow_without_logprobs=allows)
        if not built.groups:
            metadata["refused"] = _explain_nothing(built)
            return TrainingJobRef(run_id=trajectories.run_id, backend=BACKEND, metadata=metadata)
        client, base = self._require_client(), self._require_policy().newest_step
        id_ = await self._find_or_start(base, built, settings, was_interrupted)
        client.remember_base(id_, base)
        metadata |= {"job_id": id_, "base_step": base, "reinforge_job": digest, "num_rows": built.num_trained}
        if built.num_without_logprobs and not allows:
            metadata["left_out"] = {"replies without log-probs": built.num_without_logprobs}
        return TrainingJobRef(run_id=trajectories.run_id, backend=BACKEND, metadata=metadata)

    async def _find_or_start(self, base: int, built: ARTGroups, settings: dict[str, Any], was_interrupted: bool) -> str:
        """Returns the id of the job that starts from a step; starts one unless one is found."""
        from reinforge.protocols.art.client import AFTER_STEP, MAX_PAUSE_S, SubmissionLost
        from reinforge.rollout.models.openai_http import RetryableError

        client, backend = self._require_client(), self.adapter_config.backend
        lost = f"{AFTER_STEP}{base}"
        newest = await client.endpoint.retry(client.get_step)
        if was_interrupted and (newest > base or await self._settle(base)):
            logger.info("found the job that starts from step %d of %s; not starting another", base, backend.name)
            return lost
        if newest != base:
            raise BackendError(
                f"{backend.url}: {backend.name} is at step {newest}, but this run left it at step {base}: something "
                "else trains it, or its checkpoints were deleted; give each run its own backend.name"
            )
        attempts, pause_s = self.adapter_config.max_retries + 1, 0.5
        for attempt in range(1, attempts + 1):
            try:
                return await client.start_job(base, built.groups, settings)
            except SubmissionLost as error:
                logger.warning("no answer to a submission: %s; looking for the job", error)
                if await self._settle(base):
                    return lost
                reason = str(error)
            except RetryableError as error:
                reason = str(error)
                await asyncio.sleep(min(error.wait_s or pause_s, MAX_PAUSE_S) if attempt < attempts else 0)
                pause_s *= 2
        raise BackendUnavailable(f"{reason} ({attempts} attempts)")

    async def _settle(self, base: int) -> bool:
        """Returns True once the model has a step after `base`; False if none comes within `settle_s`."""
        from reinforge.rollout.models.openai_http import RetryableError

        client, settle_s = self._require_client(), self.adapter_config.settle_s
        logger.warning(
            "a job may have been started from step %d of %s, but its id is not known; looking for its checkpoint for "
            "up to %g s (settle_s)",
            base,
            self.adapter_config.backend.name,
            settle_s,
        )
        deadline = time.monotonic() + settle_s
        while True:
            try:
                if await client.find_step_after(base) is not None:
                    return True
            except RetryableError as error:
                logger.debug("looking for a job: %s", error)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            await asyncio.sleep(min(self.adapter_config.poll_interval_s, left_s))

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Returns the status of a job; while the backend does not answer, the last known one, with a message.

        Raises:
            BackendUnavailable: The backend does not answer, and this process knows no earlier status.
            BackendError: The backend has no such job.
        """
        self._remember(ref)
        return await self._require_jobs().status(ref)

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float | None = None) -> TrainingJobStatus:
        """Waits at most `max_wait_s` until a job ends; the next `publish` serves its step.

        Args:
            ref: The job.
            poll_interval: Seconds between polls; None: `poll_interval_s`.

        Raises:
            BackendError: The backend has no such job, or rejects the key.
        """
        self._remember(ref)
        status = await self._require_jobs().wait(ref, poll_interval)
        found = status.metadata or {}
        if status.produced_model and "art_step" in found:
            self._require_policy().stage_step(found["fine_tuned_model"], found["art_step"])
            if self.adapter_config.backend.delete_old_checkpoints:
                await self._delete_old(found["art_step"])
        return status

    def _remember(self, ref: TrainingJobRef) -> None:
        metadata = ref.metadata or {}
        if isinstance(metadata.get("job_id"), str) and isinstance(metadata.get("base_step"), int):
            self._require_client().remember_base(metadata["job_id"], metadata["base_step"])

    async def _delete_old(self, step: int) -> None:
        """Deletes the steps that no checkpoint of the run names; a failure costs disk space, not the run."""
        from reinforge.protocols.art.client import parse_step

        files = [] if self._checkpoints is None else self._checkpoints.glob(f"*/{HOSTED_MODEL}")
        steps = {parse_step(HostedModel.read(file.parent).model) for file in files}
        try:
            await self._require_client().keep_steps(sorted({step, *(each for each in steps if each is not None)}))
        except BackendError as error:
            logger.warning("could not delete old checkpoints: %s", error)

    async def save(self, folder: Path, version: int) -> bool:
        """Writes the name of the newest step; its weights stay at the backend. False: it serves only the newest."""
        client, policy = self._require_client(), self._require_policy()
        name = client.name_step(policy.newest_step)
        if not client.serves_steps:
            return False
        self._checkpoints = folder.parent
        HostedModel(name, policy.base_model, self.adapter_config.backend.url).write(folder)
        return True

    async def restore(self, folder: Path, version: int) -> bool:
        """Serves the step that a folder names as `version`, once it is available."""
        from reinforge.protocols.art.client import parse_step

        model = HostedModel.read(folder).model
        step = parse_step(model)
        if step is None:
            raise BackendError(f"{folder / HOSTED_MODEL}: {model} names no step of an ART model")
        policy = self._require_policy()
        policy.stage_step(model, step)
        await policy.publish(version)
        self._checkpoints = folder.parent
        return True

    async def cleanup(self) -> None:
        """Closes the connections; an unfinished job keeps running at the backend."""
        client, self._client = self._client, None
        jobs, self._jobs = self._jobs, None
        policy, self._policy = self._policy, None
        if jobs is not None:
            await jobs.release()
        if policy is not None:
            await policy.close()
        if client is not None:
            await client.close()

    def _make_client(self) -> ARTClient:
        from reinforge.protocols.art.client import Serving
        from reinforge.protocols.art.local_server import ARTServer, make_endpoints
        from reinforge.protocols.art.service import ARTTrainingService
        from reinforge.rollout.models.openai_http import OpenAIEndpoint

        config, backend = self.adapter_config, self.adapter_config.backend
        limits = self._endpoint_config()
        if backend.protocol == 2:
            key = SecretStr(backend.api_key)
            return ARTTrainingService(OpenAIEndpoint(limits, backend.url, key), backend, key, config.settle_s)
        short, long = make_endpoints(limits, backend.url, config.max_wait_s)
        named = self.llm is not None and self.llm.base_url is not None
        inference = Serving(str(self.llm.base_url), self.llm.api_key) if named and self.llm is not None else None
        return ARTServer(short, long, backend, inference, config.settle_s)

    def _endpoint_config(self) -> EndpointConfig:
        config = self.adapter_config
        return EndpointConfig(
            timeout_s=config.timeout_s, max_retries=config.max_retries, max_connections=config.max_connections
        )

    async def _make_policy(self, serving: Serving, run_config: FinetuneConfig) -> ARTPolicy:
        from reinforge.protocols.art.client import parse_step
        from reinforge.protocols.art.policy import ARTPolicy
        from reinforge.rollout.models.openai_client import OpenAIChat
        from reinforge.rollout.models.openai_http import OpenAIEndpoint

        client, backend = self._require_client(), self.adapter_config.backend
        folder = Path(run_config.policy.model or "")
        named = parse_step(HostedModel.read(folder).model) if (folder / HOSTED_MODEL).is_file() else None
        step = await client.endpoint.retry(client.get_step) if named is None else named
        asked = {"return_token_ids": True, "return_tokens_as_token_ids": True} if backend.protocol == 2 else {}
        entry = self.llm or OpenAILLMConfig(model_name=backend.name)
        extra = {**asked, **entry.extra_body, **self.adapter_config.extra_body}
        chat = entry.model_copy(update={"model_name": client.name_step(step), "logprobs": True, "extra_body": extra})
        endpoint = OpenAIEndpoint(self._endpoint_config(), serving.url, serving.key)
        served = OpenAIChat(chat, serving.url, endpoint=endpoint, verify_model_name=True)
        return ARTPolicy(served, backend.base_model, backend.name, step, ready_s=self.adapter_config.ready_s)

    def _require_client(self) -> ARTClient:
        if self._client is None:
            raise BackendError("the ART adapter is not connected; call `initialize` first")
        return self._client

    def _require_policy(self) -> ARTPolicy:
        if self._policy is None:
            raise BackendError("the ART adapter is not connected; call `initialize` first")
        return self._policy

    def _require_jobs(self) -> HostedJobs[ARTClient]:
        if self._jobs is None:
            raise BackendError("the ART adapter is not connected; call `initialize` first")
        return self._jobs


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
    """Yields the adapter, which connects in `initialize`, and closes its connections at the end."""
    named = [builder.config.llms[entry] for entry in find_served_entries(builder.config)]
    llm = next((each for each in named if isinstance(each, OpenAILLMConfig)), None)
    adapter = ARTTrainerAdapter(config, await builder.get_algorithm(), llm)
    try:
        yield adapter
    finally:
        await adapter.cleanup()
