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

from reinforge.config.schema import Config, TrajectoryBuilderConfig
from reinforge.dialects.tool_calls import write_calls
from reinforge.errors import ConfigError, ContextOverflow, EngineError, EvaluationError, Problem
from reinforge.evaluation.demonstrations import DEMONSTRATION_SHAPES, Demonstration, RowFormat, detect_format
from reinforge.evaluation.rows import RowProblems
from reinforge.evaluation.shapes import InvalidRowError
from reinforge.interfaces import Algorithm, Builder, PolicyServer, TrajectoryBuilder
from reinforge.registry import register_trajectory_builder
from reinforge.rollout.episode import build_episode_item
from reinforge.rollout.models.policy_llm import find_adapters
from reinforge.trainer.builders.group import select_epoch_examples
from reinforge.trainer.builders.offline import find_unclear_rewards, refuse_algorithm, refuse_rewards, uses_rewards
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.request import ModelRequest
from reinforge.types.trajectory import EpisodeItem, Trajectory, TrajectoryCollection

logger = logging.getLogger(__name__)

LEFT_OUT = "do not fit the model's context and are left out"  # what the note about rows that are too long says

DATASET = "eval.general.dataset"


class DatasetTrajectoryBuilderConfig(TrajectoryBuilderConfig, name="dataset"):
    """Trains on the replies in the dataset's rows; the agent only runs for validation and for the verdict."""

    examples_per_epoch: int | None = Field(
        default=None,
        ge=1,
        description="Training rows per epoch, shuffled on each pass; null: all. Rows with rewards that answer the same "
        "prompt count as one.",
    )
    reward_key: str | None = Field(
        default=None,
        description="Column with the reward of each row, for min_reward, pairs and the best of each prompt; null: "
        "`reward` or `score`, if every row has a number there, or `label`, if every row has true or false there.",
    )
    train_on: Literal["all", "last"] = Field(
        default="all", description="all: every assistant message of a row; last: only the last one."
    )


