"""The embedded backend as a trainer adapter: jobs run in this process, on the weights that the agent calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reinforge.adapters.hosted_model import HOSTED_MODEL
from reinforge.adapters.launchers import find_launcher
from reinforge.adapters.local_config import SAMPLERS, LocalAdapterConfig, OutsideSampler, VLLMSamplerConfig
from reinforge.adapters.local_jobs import (
    JobQueue,
    LocalJob,
    find_checkpoint,
    get_adapter_folder,
    save_job,
    write_checkpoint,
)
from reinforge.adapters.training import JobRunner
from reinforge.config.pipeline import list_stages
from reinforge.config.policy import PolicyConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.engine import import_engine
from reinforge.engine.model.source import FAMILY, find_token_difference, read_vocabulary
from reinforge.engine.packages import check_packages
from reinforge.engine.policies import NamedPolicies
from reinforge.errors import BackendError, ConfigError, Problem
from reinforge.files import find_damage
from reinforge.interfaces import Algorithm, Builder, PolicyServer, Teacher, TrainerAdapter
from reinforge.registry import load_named, register_trainer_adapter
from reinforge.rollout.isolation.threads import run_in_daemon_thread
from reinforge.rollout.models.policy_llm import find_adapters
from reinforge.types.job import TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from reinforge.types.sample import LossSpec, Sharding
from reinforge.types.trajectory import TrajectoryCollection

if TYPE_CHECKING:
    from reinforge.engine import Engine
    from reinforge.engine.devices import MemoryUse


def find_teachers(algorithm: Algorithm, run_config: FinetuneConfig) -> list[tuple[str, Teacher]]:
    """Returns the teacher of each stage that has one, with the path of the setting that names it."""
    stages = list_stages(run_config)
    places = {each.path if each.settings.algorithm is not None else "finetuning": each.first for each in stages}
    places = places or {"finetuning": 0}
    found = [(f"{path}.algorithm.teacher", algorithm.for_epoch(first)) for path, first in places.items()]
    return [(path, algorithm.teacher) for path, algorithm in found if algorithm.teacher is not None]


def check_teachers(algorithm: Algorithm, run_config: FinetuneConfig, policy: PolicyConfig) -> list[Problem]:
    """Returns the problem of each teacher in this process whose files show that it has other tokens."""
    problems = []
    for path, teacher in find_teachers(algorithm, run_config):
        if (theirs := getattr(teacher, "policy", None)) is not None:  # of a model in this process
            own, other = read_vocabulary(policy), read_vocabulary(theirs)
            difference = find_token_difference(own, other) if own is not None and other is not None else None
            if difference is not None:
                message = f"the teacher {teacher.model_name} has a different tokenizer than the policy: {difference}"
                problems.append(Problem(path, message, FAMILY))
    return problems


class LocalAdapter(TrainerAdapter):
    """Runs jobs one after the other on the embedded engine.

    Args:
        model: Folder or id of the model; replaces `finetuning.policy.model`.
        adapters: Names of the LoRA adapters that are trained separately, as in `llms`; none: one policy.
        job_folder: Returns the folder for a job's weights, by job key. They are served once `restore` loads them, and
            a job whose folder exists is complete. None: new weights are served from the next `publish` on.

    Attributes:
        algorithm: May be replaced between jobs; the first one decides what the engine keeps in memory.
    """

    serves_policy = True
    trains_stages = True
    serves_during_jobs = reports_progress = True
    backend = "local"
    adapter_config: LocalAdapterConfig

    def __init__(
        self,
        adapter_config: LocalAdapterConfig,
        algorithm: Algorithm,
        model: str | None = None,
        adapters: Sequence[str] = (),
        job_folder: Callable[[str], Path] | None = None,
        project_root: Path = Path(),
    ):
        super().__init__(adapter_config)
        self.model, self.adapters, self.job_folder = model, tuple(adapters), job_folder
        self.project_root = project_root
        self.engine: Engine | None = None
        self._sampler: OutsideSampler | None = None
        self._runner = JobRunner(algorithm, from_scratch=adapter_config.fine_tune_from_scratch)
        self._jobs = JobQueue(self.backend)

    @property
    def algorithm(self) -> Algorithm:
        return self._runner.algorithm

    @algorithm.setter
    def algorithm(self, algorithm: Algorithm) -> None:
        self._runner.algorithm = algorithm

    def call_before_serving(self, function: Callable[[Engine], None] | None) -> None:
        """Calls a function at the end of each job from now on, before a reply can be sampled from the new weights.

        Args:
            function: Gets the trained engine, in its own thread; if it raises, the job fails and the weights are
                those from before it. None: nothing is called.
        """
        self._runner.before_end = function

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Loads the model, once."""
        await super().initialize(run_config)
        if self.engine is not None:
            return
        if problems := self.validate(run_config):
            raise ConfigError(problems)
        policy = self._policy_config(run_config)
        stages = {
            stage.name: (stage.complete_policy(policy), self._get_loss(stage.first))
            for stage in list_stages(run_config)
        }
        load = self._prepare_loading(run_config)
        settings = {
            "seed": run_config.seed,
            "device": run_config.device,
            "deterministic": run_config.deterministic,
            "keep_reference": self.algorithm.needs.ref_logprobs,
            "keep_initial": self.adapter_config.fine_tune_from_scratch or self.job_folder is not None,
            "critic": self.algorithm.needs.values,
            "adapters": self.adapters if len(self.adapters) > 1 else (),  # a single one is the policy itself
            "loss": self.algorithm.loss,
            "stages": stages,
            "serves_during_jobs": run_config.limits.max_staleness > 0 and self._sampler_config is None,
            "in_flight": run_config.limits.in_flight,
            "samples_elsewhere": self._sampler_config is not None,
        }
        self.engine = await run_in_daemon_thread(lambda: load(policy, **settings), "engine-load")
        self._runner.loop = asyncio.get_running_loop()
        if self._sampler_config is not None:
            await self._start_sampler(self._sampler_config, run_config)

    @property
    def _sampler_config(self) -> VLLMSamplerConfig | None:
        return getattr(self.adapter_config, "sampler", None)  # other adapters that inherit have none

    async def _start_sampler(self, config: VLLMSamplerConfig, run_config: FinetuneConfig) -> None:
        engine = self._require_engine()
        given = config, engine, self.adapters, self.project_root, run_config.limits
        self._sampler = load_named(SAMPLERS[config.kind])(*given)
        try:
            await self._sampler.start(run_config.seed)
        except BaseException as error:
            await asyncio.shield(self.cleanup())
            if isinstance(error, ConfigError):
                raise ConfigError(self._place_problems(error.problems, run_config)) from error
            raise

    def _prepare_loading(self, run_config: FinetuneConfig) -> Callable[..., Engine]:
        if (launcher := find_launcher()) is None:
            # Imports torch, which nothing before needs, in the thread that loads: a signal does not wait for either.
            return lambda policy, **settings: import_engine().load(policy, **settings)
        return partial(launcher.load_engine, self.adapter_config.sharding, self.adapter_config.peer_timeout_s)

    async def prepare_training(self) -> None:
        """Loads or reaches the teachers, and compares their tokens with the policy's."""
        for path, teacher in find_teachers(self.algorithm, self.run_config):
            try:
                await teacher.prepare(self._require_engine().tokenizer)
            except ConfigError as error:
                raise ConfigError([replace(problem, path=path) for problem in error.problems]) from error

    def validate(self, run_config: FinetuneConfig) -> list[Problem]:
        """Returns the problems of model and settings that show before the model is loaded; needs no torch."""
        from reinforge.engine.model.preflight import check_adapters, check_policy, has_adapters

        policy = self._policy_config(run_config)
        problems = check_adapters(policy, self.adapters, critic=self.algorithm.needs.values)
        where = f"trainer_adapters.{run_config.trainer_adapter}" if run_config.trainer_adapter else ""
        problems += [replace(problem, path=where) for problem in check_packages(lora=has_adapters(policy))]
        has_sampler = self._sampler_config is not None
        if (launcher := find_launcher()) is not None:
            staleness = run_config.limits.max_staleness
            problems += launcher.check(self.backend, where, max_staleness=staleness, has_sampler=has_sampler)
        sharding = self.adapter_config.sharding
        problems += check_sharding(sharding, run_config, self.adapters, where, has_sampler=has_sampler)
        if self.adapter_config.fine_tune_from_scratch and run_config.pipeline:
            message = "each stage of a pipeline trains the model of the one before, so no job can start from the first"
            problems.append(Problem(f"{where}.fine_tune_from_scratch", message, "remove it"))
        if self.adapter_config.fine_tune_from_scratch and not self.algorithm.offline:
            message = f"{type(self.algorithm).__name__} needs samples from the weights that a job starts with"
            fix = "remove it, or use an algorithm that imitates samples or compares pairs, such as expert_iteration"
            where = f"trainer_adapters.{run_config.trainer_adapter}.fine_tune_from_scratch"
            problems.append(Problem(where, message, fix))
        if (sampler := self._sampler_config) is not None:
            found = load_named(SAMPLERS[sampler.kind]).check(sampler, run_config, self.project_root)
            problems += self._place_problems(found, run_config)
        if policy.model is None:
            fix = "name a folder, a hub id or bundled:NAME"
            return [Problem("finetuning.policy.model", "no model is named", fix), *problems]
        if (Path(policy.model) / HOSTED_MODEL).is_file():
            message = f"{policy.model} refers to a model of a remote service, so its weights are not available here"
            return [Problem("finetuning.policy.model", message, "use trainer_adapters._type: openai"), *problems]
        return [*check_policy(policy), *problems, *check_teachers(self.algorithm, run_config, policy)]

    def _place_problems(self, problems: Sequence[Problem], run_config: FinetuneConfig) -> list[Problem]:
        where = f"trainer_adapters.{run_config.trainer_adapter}." if run_config.trainer_adapter else ""
        return [
            replace(problem, path=f"{where}{problem.path}") if problem.path.startswith("sampler") else problem
            for problem in problems
        ]

    def _get_loss(self, epoch: int) -> LossSpec:
        from reinforge.algorithms.staged import StagedAlgorithm  # for a pipeline alone

        algorithm = self.algorithm
        return algorithm.get_loss(epoch) if isinstance(algorithm, StagedAlgorithm) else algorithm.loss

    def _policy_config(self, run_config: FinetuneConfig) -> PolicyConfig:
        return run_config.policy.model_copy(update={"model": self.model or run_config.policy.model})

    def policy(self) -> PolicyServer | None:
        """Returns the policy that shares its weights with the learner, by name if it has names; None before loading."""
        if self._sampler is not None:
            return self._sampler.policy
        if self.engine is None or not self.adapters:
            return self.engine.policy if self.engine is not None else None
        return NamedPolicies(dict(zip(self.adapters, self.engine.policies.values(), strict=True)))

    async def is_healthy(self) -> bool:
        return self.engine is not None

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Starts a job; a job key that was submitted before returns its job and is not trained again."""
        key = trajectories.resolve_job_key()
        if key in self._jobs:
            return self._jobs.get(key).ref
        folder = self.job_folder(key) if self.job_folder is not None else None
        is_trained = folder is not None and find_damage(folder) is None
        return self._jobs.add(trajectories, None if is_trained else partial(self._run, trajectories, folder))

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        status = self._job(ref).status
        if status.status is not TrainingStatusEnum.RUNNING or self.engine is None:
            return status
        return status.model_copy(update={"progress": 100 * self.engine.share_done})

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        """Waits until a job has ended, without polling.

        Raises:
            OutOfMemory, StorageError: The machine ran out of memory or storage; the job may succeed on another one.
            BackendUnavailable: The teacher's endpoint does not answer.
        """
        job = self._job(ref)
        await job.done.wait()
        if job.machine_error is not None:
            raise job.machine_error
        return job.status

    async def save(self, folder: Path, version: int) -> bool:
        """Writes a checkpoint in the Hugging Face layout, with the optimizer state next to it.

        Each of several adapters has its own subfolder, which PEFT loads.
        """
        engine = self._require_engine()
        await run_in_daemon_thread(lambda: write_checkpoint(engine, folder, version), "engine-save")
        return True

    async def restore(self, folder: Path, version: int) -> bool:
        """Loads a checkpoint's weights and serves them as `version`: those of all adapters, or none."""
        await self._serve(
            version, lambda engine, name: engine.load_weights(get_adapter_folder(folder, engine, name), name)
        )
        engine = self._require_engine()
        first = engine.missing_reference
        if first is not None and find_damage(place := find_checkpoint(folder, first)) is None:
            await run_in_daemon_thread(lambda: engine.load_reference(place, first), "engine-reference")
        return True

    async def cleanup(self) -> None:
        await self._jobs.cancel()
        if self._sampler is not None:
            sampler, self._sampler = self._sampler, None
            await sampler.close()
        if self.engine is not None:
            engine, self.engine = self.engine, None
            await run_in_daemon_thread(engine.close, "engine-close")

    def _job(self, ref: TrainingJobRef) -> LocalJob:
        return self._jobs.get((ref.metadata or {}).get("job_key", ""))

    def _require_engine(self) -> Engine:
        if self.engine is None:
            raise BackendError("the local adapter is not initialized; call initialize() first")
        return self.engine

    async def reset(self, version: int) -> None:
        await self._serve(version, lambda engine, name: engine.reset(name))

    async def _serve(self, version: int, load: Callable[[Engine, str], None]) -> None:
        """Loads and serves other weights: those of all adapters, or none."""
        engine, policy = self._require_engine(), self.policy()

        def load_all() -> None:
            engine.begin_job(*engine.policies)
            try:
                for name in engine.policies:
                    load(engine, name)
            except BaseException:
                engine.rollback()
                raise
            engine.end_job()

        await run_in_daemon_thread(load_all, "engine-restore")
        assert policy is not None  # the engine is loaded
        await policy.publish(version)

    async def _run(self, trajectories: TrajectoryCollection, folder: Path | None) -> dict[str, Any]:
        """Trains on a collection and returns the job's metrics.

        Args:
            folder: Folder for the new weights; None: they are served from the next `publish` on.
        """
        engine = self._require_engine()
        save = None if folder is None else partial(save_job, engine, folder)
        return await run_in_daemon_thread(lambda: self._train(engine, trajectories, save), "engine-job")

    def _train(
        self, engine: Engine, trajectories: TrajectoryCollection, save: Callable[[], None] | None
    ) -> dict[str, Any]:
        policy = self.policy() if self.run_config.limits.max_staleness else None
        return self._runner.run(engine, trajectories, self.run_config, save, None if policy is None else policy.version)

    def measure_memory(self) -> MemoryUse | None:
        """Returns the memory that the model uses in this process; None: it is in no process of this machine."""
        if self.engine is None:
            return None
        from reinforge.engine.devices import measure_memory  # imports torch, which is loaded by now

        return measure_memory(self.engine.model.device)


