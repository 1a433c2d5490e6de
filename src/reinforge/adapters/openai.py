"""OpenAI's fine-tuning service as a trainer adapter: rows are sent, jobs are polled, the fine-tuned model is served.

submit               rows -> one file, one job, however often it is asked for and wherever the process dies
wait_until_complete  an error of a poll is no failure of the job; a time budget ends every wait
policy()             samples from the base model, then from the newest fine-tuned one
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from reinforge.adapters.openai_config import OpenAIAdapterConfig
from reinforge.adapters.openai_model import BACKEND, HOSTED_MODEL, HostedModel
from reinforge.adapters.openai_rows import Rows, preference_rows, supervised_rows
from reinforge.adapters.openai_settings import METHODS, model_problems, refused_settings
from reinforge.algorithms.preference import Preference
from reinforge.algorithms.rejection_sampling import RejectionSampling
from reinforge.algorithms.sft import SFT
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import BackendError, ConfigError, JobFailed, Problem, TrajectoryError
from reinforge.files import to_json
from reinforge.interfaces import Algorithm, TrainerAdapter
from reinforge.registry import register_trainer_adapter
from reinforge.rollout.openai_config import OpenAILLMConfig, endpoint_of, entry_of, warn_of_key
from reinforge.types.job import TrainingJobRef, TrainingJobStatus
from reinforge.types.seeding import stable_seed
from reinforge.types.trajectory import TrajectoryCollection

if TYPE_CHECKING:
    from reinforge.adapters.openai_jobs import HostedJobs
    from reinforge.adapters.openai_policy import HostedPolicy

MAX_METADATA = 512


class OpenAIAdapter(TrainerAdapter):
    """Sends what the algorithm takes of each collection as one job.

    Args:
        adapter_config: Its configuration.
        algorithm: Which trajectories are learnt: SFT, RejectionSampling or DPO; may be set anew between jobs.
        url: The service, up to /v1.
        key: Sent as a bearer token.
    """

    trains_on = "messages"
    serves_policy = True
    adapter_config: OpenAIAdapterConfig

    def __init__(
        self, adapter_config: OpenAIAdapterConfig, algorithm: Algorithm, url: str, key: SecretStr | None = None
    ):
        super().__init__(adapter_config)
        self.algorithm, self.url, self._key = algorithm, url, key
        self._policy: HostedPolicy | None = None
        self._jobs: HostedJobs | None = None
        self._refs: dict[str, TrainingJobRef] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Connects to the service, once, and makes sure that it takes the key.

        Raises:
            ConfigError: A setting cannot be honoured; every one is named.
            BackendError: The service does not answer, or refuses the key.
        """
        await super().initialize(run_config)
        if self._jobs is not None:
            return
        if problems := self.preflight(run_config):
            raise ConfigError(problems)
        from reinforge.adapters.openai_jobs import HostedJobs  # aiohttp is loaded here and nowhere before
        from reinforge.adapters.openai_policy import HostedPolicy
        from reinforge.adapters.openai_service import FineTuningService
        from reinforge.rollout.openai_client import OpenAIChat
        from reinforge.rollout.openai_http import OpenAIEndpoint

        config = self.adapter_config
        endpoint = OpenAIEndpoint(config, self.url, self._key)
        base, model = self._models(run_config)
        chat = OpenAILLMConfig(model_name=model, extra_body=config.extra_body)
        self._jobs = HostedJobs(FineTuningService(endpoint), config, run_config.seed)
        self._policy = HostedPolicy(
            OpenAIChat(chat, self.url, endpoint=endpoint, checks_name=True), base, ready_s=config.ready_s
        )
        try:
            await self._jobs.service.check()
        except BackendError:
            await self.cleanup()
            raise

    def preflight(self, run_config: FinetuneConfig) -> list[Problem]:
        """Returns every setting that the service cannot honour; asks nobody."""
        return [
            *model_problems(self.adapter_config.base_model, run_config),
            *refused_settings(run_config, self.algorithm),
        ]

    def effective_settings(self, run_config: FinetuneConfig) -> list[tuple[str, str]]:
        """Returns what took effect, for a person: name and value."""
        config, (base, model) = self.adapter_config, self._models(run_config)
        begins = base if model == base else f"{model}, made of {base}"
        told = ", ".join(f"{name} {value}" for name, value in self._hyperparameters().items())
        return [
            ("service", f"{self.url} is sent every prompt of the agent, and the rows that are trained"),
            ("model", f"{begins}; each job goes on from {'it' if config.fine_tune_from_scratch else 'the one before'}"),
            ("job", f"{METHODS[type(self.algorithm)]}, {told}; at most {config.max_wait_s:g} s"),
        ]

    def policy(self) -> HostedPolicy | None:
        """Returns the model that is served; None before `initialize`."""
        return self._policy

    async def is_healthy(self) -> bool:
        """Returns True if the service answers and takes the key."""
        try:
            await self._connected().service.check()
        except BackendError:
            return False
        return True

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Starts a job; the same job key gives the same job, in another process too.

        Too few rows, or pairs that cannot be compared, are a failed job with the reason; nothing is sent then.

        Raises:
            BackendError: The service does not take it.
        """
        key = trajectories.resolved_job_key()
        async with self._locks.setdefault(key, asyncio.Lock()):
            if key not in self._refs:
                self._refs[key] = await self._submit(key, trajectories)
            return self._refs[key]

    async def _submit(self, key: str, trajectories: TrajectoryCollection) -> TrainingJobRef:
        metadata: dict[str, Any] = {"job_key": key, "epoch": trajectories.epoch}
        try:
            rows = self._rows(trajectories)
            self._refuse_too_few(rows)
        except (JobFailed, TrajectoryError) as error:
            refused = {**metadata, "refused": str(error)}
            return TrainingJobRef(run_id=trajectories.run_id, backend=BACKEND, metadata=refused)
        body = self._body(key)
        content = rows.content
        identity = [trajectories.run_id, key, hashlib.sha256(content).hexdigest(), body]
        own = {
            "reinforge_run": trajectories.run_id[:MAX_METADATA],
            "reinforge_job": hashlib.sha256(to_json(identity).encode()).hexdigest(),
            "reinforge_model_group": (trajectories.model_group or "")[:MAX_METADATA],
        }
        jobs = self._connected()
        sent = {
            **body,
            "training_file": await jobs.service.file_of(content),
            "metadata": {k: v for k, v in own.items() if v},
        }
        job = await jobs.service.job_of(own["reinforge_job"], sent)
        metadata |= {"job_id": job.id, "num_rows": len(rows.lines), "training_file": sent["training_file"]}
        if rows.left_out:
            metadata["left_out"] = rows.left_out
        ref = TrainingJobRef(run_id=trajectories.run_id, backend=BACKEND, metadata=metadata)
        jobs.note(ref, job)
        return ref

    def _rows(self, trajectories: TrajectoryCollection) -> Rows:
        """Returns what the algorithm takes of a collection, as rows."""
        algorithm, groups = self.algorithm, trajectories.groups
        if isinstance(algorithm, Preference):
            return preference_rows(groups, algorithm)
        assert isinstance(algorithm, SFT | RejectionSampling)  # preflight refuses every other
        return supervised_rows(chain.from_iterable(algorithm.keep(group.trajectories) for group in groups))

    def _refuse_too_few(self, rows: Rows) -> None:
        least, count = self.adapter_config.min_examples, len(rows.lines)
        if count >= least:
            return
        told = "".join(f", {number} left out ({reason})" for reason, number in rows.left_out.items())
        raise JobFailed(
            f"too little to train: {count} rows of the {least} that a job takes at least (min_examples){told}; nothing "
            "was sent. Collect more (examples_per_epoch, num_generations), or keep more (min_reward, best_k, pairs)"
        )

    def _hyperparameters(self) -> dict[str, Any]:
        config = self.adapter_config
        found: dict[str, Any] = {
            "n_epochs": config.n_epochs,
            "batch_size": config.batch_size,
            "learning_rate_multiplier": config.learning_rate_multiplier,
        }
        if isinstance(self.algorithm, Preference):
            found["beta"] = self.algorithm.config.beta
        return found

    def _body(self, key: str) -> dict[str, Any]:
        """Returns what a job is made by, but for its file and its metadata."""
        config, policy = self.adapter_config, self._served()
        method = METHODS[type(self.algorithm)]
        seed = config.seed if config.seed is not None else stable_seed(self.run_config.seed, "job", key) % 2**31
        return {
            "model": policy.base_model if config.fine_tune_from_scratch else policy.newest_model,
            "method": {"type": method, method: {"hyperparameters": self._hyperparameters()}},
            "seed": seed,
            **({"suffix": config.suffix} if config.suffix else {}),
        }

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Returns where a job stands; while the service does not answer, where it stood, and that it does not.

        Raises:
            BackendUnavailable: The service does not answer, and has never told this process of the job.
            BackendError: The service knows no such job, or says a status that nobody knows.
        """
        return await self._connected().status(ref)

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float | None = None) -> TrainingJobStatus:
        """Waits for a job's end, at most `max_wait_s`; what it made is served from the next `publish` on.

        Args:
            ref: The job.
            poll_interval: Seconds between looks; None: `poll_interval_s`.

        Raises:
            BackendError: The service knows no such job, refuses the key, or says a status that nobody knows.
        """
        status = await self._connected().wait(ref, poll_interval)
        made = (status.metadata or {}).get("fine_tuned_model")
        if status.produced_model and made is not None:
            self._served().stage(made)
        return status

    async def cancel(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Cancels a job at the service and returns how it ended: it may have been done before.

        Raises:
            BackendError: It could not be cancelled.
        """
        return await self._connected().cancel(ref)

    async def save(self, folder: Path, version: int) -> bool:
        """Writes the name of the newest model: the weights stay at the service."""
        policy = self._served()
        HostedModel(policy.newest_model, policy.base_model, self.url).write(folder)
        return True

    async def restore(self, folder: Path, version: int) -> bool:
        """Serves the model that a folder names as `version`, once it answers."""
        policy = self._served()
        policy.stage(HostedModel.read(folder).model)
        await policy.publish(version)
        return True

    async def cleanup(self) -> None:
        """Closes the connections; a job in flight goes on unless `cancel_on_stop`."""
        if self._jobs is None:
            return
        jobs, self._jobs, self._policy = self._jobs, None, None
        await jobs.leave()
        await jobs.service.endpoint.close()

    def _models(self, run_config: FinetuneConfig) -> tuple[str, str]:
        """Returns the base model and the one to begin with, which differ where a folder names a fine-tuned one."""
        named = run_config.policy.model
        if named is not None and (Path(named) / HOSTED_MODEL).is_file():
            found = HostedModel.read(Path(named))
            return found.base_model, found.model
        base = self.adapter_config.base_model or named
        assert base is not None  # preflight was asked before
        return base, base

    def _connected(self) -> HostedJobs:
        if self._jobs is None:
            raise BackendError("the OpenAI adapter is not initialised")
        return self._jobs

    def _served(self) -> HostedPolicy:
        if self._policy is None:
            raise BackendError("the OpenAI adapter is not initialised")
        return self._policy


@register_trainer_adapter(config_type=OpenAIAdapterConfig)
async def openai_adapter(config: OpenAIAdapterConfig, builder: Any) -> AsyncIterator[OpenAIAdapter]:
    """Yields the adapter, not yet connected, and closes its connections at the end."""
    url, key = endpoint_of(config)
    path = ("trainer_adapters", entry_of(builder.config.trainer_adapters, config))
    warn_of_key(config, url, path, builder)
    adapter = OpenAIAdapter(config, await builder.get_algorithm(), url, key)
    try:
        yield adapter
    finally:
        await adapter.cleanup()
