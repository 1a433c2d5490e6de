"""A shared-model group over a trainer adapter: data of the agents becomes one job, and what it made is served.

    rollouts of the agents ─► views, frozen agents left out ─► TrajectoryCollection ─► adapter.submit ─► status ─► serve

A job's name is a hash of what it trains on and how, so asking for it again, in another process too, gives the same job.
One that ended without a model is tried anew when it is asked for again. All work is done on a loop of the group's own:
its methods may be awaited from any loop, and `group.sync` blocks on it.
"""

from __future__ import annotations

import asyncio
import hashlib
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from reinforge.algorithms.dpo import DPO, DPOConfig
from reinforge.algorithms.sft import SFT, SFTConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.crash import crash_point
from reinforge.errors import BackendError, ConfigError, JobFailed, Problem, TrajectoryError
from reinforge.interfaces import Algorithm, ContextOverflow, PolicyServer
from reinforge.multiagent.agents import PureTextWholeAgent
from reinforge.multiagent.nip.job_files import GroupFiles, JobRecord, Method
from reinforge.multiagent.nip.parameters import ExperimentSettings, HyperParameters
from reinforge.multiagent.nip.shared_model import (
    JobStatus,
    PureTextSharedModelGroup,
    PureTextSharedModelGroupState,
    Rollouts,
)
from reinforge.multiagent.nip.training_data import TrainingData
from reinforge.multiagent.protocol import ProtocolHandler
from reinforge.rollout.episode import bind_prompts
from reinforge.types.job import TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from reinforge.types.request import ModelReply, ModelRequest
from reinforge.types.trajectory import EpisodeItem, Trajectory, TrajectoryCollection

T = TypeVar("T")
Ask = Callable[[TrainingJobRef], Awaitable[TrainingJobStatus]]

