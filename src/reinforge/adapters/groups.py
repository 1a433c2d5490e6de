"""Agents with a model each: a trainer adapter for each name in `llms`, and one job of the run is a job of each of them.

groups of     prover  verifier  prover   =>  the adapter prover gets groups 0 and 2, the adapter verifier gets group 1
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from pydantic import Field

from reinforge.config.schema import FinetuneConfig, TrainerAdapterConfig
from reinforge.engine.policies import NamedPolicies
from reinforge.errors import BackendError, ConfigError, Problem
from reinforge.interfaces import Builder, PolicyServer, TrainerAdapter
from reinforge.port_bases import DescribesSettings, PreparesTraining, Resubmits, SavesWeights
from reinforge.registry import REGISTRY, register_trainer_adapter
from reinforge.rollout.models.policy_llm import find_adapters
from reinforge.types.job import TrainingJobRef, TrainingJobStatus
from reinforge.types.seeding import stable_seed
from reinforge.types.trajectory import TrajectoryCollection, TrajectoryGroup


class GroupsAdapterConfig(TrainerAdapterConfig, name="groups"):
    """Trains several models, each with a trainer adapter of its own, on what its agents sampled."""

    backend: str = Field(description="Entry of trainer_adapters that says how each model is trained.")
    models: dict[str, str] = Field(min_length=1, description="`adapter` of an entry of llms -> its base model.")


class GroupsAdapter(TrainerAdapter):
    """Splits each job by model; the adapters are named as in `llms` and the trajectories."""

    serves_policy = True

    def __init__(self, adapter_config: GroupsAdapterConfig, adapters: Mapping[str, TrainerAdapter]):
        super().__init__(adapter_config)
        self.models, self.adapters = adapter_config.models, dict(adapters)
        self.trains_on = next(iter(self.adapters.values())).trains_on

    def _build_config(self, name: str, run_config: FinetuneConfig) -> FinetuneConfig:
        policy = run_config.policy.model_copy(update={"model": self.models[name]})
        return run_config.model_copy(update={"policy": policy, "seed": stable_seed(run_config.seed, name)})

    def validate(self, run_config: FinetuneConfig) -> list[Problem]:
        if not all(
            isinstance(each, SavesWeights) and not isinstance(each, Resubmits) for each in self.adapters.values()
        ):
            where, fix = f"trainer_adapters.{run_config.trainer_adapter}.backend", "use one such as local or openai"
            return [Problem(where, "this backend cannot run several jobs of one run", fix)]
        found = (each.validate(self._build_config(name, run_config)) for name, each in self.adapters.items())
        return list(dict.fromkeys(problem for problems in found for problem in problems))

    def effective_settings(self, run_config: FinetuneConfig) -> list[tuple[str, str]]:
        name, first = next(iter(self.adapters.items()))
        if isinstance(first, DescribesSettings):
            shown = first.effective_settings(self._build_config(name, run_config))
        else:
            policy = run_config.policy.model_dump(mode="json", exclude_unset=True)
            shown = [("policy", ", ".join(f"{key} {value}" for key, value in policy.items() if key != "model"))]
        models = "; ".join(f"{name}: {model}" for name, model in self.models.items())
        return [("models", models), *(line for line in shown if line[0] != "model")]

    async def initialize(self, run_config: FinetuneConfig) -> None:
        await super().initialize(run_config)
        for name, adapter in self.adapters.items():
            await adapter.initialize(self._build_config(name, run_config))

    async def prepare_training(self) -> None:
        for adapter in self.adapters.values():
            if isinstance(adapter, PreparesTraining):
                await adapter.prepare_training()

    def policy(self) -> PolicyServer | None:
        found = {name: adapter.policy() for name, adapter in self.adapters.items()}
        served = {name: policy for name, policy in found.items() if policy is not None}
        return NamedPolicies(served) if len(served) == len(found) else None

    async def is_healthy(self) -> bool:
        return all([await adapter.is_healthy() for adapter in self.adapters.values()])

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Submits a job to the adapter of each model that has trajectories; the others keep their weights."""
        key, by_name = trajectories.resolve_job_key(), dict[str, list[TrajectoryGroup]]()
        for group in trajectories.groups:
            by_name.setdefault(group.model_group or "", []).append(group)
        if unknown := by_name.keys() - self.adapters.keys():
            raise BackendError(f"nothing trains the trajectories of {', '.join(map(repr, sorted(unknown)))}")
        jobs = {}
        for name, groups in by_name.items():
            part = {"trajectories": [group.trajectories for group in groups], "model_group": name}
            job = trajectories.model_copy(update={**part, "job_key": f"{key}-{name}"})
            jobs[name] = (await self.adapters[name].submit(job)).model_dump()
        return TrainingJobRef(run_id=trajectories.run_id, backend="groups", metadata={"job_key": key, "jobs": jobs})

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        return _merge(ref, {name: await self.adapters[name].status(job) for name, job in _list_jobs(ref).items()})

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float | None = None) -> TrainingJobStatus:
        jobs = _list_jobs(ref)
        interval = () if poll_interval is None else (poll_interval,)  # else each adapter's own
        waits = (self.adapters[name].wait_until_complete(job, *interval) for name, job in jobs.items())
        return _merge(ref, dict(zip(jobs, await asyncio.gather(*waits), strict=True)))

    async def save(self, folder: Path, version: int) -> bool:
        """Writes the weights of each model into a subfolder of its name."""
        return all([await each.save(folder / name, version) for name, each in self._list_saving().items()])

    async def restore(self, folder: Path, version: int) -> bool:
        return all([await each.restore(folder / name, version) for name, each in self._list_saving().items()])

    def _list_saving(self) -> dict[str, SavesWeights]:
        return {name: each for name, each in self.adapters.items() if isinstance(each, SavesWeights)}

    async def cleanup(self) -> None:
        for adapter in self.adapters.values():
            await adapter.cleanup()


