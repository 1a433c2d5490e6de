"""The embedded backend as a trainer adapter: jobs run in this process, on the same weights that the agent calls."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reinforge.algorithms.samples import num_left_out, num_of_other_choices, weigh_agents
from reinforge.config.schema import FinetuneConfig, PolicyConfig, TrainerAdapterConfig
from reinforge.errors import BackendError, ConfigError, JobFailed, OutOfMemory, Problem, ReinforgeError, StorageError
from reinforge.interfaces import Algorithm, PolicyServer, TrainerAdapter
from reinforge.registry import register_trainer_adapter
from reinforge.rollout.threads import in_daemon_thread
from reinforge.types.job import JOB_TRANSITIONS, TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from reinforge.types.sample import FloatArray, TrainingSample, UpdateReport
from reinforge.types.seeding import stable_random
from reinforge.types.supports import MAX_SUPPORT
from reinforge.types.trajectory import TrajectoryCollection

if TYPE_CHECKING:
    from reinforge.engine import Engine

BACKEND = "local"
MAX_NAMED = 5
DIRECTION_SAMPLES = (8, 256)
"""Of a job's samples an eighth, at least and at most so many, are scored again after it to see which way their
log-probs moved: a forward pass of all of them would cost a third of the update."""


class LocalAdapterConfig(TrainerAdapterConfig, name="local"):
    """Trains in this process; model, optimizer and batches are the blocks of `finetuning.policy`."""


class _StepsRefused(JobFailed):
    """Numbers were not finite; `told` is what the job's record keeps of it."""

    def __init__(self, message: str, told: dict[str, Any]):
        super().__init__(message)
        self.told = told


@dataclass(slots=True)
class _Job:
    """One job of this process; `world` is why it failed where the machine failed it, not the job itself."""

    ref: TrainingJobRef
    status: TrainingJobStatus
    done: asyncio.Event
    world: ReinforgeError | None = None

    def move(self, status: TrainingStatusEnum, message: str, metadata: dict[str, Any] | None = None) -> None:
        """Goes to another status; the table of transitions holds."""
        if status not in JOB_TRANSITIONS[self.status.status]:
            raise BackendError(f"a job cannot go from {self.status.status} to {status}")
        update = {"status": status, "message": message, "metadata": metadata}
        self.status = self.status.model_copy(update=update)
        if status.is_terminal:
            self.done.set()


