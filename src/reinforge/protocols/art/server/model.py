"""One model that clients train, on an engine of this process: its steps, its jobs, and what is served."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from reinforge.adapters.local import LocalAdapter
from reinforge.adapters.local_config import LocalAdapterConfig
from reinforge.algorithms.cispo import CISPO, CISPOConfig
from reinforge.algorithms.grpo import GRPO, GRPOConfig
from reinforge.algorithms.gspo import GSPO, GSPOConfig
from reinforge.algorithms.policy_gradient import PolicyGradient
from reinforge.config.policy import PolicyConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import EngineError, JobFailed, ReinforgeError, StorageError
from reinforge.files import write_folder
from reinforge.interfaces import PolicyServer
from reinforge.limits import get_limits
from reinforge.protocols.art.config import ARTTrainingSettings
from reinforge.protocols.art.server.records import JobResult, ModelFolder, ModelRecord
from reinforge.protocols.art.server.trajectories import ReadTrajectories, SampledReplies, TrajectoryReader, parse_groups
from reinforge.rollout.isolation.threads import run_in_daemon_thread
from reinforge.serving.routes import ApiError, hide_paths, make_id, refuse_invalid
from reinforge.types.job import TrainingStatusEnum
from reinforge.types.trajectory import TrajectoryCollection

if TYPE_CHECKING:
    from reinforge.engine import Engine


DEFAULT_LEARNING_RATE = 5e-6  # that of ART's clients
REQUIRED: dict[str, Any] = {
    "advantage_balance": 0.0,
    "allow_training_without_logprobs": False,
    "kimi_k2_tau": None,
    "kl_penalty_reference_step": 0,
    "kl_penalty_step_lag": None,
    "kl_ref_adapter_path": None,
    "mask_prob_ratio": False,
    "max_negative_advantage_importance_sampling_weight": None,
    "num_trajectories_learning_rate_multiplier_power": 0.0,
    "scale_learning_rate_by_reward_std_dev": False,
}
"""Settings that this server does not have, with the value that asks for nothing."""


class ServedSettings(ARTTrainingSettings):
    """Every setting that the clients of both protocols send."""

    normalize_advantages: bool | None = None
    plot_tensors: bool | None = None


@dataclass(frozen=True, slots=True)
class ARTTraining:
    algorithm: PolicyGradient
    learning_rate: float


def read_settings(given: Mapping[str, Any]) -> ARTTraining:
    """Returns how a job trains by its settings under ART's names; null is the default.

    loss_fn cispo (the default)  => CISPO: epsilon -> clip_low (from 1 on: not clipped below), epsilon_high -> clip_high
    loss_fn ppo                  => GRPO: epsilon -> clip_low, epsilon_high -> clip_high
    importance_sampling_level sequence, with loss_fn ppo => GSPO

    What says how something is computed, such as packed_sequence_length, changes nothing here. What would change the
    result and is not there is refused by its name.
    """
    try:
        settings = ServedSettings.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise refuse_invalid(error) from None
    for name, neutral in REQUIRED.items():
        value = getattr(settings, name)
        if value is not None and value != neutral:
            message = f"{name} is {value!r}, which this server does not support; leave it out"
            raise ApiError(422, message, param=name, code="unsupported_setting")
    if settings.kl_penalty_coef and settings.kl_penalty_source == "sample":
        message = (
            "kl_penalty_source is 'sample', which this server does not support; leave it out, or use current_learner"
        )
        raise ApiError(422, message, param="kl_penalty_source", code="unsupported_setting")
    return ARTTraining(_choose_algorithm(settings), settings.learning_rate or DEFAULT_LEARNING_RATE)


def _choose_algorithm(settings: ServedSettings) -> PolicyGradient:
    if settings.loss_fn is not None and settings.ppo is not None and settings.ppo != (settings.loss_fn == "ppo"):
        message = f"loss_fn is {settings.loss_fn}, but ppo is {settings.ppo}"
        raise ApiError(422, message, param="ppo")
    shared: dict[str, Any] = {
        "kl_coef": settings.kl_penalty_coef or 0.0,
        "scale_rewards": settings.scale_rewards is not False and settings.normalize_advantages is not False,
    }
    if settings.truncated_importance_sampling is not None:
        shared["tis_cap"] = settings.truncated_importance_sampling
    low, level = settings.epsilon, settings.importance_sampling_level or "token"
    high = settings.epsilon_high if settings.epsilon_high is not None else low
    clips = {name: value for name, value in (("clip_low", low), ("clip_high", high)) if value is not None}
    try:
        if not (settings.ppo or settings.loss_fn == "ppo"):
            _require_level(level, ("token",), "cispo")
            if settings.epsilon_high is None:
                clips.pop("clip_high", None)
            if low is not None and low >= 1:
                del clips["clip_low"]  # a weight is never below 0
            return CISPO(CISPOConfig(**shared, **clips))
        _require_level(level, ("token", "sequence"), "ppo")
        if level == "sequence":
            return GSPO(GSPOConfig(**shared, **clips))
        return GRPO(GRPOConfig(**shared, **clips, loss_aggregation="token"))
    except ValidationError as error:
        names = {"clip_low": "epsilon", "clip_high": "epsilon_high", "tis_cap": "truncated_importance_sampling"}
        raise refuse_invalid(error, names=names) from None


def _require_level(level: str, known: tuple[str, ...], loss: str) -> None:
    if level not in known:
        name = "importance_sampling_level"
        message = f"{name} {level} does not exist for loss_fn {loss} here; expected {' or '.join(known)}"
        raise ApiError(422, message, param=name, code="unsupported_setting")


logger = logging.getLogger(__name__)


@dataclass(eq=False)
class ARTJob:
    """One job of this process."""

    id: str
    model_id: str
    num_sequences: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)
    result: JobResult | None = None  # how it ended; None: it has not

    def end(self, result: JobResult) -> None:
        self.result, self.num_sequences = result, result.num_sequences
        self.done.set()


class ARTModel:
    def __init__(
        self,
        record: ModelRecord,
        folder: ModelFolder,
        policy: PolicyConfig,
        device: str,
        replies: SampledReplies,
        has_made: Callable[[ARTModel, int], None],
    ):
        self.record, self.folder, self.replies, self._has_made = record, folder, replies, has_made
        constant = policy.schedule.model_copy(update={"name": "constant", "warmup_steps": 0})
        self._policy_config, self._device = policy.model_copy(update={"schedule": constant}), device
        with_reference = GRPO(GRPOConfig(kl_coef=1.0))  # so that any job may ask for a KL to the base model
        self._adapter = LocalAdapter(LocalAdapterConfig(), with_reference)
        self._loading, self._training = asyncio.Lock(), asyncio.Lock()
        self._num_waiting = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def load(self) -> PolicyServer:
        """Loads the newest step, once, and returns what serves it."""
        async with self._loading:
            if self._adapter.engine is None:
                config = FinetuneConfig(policy=self._policy_config, device=self._device)
                await self._adapter.initialize(config)
                step = await run_in_daemon_thread(self.folder.find_newest, "step-check")
                if step is not None:
                    await self._adapter.restore(self.folder.get_checkpoint(step), step)
        return self.policy

    @property
    def policy(self) -> PolicyServer:
        policy = self._adapter.policy()
        if policy is None:
            raise EngineError(f"the model {self.record.name} is not loaded")
        return policy

    @property
    def engine(self) -> Engine:
        assert self._adapter.engine is not None  # it is loaded
        return self._adapter.engine

    @property
    def step(self) -> int:
        return self.policy.version

    def list_steps(self) -> list[int]:
        return [0, *self.folder.list_steps()]

    def list_earlier(self) -> list[int]:
        """Returns the steps that may be deleted: not the newest, nor one that is saved and about to be served."""
        return [step for step in self.folder.list_steps() if step < self.step]

    async def submit(self, groups: object, settings: Mapping[str, Any]) -> ARTJob:
        """Starts a job, which trains once those before it have ended."""
        num_sequences = sum(len(group.trajectories) for group in await asyncio.to_thread(parse_groups, groups))
        read_settings(settings)
        if not num_sequences:
            raise ApiError(422, "trajectory_groups holds no trajectory", param="trajectory_groups")
        if self._num_waiting >= (most := get_limits().waiting_jobs):
            raise ApiError(429, f"{most} jobs of this model wait already", headers={"retry-after": "10"})
        job = ARTJob(make_id("job"), self.record.id, num_sequences)
        await asyncio.to_thread(self.folder.record_job, job.id, _build_request(groups, settings))
        self._start(job, groups, settings)
        return job

    def find_repeated(self, groups: object, settings: Mapping[str, Any]) -> str | None:
        """Returns the id of the job that the same request has started before its client sent it again; None: none."""
        return self.folder.find_repeated(_build_request(groups, settings))

    def resume(self, id_: str) -> ARTJob | None:
        """Returns a job of an earlier process, which runs again if it had not ended; None: there is none of that id."""
        if id_ not in self.folder.list_jobs():
            return None
        job, request = ARTJob(id_, self.record.id), self.folder.read_request(id_)
        if (result := self.folder.read_result(id_)) is not None:
            job.end(result)
        elif request is not None:
            job.num_sequences = sum(len(group.trajectories) for group in parse_groups(request["trajectory_groups"]))
            self._start(job, request["trajectory_groups"], request["experimental_config"])
        return job

    def _start(self, job: ARTJob, groups: object, settings: Mapping[str, Any]) -> None:
        self._num_waiting += 1
        task = asyncio.create_task(self._run(job, groups, settings))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, job: ARTJob, groups: object, settings: Mapping[str, Any]) -> None:
        async with self._training:
            self._num_waiting -= 1
            try:
                step = self.folder.find_step_of(job.id)  # the last process may have ended after it had saved them
                metrics: dict[str, float] = {}
                if step is None:
                    step, metrics = await self._train(job, groups, settings)
                result = JobResult(step, None, metrics, job.num_sequences)
            except ReinforgeError as error:
                logger.warning("the job %s of %s failed: %s", job.id, self.record.name, error)
                result = JobResult(None, hide_paths(str(error)), {}, job.num_sequences)
            except Exception as error:
                logger.exception("the job %s of %s failed", job.id, self.record.name)
                result = JobResult(None, hide_paths(f"{type(error).__name__}: {error}"), {}, job.num_sequences)
            try:
                self.folder.record_result(job.id, result)
            except StorageError as error:
                logger.warning("the job %s has ended, but this is not recorded: %s", job.id, error)
            job.end(result)

    async def _train(self, job: ARTJob, groups: object, settings: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
        await self.load()
        training, engine = read_settings(settings), self.engine
        reader = TrajectoryReader(self.policy, self.replies, self.record.base_model, engine.model.max_model_len)
        read = await reader.read(parse_groups(groups))
        step = self.step + 1
        target = self.folder.get_checkpoint(step)

        def save(trained: Engine) -> None:
            write_folder(target, lambda staged: trained.write(staged, step), version=step, job=job.id)

        metrics: dict[str, float] = {}
        # without a group whose rewards differ the next step has the same weights, as with ART's server
        if any(len({each.reward for each in siblings}) > 1 for siblings in read.groups):
            self._adapter.call_before_serving(save)
            metrics = await self._update(job, read, step, training)
        else:
            await run_in_daemon_thread(lambda: save(engine), "engine-save")
        counts = {"num_replies": read.num_replies, "num_derived": read.num_derived, "num_left_out": read.num_left_out}
        metrics |= {name: float(value) for name, value in counts.items()}
        metrics["learning_rate"] = training.learning_rate
        await self.policy.publish(step)
        self._has_made(self, step)
        return step, metrics

    async def _update(self, job: ARTJob, read: ReadTrajectories, step: int, training: ARTTraining) -> dict[str, float]:
        self._adapter.algorithm = training.algorithm
        self.engine.set_learning_rate(training.learning_rate)
        collection = TrajectoryCollection(
            trajectories=read.groups, run_id=self.record.id, epoch=step - 1, job_key=job.id
        )
        status = await self._adapter.wait_until_complete(await self._adapter.submit(collection))
        if status.status is not TrainingStatusEnum.COMPLETED:
            left_out = f"; {read.num_left_out} replies have no known tokens" if read.num_left_out else ""
            raise JobFailed(f"{status.message}{left_out}")
        reported = status.metadata or {}
        return {name: float(value) for name, value in reported.items() if isinstance(value, int | float)}

    async def stop(self) -> None:
        """Stops all jobs, which run again after a restart."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        await self.stop()
        await self._adapter.cleanup()


def _build_request(groups: object, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"trajectory_groups": groups, "experimental_config": dict(settings)}
