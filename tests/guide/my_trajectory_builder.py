import asyncio
import logging
from typing import Any

from pydantic import Field

from reinforge.finetuning import (
    EpisodeItem,
    EpisodeItemRole,
    EvalOutputItem,
    EvaluationRunOutput,
    IntermediateStepType,
    Trajectory,
    TrajectoryBuilder,
    TrajectoryBuilderConfig,
    TrajectoryCollection,
)

logger = logging.getLogger(__name__)


class MyTrajectoryBuilderConfig(TrajectoryBuilderConfig, name="my_traj_builder"):
    """Configuration for my custom trajectory builder."""

    num_generations: int = Field(default=2, ge=1, description="Number of trajectory generations per example")
    include_tool_calls: bool = Field(default=True, description="Whether to include tool call messages in trajectories")
    min_episode_length: int = Field(default=2, description="Minimum number of messages required for a valid trajectory")


class MyTrajectoryBuilder(TrajectoryBuilder):
    """Runs the evaluation several times and groups what it gave by example."""

    def __init__(self, trajectory_builder_config: MyTrajectoryBuilderConfig):
        super().__init__(trajectory_builder_config)
        self.evaluation_runs: dict[str, list[asyncio.Task[EvaluationRunOutput]]] = {}

    async def start_run(self, run_id: str, meta: dict | None = None) -> None:
        count = self.trajectory_builder_config.num_generations
        self.evaluation_runs[run_id] = [asyncio.create_task(self.run_eval()) for _ in range(count)]

    async def finalize(self, run_id: str, meta: dict | None = None) -> TrajectoryCollection:
        outputs = await asyncio.gather(*self.evaluation_runs.pop(run_id))
        groups: dict[str, list[Trajectory]] = {}
        for output in outputs:
            scores = self._scores(output)
            for item in output.eval_input.eval_input_items:
                reward = await self.compute_reward(scores[item.id], meta)
                episode = self._episode(item.trajectory)
                if reward is not None and len(episode) >= self.trajectory_builder_config.min_episode_length:
                    trajectory = Trajectory(episode=episode, reward=reward, metadata={"example": item.id})
                    groups.setdefault(item.id, []).append(trajectory)
        return TrajectoryCollection(trajectories=list(groups.values()), run_id=run_id)

    def _scores(self, output: EvaluationRunOutput) -> dict[Any, EvalOutputItem]:
        reward = self.trajectory_builder_config.reward
        for name, result in output.evaluation_results:
            if reward is None or name == reward.name:
                return {item.id: item for item in result.eval_output_items}
        raise KeyError(reward)

    def _episode(self, steps: list[Any]) -> list[EpisodeItem]:
        episode: list[EpisodeItem] = []
        for step in steps:
            if step.event_type != IntermediateStepType.LLM_END:
                continue
            for message in step.data.input[len(episode) :]:
                if message["role"] != "tool" or self.trajectory_builder_config.include_tool_calls:
                    episode.append(EpisodeItem(role=message["role"], content=message["content"]))
            choice = step.data.payload.choices[0]
            reply = EpisodeItem(
                role=EpisodeItemRole.ASSISTANT, content=choice.message.content, logprobs=choice.logprobs
            )
            episode.append(reply)
        return episode

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        logger.info("collected %s: %s", run_id, metrics)