def _list_jobs(ref: TrainingJobRef) -> dict[str, TrainingJobRef]:
    return {name: TrainingJobRef(**job) for name, job in (ref.metadata or {})["jobs"].items()}


def _merge(ref: TrainingJobRef, parts: Mapping[str, TrainingJobStatus]) -> TrainingJobStatus:
    """Returns the status of a job, which is completed if all its parts are, and failed if one of them is."""
    order = ("FAILED", "CANCELED", "RUNNING", "PENDING", "COMPLETED")
    status = min((each.status for each in parts.values()), key=lambda each: order.index(each.name))
    metadata: dict[str, Any] = {"groups": {name: each.metadata for name, each in parts.items()}}
    for name in ("num_updates", "num_samples", "num_tokens", "num_rows"):
        counts = [(each.metadata or {}).get(name) for each in parts.values()]
        if all(count is not None for count in counts):
            metadata[name] = sum(count for count in counts if count is not None)
    message = "; ".join(f"{name}: {each.message}" for name, each in parts.items() if each.message)
    return TrainingJobStatus(
        run_id=ref.run_id, backend="groups", status=status, message=message or None, metadata=metadata
    )


class _OwnModel:
    """The builder as the adapter of one model sees it: without the names of the others."""

    def __init__(self, builder: Builder, model: str):
        self._builder, self._model = builder, model
        self.config = builder.config.model_copy(update={"llms": {}})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._builder, name)

    async def get_model_path(self) -> str:
        return await self._builder.get_bundled(self._model, "trainer_adapters")


@register_trainer_adapter(config_type=GroupsAdapterConfig)
async def groups_adapter(config: GroupsAdapterConfig, builder: Builder) -> AsyncIterator[GroupsAdapter]:
    backend = builder.config.trainer_adapters.get(config.backend)
    if backend is None or backend is config:
        known = ", ".join(name for name, each in builder.config.trainer_adapters.items() if each is not config)
        raise ConfigError(Problem("trainer_adapters", f"no backend named {config.backend}", f"name one of: {known}"))
    if (names := set(find_adapters(builder.config.llms).values())) != config.models.keys():
        message = (
            f"there are models for {', '.join(config.models)}, but llms has the adapters {', '.join(sorted(names))}"
        )
        raise ConfigError(Problem("trainer_adapters", message, "use the same names"))
    factory = REGISTRY.get("trainer_adapter", str(backend.static_type)).factory
    async with AsyncExitStack() as stack:
        adapters = {
            name: await stack.enter_async_context(asynccontextmanager(factory)(backend, _OwnModel(builder, model)))
            for name, model in config.models.items()
        }
        yield GroupsAdapter(config, adapters)