class LocalAdapter(TrainerAdapter):
    """Runs one job after the other on the embedded engine.

    Args:
        adapter_config: Its configuration.
        algorithm: Which tokens earn which credit, and the name of the loss.
        model: Folder or id of the model; replaces `finetuning.policy.model`.
    """

    def __init__(self, adapter_config: LocalAdapterConfig, algorithm: Algorithm, model: str | None = None):
        super().__init__(adapter_config)
        self.algorithm, self.model = algorithm, model
        self.engine: Engine | None = None
        self._jobs: dict[str, _Job] = {}
        self._refused_in_a_row = 0
        self._one_at_a_time = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Loads the model, once.

        Raises:
            ConfigError: The model cannot be used, with every reason at once.
        """
        await super().initialize(run_config)
        if self.engine is not None:
            return
        if problems := self.preflight(run_config):
            raise ConfigError(problems)
        from reinforge.engine import Engine  # torch is loaded here and nowhere before

        policy = self._policy_config(run_config)
        self.engine = await in_daemon_thread(
            lambda: Engine.load(
                policy,
                seed=run_config.seed,
                device=run_config.device,
                deterministic=run_config.deterministic,
                keep_reference=self.algorithm.needs.ref_logprobs,
                critic=self.algorithm.needs.values,
            ),
            "engine-load",
        )

    def preflight(self, run_config: FinetuneConfig) -> list[Problem]:
        """Returns everything about the model that can be refused before it is loaded; needs no torch."""
        from reinforge.engine.preflight import check_policy

        policy = self._policy_config(run_config)
        if policy.model is None:
            return [Problem("finetuning.policy.model", "no model is named", "give a folder, a hub id or bundled:NAME")]
        return check_policy(policy)

    def _policy_config(self, run_config: FinetuneConfig) -> PolicyConfig:
        return run_config.policy.model_copy(update={"model": self.model or run_config.policy.model})

    def policy(self) -> PolicyServer | None:
        """Returns the policy that shares its weights with the learner; None before `initialize`."""
        return self.engine.policy if self.engine is not None else None

    async def is_healthy(self) -> bool:
        """Returns True once the model is loaded."""
        return self.engine is not None

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Starts a job; the same job key gives the same job, which is not trained twice."""
        key = trajectories.resolved_job_key()
        if key not in self._jobs:
            ref = TrainingJobRef(
                run_id=trajectories.run_id, backend=BACKEND, metadata={"job_key": key, "epoch": trajectories.epoch}
            )
            status = TrainingJobStatus(
                run_id=ref.run_id, backend=BACKEND, status=TrainingStatusEnum.PENDING, progress=0.0
            )
            self._jobs[key] = _Job(ref, status, asyncio.Event())
            task = asyncio.create_task(self._run(self._jobs[key], trajectories))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return self._jobs[key].ref

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Returns where a job stands; a pure read."""
        return self._job(ref).status

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        """Waits for a job's end; nothing is polled, so waiting costs nothing but the job.

        Raises:
            OutOfMemory, StorageError: The machine could not do it; the same job may well succeed elsewhere.
        """
        job = self._job(ref)
        await job.done.wait()
        if job.world is not None:
            raise job.world
        return job.status

    async def save(self, folder: Path, version: int) -> bool:
        """Writes a checkpoint in the Hugging Face layout, with the optimizer's state beside it."""
        engine = self._loaded()
        await in_daemon_thread(lambda: engine.write(folder, version), "engine-save")
        return True

    async def restore(self, folder: Path, version: int) -> bool:
        """Loads a checkpoint's weights and serves them as `version`."""
        engine = self._loaded()

        def load() -> None:
            engine.begin_job()
            try:
                engine.load_weights(folder)
            except BaseException:
                engine.rollback()
                raise
            engine.end_job()

        await in_daemon_thread(load, "engine-restore")
        await engine.policy.publish(version)
        return True

    async def cleanup(self) -> None:
        """Stops the job in flight and gives the model back."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.engine is not None:
            engine, self.engine = self.engine, None
            await in_daemon_thread(engine.close, "engine-close")

    def _job(self, ref: TrainingJobRef) -> _Job:
        key = (ref.metadata or {}).get("job_key", "")
        if key not in self._jobs:
            raise BackendError(f'the local backend knows no job with key "{key}"')
        return self._jobs[key]

    def _loaded(self) -> Engine:
        if self.engine is None:
            raise BackendError("the local adapter is not initialised")
        return self.engine

    async def _run(self, job: _Job, trajectories: TrajectoryCollection) -> None:
        """Runs one job; whatever goes wrong is the job's failure, with its reason."""
        async with self._one_at_a_time:
            job.move(TrainingStatusEnum.RUNNING, "training")
            try:
                engine = self._loaded()
                metadata = await in_daemon_thread(lambda: self._train(engine, trajectories), "engine-job")
            except asyncio.CancelledError:
                job.move(TrainingStatusEnum.CANCELED, "the run was stopped")
                raise
            except Exception as error:  # noqa: BLE001  every failure of a job ends as its status, with the reason
                text = str(error) if isinstance(error, ReinforgeError) else f"{type(error).__name__}: {error}"
                job.world = error if isinstance(error, StorageError | OutOfMemory) else None
                told = error.told if isinstance(error, _StepsRefused) else {}
                job.move(TrainingStatusEnum.FAILED, text, {"num_updates": 0, **told})
            else:
                job.move(TrainingStatusEnum.COMPLETED, "trained", metadata)

    def _train(self, engine: Engine, trajectories: TrajectoryCollection) -> dict[str, Any]:
        """Builds samples, scores, credits and updates; returns the job's metrics."""
        samples = self.algorithm.build_samples(trajectories.groups)
        left_out = num_left_out(trajectories.groups)
        if not samples:
            unrecorded = (
                f"; {left_out:,} sampled tokens may not be: drawn at temperature 0, or from more than {MAX_SUPPORT} "
                "that finetuning.sampling's top_p, top_k or min_p kept"
            )
            raise JobFailed(
                f"nothing to train: of {trajectories.num_trajectories} trajectories {type(self.algorithm).__name__} "
                "took none: no turn has token ids that may be trained, or none is good enough (min_reward, min_margin)"
                f"{unrecorded if left_out else ''}"
            )
        weigh_agents(samples)
        engine.begin_job()
        try:
            engine.score(samples, self.algorithm.needs)
            for sample, advantages in zip(samples, self.algorithm.credit(samples), strict=True):
                sample.advantages = advantages
            if not any(np.any(sample.advantages) for sample in samples):
                raise JobFailed("nothing to learn: every token's credit is zero")
            if not any(sample.weight > 0 for sample in samples):
                raise JobFailed("nothing to learn: every sample's weight is zero (overlong_filtering, agent_weights)")
            start, end = self._progress(trajectories.epoch)
            watched = self._watched(engine, samples, trajectories.epoch or 0)
            report = engine.update(
                samples, self.algorithm.loss, progress_start=start, progress_end=end, epoch=trajectories.epoch or 0
            )
            skipped = _episodes_of(trajectories, samples, report.skipped_samples)
            self._refuse_broken(report, skipped)
            direction = _direction(engine, watched)
        except BaseException:
            engine.rollback()
            raise
        engine.end_job()
        return {
            "num_updates": report.num_updates,
            "num_skipped_steps": report.num_skipped_steps,
            "num_samples": report.num_samples,
            "num_tokens": report.num_tokens,
            "num_tokens_left_out": left_out,
            "num_tokens_of_other_choices": num_of_other_choices(trajectories.groups),
            "direction": direction,
            **({"skipped_episodes": skipped} if skipped else {}),
            **report.metrics,
        }

    def _refuse_broken(self, report: UpdateReport, skipped: list[str]) -> None:
        """Stops where no step could be made, or too many in a row could not, those of jobs before included.

        Raises:
            JobFailed: The job is to be rolled back, with the episodes of the refused steps.
        """
        limit, longest = self.run_config.limits.max_refused_steps, 0
        for step in range(report.num_updates + report.num_skipped_steps):
            self._refused_in_a_row = self._refused_in_a_row + 1 if step in report.skipped_steps else 0
            longest = max(longest, self._refused_in_a_row)
        if report.num_updates and longest < limit:
            return
        why = f"{longest} optimizer steps in a row were refused (finetuning.limits.max_refused_steps: {limit})"
        if report.num_updates == 0:
            why = f"no optimizer step was made: {report.num_skipped_steps} were refused"
        named = ", ".join(skipped[:MAX_NAMED]) + (
            f" and {len(skipped) - MAX_NAMED} more" if skipped[MAX_NAMED:] else ""
        )
        raise _StepsRefused(
            f"{why}, since numbers were not finite (run.log says which); the weights are those from before the job. "
            f"The refused steps held the episodes {named}; all are in the job's record in run.sqlite",
            {"num_skipped_steps": report.num_skipped_steps, "skipped_episodes": skipped},
        )

    def _progress(self, epoch: int | None) -> tuple[float, float]:
        """Returns the shares of the run that are done before and after this job, for the schedule."""
        total = max(1, self.run_config.num_epochs)
        number = min(epoch or 0, total - 1)
        return number / total, (number + 1) / total

    def _watched(
        self, engine: Engine, samples: list[TrainingSample], epoch: int
    ) -> list[tuple[TrainingSample, FloatArray]]:
        """Returns samples whose log-probs are looked at again after the job, with what they are before it."""
        samples = [sample for sample in samples if sample.weight > 0 and sample.is_finite]
        chosen = watched_samples(samples, stable_random(self.run_config.seed, "direction", epoch))
        before = [s.sampling_logprobs if s.old_logprobs is None else s.old_logprobs for s in chosen]
        if any(np.isnan(logprobs).any() for logprobs in before):  # nobody sampled these
            before = engine.logprobs(chosen)
        return list(zip(chosen, before, strict=True))


