"""What the adapters of training services have in common: each job key starts one job, which is then polled."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from reinforge.config.schema import FinetuneConfig, TrainerAdapterConfig
from reinforge.errors import BackendError, ConfigError, JobFailed, TrajectoryError
from reinforge.interfaces import Algorithm, TrainerAdapter
from reinforge.types.job import TrainingJobRef, TrainingJobStatus
from reinforge.types.trajectory import TrajectoryCollection

if TYPE_CHECKING:  # these import aiohttp, which nothing before `initialize` needs
    from reinforge.protocols.hosted_policy import HostedPolicy
    from reinforge.protocols.jobs import HostedJobs
    from reinforge.protocols.service import HostedJob, HostedService

S = TypeVar("S", bound="HostedService")
P = TypeVar("P", bound="HostedPolicy")


class HostedAdapter(TrainerAdapter, Generic[S, P]):
    """Trains on each collection with one job at a service."""

    trains_on = "messages"
    backend: ClassVar[str]
    title: ClassVar[str]

    def __init__(self, adapter_config: TrainerAdapterConfig, algorithm: Algorithm):
        super().__init__(adapter_config)
        self.algorithm = algorithm
        self._jobs: HostedJobs[S] | None = None
        self._policy: P | None = None
        self._refs: dict[str, TrainingJobRef] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Connects to the service on the first call; settings that it does not support are a `ConfigError`."""
        await super().initialize(run_config)
        if self._jobs is not None:
            return
        if problems := self.validate(run_config):
            raise ConfigError(problems)
        try:
            await self._connect(run_config)
        except BaseException:
            await self.cleanup()
            raise

    @abstractmethod
    async def _connect(self, run_config: FinetuneConfig) -> None:
        """Sets `_jobs`, and `_policy` if the service serves the model; checks that the service answers."""

    def policy(self) -> P | None:
        return self._policy

    async def is_healthy(self) -> bool:
        try:
            await self._require_jobs().service.check_access()
        except BackendError:
            return False
        return True

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Starts a job; the same job key returns the same job, even from another process.

        If there is nothing to train, nothing is sent; the job's status is failed, with the reason.
        """
        key = trajectories.resolve_job_key()
        async with self._locks.setdefault(key, asyncio.Lock()):
            if key not in self._refs:
                metadata: dict[str, Any] = {"job_key": key, "epoch": trajectories.epoch}
                job = None
                try:
                    job = await self._submit(trajectories, metadata)
                except (JobFailed, TrajectoryError) as error:
                    metadata["refused"] = str(error)
                ref = TrainingJobRef(run_id=trajectories.run_id, backend=self.backend, metadata=metadata)
                if job is not None:
                    self._require_jobs().record(ref, job)
                self._refs[key] = ref
            return self._refs[key]

    @abstractmethod
    async def _submit(self, trajectories: TrajectoryCollection, metadata: dict[str, Any]) -> HostedJob | None:
        """Finds or starts the job, and adds `job_id` and further facts to the reference's metadata."""

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Returns a job's status; while the service does not answer, the last known one, with a message."""
        return await self._require_jobs().status(ref)

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float | None = None) -> TrainingJobStatus:
        """Waits at most `max_wait_s` until a job ends; the next `publish` serves its model."""
        status = await self._require_jobs().wait(ref, poll_interval)
        if status.produced_model:
            await self._adopt(status.metadata or {})
        return status

    async def _adopt(self, metadata: dict[str, Any]) -> None:
        if self._policy is not None and "fine_tuned_model" in metadata:
            self._policy.stage(metadata["fine_tuned_model"])

    async def cleanup(self) -> None:
        """Closes the connections; an unfinished job keeps running unless `cancel_on_stop` is set."""
        jobs, self._jobs = self._jobs, None
        policy, self._policy = self._policy, None
        if jobs is not None:
            await jobs.release()
        if policy is not None:
            await policy.close()
        if jobs is not None:
            await jobs.service.close()

    def _require_jobs(self) -> HostedJobs[S]:
        if self._jobs is None:
            raise self._make_unconnected()
        return self._jobs

    def _require_policy(self) -> P:
        if self._policy is None:
            raise self._make_unconnected()
        return self._policy

    def _make_unconnected(self) -> BackendError:
        return BackendError(f"the {self.title} adapter is not connected; call `initialize` first")
