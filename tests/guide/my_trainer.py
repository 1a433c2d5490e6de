import logging
from typing import Any

from reinforge.finetuning import (
    FinetuneConfig,
    Trainer,
    TrainerConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrajectoryCollection,
)

logger = logging.getLogger(__name__)


class MyTrainerConfig(TrainerConfig, name="my_trainer"):
    """Configuration for my trainer."""


class MyTrainer(Trainer):
    """Validates before each epoch instead of after, and trains on the groups that differ at all."""

    def __init__(self, trainer_config: MyTrainerConfig, **kwargs) -> None:
        super().__init__(trainer_config, **kwargs)
        self.pending_tasks: dict[str, TrainingJobRef] = {}
        self.history: list[dict[str, Any]] = []

    async def initialize(self, run_config: FinetuneConfig) -> None:
        await super().initialize(run_config)
        logger.info("Starting with %d epochs", run_config.num_epochs)

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        try:
            name = f"{run_id}-epoch-{epoch}"
            await self.trajectory_builder.start_run(name, {"epoch": epoch, "trainer_run_id": run_id})
            collection = await self.trajectory_builder.finalize(name, {"epoch": epoch, "trainer_run_id": run_id})
            collection = self.apply_curriculum_learning(collection, epoch)
            if not collection.trajectories:
                return None
            ref = await self.trainer_adapter.submit(collection)
            self.pending_tasks[name] = ref
            return ref
        except Exception:
            logger.exception("Error in epoch %d", epoch)
            raise

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        statuses = []
        for epoch in range(num_epochs):
            validation = await self.run_validation_evaluation(epoch, "my-run")
            ref = await self.run_epoch(epoch, "my-run")
            if ref is not None:
                statuses.append(await self.trainer_adapter.wait_until_complete(ref, poll_interval=0.01))
            self.log_progress(epoch, {"reward": validation["avg_reward"]})
        return statuses

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        return {"run_id": run_id, "history": self.history}

    async def cleanup(self) -> None:
        self.pending_tasks.clear()

    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        self.history.append({"epoch": epoch, **metrics})

    def apply_curriculum_learning(
        self, trajectory_collection: TrajectoryCollection, epoch: int
    ) -> TrajectoryCollection:
        spread = [group for group in trajectory_collection.trajectories if len({t.reward for t in group}) > 1]
        return TrajectoryCollection(trajectories=spread, run_id=trajectory_collection.run_id, epoch=epoch)