def watched_samples(samples: list[TrainingSample], rng: random.Random) -> list[TrainingSample]:
    """Returns some of a job's samples, in whole groups where they fit: siblings share the cost of their prompt.

    Example: 64 samples in groups of 8 -> the 8 of one group; 20 samples of one group -> 8 of them.
    """
    least, most = DIRECTION_SAMPLES
    count = min(most, max(least, len(samples) // 8))
    groups: dict[str, list[TrainingSample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    order = rng.sample(list(groups.values()), len(groups))
    return list(chain.from_iterable(order))[:count]


def _episodes_of(
    trajectories: TrajectoryCollection, samples: list[TrainingSample], indices: Sequence[int]
) -> list[str]:
    """Returns the ids of the episodes that samples are of, each once; `GROUP#INDEX` of one without an id."""
    episodes = [
        trajectory.episode_id or f"{group.group_id}#{index}"
        for group in trajectories.groups
        for index, trajectory in enumerate(group.trajectories)
    ]
    return list(dict.fromkeys(episodes[samples[index].trajectory_index] for index in indices))


def _direction(engine: Engine, watched: list[tuple[TrainingSample, FloatArray]]) -> float:
    """Returns the mean of advantage x change of log-prob over trained tokens: positive if the job did its work."""
    moved, count = 0.0, 0
    for (sample, before), after in zip(watched, engine.logprobs([sample for sample, _ in watched]), strict=True):
        assert sample.advantages is not None
        moved += float(np.sum(sample.advantages * (after - before) * sample.loss_mask, dtype=np.float64))
        count += sample.num_trained
    return moved / max(1, count)


@register_trainer_adapter(config_type=LocalAdapterConfig)
async def local_adapter(config: LocalAdapterConfig, builder: Any) -> AsyncIterator[LocalAdapter]:
    """Yields the local adapter and gives its model back at the end."""
    adapter = LocalAdapter(config, await builder.get_algorithm(), await builder.get_model_path())
    try:
        yield adapter
    finally:
        await adapter.cleanup()
