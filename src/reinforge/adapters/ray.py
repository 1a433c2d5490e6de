"""The embedded backend on several processes or machines: Ray places the workers, each of which holds an engine."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field, field_validator, model_validator

from reinforge.adapters.local import LocalAdapter, LocalAdapterConfig
from reinforge.adapters.ray_cluster import RayConnection, check_ray
from reinforge.config.schema import FinetuneConfig, TrainerAdapterConfig
from reinforge.errors import Problem
from reinforge.interfaces import Algorithm, Builder
from reinforge.registry import register_trainer_adapter
from reinforge.rollout.isolation.threads import run_in_daemon_thread
from reinforge.rollout.models.llms import find_adapters
from reinforge.types.trajectory import TrajectoryCollection

if TYPE_CHECKING:
    from reinforge.adapters.ray_workers import WorkerGroup
    from reinforge.engine import Engine

logger = logging.getLogger(__name__)


class RayAdapterConfig(TrainerAdapterConfig, name="ray"):
    """Samples and trains on several workers, each with a copy of the model; Ray starts and watches them."""

    num_workers: int = Field(
        default=2, ge=1, le=4096, description="How many workers share the sampling and the training."
    )
    min_workers: int = Field(
        default=1,
        ge=1,
        description="How many must be left when some end; with fewer the run stops, and can be resumed.",
    )
    resources_per_worker: dict[str, float] = Field(
        default_factory=lambda: {"CPU": 1.0},
        description="What each worker needs, by Ray's names: `CPU` (also its number of threads), `GPU`, or your own.",
    )
    address: str | None = Field(
        default=None,
        description="`HOST:PORT` of a running Ray cluster, which must demand a token unless it is on this machine. Not "
        "set: a cluster starts on this machine and ends with the run.",
    )
    fine_tune_from_scratch: bool = LocalAdapterConfig.model_fields["fine_tune_from_scratch"]  # type: ignore[assignment]

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


class RayAdapter(LocalAdapter):
    """Runs jobs like the local adapter, on an engine that is made of Ray workers.

    A worker that ends costs no reply and no job: its replies are sampled again by another worker, and a job is undone
    and run again on those that are left.
    """

    backend = "ray"
    adapter_config: RayAdapterConfig  # type: ignore[assignment]

    def __init__(
        self,
        adapter_config: RayAdapterConfig,
        algorithm: Algorithm,
        model: str | None = None,
        adapters: Sequence[str] = (),
    ):
        super().__init__(adapter_config, algorithm, model, adapters)  # type: ignore[arg-type]  # has the same fields
        self._connection: RayConnection | None = None

    def validate(self, run_config: FinetuneConfig) -> list[Problem]:
        """Returns the problems of Ray, model and settings that show before anything is started."""
        where = f"trainer_adapters.{run_config.trainer_adapter}" if run_config.trainer_adapter else ""
        found = check_ray(self.adapter_config.address)
        problems = [replace(each, path=".".join(filter(None, (where, each.path)))) for each in found]
        return problems + super().validate(run_config)

    def _prepare_loading(self, run_config: FinetuneConfig) -> Callable[..., Engine]:
        return cast("Callable[..., Engine]", partial(self._load))

    def _load(self, *arguments: Any, **settings: Any) -> WorkerGroup:
        config = self.adapter_config
        resources = {"CPU": 1.0, **config.resources_per_worker}
        self._connection = RayConnection(config.address, config.num_workers, resources)
        from reinforge.adapters.ray_workers import WorkerGroup  # imports ray, which the connection must do first

        return WorkerGroup.load(
            *arguments,
            num_workers=config.num_workers,
            min_workers=config.min_workers,
            resources=resources,
            **settings,
        )

    def _train(
        self, engine: Engine, trajectories: TrajectoryCollection, save: Callable[[], None] | None
    ) -> dict[str, Any]:
        from reinforge.adapters.ray_workers import WorkerGroup, WorkerLost

        group = cast("WorkerGroup", engine)
        assert isinstance(group, WorkerGroup)
        while True:
            try:
                return super()._train(engine, trajectories, save)
            except WorkerLost as loss:
                logger.warning("the job is undone and runs again, since %s", loss)
                group.recover()

    def measure_memory(self) -> None:
        """Returns None: the model is in other processes."""
        return

    async def cleanup(self) -> None:
        """Ends the workers, and the cluster that was started for them."""
        await super().cleanup()
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await run_in_daemon_thread(connection.close, "ray-close")


@register_trainer_adapter(config_type=RayAdapterConfig)
async def ray_adapter(config: RayAdapterConfig, builder: Builder) -> AsyncIterator[RayAdapter]:
    """Yields the adapter and ends its workers at the end."""
    adapters = list(dict.fromkeys(find_adapters(builder.config.llms).values()))
    adapter = RayAdapter(config, await builder.get_algorithm(), await builder.get_model_path(), adapters)
    try:
        yield adapter
    finally:
        await adapter.cleanup()
