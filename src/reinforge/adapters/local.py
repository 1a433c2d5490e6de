"""The embedded backend as a trainer adapter: jobs run in this process, on the same weights that the agent calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from reinforge.adapters.openai_model import HOSTED_MODEL
from reinforge.adapters.training import StepsRefused, Training
from reinforge.config.schema import FinetuneConfig, PolicyConfig, TrainerAdapterConfig
from reinforge.engine.policies import NamedPolicies
from reinforge.errors import BackendError, ConfigError, OutOfMemory, Problem, ReinforgeError, StorageError
from reinforge.files import damage, write_folder
from reinforge.interfaces import Algorithm, PolicyServer, TrainerAdapter
from reinforge.registry import register_trainer_adapter
from reinforge.rollout.llms import adapters_of
from reinforge.rollout.threads import in_daemon_thread
from reinforge.types.job import JOB_TRANSITIONS, TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from reinforge.types.trajectory import TrajectoryCollection

if TYPE_CHECKING:
    from reinforge.engine import Engine

BACKEND = "local"


class LocalAdapterConfig(TrainerAdapterConfig, name="local"):
    """Trains in this process; model, optimizer and batches are the blocks of `finetuning.policy`."""

    fine_tune_from_scratch: bool = Field(
        default=False,
        description="Each job begins with the weights that the run began with, not with those of the job before; for "
        "algorithms that imitate or compare, such as expert_iteration and malt.",
    )


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
        adapters: Names of the LoRA adapters that are trained apart, as `llms` names them; none: one policy.
        folder_of: Where the weights go that a job makes, by its key: they are served once `restore` loads them, and a
            job whose folder is there has been done. None: they are served from the next `publish` on.

    Attributes:
        algorithm: May be set anew between jobs; the first one says what the engine keeps.
    """

    serves_policy = True
    adapter_config: LocalAdapterConfig

    def __init__(
        self,
        adapter_config: LocalAdapterConfig,
        algorithm: Algorithm,
        model: str | None = None,
        adapters: Sequence[str] = (),
        folder_of: Callable[[str], Path] | None = None,
    ):
        super().__init__(adapter_config)
        self.model, self.adapters, self.folder_of = model, tuple(adapters), folder_of
        self.engine: Engine | None = None
        self._training = Training(algorithm, from_scratch=adapter_config.fine_tune_from_scratch)
        self._jobs: dict[str, _Job] = {}
        self._one_at_a_time = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def algorithm(self) -> Algorithm:
        """Which tokens earn which credit, and the name of the loss."""
        return self._training.algorithm

    @algorithm.setter
    def algorithm(self, algorithm: Algorithm) -> None:
        self._training.algorithm = algorithm

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
                keep_initial=self.adapter_config.fine_tune_from_scratch or self.folder_of is not None,
                critic=self.algorithm.needs.values,
                adapters=self.adapters if len(self.adapters) > 1 else (),  # one is the policy under a name
            ),
            "engine-load",
        )

    def preflight(self, run_config: FinetuneConfig) -> list[Problem]:
        """Returns everything about the model that can be refused before it is loaded; needs no torch."""
        from reinforge.engine.model.preflight import check_adapters, check_policy

        policy = self._policy_config(run_config)
        problems = check_adapters(policy, self.adapters, critic=self.algorithm.needs.values)
        if self.adapter_config.fine_tune_from_scratch and not self.algorithm.offline:
            message = f"{type(self.algorithm).__name__} weighs tokens by the weights that drew them"
            fix = "leave it out, or use an algorithm that imitates or compares, such as expert_iteration"
            where = f"trainer_adapters.{run_config.trainer_adapter}.fine_tune_from_scratch"
            problems.append(Problem(where, message, fix))
        if policy.model is None:
            fix = "give a folder, a hub id or bundled:NAME"
            return [Problem("finetuning.policy.model", "no model is named", fix), *problems]
        if (Path(policy.model) / HOSTED_MODEL).is_file():
            message = f"{policy.model} names a model that a service holds; its weights are not here"
            return [Problem("finetuning.policy.model", message, "use trainer_adapters._type: openai"), *problems]
        return [*check_policy(policy), *problems]

    def _policy_config(self, run_config: FinetuneConfig) -> PolicyConfig:
        return run_config.policy.model_copy(update={"model": self.model or run_config.policy.model})

    def policy(self) -> PolicyServer | None:
        """Returns the policy that shares its weights with the learner, by names if it has any; None: not loaded yet."""
        if self.engine is None or not self.adapters:
            return self.engine.policy if self.engine is not None else None
        return NamedPolicies(dict(zip(self.adapters, self.engine.policies.values(), strict=True)))

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
            job = self._jobs[key] = _Job(ref, status, asyncio.Event())
            folder = self.folder_of(key) if self.folder_of is not None else None
            if folder is not None and damage(folder) is None:
                job.move(TrainingStatusEnum.COMPLETED, "trained before")
                return ref
            task = asyncio.create_task(self._run(job, trajectories, folder))
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
        """Writes a checkpoint in the Hugging Face layout, with the optimizer's state beside it.

        Of several adapters each has a folder of its own below it, which PEFT loads.
        """
        engine = self._loaded()
        await in_daemon_thread(lambda: _write(engine, folder, version), "engine-save")
        return True

    async def restore(self, folder: Path, version: int) -> bool:
        """Loads a checkpoint's weights and serves them as `version`; of several adapters all, or none."""
        await self._serve(version, lambda engine, name: engine.load_weights(_place(folder, engine, name), name))
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

    async def reset(self, version: int) -> None:
        """Serves the weights that the engine was loaded with as `version`.

        Raises:
            EngineError: They are not kept: the adapter has no `folder_of`, and trains on from job to job.
        """
        await self._serve(version, lambda engine, name: engine.reset(name))

    async def _serve(self, version: int, load: Callable[[Engine, str], None]) -> None:
        """Serves other weights; of several adapters all, or none."""
        engine, policy = self._loaded(), self.policy()

        def load_all() -> None:
            engine.begin_job(*engine.policies)
            try:
                for name in engine.policies:
                    load(engine, name)
            except BaseException:
                engine.rollback()
                raise
            engine.end_job()

        await in_daemon_thread(load_all, "engine-restore")
        assert policy is not None  # it is loaded
        await policy.publish(version)

    async def _run(self, job: _Job, trajectories: TrajectoryCollection, folder: Path | None) -> None:
        """Runs one job; whatever goes wrong is the job's failure, with its reason.

        Args:
            job: The job.
            trajectories: What it trains on.
            folder: Where the weights go, if not into what is served.
        """
        async with self._one_at_a_time:
            job.move(TrainingStatusEnum.RUNNING, "training")
            try:
                engine = self._loaded()
                keep = None if folder is None else partial(_keep, engine, folder)
                metadata = await in_daemon_thread(
                    lambda: self._training.run(engine, trajectories, self.run_config, keep), "engine-job"
                )
            except asyncio.CancelledError:
                job.move(TrainingStatusEnum.CANCELED, "the run was stopped")
                raise
            except Exception as error:  # noqa: BLE001  every failure of a job ends as its status, with the reason
                text = str(error) if isinstance(error, ReinforgeError) else f"{type(error).__name__}: {error}"
                job.world = error if isinstance(error, StorageError | OutOfMemory) else None
                told = error.told if isinstance(error, StepsRefused) else {}
                job.move(TrainingStatusEnum.FAILED, text, {"num_updates": 0, **told})
            else:
                job.move(TrainingStatusEnum.COMPLETED, "trained", metadata)


def _keep(engine: Engine, folder: Path) -> None:
    """Writes what a job made, whole or not at all."""
    version = engine.policy.version + 1
    write_folder(folder, lambda staged: _write(engine, staged, version), version=version)


def _write(engine: Engine, folder: Path, version: int) -> None:
    for name in engine.policies:
        engine.write(_place(folder, engine, name), version, name)


def _place(folder: Path, engine: Engine, name: str) -> Path:
    """Returns where an adapter lies in a checkpoint: in a folder of its own, where there are several."""
    return folder / name if len(engine.policies) > 1 else folder


@register_trainer_adapter(config_type=LocalAdapterConfig)
async def local_adapter(config: LocalAdapterConfig, builder: Any) -> AsyncIterator[LocalAdapter]:
    """Yields the local adapter and gives its model back at the end."""
    adapters = list(dict.fromkeys(adapters_of(builder.config.llms).values()))
    adapter = LocalAdapter(config, await builder.get_algorithm(), await builder.get_model_path(), adapters)
    try:
        yield adapter
    finally:
        await adapter.cleanup()
