import asyncio
import logging
from typing import Any

from pydantic import BaseModel, Field

from reinforge.finetuning import (
    FinetuneConfig,
    TrainerAdapter,
    TrainerAdapterConfig,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    TrajectoryCollection,
)

logger = logging.getLogger(__name__)


class MyBackendConfig(BaseModel):
    """Configuration for the training backend."""

    endpoint: str = Field(description="Training API endpoint URL")
    api_key: str = Field(description="API key for authentication")
    timeout: int = Field(default=3600, description="Request timeout in seconds")
    # Training hyperparameters
    learning_rate: float = Field(default=1e-5, description="Learning rate")
    batch_size: int = Field(default=4, description="Training batch size")
    gradient_accumulation_steps: int = Field(default=4, description="Gradient accumulation")


class MyTrainerAdapterConfig(TrainerAdapterConfig, name="my_trainer_adapter"):
    """Configuration for my trainer adapter."""

    backend: MyBackendConfig = Field(description="Backend configuration")
    validate_trajectories: bool = Field(default=True, description="Whether to validate trajectories before submission")


class MyClient:
    """The guide's training API, here a service that is always done at the second look."""

    def __init__(self, backend: MyBackendConfig):
        self.backend, self.jobs, self.is_up = backend, {}, True

    def post(self, run_id: str, rows: list[dict[str, Any]]) -> str:
        job_id = f"job-{len(self.jobs)}"
        self.jobs[job_id] = {"run_id": run_id, "rows": rows, "states": ["queued", "succeeded"]}
        return job_id

    def get(self, job_id: str) -> str:
        states = self.jobs[job_id]["states"]
        return states.pop(0) if len(states) > 1 else states[0]


class MyTrainerAdapter(TrainerAdapter):
    """Bridges to the training API."""

    STATES = {"queued": TrainingStatusEnum.PENDING, "succeeded": TrainingStatusEnum.COMPLETED}

    def __init__(self, adapter_config: MyTrainerAdapterConfig):
        super().__init__(adapter_config)
        self.client = MyClient(adapter_config.backend)

    async def initialize(self, run_config: FinetuneConfig) -> None:
        await super().initialize(run_config)
        if not await self.is_healthy():
            raise ConnectionError(f"{self.adapter_config.backend.endpoint} does not answer")

    async def is_healthy(self) -> bool:
        return self.client.is_up

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        rows = []
        for group in trajectories.trajectories:
            for trajectory in group:
                if self.adapter_config.validate_trajectories and not trajectory.episode:
                    raise ValueError("an empty trajectory")
                messages = [{"role": item.role.value, "content": item.content} for item in trajectory.episode]
                rows.append({"messages": messages, "reward": trajectory.reward})
        job_id = self.client.post(trajectories.run_id, rows)
        return TrainingJobRef(run_id=trajectories.run_id, backend="my_backend", metadata={"job_id": job_id})

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        state = self.STATES[self.client.get(ref.metadata["job_id"])]
        return TrainingJobStatus(run_id=ref.run_id, backend=ref.backend, status=state)

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        while not (status := await self.status(ref)).is_terminal:
            await asyncio.sleep(poll_interval)
        return status

    def log_progress(self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        logger.info("job %s: %s", ref.run_id, metrics)
