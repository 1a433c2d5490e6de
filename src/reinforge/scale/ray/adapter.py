"""The embedded backend on several processes or machines: Ray places the workers, each of which holds an engine."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pydantic import ConfigDict, Field, field_validator, model_validator

from reinforge.adapters.local import LocalAdapter
from reinforge.adapters.local_config import LocalAdapterConfig, VLLMSamplerConfig
from reinforge.config.schema import FinetuneConfig, TrainerAdapterConfig
from reinforge.errors import BackendUnavailable, Problem
from reinforge.interfaces import Algorithm, Builder
from reinforge.registry import register_trainer_adapter
from reinforge.rollout.isolation.threads import run_in_daemon_thread
from reinforge.rollout.models.policy_llm import find_adapters
from reinforge.scale.engine_worker import PeerSettings
from reinforge.scale.ray.cluster import RayConnection, check_ray
from reinforge.types.sample import Sharding
from reinforge.types.trajectory import TrajectoryCollection

if TYPE_CHECKING:
    from reinforge.engine import Engine
    from reinforge.scale.ray.workers import WorkerGroup

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 5  # attempts at one job, each undone by the death of a worker: perhaps it is the job that kills them
T = TypeVar("T")


class RayAdapterConfig(TrainerAdapterConfig, name="ray"):
    """Samples and trains on several workers, each with a copy of the model; Ray starts and watches them."""

    model_config = ConfigDict(hide_input_in_errors=True)  # the key of a sampler must not end up in a message

    num_workers: int = Field(
        default=2, ge=1, le=4096, description="How many workers share the sampling and the training."
    )
    min_workers: int = Field(
        default=1,
        ge=1,
        description="How many must run to start, and for each job. A worker that dies is replaced once there is room; "
        "with fewer than this the run waits, then stops and can be resumed.",
    )
    placement_timeout_s: float = Field(
        default=120.0,
        gt=0,
        description="Seconds that Ray may take to place a required worker; loading the model does not count.",
    )
    resources_per_worker: dict[str, float] = Field(
        default_factory=lambda: {"CPU": 1.0},
        description="What each worker needs, by Ray's names: `CPU` (also its number of threads), `GPU`, or your own.",
    )
    address: str | None = Field(
        default=None,
        description="`HOST:PORT` of a running Ray cluster, which must require a token unless it is on this machine. "
        "Null: the run starts a cluster on this machine, and stops it at its end.",
    )
    fine_tune_from_scratch: bool = LocalAdapterConfig.model_fields["fine_tune_from_scratch"]  # type: ignore[assignment]
    sharding: Sharding = LocalAdapterConfig.model_fields["sharding"]  # type: ignore[assignment]
    peer_timeout_s: float = LocalAdapterConfig.model_fields["peer_timeout_s"]  # type: ignore[assignment]
    sampler: VLLMSamplerConfig | None = LocalAdapterConfig.model_fields["sampler"]  # type: ignore[assignment]

    @field_validator("resources_per_worker")
    @classmethod
    def _check_resources(cls, resources: dict[str, float]) -> dict[str, float]:
        if wrong := [f"{name}: {value:g}" for name, value in resources.items() if not value > 0]:
            raise ValueError(f"expected numbers above 0, found {', '.join(wrong)}")
        return resources

    @model_validator(mode="after")
    def _check_counts(self) -> RayAdapterConfig:
        if self.min_workers > self.num_workers:
            raise ValueError(f"min_workers ({self.min_workers}) is more than num_workers ({self.num_workers})")
        return self

    def prepare_restarts(self) -> Callable[[], None]:
        """Starts Ray on this machine, unless it runs elsewhere, so that a run which continues finds it."""
        if self.address is not None or check_ray(None):
            return super().prepare_restarts()
        from reinforge.scale.ray.held_cluster import hold_cluster

        return hold_cluster(self.num_workers, self.resources_per_worker)


class RayAdapter(LocalAdapter):
    """Runs jobs like the local adapter, on an engine that is made of Ray workers.

    A worker that dies costs no reply and no job: its replies are sampled again by another worker, and a job is undone
    and run again on those that are left. It is replaced when there is room for another one.
    """

    backend = "ray"
    adapter_config: RayAdapterConfig  # type: ignore[assignment]

    def __init__(
        self,
        adapter_config: RayAdapterConfig,
        algorithm: Algorithm,
        model: str | None = None,
        adapters: Sequence[str] = (),
        project_root: Path = Path(),
    ):
        same: Any = adapter_config  # has the fields of the local one
        super().__init__(same, algorithm, model, adapters, project_root=project_root)
        self._connection: RayConnection | None = None

    def validate(self, run_config: FinetuneConfig) -> list[Problem]:
        where = f"trainer_adapters.{run_config.trainer_adapter}" if run_config.trainer_adapter else ""
        found = check_ray(self.adapter_config.address)
        problems = [replace(each, path=".".join(filter(None, (where, each.path)))) for each in found]
        return problems + super().validate(run_config)

    def _prepare_loading(self, run_config: FinetuneConfig) -> Callable[..., Engine]:
        return cast("Callable[..., Engine]", partial(self._load))

    def _load(self, *arguments: Any, **settings: Any) -> WorkerGroup:
        config = self.adapter_config
        resources = {"CPU": 1.0, **config.resources_per_worker}
        self._connection = RayConnection(config.address, config.num_workers, resources, config.min_workers)
        from reinforge.scale.ray.workers import WorkerGroup  # imports ray, which the connection must do first

        return WorkerGroup.load(
            *arguments,
            num_workers=config.num_workers,
            min_workers=config.min_workers,
            resources=resources,
            placement_timeout_s=config.placement_timeout_s,
            peers=PeerSettings(config.sharding, config.peer_timeout_s),
            **settings,
        )

    def _train(
        self, engine: Engine, trajectories: TrajectoryCollection, save: Callable[[], None] | None
    ) -> dict[str, Any]:
        return self._retry(lambda: super(RayAdapter, self)._train(engine, trajectories, save))

    def _retry(self, work: Callable[[], T]) -> T:
        from reinforge.scale.ray.members import WorkerLost

        for _ in range(MAX_ATTEMPTS):
            try:
                return work()
            except WorkerLost as loss:
                logger.warning("the job is undone and runs again, since %s", loss)
                self._group.recover()
        raise BackendUnavailable(
            f"workers died in each of {MAX_ATTEMPTS} attempts at one job, so it is given up; if they ran out of "
            "memory, lower finetuning.policy.batch.micro_batch_tokens or policy.max_num_seqs, and resume the run"
        )

    @property
    def _group(self) -> WorkerGroup:
        return cast("WorkerGroup", self._require_engine())

    async def save(self, folder: Path, version: int) -> bool:
        """Writes a checkpoint, from which replacements start if no worker is left."""
        is_saved = await super().save(folder, version)
        self._group.checkpoints = folder.parent
        return is_saved

    async def restore(self, folder: Path, version: int) -> bool:
        self._group.checkpoints = folder.parent
        return await super().restore(folder, version)

    def measure_memory(self) -> None:
        return

    async def cleanup(self) -> None:
        await super().cleanup()
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await run_in_daemon_thread(connection.close, "ray-close")


@register_trainer_adapter(config_type=RayAdapterConfig)
async def ray_adapter(config: RayAdapterConfig, builder: Builder) -> AsyncIterator[RayAdapter]:
    adapters = list(dict.fromkeys(find_adapters(builder.config.llms).values()))
    model = await builder.get_model_path()
    adapter = RayAdapter(config, await builder.get_algorithm(), model, adapters, builder.project_root)
    try:
        yield adapter
    finally:
        await adapter.cleanup()
