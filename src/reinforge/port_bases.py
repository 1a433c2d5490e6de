"""What the ports of `interfaces.py` start from: what a run binds, with defaults.

What only some components do is a protocol beside their base: a component does it if it defines the protocol's methods.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from reinforge.config.schema import (
    CurriculumLearningConfig,
    FinetuneConfig,
    FinetuneRunConfig,
    TrainerAdapterConfig,
    TrainerConfig,
    TrajectoryBuilderConfig,
)
from reinforge.errors import BackendError, ConfigError, EvaluationError, describe_error
from reinforge.types.evaluation import EvalInputItem, EvaluationRunConfig, EvaluationRunOutput
from reinforge.types.job import TrainingJobRef
from reinforge.types.request import ChatPrompt, Message, ModelRequest, TokenLogprobs
from reinforge.types.trajectory import CollectionPlan, TrajectoryCollection, TrajectoryGroup

if TYPE_CHECKING:
    from reinforge.types.episode import EpisodeRecord, ModelCall

logger = logging.getLogger(__name__)

EVALUATION_OF_A_FILE = "reinforge.trainer.evaluate"
"""Has the `EvaluationRun` for a builder outside a run. It is made of the interfaces, so it is loaded on first use."""


class BuilderBase:
    """State and defaults of a trajectory builder."""

    records: list[EpisodeRecord] | None = None
    """The episodes of the last collection; None: unknown, so missing ones are not counted."""
    rewards_are_scores: bool = True
    """False: rewards come with the data and say nothing about the policy; they are not reported."""
    is_resumable: bool = False
    """True: a resumed run may reuse journalled episodes, and the run calls `compute_reward`; False: a resumed run
    collects an open epoch again, and the builder calls `compute_reward` itself."""
    first_epoch: int = 0
    """The epoch that begins its first pass over the examples: 0, or the first of a pipeline's stage."""
    collects_ahead: bool = False
    """True: `start_run` may be called for later epochs before an earlier one is finalized, and `discard_run` ends what
    is not finalized."""
    may_train_nothing: bool = False
    """True: an epoch without groups is not a failure, however many there are."""
    evaluation: Any = None

    def __init__(self, trajectory_builder_config: TrajectoryBuilderConfig):
        self.trajectory_builder_config = trajectory_builder_config
        self.run_config: FinetuneConfig = None  # type: ignore[assignment]  # set by initialize

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Binds the run's configuration."""
        self.run_config = run_config
        self.trajectory_builder_config.reward = run_config.reward_function

    async def run_eval(self) -> EvaluationRunOutput:
        """Runs the agent once on every training example and returns outputs, steps and scores.

        Outside a run it evaluates the whole dataset of `run_config.run_configuration`.

        Raises:
            EvaluationError: Outside a run, and no configuration file is known.
        """
        if self.evaluation is not None:
            return await self.evaluation.run_eval()
        settings = self.run_config.run_configuration if self.run_config is not None else None
        if settings is None or settings.config_file is None:
            raise EvaluationError(
                "builder.evaluation is not set; a run sets it. Outside a run, set it yourself, or call "
                "builder.initialize(FinetuneConfig(run_configuration={'config_file': 'FILE'})) before"
            )
        shared = EvaluationRunConfig.model_fields.keys() & FinetuneRunConfig.model_fields.keys()
        config = EvaluationRunConfig(**{name: getattr(settings, name) for name in shared})
        output = await importlib.import_module(EVALUATION_OF_A_FILE).EvaluationRun(config).run_and_evaluate()
        assert isinstance(output, EvaluationRunOutput)
        return output

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Reports on a collection; does nothing unless overridden."""

    async def cleanup(self) -> None:
        """Frees resources; does nothing unless overridden."""

    def example_rewards(self, groups: Sequence[TrajectoryGroup]) -> list[tuple[str, float]]:
        """Returns the example and the mean reward of each of an epoch's groups; empty where rewards are not scores."""
        return [(group.example_id, group.mean_reward) for group in groups] if self.rewards_are_scores else []


@runtime_checkable
class PlansEpochs(Protocol):
    """A builder that knows beforehand which episodes an epoch collects."""

    def plan(self, epoch: int) -> CollectionPlan | None:
        """Returns which episodes an epoch collects; None: unknown, so no example is skipped and nothing is refilled."""


def find_plan(builder: BuilderBase, epoch: int) -> CollectionPlan | None:
    return builder.plan(epoch) if isinstance(builder, PlansEpochs) else None


@runtime_checkable
class RefillsEpochs(Protocol):
    """A builder that can collect further examples, if too few groups of an epoch have signal."""

    def further_examples(self, epoch: int, used: set[str], count: int) -> list[str]:
        """Returns up to `count` training examples that the epoch has not used yet, for a refill."""


