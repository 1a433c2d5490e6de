"""The trajectory builder `_type: dataset`: rows that show what to say become trajectories; the agent does not run.

Only the training split is read from its rows. The `select` and `confirm` examples are judged as in any run: the agent
answers their prompts and the evaluators score what it says.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from reinforge.algorithms.sft import SFT
from reinforge.config.schema import TrajectoryBuilderConfig
from reinforge.errors import ConfigError, EngineError, EvaluationError, Problem
from reinforge.evaluation.demonstrations import PAIRS, SHOWN, Demonstration, demonstrations_of, shape_of_rows
from reinforge.evaluation.rows import Found
from reinforge.evaluation.shapes import LABELLED, BadRow
from reinforge.interfaces import Algorithm, ContextOverflow, PolicyServer, TrajectoryBuilder
from reinforge.registry import register_trajectory_builder
from reinforge.rollout.episode import item_of
from reinforge.trainer.builders.group import ids_of_epoch
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.request import ModelRequest
from reinforge.types.trajectory import EpisodeItem, Trajectory, TrajectoryCollection

logger = logging.getLogger(__name__)

DATASET = "eval.general.dataset"


class DatasetTrajectoryBuilderConfig(TrajectoryBuilderConfig, name="dataset"):
    """Trains on what the dataset's rows show; the agent runs for the validations and the verdict only."""

    examples_per_epoch: int | None = Field(
        default=None, ge=1, description="Training rows of an epoch, in a fresh order each pass; null: all."
    )
    train_on: Literal["all", "last"] = Field(
        default="all", description="all: every assistant message that the rows show; last: only the last one of each."
    )