WORDS: dict[TrainingStatusEnum, JobStatus] = {
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
NOT_THERE = 404


class AdapterSharedModelGroup(PureTextSharedModelGroup):
    """A group whose jobs go to a trainer adapter; see `PureTextSharedModelGroup` for what it is given.

    Attributes:
        adapter: The trainer adapter.
        files: The group's folder.
    """

    def __init__(
        self,
        hyper_params: HyperParameters,
        settings: ExperimentSettings,
        protocol_handler: ProtocolHandler,
        agent_wholes: Iterable[PureTextWholeAgent],
        group_name: str,
    ):
        super().__init__(hyper_params, settings, protocol_handler, agent_wholes, group_name)
        self.files = GroupFiles(Path(settings.groups_dir, settings.run_id, group_name).absolute())
        self.adapter, self._run_config = self._make_adapter()
        self._job: JobRecord | None = None
        self._opening: asyncio.Task[None] | None = None
        self._served: str | None = None
        self._lock = asyncio.Lock()
        self._read_state()

    # What a backend says.

    @abstractmethod
    def _make_adapter(self) -> tuple[Any, FinetuneConfig]:
        """Returns the adapter, not yet initialised, and the configuration that it gets."""

    @abstractmethod
    def _id_of(self, job: JobRecord) -> str:
        """Returns how the backend names a job that it has taken."""

    @abstractmethod
    def _forgets(self, job: JobRecord) -> bool:
        """Returns True if a new process must hand a job to the adapter again."""

    @abstractmethod
    def _made_by(self, job: JobRecord, status: TrainingJobStatus) -> str:
        """Returns the name of the model that a job made."""

    @abstractmethod
    async def _serve(self, model_name: str) -> None:
        """Makes the policy answer by a model."""

    def _foreign(self, job_id: str) -> JobRecord | None:
        """Returns a job that another folder knows, by the backend's name of it; None: it cannot be found again."""
        return None

    def _prepare(self, job: JobRecord) -> None:
        """Sets the adapter up for a job."""
        self.adapter.algorithm = ALGORITHMS[job.method]

    # Jobs.

    async def create_supervised_fine_tune_job(
        self,
        rollouts_per_agent: dict[str, Rollouts],
        guess_replaced_rollouts: dict[str, Rollouts] = {},  # noqa: B006  the seed's default, which nobody changes
        job_name: str | None = None,
    ) -> str:
        """Starts a job that imitates what agents said, and returns its id; equal data gives the same job.

        Raises:
            ConfigError: An agent is not of the group, or all of its agents are frozen.
            TrajectoryError: The data contradicts itself.
            JobFailed: Another job of the group is not done yet.
        """
        groups = self._data.supervised(rollouts_per_agent, guess_replaced_rollouts)
        return await self._on_own_loop(self._create("supervised", groups, job_name))

    async def create_dpo_fine_tune_job(
        self,
        positive_examples_per_agent: dict[str, Rollouts],
        negative_examples_per_agent: dict[str, Rollouts],
        job_name: str | None = None,
        *more: Any,
        timesteps_per_agent: Any = None,
    ) -> str:
        """Starts a job that prefers some replies to others, and returns its id; equal data gives the same job.

        Raises:
            ConfigError: An agent is not of the group, or all of its agents are frozen.
            TrajectoryError: The data contradicts itself.
            JobFailed: Another job of the group is not done yet.
        """
        preferred, other = positive_examples_per_agent, negative_examples_per_agent
        if isinstance(job_name, Mapping):  # (timesteps, positive, negative[, job_name])
            timesteps_per_agent, preferred, other, job_name = preferred, other, job_name, next(iter(more), None)
        groups = self._data.preferences(preferred, other, timesteps_per_agent)
        return await self._on_own_loop(self._create("dpo", groups, job_name))

    async def get_fine_tune_job_status(self) -> JobStatus:
        """Returns where the job stands that was created last; `not_found`: there is none."""
        return (await self._on_own_loop(self._looked_at()))[0]

    async def get_fine_tune_job_error_repr(self) -> str:
        """Returns why the job has failed, or that it has not."""
        word, status = await self._on_own_loop(self._looked_at())
        if word == "not_found":
            return f"there is no job {self.fine_tune_job_id}" if self.fine_tune_job_id else "no job was created"
        said = status.message if status is not None else None
        return str(said) if word in ("failed", "cancelled") else f"no error: the job has {word}"

    async def wait_for_fine_tune_job(self, timeout: float | None = None) -> JobStatus:
        """Waits until the job has ended, and returns how.

        Args:
            timeout: Seconds; None: as long as the backend allows a job to take.

        Raises:
            TimeoutError: It has not by then; it goes on.
        """
        async with asyncio.timeout(timeout):
            return await self._on_own_loop(self._wait_for_job())

    async def switch_to_next_model(self) -> None:
        """Serves what the job made; a group whose agents are all frozen keeps the model that it has.

        Raises:
            JobFailed: The job has not succeeded, with the reason.
        """
        await super().switch_to_next_model()
        if self.is_trainable:
            await self._on_own_loop(self._switch())

    async def sample(self, request: ModelRequest) -> ModelReply:
        """Returns a reply of the model that the group has now."""

        async def ask() -> ModelReply:
            await self._ready()
            return await self._policy().sample(request)

        return await self._on_own_loop(ask())

    async def close(self) -> None:
        """Gives the backend back; a job goes on when a group of the same name is made again."""
        await self._on_own_loop(self.adapter.cleanup())
        self._own_loop.close()

    def set_state(self, checkpoint: PureTextSharedModelGroupState) -> None:
        """Goes on from a state, which may be a dict, of this process or of another one.

        Raises:
            ConfigError: It is no state.
        """
        super().set_state(checkpoint)
        self._job = self._find_job(self.fine_tune_job_id)
        self._opening = None
        if self._job is not None:
            self.files.write_job(self._job)
        self._write_state()

    # On the group's own loop.

    async def _on_own_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self._own_loop.start(work))

    async def _wait_until_ready(self) -> None:
        await self._on_own_loop(self._ready())

    async def _ready(self) -> None:
        """Returns once the model answers and the job that was created last is with the backend."""
        tried = self._opening
        if tried is None or tried.cancelled() or (tried.done() and tried.exception() is not None):
            self._opening = asyncio.create_task(self._open())
        assert self._opening is not None
        await asyncio.shield(self._opening)

    async def _open(self) -> None:
        if self.adapter.policy() is None:
            await self.adapter.initialize(self._run_config)
        if self._served != self.model_name and (self._served is not None or self.fine_tuned_model_name is not None):
            await self._serve(self.model_name)
        self._served = self.model_name
        job = self._job
        if job is not None and job.failed is None and (job.ref is None or self._forgets(job)):
            collection = self.files.read_trajectories(job.name)
            if collection is not None:
                await self._submit(job, collection)

    async def _create(self, method: Method, groups: list[list[Trajectory]], job_name: str | None) -> str:
        if not self.is_trainable:
            message = f"all agents of the group {self.group_name} are frozen, so no job can train it"
            raise ConfigError(Problem("hyper_params.agents.*.freeze_agent", message, "leave one trainable"))
        await self._ready()
        async with self._lock:
            collection = await self._written(groups)
            job = await self._next_job(method, job_name, collection)
            collection.job_key = job.name
            self.files.write_trajectories(job.name, collection)
            self.files.write_job(job)
            self._job, self.fine_tune_job_id = job, None
            self._write_state()
            crash_point("submit.after_intent")
            return await self._submit(job, collection)

    async def _next_job(self, method: Method, job_name: str | None, collection: TrajectoryCollection) -> JobRecord:
        """Returns the job for a collection: the one that is there, or a new one where none is or no model came of it.

        Raises:
            JobFailed: Another job of the group is not done yet.
        """
        shared = [getattr(self.shared_agent_params, field) for field in self.SHARED]
        what = (method, self.model_name, self.num_epochs, self.rl_learning_rate, *shared)
        digest = hashlib.sha256(f"{what}{collection.resolved_job_key()}".encode()).hexdigest()[:16]
        word, _ = await self._looked_at()
        if self._job is not None and word in ("pending", "running") and not self._job.name.startswith(digest):
            raise JobFailed(f"{self.group_name}: the job {self.fine_tune_job_id} is {word}; wait for its end first")
        attempt = 0
        while (known := self.files.read_job(f"{digest}-{attempt}")) is not None and known.failed is not None:
            attempt += 1
        return known or JobRecord(f"{digest}-{attempt}", method, job_name, self.model_name)

    async def _submit(self, job: JobRecord, collection: TrajectoryCollection) -> str:
        """Hands a job to the adapter, which may have it already, and notes how it is called there."""
        self._prepare(job)
        ref = await self.adapter.submit(collection)
        crash_point("submit.after_send")
        self._job = job.but(ref=ref.model_dump())
        self.files.write_job(self._job)
        self.fine_tune_job_id = self._id_of(self._job)
        self._write_state()
        crash_point("submit.after_id")
        self.logger.info(
            "%s: job %s on %d trajectories", self.group_name, self.fine_tune_job_id, collection.num_trajectories
        )
        return self.fine_tune_job_id

    async def _looked_at(self) -> tuple[JobStatus, TrainingJobStatus | None]:
        """Returns where the job stands, and what the adapter says of it."""
        await self._ready()
        return await self._asked(self.adapter.status)

    async def _wait_for_job(self) -> JobStatus:
        await self._ready()
        return (await self._asked(self.adapter.wait_until_complete))[0]

    async def _asked(self, ask: Ask) -> tuple[JobStatus, TrainingJobStatus | None]:
        """Returns what the adapter says of the job; an end without a model is noted, and not asked for again."""
        job = self._job
        if job is None or (ref := job.training_ref) is None:
            return "not_found", None
        if job.failed is not None:
            end = TrainingStatusEnum.CANCELED if job.cancelled else TrainingStatusEnum.FAILED
            return WORDS[end], TrainingJobStatus(run_id=ref.run_id, backend=ref.backend, status=end, message=job.failed)
        try:
            status = await ask(ref)
        except BackendError as error:
            if getattr(error, "status", None) != NOT_THERE:
                raise
            return "not_found", None
        if not status.is_terminal or status.produced_model:
            return WORDS[status.status], status
        is_cancelled = status.status is TrainingStatusEnum.CANCELED
        told = status.message or ("it was cancelled" if is_cancelled else "it made no optimizer step")
        ended = job.but(failed=told, cancelled=is_cancelled)
        self.files.write_job(ended)
        if self._job == job:  # another one may have been created while this was asked
            self._job = ended
        return ("cancelled" if is_cancelled else "failed"), status.model_copy(update={"message": told})

    async def _switch(self) -> None:
        _, status = await self._looked_at()
        assert self._job is not None  # it has succeeded
        assert status is not None
        made = self._made_by(self._job, status)
        if made != self._served:
            await self._serve(made)
        self.fine_tuned_model_name = self._served = made
        self._write_state()
        self.logger.info("%s: %s serves", self.group_name, made)

    # Data and state.

    @property
    def _data(self) -> TrainingData:
        trained = {name: agent for name, agent in self.agent_wholes.items() if not self.is_frozen(name)}
        weights = {name: self.hyper_params.agents[name].agent_weight for name in trained}
        return TrainingData(self.group_name, self.protocol_handler, self.agent_wholes, trained, weights)

    def _policy(self) -> PolicyServer:
        found = self.adapter.policy()
        if found is None:
            raise BackendError(f"{self.group_name}: the backend serves no policy")
        return found

    async def _written(self, groups: Sequence[Sequence[Trajectory]]) -> TrajectoryCollection:
        """Returns data as the backend trains on it; what does not fit the context is left out, pairs as a whole."""
        kept, num_too_long = list[list[Trajectory]](), 0
        for siblings in groups:
            try:
                kept.append([await self._bound(trajectory) for trajectory in siblings])
            except ContextOverflow:
                num_too_long += 1
        if num_too_long:
            self.logger.warning("%s: %d of %d do not fit the context", self.group_name, num_too_long, len(groups))
        return TrajectoryCollection(trajectories=kept, run_id=self.settings.run_id, model_group=self.group_name)

    async def _bound(self, trajectory: Trajectory) -> Trajectory:
        """Returns a trajectory whose trained turns say exactly what they are, as the backend wants to know it."""
        items = [item for item in trajectory.episode if isinstance(item, EpisodeItem)]
        if len(items) < len(trajectory.episode):
            raise TrajectoryError(f"{trajectory.episode_id}: a pair is two trajectories here, and no DPOItem")
        trajectory = trajectory.model_copy(update={"episode": [item.model_copy() for item in items]})
        bind_prompts(trajectory)
        if self.adapter.trains_on == "messages":
            return trajectory
        for turn in trajectory.turns:
            if turn.tokens is None and turn.is_trained and turn.prompt is not None:
                tools = list(turn.prompt.tools) if turn.prompt.tools else None
                request = ModelRequest(list(turn.prompt.messages), tools=tools)
                turn.logprobs = await self._policy().encode(request, {"role": "assistant", "content": turn.content})
        return trajectory

    def _read_state(self) -> None:
        found = self.files.read_state()
        self.fine_tune_job_id = found.get("fine_tune_job_id")
        self.fine_tuned_model_name = found.get("fine_tuned_model_name")
        self._job = self.files.read_job(found["job"]) if found.get("job") else None

    def _write_state(self) -> None:
        self.files.write_state(**self.get_state_dict(), job=None if self._job is None else self._job.name)

    def _find_job(self, job_id: str | None) -> JobRecord | None:
        """Returns the job of an id: one of this folder's, or one that the backend knows by its id alone."""
        if job_id is None:
            return None
        names = sorted(path.parent.name for path in self.files.jobs.glob("*/job.json"))
        known = [job for name in names if (job := self.files.read_job(name)) is not None and job.ref is not None]
        return next((job for job in known if self._id_of(job) == job_id), None) or self._foreign(job_id)
