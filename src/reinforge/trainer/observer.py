"""Shows what a user's own trainer does: it knows no stages, so they are read off its calls of builder and adapter.

builder.start_run .. finalize       COLLECT, with the epoch in `meta`
run_validation_evaluation           VALIDATE
adapter.submit                      SUBMIT, which counts a job
adapter.wait_until_complete         AWAIT
anything else                       TRAINER
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from reinforge.interfaces import Trainer
from reinforge.port_bases import find_plan
from reinforge.trainer.context import RunContext
from reinforge.trainer.epoch_collection import attach_calls
from reinforge.types.job import TrainingJobRef
from reinforge.types.trajectory import TrajectoryCollection

T = TypeVar("T")
OTHER = "TRAINER"  # the stage between the known calls


class TrainerObserver:
    """Begins a stage at each call of a trainer that is not ours, and gives the turns that it collects their tokens."""

    def __init__(self, trainer: Trainer, context: RunContext):
        self.context, self.num_jobs, self.num_collections = context, 0, 0
        self._epoch: int | None = None
        builder, adapter = trainer.trajectory_builder, trainer.trainer_adapter
        self._builder, self._adapter = builder, adapter
        calls: list[tuple[Any, str, Callable[..., Awaitable[Any]]]] = [
            (builder, "start_run", self._observe_start),
            (builder, "finalize", self._observe_finalize),
            (adapter, "submit", self._observe_submit),
            (adapter, "wait_until_complete", functools.partial(self._observe, "AWAIT")),
            (trainer, "run_validation_evaluation", self._observe_validation),
        ]
        for part, name, observe in calls:
            method = getattr(part, name)
            setattr(part, name, functools.wraps(method)(functools.partial(observe, method)))

    def begin(self) -> None:
        self.context.begin_stage(OTHER)

    async def _observe_start(
        self, method: Callable[..., Awaitable[None]], run_id: str, meta: dict[str, Any] | None = None, **more: Any
    ) -> None:
        self.num_collections += 1
        epoch = (meta or {}).get("epoch")
        self._epoch = epoch if isinstance(epoch, int) and epoch >= 0 else None
        plan = find_plan(self._builder, self._epoch) if self._epoch is not None else None
        total = None if plan is None else len(plan.example_ids) * plan.episodes_per_example
        self.context.begin_stage("COLLECT", self._epoch, total)
        await method(run_id, meta, **more)

    async def _observe_finalize(
        self, method: Callable[..., Awaitable[TrajectoryCollection]], *given: Any, **named: Any
    ) -> TrajectoryCollection:
        collection = await method(*given, **named)
        attach_calls(collection, self._builder, self._adapter)
        if self.context.stage_name == "COLLECT":
            self.context.end_stage({"trajectories": collection.num_trajectories})
            self.begin()
        return collection

    async def _observe(self, stage: str, method: Callable[..., Awaitable[T]], *given: Any, **named: Any) -> T:
        self.context.begin_stage(stage, self._epoch)
        result = await method(*given, **named)
        self.begin()
        return result

    async def _observe_submit(
        self, method: Callable[..., Awaitable[TrainingJobRef]], *given: Any, **named: Any
    ) -> TrainingJobRef:
        ref = await self._observe("SUBMIT", method, *given, **named)
        self.num_jobs += 1
        return ref

    async def _observe_validation(
        self, method: Callable[..., Awaitable[dict[str, Any]]], epoch: int, *given: Any, **named: Any
    ) -> dict[str, Any]:
        if self.context.stage_name in ("BASELINE", "VALIDATE"):  # the run's own
            return await method(epoch, *given, **named)
        self.context.begin_stage("VALIDATE", epoch)
        report = await method(epoch, *given, **named)
        self.begin()
        return report