class DatasetTrajectoryBuilder(TrajectoryBuilder):
    """Makes one group of each training row: one trajectory, or the chosen and the rejected one.

    Args:
        trajectory_builder_config: Its configuration.
        policy: Returns the policy whose chat template writes the rows as tokens.

    Attributes:
        unsaid: What the user should hear and has not heard yet.
    """

    rewards_are_scores = False
    trajectory_builder_config: DatasetTrajectoryBuilderConfig

    def __init__(
        self,
        trajectory_builder_config: DatasetTrajectoryBuilderConfig,
        policy: Callable[[], PolicyServer | None] = lambda: None,
    ):
        super().__init__(trajectory_builder_config)
        self.policy = policy
        self.unsaid: str | None = None
        self._fitting: list[str] | None = None
        self._runs: dict[str, asyncio.Task[list[list[Trajectory]]]] = {}

    def problems(
        self, items: Sequence[EvalInputItem], places: Mapping[str, str], algorithm: Algorithm
    ) -> list[Problem]:
        """Returns why these rows cannot be trained on by this algorithm; needs no model.

        Args:
            items: The training examples.
            places: Where the row of each example stands, by its id, as far as that is known.
            algorithm: The run's.
        """
        shape, found = shape_of_rows([item.full_dataset_entry for item in items]), Found()
        refused = _refuse_algorithm(algorithm, shape)
        if shape not in SHOWN:
            message = f"the rows have the shape {shape}, which does not show what the assistant says"
            fix = "give rows of messages, prompt/completion or prompt/chosen/rejected; `_type: group` runs the agent"
            return [*refused, Problem(DATASET, message, fix)]
        for item in items:
            try:
                demonstrations_of(item.full_dataset_entry, shape)
            except (BadRow, LookupError, TypeError) as error:
                place = places.get(str(item.id), f'example "{item.id}"')
                found.add(place, str(error) if isinstance(error, BadRow) else f"not of the shape {shape}: {error!r}")
        return [*refused, *found.problems]

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        """Starts writing an epoch's rows as tokens; `meta` names the epoch."""
        self._runs[run_id] = asyncio.create_task(self._groups(int((meta or {}).get("epoch", 0))))

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        """Returns the groups of an epoch, one of each row."""
        groups = await self._runs.pop(run_id)
        return TrajectoryCollection(trajectories=groups, run_id=run_id, epoch=(meta or {}).get("epoch"))

    async def cleanup(self) -> None:
        """Cancels what is still running."""
        for task in self._runs.values():
            task.cancel()
        await asyncio.gather(*self._runs.values(), return_exceptions=True)
        self._runs.clear()

    async def _groups(self, epoch: int) -> list[list[Trajectory]]:
        if self.evaluation is None:
            raise EvaluationError("builder.evaluation is not set: a builder runs inside a run, or set it yourself")
        items = {str(item.id): item for item in self.evaluation.examples("train")}
        shape = shape_of_rows([item.full_dataset_entry for item in items.values()])
        if self._fitting is None:
            self._fitting = await self._measure(items, shape)
        count = self.trajectory_builder_config.examples_per_epoch
        ids = ids_of_epoch(self._fitting, count, self.run_config.seed, epoch)
        return [await self._group(items[id_], shape) for id_ in ids]

    async def _measure(self, items: Mapping[str, EvalInputItem], shape: str) -> list[str]:
        """Returns the ids of the rows that fit the context, and says once how many do not.

        Raises:
            ConfigError: The chat template refuses rows, or none fits.
        """
        found, fitting, reason = Found(), list[str](), ""
        for id_, item in items.items():
            try:
                await self._group(item, shape)
            except ContextOverflow as overflow:
                reason = reason or f'example "{id_}": {overflow}'
            except EngineError as error:
                found.add(f'example "{id_}"', str(error))
            else:
                fitting.append(id_)
        found.raise_all()
        if not fitting:
            message = f"none of the {len(items)} training rows fits the model's context ({reason})"
            raise ConfigError(Problem(DATASET, message, "shorten the rows, or take a model with a longer context"))
        if len(fitting) < len(items):
            left_out = len(items) - len(fitting)
            self.unsaid = f"{left_out} of {len(items)} training rows do not fit the context and are left out ({reason})"
            logger.warning(self.unsaid)
        return fitting

    async def _group(self, item: EvalInputItem, shape: str) -> list[Trajectory]:
        shown = demonstrations_of(item.full_dataset_entry, shape)
        return [await self._trajectory(str(item.id), number, each) for number, each in enumerate(shown)]

    async def _trajectory(self, id_: str, number: int, shown: Demonstration) -> Trajectory:
        policy = self.policy()
        if policy is None:
            why = "the backend serves no policy, so nobody can write rows as tokens"
            raise ConfigError(Problem("finetuning.trainer_adapter", why, "use `_type: local`"))
        replies = shown.replies(last_only=self.trajectory_builder_config.train_on == "last")
        episode: list[EpisodeItem] = []
        for place, message in enumerate(shown.messages):
            if place in replies:
                request = ModelRequest(shown.messages[:place], tools=shown.tools)
                episode.append(item_of(message, logprobs=await policy.encode(request, message)))
            else:
                episode.append(item_of(message, trained=False))
        return Trajectory.model_construct(
            episode=episode,
            reward=shown.reward,
            shaped_rewards=None,
            metadata={"generation": number},
            group_id=id_,
            episode_id=f"dataset/{id_}/{number}",
            agent=None,
            model_group=None,
        )


def _refuse_algorithm(algorithm: Algorithm, shape: str) -> list[Problem]:
    """Returns why an algorithm cannot learn from rows of this shape."""
    name, path = type(algorithm).__name__, "finetuning.algorithm"
    if not algorithm.offline:
        message = f"{name} weighs each token by how likely the sampler was to draw it, and nobody drew a dataset's"
        fix = "use `_type: sft`, dpo or ipo, or run the agent with the trajectory builder `_type: group`"
        return [Problem(path, message, f"{fix}; an algorithm of your own that can do it says `offline = True`")]
    if isinstance(algorithm, SFT) and algorithm.config.min_reward is None and shape in (*PAIRS, LABELLED):
        what = "rejected replies" if shape in PAIRS else "replies with the label false"
        message = f"the rows have the shape {shape}, and sft would learn the {what} too"
        return [
            Problem(f"{path}.min_reward", message, "set min_reward: 0.5, which leaves them out (they have reward 0)")
        ]
    return []


@register_trajectory_builder(config_type=DatasetTrajectoryBuilderConfig)
async def dataset_builder(
    config: DatasetTrajectoryBuilderConfig, builder: Any
) -> AsyncIterator[DatasetTrajectoryBuilder]:
    """Yields the dataset builder."""
    yield DatasetTrajectoryBuilder(config, builder.policy)