@runtime_checkable
class DiscardsRuns(Protocol):
    """A builder that can stop what it collects ahead."""

    async def discard_run(self, run_id: str) -> None:
        """Stops a collection that was started and will not be finalized."""


@runtime_checkable
class TakesNotes(Protocol):
    """A builder that has something to tell the user."""

    def take_notes(self) -> list[str]:
        """Returns, once, what the user should know about the last collection."""


class AdapterBase:
    """State and defaults of a trainer adapter."""

    trains_stages: bool = False
    """True: jobs of different stages of a pipeline may differ in algorithm, optimizer and batches."""
    serves_during_jobs: bool = False
    """True: the policy samples from the published version while a job trains, so a run may collect later epochs
    meanwhile (`limits.max_staleness`)."""
    reports_progress: bool = False  # True: `status` says how much of a running job is done, at no cost
    keeps_jobs: bool = False
    """True: a submitted job lasts at the backend, so a resumed run continues with its reference; False: where the
    weights come from a checkpoint, later jobs count as not submitted."""

    def __init__(self, adapter_config: TrainerAdapterConfig):
        self.adapter_config = adapter_config
        self.run_config: FinetuneConfig = None  # type: ignore[assignment]  # set by initialize

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Binds the run's configuration and allocates what the adapter needs."""
        self.run_config = run_config
        self.adapter_config.reward = run_config.reward_function

    def log_progress(self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Reports on a job; does nothing unless overridden."""

    async def cleanup(self) -> None:
        """Frees resources; does nothing unless overridden."""


@runtime_checkable
class SavesWeights(Protocol):
    """An adapter that writes and loads checkpoints; without them there is no verdict."""

    async def save(self, folder: Path, version: int) -> bool:
        """Writes the weights to the new folder `folder`, which the run then makes durable; False: not these weights."""

    async def restore(self, folder: Path, version: int) -> bool:
        """Loads weights that `save` wrote and serves them as `version`; False: it cannot."""


@runtime_checkable
class Resubmits(Protocol):
    """An adapter of a service that cannot search its jobs."""

    async def resubmit(self, trajectories: TrajectoryCollection, known: TrainingJobRef | None) -> TrainingJobRef:
        """Returns the job of a key that an earlier process of the run intended to submit.

        Args:
            known: The job, if that process stored it; None: it died before, so the job may exist or not.
        """


@runtime_checkable
class PreparesTraining(Protocol):
    """An adapter that loads more for training than for sampling."""

    async def prepare_training(self) -> None:
        """Loads what only training needs, such as a teacher; a run calls it after `initialize`, before any work.

        Raises:
            ConfigError: It cannot be used.
        """


@runtime_checkable
class DescribesSettings(Protocol):
    """An adapter of a backend with settings of its own."""

    def effective_settings(self, run_config: FinetuneConfig) -> list[tuple[str, str]]:
        """Returns the effective settings to print, as name and value, in place of those of `policy`."""


class TrainerBase:
    """State of a trainer, with validation and curriculum as in the NeMo Agent Toolkit."""

    def __init__(self, trainer_config: TrainerConfig, **kwargs: Any) -> None:
        self.trainer_config = trainer_config
        self.run_config: FinetuneConfig = None  # type: ignore[assignment]  # these are set by initialize
        self.curriculum_config: CurriculumLearningConfig = None  # type: ignore[assignment]
        self.trajectory_builder: Any = None  # these by bind_components
        self.trainer_adapter: Any = None
        self._curriculum_state: dict[str, Any] = None  # type: ignore[assignment]

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Binds the run's configuration and initializes both parts."""
        self.run_config = run_config
        self.trainer_config.reward = run_config.reward_function
        self.curriculum_config = run_config.curriculum_learning
        self._curriculum_state = {
            "current_percentile": self.curriculum_config.initial_percentile,
            "last_expansion_epoch": -1,
            "total_groups": 0,
            "included_groups": set(),
        }
        await self.trajectory_builder.initialize(run_config)
        await self.trainer_adapter.initialize(run_config)

    async def cleanup(self) -> None:
        """Frees the resources of builder and adapter; call it from an override."""
        for part in (self.trajectory_builder, self.trainer_adapter):
            if part is not None:
                await part.cleanup()

    def apply_curriculum_learning(
        self, trajectory_collection: TrajectoryCollection, epoch: int
    ) -> TrajectoryCollection:
        """Chooses the groups that an epoch trains on; a trainer with a curriculum overrides it."""
        raise NotImplementedError("Override to implement curriculum learning")

    async def run_validation_evaluation(self, epoch: int, run_id: str) -> dict[str, Any]:
        """Runs the agent on the `select` examples; outside a run, the builder's `run_eval` on the validation dataset.

        Returns:
            `epoch`, `dataset_type`, `avg_reward`, `min_reward`, `max_reward` (None where nothing could be scored, with
            the reason in `error`), `num_examples`; inside a run also `num_unscored`, `ci_low`, `ci_high`, and `metrics`
            by evaluator.

        Raises:
            EvaluationError: No builder is bound.
            ConfigError: Outside a run, and the configuration file is wrong.
        """
        known = {"epoch": epoch, "dataset_type": "validation"}
        builder = self.trajectory_builder
        if builder is None:
            raise EvaluationError("cannot validate: call bind_components(trajectory_builder, trainer_adapter) before")
        if builder.evaluation is not None:
            return {**known, **(await builder.evaluation.validate("select", epoch)).as_validation()}
        own_config, builder.run_config = builder.run_config, _select_validation_data(builder.run_config)
        try:
            return {**known, **self._calculate_validation_metrics(await builder.run_eval())}
        except ConfigError:
            raise
        except Exception as error:  # a user's run_eval may raise anything; an unknown reward is never 0.0
            logger.exception("the validation of epoch %d failed", epoch)
            unknown = dict.fromkeys(("avg_reward", "min_reward", "max_reward"))
            return {**known, **unknown, "num_examples": 0, "error": describe_error(error)}
        finally:
            builder.run_config = own_config

    def _calculate_validation_metrics(self, eval_output: EvaluationRunOutput) -> dict[str, Any]:
        """Returns mean, lowest and highest score of the reward function over an evaluation's scored items."""
        reward = self.run_config.reward_function if self.run_config is not None else self.trainer_config.reward
        return eval_output.score_range(reward.name if reward else None)

    def get_curriculum_state(self) -> dict[str, Any]:
        """Returns the curriculum's state, ready for JSON."""
        state = dict(self._curriculum_state or {})
        if "included_groups" in state:
            state["included_groups"] = sorted(state["included_groups"])
        return state


def _select_validation_data(run_config: FinetuneConfig | None) -> FinetuneConfig:
    """Returns a configuration whose `run_configuration` evaluates the validation dataset, by its file if it has one."""
    settings = run_config.run_configuration if run_config is not None else None
    if run_config is None or settings is None:
        return run_config  # type: ignore[return-value]  # None until initialize, as declared
    changes = {
        "config_file": settings.validation_config_file or settings.config_file,
        "dataset": settings.validation_dataset,
    }
    return run_config.model_copy(update={"run_configuration": settings.model_copy(update=changes)})


class RunnerBase:
    """Defaults of an evaluation runner."""

    def examples(self, split: str) -> list[EvalInputItem]:
        """Returns a split's examples with their rows."""
        raise EvaluationError(f"{type(self).__name__} does not give access to its examples")

    def journalled_episodes(self, epoch: int) -> list[EpisodeRecord]:
        """Returns the collected episodes of a finished epoch from the journal, in the order of their keys."""
        raise EvaluationError(f"{type(self).__name__} keeps no journal of earlier epochs")

    def find_call(self, call_id: str) -> ModelCall | None:
        """Returns a model call of this epoch's episodes by the id of its completion, or None if it is unknown."""
        return None


class PolicyServerBase:
    """Defaults of a policy server."""

    @property
    def history(self) -> str:
        """How earlier replies reach the model: `template`, or `splice` for one that reads `ModelRequest.continued`."""
        return "template"

    @property
    def chat_template(self) -> str | None:
        """The text of the chat template, which defines how the model writes tool calls; None: unknown."""
        return None

    def release_memory(self) -> None:
        """Frees memory that sampling does not need at present, without waiting for it; a server calls it repeatedly."""

    def count_waiting(self) -> int:
        """Returns the replies that wait until others end, also those of other policies of the same sampler."""
        return 0

    async def encode(self, request: ModelRequest, reply: Message) -> TokenLogprobs | ChatPrompt:
        """Returns the tokens of a given reply, as if the policy had sampled it.

        Args:
            request: The conversation; sampling parameters are ignored.
            reply: The assistant message, tool calls included.

        Returns:
            Prompt and reply tokens, the reply's end included; log-probs are NaN and the version is -1. A policy that
            does not expose tokens returns the prompt itself.

        Raises:
            ContextOverflow: Prompt and reply do not fit the context.
            EngineError: The chat template rejects the messages.
            BackendError: This policy server cannot encode a reply.
        """
        raise BackendError(f"{type(self).__name__} cannot encode given replies as tokens")

    async def count_prompt(self, request: ModelRequest) -> int | None:
        """Returns the tokens of a request's prompt, also beyond the context; None: only the backend knows them."""
        return None