class DatasetTrajectoryBuilder(TrajectoryBuilder):
    """Makes groups of the training rows: the replies to one prompt if they have rewards, else those of one row."""

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
        self._groups: dict[str, list[str]] | None = None
        self._runs: dict[str, asyncio.Task[list[list[Trajectory]]]] = {}

    def take_notes(self) -> list[str]:
        """Returns, once, how many rows were left out and why."""
        notes, self._notes = self._notes, []
        return notes

    def validate(
        self, config: Config, algorithm: Algorithm, examples: Sequence[EvalInputItem], row_locations: Mapping[str, str]
    ) -> list[Problem]:
        problems = list[Problem]()
        if len(names := list(dict.fromkeys(find_adapters(config.llms).values()))) > 1:
            message = f"the rows of a dataset do not say which adapter to train: {', '.join(names)}"
            problems.append(Problem("", message, "train one adapter per run"))
        return problems + (self._validate_rows(examples, row_locations, algorithm) if examples else [])

    def _validate_rows(
        self, items: Sequence[EvalInputItem], row_locations: Mapping[str, str], algorithm: Algorithm
    ) -> list[Problem]:
        config, rows = self.trajectory_builder_config, {str(item.id): item.full_dataset_entry for item in items}
        row_format = detect_format(list(rows.values()), config.reward_key)
        refused = refuse_algorithm(algorithm, row_format)
        if row_format.shape not in DEMONSTRATION_SHAPES:
            message = f"the rows have the shape {row_format.shape}, which has no assistant replies to train on"
            fix = "use rows of messages, prompt/completion or prompt/chosen/rejected, or run the agent: `_type: group`"
            return [*refused, Problem(DATASET, message, fix)]
        if row_format.is_paired and config.reward_key is not None:
            message = f"the rows have the shape {row_format.shape}, which already says which reply is better"
            return [Problem("reward_key", message, "remove reward_key")]
        locations = {id_: row_locations.get(id_, f'example "{id_}"') for id_ in rows}
        is_detected = row_format.is_rewardable and config.reward_key is None and uses_rewards(algorithm)
        if is_detected and (unclear := find_unclear_rewards(list(rows.values()), list(locations.values()))):
            return unclear
        problems = [*refused, *_find_row_problems(rows, row_format, locations)]
        if problems:
            return problems
        if row_format.reward_key is not None and not uses_rewards(algorithm):
            note = f"the rows have rewards ({row_format.reward_key}), but every row is trained: no min_reward is set"
            self._notes.append(note)
        groups = row_format.group(rows, last_only=config.train_on == "last")
        rewards = [[each.reward for id_ in group for each in row_format.parse(rows[id_])] for group in groups]
        return refuse_rewards(algorithm, rewards)

    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        self._runs[run_id] = asyncio.create_task(self._build_groups(int((meta or {}).get("epoch", 0))))

    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        groups = await self._runs.pop(run_id)
        return TrajectoryCollection(trajectories=groups, run_id=run_id, epoch=(meta or {}).get("epoch"))

    async def cleanup(self) -> None:
        for task in self._runs.values():
            task.cancel()
        await asyncio.gather(*self._runs.values(), return_exceptions=True)
        self._runs.clear()

    async def _build_groups(self, epoch: int) -> list[list[Trajectory]]:
        if self.evaluation is None:
            raise EvaluationError(
                "builder.evaluation is not set; a run sets it, but outside a run you have to set it yourself"
            )
        config = self.trajectory_builder_config
        rows = {str(item.id): item.full_dataset_entry for item in self.evaluation.examples("train")}
        row_format = detect_format(list(rows.values()), config.reward_key)
        if self._groups is None:
            fitting = await self._find_fitting_rows(rows, row_format)
            groups = row_format.group({id_: rows[id_] for id_ in fitting}, last_only=config.train_on == "last")
            self._groups = {group[0]: group for group in groups}
        number = epoch - self.first_epoch
        ids = select_epoch_examples(list(self._groups), config.examples_per_epoch, self.run_config.seed, number)
        return [
            await self._build_group(id_, {each: rows[each] for each in self._groups[id_]}, row_format) for id_ in ids
        ]

    async def _find_fitting_rows(self, rows: Mapping[str, Any], row_format: RowFormat) -> list[str]:
        found, fitting, reason = RowProblems(), list[str](), ""
        for id_, row in rows.items():
            try:
                await self._build_group(id_, {id_: row}, row_format)
            except ContextOverflow as overflow:
                reason = reason or f'example "{id_}": {overflow}'
            except EngineError as error:
                found.add(f'example "{id_}"', str(error))
            else:
                fitting.append(id_)
        found.raise_all()
        if not fitting:
            message = f"none of the {len(rows)} training rows fits the model's context ({reason})"
            raise ConfigError(Problem(DATASET, message, "shorten the rows, or use a model with a longer context"))
        if len(fitting) < len(rows):
            left_out = len(rows) - len(fitting)
            note = f"{left_out} of {len(rows)} training rows {LEFT_OUT} ({reason})"
            self._notes.append(note)
            logger.warning(note)
        return fitting

    async def _build_group(self, group_id: str, rows: Mapping[str, Any], row_format: RowFormat) -> list[Trajectory]:
        """Returns the siblings of a group; the episode ids count the replies of a row, generations those of a group."""
        replies = [
            (f"dataset/{id_}/{number}", each)
            for id_, row in rows.items()
            for number, each in enumerate(row_format.parse(row))
        ]
        return [
            await self._build_trajectory(group_id, episode_id, number, each)
            for number, (episode_id, each) in enumerate(replies)
        ]

    async def _build_trajectory(
        self, group_id: str, episode_id: str, number: int, demonstration: Demonstration
    ) -> Trajectory:
        policy = self.policy()
        if policy is None:
            why = "the backend serves no policy, so rows cannot be tokenized"
            raise ConfigError(Problem("finetuning.trainer_adapter", why, "use `_type: local`"))
        replies = demonstration.replies(last_only=self.trajectory_builder_config.train_on == "last")
        written = write_calls(demonstration.messages, policy.chat_template)  # as the policy gets and writes them
        episode: list[EpisodeItem] = []
        for place, message in enumerate(demonstration.messages):
            if place in replies:
                request = ModelRequest(written[:place], tools=demonstration.tools)
                episode.append(build_episode_item(message, logprobs=await policy.encode(request, written[place])))
            else:
                episode.append(build_episode_item(message, trained=False))
        label = {} if demonstration.label is None else {"label": demonstration.label}
        return Trajectory.model_construct(
            episode=episode,
            reward=demonstration.reward,
            shaped_rewards=None,
            metadata={"generation": number, **label},
            group_id=group_id,
            episode_id=episode_id,
            agent=None,
            model_group=None,
        )


def _find_row_problems(rows: Mapping[str, Any], row_format: RowFormat, locations: Mapping[str, str]) -> list[Problem]:
    found = RowProblems()
    for id_, row in rows.items():
        try:
            row_format.parse(row)
        except InvalidRowError as error:
            found.add(locations[id_], str(error))
        except (LookupError, TypeError) as error:
            found.add(locations[id_], f"not of the shape {row_format.shape}: {error!r}")
    return found.first


@register_trajectory_builder(config_type=DatasetTrajectoryBuilderConfig)
async def dataset_builder(
    config: DatasetTrajectoryBuilderConfig, builder: Builder
) -> AsyncIterator[DatasetTrajectoryBuilder]:
    yield DatasetTrajectoryBuilder(config, builder.policy)
