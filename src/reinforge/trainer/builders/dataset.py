"""The trajectory builder `_type: dataset`: rows with replies become trajectories; the agent does not run.

Only the training split uses the replies of its rows. The `select` and `confirm` examples are evaluated as in any run:
the agent answers their prompts and the evaluators score the answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from reinforge.algorithms.sft import SFT
from reinforge.config.schema import Config, TrajectoryBuilderConfig
from reinforge.errors import ConfigError, ContextOverflow, EngineError, EvaluationError, Problem
from reinforge.evaluation.demonstrations import (
    DEMONSTRATION_SHAPES,
    PREFERENCE_SHAPES,
    Demonstration,
    detect_row_shape,
    parse_demonstrations,
)
from reinforge.evaluation.rows import RowProblems
from reinforge.evaluation.shapes import LABELLED, InvalidRowError
from reinforge.interfaces import Algorithm, Builder, PolicyServer, TrajectoryBuilder
from reinforge.registry import register_trajectory_builder
from reinforge.rollout.episode import build_episode_item
from reinforge.rollout.llms import find_adapters
from reinforge.trainer.builders.group import select_epoch_examples
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.request import ModelRequest
from reinforge.types.trajectory import EpisodeItem, Trajectory, TrajectoryCollection

logger = logging.getLogger(__name__)

DATASET = "eval.general.dataset"


class DatasetTrajectoryBuilderConfig(TrajectoryBuilderConfig, name="dataset"):
    """Trains on the replies in the dataset's rows; the agent only runs for validation and for the verdict."""

    examples_per_epoch: int | None = Field(
        default=None, ge=1, description="Training rows per epoch, shuffled on each pass; null: all."
    )
    train_on: Literal["all", "last"] = Field(
        default="all", description="all: every assistant message of a row; last: only the last one."
    )


