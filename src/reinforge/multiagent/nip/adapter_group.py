"""A shared-model group over a trainer adapter: the agents' data becomes one job, whose model is then served.

    rollouts of the agents ─► views, without frozen agents ─► TrajectoryCollection ─► adapter.submit ─► status ─► serve

A job's name is a hash of its training data and settings, so creating it again, even in another process, gives the same
job; a job that ended without a model is retried. All work runs on the group's own event loop: its methods may be
awaited from any loop, and `group.sync` blocks on it.
"""

from __future__ import annotations

import asyncio
import hashlib
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from reinforge.algorithms.dpo import DPO, DPOConfig
from reinforge.algorithms.sft import SFT, SFTConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.crash import crash_point
from reinforge.errors import BackendError, ContextOverflow, JobFailed, TrajectoryError
from reinforge.files import to_json
from reinforge.interfaces import Algorithm, PolicyServer
from reinforge.multiagent.nip.job_files import GroupFiles, JobRecord, Method
from reinforge.multiagent.nip.shared_model import (
    FROZEN_JOB_ID,
    JobStatus,
    PureTextSharedModelGroup,
    PureTextSharedModelGroupState,
    Rollouts,
)
from reinforge.multiagent.nip.training_data import PreferenceArguments, TrainingData
from reinforge.rollout.episode import attach_sources
from reinforge.types.job import TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from reinforge.types.request import ModelReply, ModelRequest
from reinforge.types.trajectory import EpisodeItem, Trajectory, TrajectoryCollection

T = TypeVar("T")
StatusQuery = Callable[[TrainingJobRef], Awaitable[TrainingJobStatus]]

JOB_STATUS: dict[TrainingStatusEnum, JobStatus] = {
    TrainingStatusEnum.PENDING: "pending",
    TrainingStatusEnum.RUNNING: "running",
    TrainingStatusEnum.COMPLETED: "succeeded",
    TrainingStatusEnum.FAILED: "failed",
    TrainingStatusEnum.CANCELED: "cancelled",
}

ALGORITHMS: dict[Method, Algorithm] = {
    "supervised": SFT(SFTConfig(drop_duplicates=True)),
    "dpo": DPO(DPOConfig(drop_duplicates=True)),
}
HTTP_NOT_FOUND = 404