def check_sharding(
    sharding: Sharding, run_config: FinetuneConfig, adapters: Sequence[str], where: str, *, has_sampler: bool = False
) -> list[Problem]:
    if sharding != "full":
        return []
    found = []
    if len(adapters) > 1:
        found.append(f"{len(adapters)} adapters are trained separately ({', '.join(adapters)})")
    if run_config.policy.quantization is not None:
        found.append(f"weights in {run_config.policy.quantization} cannot be sharded (finetuning.policy.quantization)")
    if run_config.limits.max_staleness > 0 and not has_sampler:
        found.append("replies are sampled while a job trains (finetuning.limits.max_staleness)")
    fix = "set it to replicate, or remove that"
    return [Problem(f"{where}.sharding", f"full is not possible: {each}", fix) for each in found]


@register_trainer_adapter(config_type=LocalAdapterConfig)
async def local_adapter(config: LocalAdapterConfig, builder: Builder) -> AsyncIterator[LocalAdapter]:
    adapters = list(dict.fromkeys(find_adapters(builder.config.llms).values()))
    adapter = LocalAdapter(
        config,
        await builder.get_algorithm(),
        await builder.get_model_path(),
        adapters,
        project_root=builder.project_root,
    )
    try:
        yield adapter
    finally:
        await adapter.cleanup()