class DatasetTrajectoryBuilder(TrajectoryBuilder):
    """Makes one group per training row: one trajectory, or the chosen and the rejected one.

    Args:
        trajectory_builder_config: Its configuration.
        policy: Returns the policy whose chat template renders the rows as tokens.
    """

    rewards_are_scores = False
    is_resumable = True
    requires_policy_llm = True
    trajectory_builder_config: DatasetTrajectoryBuilderConfig

    def __init__(
        self,
        trajectory_builder_config: DatasetTrajectoryBuilderConfig,
        policy: Callable[[], PolicyServer | None] = lambda: None,
    ):
        super().__init__(trajectory_builder_config)
        self.policy = policy
        self._notes: list[str] = []
        self._fitting: list[str] | None = None
        self._runs: dict[str, asyncio.Task[list[list[Trajectory]]]] = {}

    def take_notes(self) -> list[str]:
        """Returns, once, how many rows were left out and why."""
        notes, self._notes = self._notes, []
        return notes

    def validate(
        self, config: Config, algorithm: Algorithm, examples: Sequence[EvalInputItem], row_locations: Mapping[str, str]
    ) -> list[Problem]:
        """Returns why these rows cannot be trained on by this algorithm; needs no model."""
        problems = list[Problem]()
        if len(names := list(dict.fromkeys(find_adapters(config.llms).values()))) > 1:
            message = f"the rows of a dataset do not say which adapter to train: {', '.join(names)}"
            problems.append(Problem("", message, "train one adapter per run"))
        return problems + (self._validate_rows(examples, row_locations, algorithm) if examples else [])

    def _validate_rows(
        self, items: Sequence[EvalInputItem], row_locations: Mapping[str, str], algorithm: Algorithm
    ) -> list[Problem]:
        shape, found = detect_row_shape([item.full_dataset_entry for item in items]), RowProblems()
        refused = _find_algorithm_problems(algorithm, shape)
        if shape not in DEMONSTRATION_SHAPES:
            message = f"the rows have the shape {shape}, which has no assistant replies to train on"
            fix = "use rows of messages, prompt/completion or prompt/chosen/rejected, or run the agent: `_type: group`"
            return [*refused, Problem(DATASET, message, fix)]
        for item in items:
            try:
                parse_demonstrations(item.full_dataset_entry, shape)
            except (InvalidRowError, LookupError, TypeError) as error:
                location = row_locations.get(str(item.id), f'example "{item.id}"')
                found.add(
                    location,
                    str(error) if isinstance(error, InvalidRowError) else f"not of the shape {shape}: {error!r}",
                )
        return [*refused, *found.problems]

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        """Starts tokenizing the rows of an epoch; `meta` names the epoch."""
        self._runs[run_id] = asyncio.create_task(self._build_groups(int((meta or {}).get("epoch", 0))))

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        """Returns the groups of an epoch, one per row."""
        groups = await self._runs.pop(run_id)
        return TrajectoryCollection(trajectories=groups, run_id=run_id, epoch=(meta or {}).get("epoch"))

    async def cleanup(self) -> None:
        """Cancels the collections that are still running."""
        for task in self._runs.values():
            task.cancel()
        await asyncio.gather(*self._runs.values(), return_exceptions=True)
        self._runs.clear()

    async def _build_groups(self, epoch: int) -> list[list[Trajectory]]:
        if self.evaluation is None:
            raise EvaluationError(
                "builder.evaluation is not set; a run sets it, but outside a run you have to set it yourself"
            )
        items = {str(item.id): item for item in self.evaluation.examples("train")}
        shape = detect_row_shape([item.full_dataset_entry for item in items.values()])
        if self._fitting is None:
            self._fitting = await self._find_fitting_rows(items, shape)
        count = self.trajectory_builder_config.examples_per_epoch
        ids = select_epoch_examples(self._fitting, count, self.run_config.seed, epoch)
        return [await self._build_group(items[id_], shape) for id_ in ids]

    async def _find_fitting_rows(self, items: Mapping[str, EvalInputItem], shape: str) -> list[str]:
        """Returns the ids of the rows that fit the context, and notes how many do not.

        Raises:
            ConfigError: The chat template rejects some rows, or no row fits.
        """
        found, fitting, reason = RowProblems(), list[str](), ""
        for id_, item in items.items():
            try:
                await self._build_group(item, shape)
            except ContextOverflow as overflow:
                reason = reason or f'example "{id_}": {overflow}'
            except EngineError as error:
                found.add(f'example "{id_}"', str(error))
            else:
                fitting.append(id_)
        found.raise_all()
        if not fitting:
            message = f"none of the {len(items)} training rows fits the model's context ({reason})"
            raise ConfigError(Problem(DATASET, message, "shorten the rows, or use a model with a longer context"))
        if len(fitting) < len(items):
            left_out = len(items) - len(fitting)
            note = (
                f"{left_out} of {len(items)} training rows do not fit the model's context and are left out ({reason})"
            )
            self._notes.append(note)
            logger.warning(note)
        return fitting

    async def _build_group(self, item: EvalInputItem, shape: str) -> list[Trajectory]:
        demonstrations = parse_demonstrations(item.full_dataset_entry, shape)
        return [await self._build_trajectory(str(item.id), number, each) for number, each in enumerate(demonstrations)]

    async def _build_trajectory(self, id_: str, number: int, demonstration: Demonstration) -> Trajectory:
        policy = self.policy()
        if policy is None:
            why = "the backend serves no policy, so rows cannot be tokenized"
            raise ConfigError(Problem("finetuning.trainer_adapter", why, "use `_type: local`"))
        replies = demonstration.replies(last_only=self.trajectory_builder_config.train_on == "last")
        episode: list[EpisodeItem] = []
        for place, message in enumerate(demonstration.messages):
            if place in replies:
                request = ModelRequest(demonstration.messages[:place], tools=demonstration.tools)
                episode.append(build_episode_item(message, logprobs=await policy.encode(request, message)))
            else:
                episode.append(build_episode_item(message, trained=False))
        return Trajectory.model_construct(
            episode=episode,
            reward=demonstration.reward,
            shaped_rewards=None,
            metadata={"generation": number},
            group_id=id_,
            episode_id=f"dataset/{id_}/{number}",
            agent=None,
            model_group=None,
        )


def _find_algorithm_problems(algorithm: Algorithm, shape: str) -> list[Problem]:
    """Returns why an algorithm cannot learn from rows of this shape."""
    name, path = type(algorithm).__name__, "finetuning.algorithm"
    if not algorithm.offline:
        message = f"{name} needs the sampler's log-prob of each token, but the tokens of a dataset were not sampled"
        fix = "use `_type: sft`, dpo or ipo, or run the agent with the trajectory builder `_type: group`"
        return [
            Problem(path, message, f"{fix}; if your own algorithm does not need log-probs, set its `offline = True`")
        ]
    if isinstance(algorithm, SFT) and algorithm.config.min_reward is None and shape in (*PREFERENCE_SHAPES, LABELLED):
        what = "rejected replies" if shape in PREFERENCE_SHAPES else "replies with the label false"
        message = f"the rows have the shape {shape}, so sft would also train on the {what}"
        return [Problem(f"{path}.min_reward", message, "set min_reward: 0.5 to leave them out (their reward is 0)")]
    return []


@register_trajectory_builder(config_type=DatasetTrajectoryBuilderConfig)
async def dataset_builder(
    config: DatasetTrajectoryBuilderConfig, builder: Builder
) -> AsyncIterator[DatasetTrajectoryBuilder]:
    """Yields the dataset builder."""
    yield DatasetTrajectoryBuilder(config, builder.policy)