class AdapterSharedModelGroup(PureTextSharedModelGroup):
    """A group whose jobs go to a trainer adapter; see `PureTextSharedModelGroup` for the arguments."""

    is_policy = False  # as the model of its agents (`collect_rollouts`): they set their own sampling parameters

    def __init__(self, *args: Any, **keywords: Any):
        super().__init__(*args, **keywords)
        folder = Path(self.settings.groups_dir, str(self.settings.run_id), self.group_name)
        self.files = GroupFiles(folder.absolute())
        try:
            self.adapter, self._run_config = self._make_adapter()
        except Exception:
            self._release_agents()
            raise
        self._job: JobRecord | None = None
        self._startup: asyncio.Task[None] | None = None
        self._served: str | None = None
        self._lock = asyncio.Lock()
        self._read_state()

    # Implemented per backend.

    @abstractmethod
    def _make_adapter(self) -> tuple[Any, FinetuneConfig]:
        """Returns the adapter, not yet initialized, and its run configuration."""

    @property
    @abstractmethod
    def _job_settings(self) -> dict[str, Any]:
        """The caller's own settings of the backend that a job's model depends on; part of a job's name."""

    @abstractmethod
    def _backend_job_id(self, job: JobRecord) -> str:
        """Returns the backend's id of a job that it has accepted."""

    @abstractmethod
    def _needs_resubmission(self, job: JobRecord) -> bool:
        """Returns True if a new process must submit a job to the adapter again."""

    @abstractmethod
    def _trained_model_name(self, job: JobRecord, status: TrainingJobStatus) -> str:
        """Returns the name of the model that a job produced."""

    @abstractmethod
    async def _serve(self, model_name: str) -> None:
        """Makes the policy serve a model."""

    def _adopt_job(self, job_id: str) -> JobRecord | None:
        """Returns a record for a job of another folder, from the backend's id alone; None if the backend cannot."""
        return None

    def _configure_adapter(self, job: JobRecord) -> None:
        self.adapter.algorithm, beta = ALGORITHMS[job.method], self.shared_agent_params.dpo_beta
        if job.method == "dpo" and beta is not None:
            self.adapter.algorithm = DPO(DPOConfig(drop_duplicates=True, beta=beta))

    async def create_supervised_fine_tune_job(
        self,
        rollouts_per_agent: dict[str, Rollouts],
        guess_replaced_rollouts: dict[str, Rollouts] = {},  # noqa: B006  the signature of neural-interactive-proofs
        job_name: str | None = None,
    ) -> str:
        groups = self._training_data.build_supervised(rollouts_per_agent, guess_replaced_rollouts)
        return await self._run_on_loop(self._create_job("supervised", groups, job_name))

    async def create_dpo_fine_tune_job(
        self,
        positive_examples_per_agent: dict[str, Rollouts],
        negative_examples_per_agent: dict[str, Rollouts],
        *more: Any,
        job_name: str | None = None,
        timesteps_per_agent: Any = None,
    ) -> str:
        given = PreferenceArguments.from_call(
            positive_examples_per_agent, negative_examples_per_agent, more, job_name, timesteps_per_agent
        )
        groups = self._training_data.build_preferences(given.preferred, given.rejected, given.timesteps)
        return await self._run_on_loop(self._create_job("dpo", groups, given.job_name))

    async def get_fine_tune_job_status(self) -> JobStatus:
        return (await self._run_on_loop(self._fetch_status()))[0]

    async def get_fine_tune_job_error_repr(self) -> str:
        job_status, details = await self._run_on_loop(self._fetch_status())
        if job_status == "not_found":
            return f"job {self.fine_tune_job_id} not found" if self.fine_tune_job_id else "no job has been created"
        message = details.message if details is not None else None
        return str(message) if job_status in ("failed", "cancelled") else f"no error; the job's status is {job_status}"

    async def wait_for_fine_tune_job(self, timeout: float | None = None) -> JobStatus:
        """Waits until the job has ended, and returns its status.

        Args:
            timeout: Seconds; None: as long as the backend lets a job run.

        Raises:
            TimeoutError: The job is still running; it is not cancelled.
        """
        async with asyncio.timeout(timeout):
            return (await self._run_on_loop(self._fetch_status(wait=True)))[0]

    async def switch_to_next_model(self) -> None:
        await super().switch_to_next_model()
        if self.is_trainable:
            await self._run_on_loop(self._serve_trained_model())

    async def sample(self, request: ModelRequest) -> ModelReply:
        async def sample_when_ready() -> ModelReply:
            await self._ensure_ready()
            return await self._policy().sample(request)

        return await self._run_on_loop(sample_when_ready())

    async def close(self) -> None:
        """Releases the backend; a new group with the same name resumes an unfinished job."""
        await self._run_on_loop(self.adapter.cleanup())
        self._loop.close()
        self._release_agents()

    def set_state(self, checkpoint: PureTextSharedModelGroupState) -> None:
        super().set_state(checkpoint)
        self._job = self._find_job(self.fine_tune_job_id)
        self._startup = None
        if self._job is not None:
            self.files.write_job(self._job)
        self._write_state()

    # On the group's own loop.

    async def _run_on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self._loop.start(work))

    async def _wait_until_ready(self) -> None:
        await self._run_on_loop(self._ensure_ready())

    async def _ensure_ready(self) -> None:
        """Returns once the model is served and the backend has the last job; a failed startup is retried."""
        startup = self._startup
        if startup is None or startup.cancelled() or (startup.done() and startup.exception() is not None):
            self._startup = asyncio.create_task(self._start_backend())
        assert self._startup is not None
        await asyncio.shield(self._startup)

    async def _start_backend(self) -> None:
        if self.adapter.policy() is None:
            await self.adapter.initialize(self._run_config)
        if self._served != self.model_name and (self._served is not None or self.fine_tuned_model_name is not None):
            await self._serve(self.model_name)
        self._served = self.model_name
        job = self._job
        if job is not None and job.failed is None and (job.ref is None or self._needs_resubmission(job)):
            collection = self.files.read_trajectories(job.name)
            if collection is not None:
                await self._submit_job(job, collection)

    async def _create_job(self, method: Method, groups: list[list[Trajectory]], job_name: str | None) -> str:
        if not self.is_trainable:
            return FROZEN_JOB_ID
        await self._ensure_ready()
        async with self._lock:
            collection = await self._build_collection(groups)
            num_pairs = len(collection.trajectories)
            if method == "dpo":
                collection = self._drop_identical_pairs(collection)
            job = await self._find_or_create_job(method, job_name, collection)
            collection.job_key = job.name
            self.files.write_trajectories(job.name, collection)
            if num_pairs and not collection.trajectories:
                reason = f"nothing to learn: both replies of all {num_pairs} pairs are the same"
                return self._record_failure(job, reason)
            self.files.write_job(job)
            self._job, self.fine_tune_job_id = job, None
            self._write_state()
            crash_point("submit.after_intent")
            return await self._submit_job(job, collection)

    def _drop_identical_pairs(self, collection: TrajectoryCollection) -> TrajectoryCollection:
        """Returns the pairs whose replies differ: the gradients of two equal replies cancel.

        A backend that trains on messages leaves out equal ones itself, and counts them.
        """
        kept = [pair for pair in collection.trajectories if len({_get_trained_tokens(each) for each in pair}) > 1]
        if num_identical := len(collection.trajectories) - len(kept):
            message = "%s: %d of %d pairs are left out: both of their replies are the same"
            self.logger.warning(message, self.group_name, num_identical, len(collection.trajectories))
        return collection.model_copy(update={"trajectories": kept}) if num_identical else collection

    def _record_failure(self, job: JobRecord, reason: str) -> str:
        ref = TrainingJobRef(run_id=str(self.settings.run_id), backend="none", metadata={"job_key": job.name})
        self._job = replace(job, ref=ref.model_dump(), failed=reason)
        self.files.write_job(self._job)
        self.fine_tune_job_id = self._backend_job_id(self._job)
        self._write_state()
        return self.fine_tune_job_id

    async def _find_or_create_job(
        self, method: Method, job_name: str | None, collection: TrajectoryCollection
    ) -> JobRecord:
        """Returns the existing job for a collection, or a new one if there is none or it ended without a model."""
        shared = [getattr(self.shared_agent_params, field) for field in self.SHARED_FIELDS]
        if method == "dpo" and self.shared_agent_params.dpo_beta is not None:
            shared.append(self.shared_agent_params.dpo_beta)
        if self._job_settings:
            shared.append(to_json(dict(sorted(self._job_settings.items()))))
        settings = (method, self.model_name, self.num_epochs, self.rl_learning_rate, *shared)
        digest = hashlib.sha256(f"{settings}{collection.resolve_job_key()}".encode()).hexdigest()[:16]
        status, _ = await self._fetch_status()
        if self._job is not None and status in ("pending", "running") and not self._job.name.startswith(digest):
            raise JobFailed(f"{self.group_name}: the job {self.fine_tune_job_id} is {status}; wait until it has ended")
        attempt = 0
        while (known := self.files.read_job(f"{digest}-{attempt}")) is not None and known.failed is not None:
            attempt += 1
        return known or JobRecord(f"{digest}-{attempt}", method, job_name, self.model_name)

    async def _submit_job(self, job: JobRecord, collection: TrajectoryCollection) -> str:
        self._configure_adapter(job)
        ref = await self.adapter.submit(collection)
        crash_point("submit.after_send")
        self._job = replace(job, ref=ref.model_dump())
        self.files.write_job(self._job)
        self.fine_tune_job_id = self._backend_job_id(self._job)
        self._write_state()
        crash_point("submit.after_id")
        message = "%s: job %s on %d trajectories"
        self.logger.info(message, self.group_name, self.fine_tune_job_id, collection.num_trajectories)
        return self.fine_tune_job_id

    async def _fetch_status(self, *, wait: bool = False) -> tuple[JobStatus, TrainingJobStatus | None]:
        if not self.is_trainable:
            return "succeeded", None
        await self._ensure_ready()
        return await self._query_status(self.adapter.wait_until_complete if wait else self.adapter.status)

    async def _query_status(self, query: StatusQuery) -> tuple[JobStatus, TrainingJobStatus | None]:
        """Returns the job's status; an end without a model is stored and not queried again."""
        job = self._job
        if job is None or (ref := job.training_ref) is None:
            return "not_found", None
        if job.failed is not None:
            end = TrainingStatusEnum.CANCELED if job.cancelled else TrainingStatusEnum.FAILED
            known = TrainingJobStatus(run_id=ref.run_id, backend=ref.backend, status=end, message=job.failed)
            return JOB_STATUS[end], known
        try:
            status = await query(ref)
        except BackendError as error:
            if getattr(error, "status", None) != HTTP_NOT_FOUND:
                raise
            return "not_found", None
        if not status.is_terminal or status.produced_model:
            return JOB_STATUS[status.status], status
        is_cancelled = status.status is TrainingStatusEnum.CANCELED
        reason = status.message or ("it was cancelled" if is_cancelled else "it made no optimizer step")
        ended = replace(job, failed=reason, cancelled=is_cancelled)
        self.files.write_job(ended)
        if self._job == job:  # another job may have been created during the query
            self._job = ended
        return ("cancelled" if is_cancelled else "failed"), status.model_copy(update={"message": reason})

    async def _serve_trained_model(self) -> None:
        _, status = await self._fetch_status()
        assert self._job is not None  # the job has succeeded
        assert status is not None
        model_name = self._trained_model_name(self._job, status)
        if model_name != self._served:
            await self._serve(model_name)
        self.fine_tuned_model_name = self._served = model_name
        self._write_state()
        self.logger.info("%s: now serving %s", self.group_name, model_name)

    @property
    def _training_data(self) -> TrainingData:
        trained = {name: agent for name, agent in self.agent_wholes.items() if not self.is_frozen(name)}
        weights = {name: self.hyper_params.agents[name].agent_weight for name in trained}
        return TrainingData(self.group_name, self.protocol_handler, self.agent_wholes, trained, weights)

    def _policy(self) -> PolicyServer:
        policy: PolicyServer | None = self.adapter.policy()
        if policy is None:
            raise BackendError(f"{self.group_name}: the backend serves no policy")
        return policy

    async def _build_collection(self, groups: Sequence[Sequence[Trajectory]]) -> TrajectoryCollection:
        kept, num_too_long = list[list[Trajectory]](), 0
        for siblings in groups:
            try:
                kept.append([await self._encode_turns(trajectory) for trajectory in siblings])
            except ContextOverflow:
                num_too_long += 1
        if num_too_long:
            message = "%s: %d of %d groups do not fit the context and are left out"
            self.logger.warning(message, self.group_name, num_too_long, len(groups))
        return TrajectoryCollection(trajectories=kept, run_id=self.settings.run_id, model_group=self.group_name)

    async def _encode_turns(self, trajectory: Trajectory) -> Trajectory:
        """Returns a trajectory whose trained turns have tokens, or prompts if the backend trains on messages."""
        items = [item for item in trajectory.episode if isinstance(item, EpisodeItem)]
        if len(items) < len(trajectory.episode):
            raise TrajectoryError(f"{trajectory.episode_id}: pass a pair as two trajectories, not as a DPOItem")
        trajectory = trajectory.model_copy(update={"episode": [item.model_copy() for item in items]})
        attach_sources([trajectory], trains_on="messages")
        if self.adapter.trains_on == "messages":
            return trajectory
        for turn in trajectory.turns:
            if turn.tokens is None and turn.is_trained and turn.prompt is not None:
                tools = list(turn.prompt.tools) if turn.prompt.tools else None
                request = ModelRequest(list(turn.prompt.messages), tools=tools)
                turn.logprobs = await self._policy().encode(request, {"role": "assistant", "content": turn.content})
        return trajectory

    def _read_state(self) -> None:
        state = self.files.read_state()
        self.fine_tune_job_id = state.get("fine_tune_job_id")
        self.fine_tuned_model_name = state.get("fine_tuned_model_name")
        self._job = self.files.read_job(state["job"]) if state.get("job") else None

    def _write_state(self) -> None:
        self.files.write_state(**self.get_state_dict(), job=None if self._job is None else self._job.name)

    def _find_job(self, job_id: str | None) -> JobRecord | None:
        """Returns the job with an id, from this folder or, if the backend can tell from the id alone, from another."""
        if job_id is None:
            return None
        names = sorted(path.parent.name for path in self.files.jobs.glob("*/job.json"))
        known = [job for name in names if (job := self.files.read_job(name)) is not None and job.ref is not None]
        return next((job for job in known if self._backend_job_id(job) == job_id), None) or self._adopt_job(job_id)


def _get_trained_tokens(trajectory: Trajectory) -> Any:
    trained = [turn.tokens for turn in trajectory.turns if turn.is_trained]
    if any(tokens is None for tokens in trained):
        return id(trajectory)
    return tuple(tuple(tokens.token_ids) for tokens in trained if tokens is not None)
