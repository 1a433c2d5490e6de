"""The ports: what reinforge asks of its parts, on one page. Read this first.

    TrajectoryBuilder  runs the agent and returns trajectories      (the seed's)
    TrainerAdapter     sends trajectories to a training backend     (the seed's)
    Trainer            repeats the two over epochs                  (the seed's)
    Workflow           the agent: one call is one episode
    DatasetLoader      rows of examples
    Evaluator          looks at an answer and returns a score
    EvaluationRunner   runs a workflow over examples and scores it
    Algorithm          which tokens earn which credit, and the name of the loss
    PolicyServer       samples from the weights being trained
    Journal            the record of a run

Each has a handful of methods; anything that implements them drops in, alone or with our other parts.
"""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np

from reinforge.config.schema import (
    CurriculumLearningConfig,
    FinetuneConfig,
    TrainerAdapterConfig,
    TrainerConfig,
    TrajectoryBuilderConfig,
)
from reinforge.errors import BackendError, ConfigError, EvaluationError, Problem
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem, EvaluationReport, EvaluationRunOutput
from reinforge.types.job import TrainingJobRef, TrainingJobStatus
from reinforge.types.request import ChatPrompt, Message, ModelReply, ModelRequest, TokenLogprobs
from reinforge.types.sample import FloatArray, LossSpec, Needs, TrainingSample
from reinforge.types.trajectory import TrajectoryCollection, TrajectoryGroup

if TYPE_CHECKING:
    from reinforge.types.episode import EpisodeKey, EpisodeRecord, ModelCall


class TrajectoryBuilder(ABC):
    """Runs the agent and turns what it did into trajectories."""

    rewards_are_scores: bool = True
    """False: rewards come with the data and say nothing about the policy, so their mean is not reported."""

    def __init__(self, trajectory_builder_config: TrajectoryBuilderConfig):
        self.trajectory_builder_config = trajectory_builder_config
        self.run_config: FinetuneConfig = None  # type: ignore[assignment]  # set by initialize, as in the seed
        self.evaluation: EvaluationRunner | None = None

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Binds the run's configuration; the run has set `evaluation` before."""
        self.run_config = run_config
        self.trajectory_builder_config.reward = run_config.reward_function

    async def run_eval(self) -> EvaluationRunOutput:
        """Runs the agent once on every training example and returns outputs, steps and scores.

        Raises:
            EvaluationError: The builder runs outside a run, so there is nothing to evaluate with.
        """
        if self.evaluation is None:
            raise EvaluationError("builder.evaluation is not set: a builder runs inside a run, or set it yourself")
        return await self.evaluation.run_eval()

    @abstractmethod
    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        """Starts collecting.

        Args:
            run_id: Names this collection.
            meta: `epoch` and `trainer_run_id`; for a refill also `example_ids` and `round`.
        """

    @abstractmethod
    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        """Waits for the collection and returns every group, with or without signal."""

    def example_rewards(self, groups: Sequence[TrajectoryGroup]) -> list[float]:
        """Returns the mean reward of each example of an epoch's groups; empty where rewards are no scores."""
        return [group.mean_reward for group in groups] if self.rewards_are_scores else []

    async def compute_reward(self, output_item: EvalOutputItem, meta: dict[str, Any] | None = None) -> float | None:
        """Returns the reward of one scored example, or None where the score is missing (never 0.0 for unknown)."""
        score = output_item.score
        if output_item.error is not None or isinstance(score, bool) or not isinstance(score, int | float):
            return float(score) if isinstance(score, bool) and output_item.error is None else None
        return float(score) if np.isfinite(score) else None

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Says how collecting goes; does nothing unless overridden."""

    async def cleanup(self) -> None:
        """Frees what the builder holds; does nothing unless overridden."""


class TrainerAdapter(ABC):
    """Sends trajectories to a training backend and reports on the jobs.

    Attributes:
        trains_on: What it needs of a trained turn: `tokens`, the sampler's own, or `messages`, what exactly was asked
            and answered, from samplers that tell no tokens.
        serves_policy: `policy()` is there after `initialize`, so a run whose agent never calls it is refused.
    """

    trains_on: Literal["tokens", "messages"] = "tokens"
    serves_policy: bool = False

    def __init__(self, adapter_config: TrainerAdapterConfig):
        self.adapter_config = adapter_config
        self.run_config: FinetuneConfig = None  # type: ignore[assignment]  # set by initialize, as in the seed

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Binds the run's configuration and allocates what the adapter needs."""
        self.run_config = run_config
        self.adapter_config.reward = run_config.reward_function

    def preflight(self, run_config: FinetuneConfig) -> list[Problem]:
        """Returns the settings that this backend cannot honour, before anything is allocated."""
        return []

    def effective_settings(self, run_config: FinetuneConfig) -> list[tuple[str, str]] | None:
        """Returns what took effect of the backend's settings, for a person: name and value; None: `policy`'s did."""
        return None

    @abstractmethod
    async def is_healthy(self) -> bool:
        """Returns True if the backend can take a job now."""

    @abstractmethod
    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Starts a job; a collection with a job key that was submitted before returns that job."""

    @abstractmethod
    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Returns where a job stands; a pure read, as often as wanted."""

    @abstractmethod
    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        """Waits until a job has ended.

        Args:
            ref: The job.
            poll_interval: Seconds between looks, for a backend that must be polled.
        """

    def policy(self) -> PolicyServer | None:
        """Returns what `llms.<name>._type: policy` resolves to; None: this backend serves no policy."""
        return None

    async def save(self, folder: Path, version: int) -> bool:
        """Writes the weights as they are to the new folder `folder`, which the run then makes durable.

        Returns:
            False: this backend keeps its weights to itself.
        """
        return False

    async def restore(self, folder: Path, version: int) -> bool:
        """Loads weights that `save` wrote and serves them as `version`; False: this backend cannot."""
        return False

    def log_progress(self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Says how a job goes; does nothing unless overridden."""

    async def cleanup(self) -> None:
        """Frees what the adapter holds; does nothing unless overridden."""


class Trainer(ABC):
    """Repeats collecting and training over epochs."""

    def __init__(self, trainer_config: TrainerConfig, **kwargs: Any) -> None:
        self.trainer_config = trainer_config
        self.run_config: FinetuneConfig = None  # type: ignore[assignment]  # set by initialize, as in the seed
        self.curriculum_config: CurriculumLearningConfig = None  # type: ignore[assignment]
        self.trajectory_builder: TrajectoryBuilder = None  # type: ignore[assignment]
        self.trainer_adapter: TrainerAdapter = None  # type: ignore[assignment]
        self._curriculum_state: dict[str, Any] = None  # type: ignore[assignment]

    async def bind_components(self, trajectory_builder: TrajectoryBuilder, trainer_adapter: TrainerAdapter) -> None:
        """Binds the two parts that the trainer drives."""
        self.trajectory_builder = trajectory_builder
        self.trainer_adapter = trainer_adapter

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Binds the run's configuration and initialises both parts."""
        self.run_config = run_config
        self.curriculum_config = run_config.curriculum_learning
        self._curriculum_state = {
            "current_percentile": self.curriculum_config.initial_percentile,
            "last_expansion_epoch": -1,
            "total_groups": 0,
            "included_groups": set(),
        }
        await self.trajectory_builder.initialize(run_config)
        await self.trainer_adapter.initialize(run_config)

    @abstractmethod
    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        """Collects and trains once; None: nothing was submitted."""

    @abstractmethod
    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Runs all epochs and returns the status of every job."""

    @abstractmethod
    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        """Returns what is known of a run so far."""

    @abstractmethod
    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Records the metrics of one epoch."""

    async def cleanup(self) -> None:
        """Frees what builder and adapter hold; a trainer that overrides it frees its own as well."""
        for part in (self.trajectory_builder, self.trainer_adapter):
            if part is not None:
                await part.cleanup()

    async def run_validation_evaluation(self, epoch: int, run_id: str) -> dict[str, Any]:
        """Runs the agent on the `select` examples.

        Returns:
            `avg_reward` (None where nothing could be scored, with the reason in `error`), `num_examples`,
            `num_unscored`, `ci_low`, `ci_high`, `epoch`, and `metrics` by evaluator.
        """
        if self.trajectory_builder is None or self.trajectory_builder.evaluation is None:
            raise EvaluationError("there is nothing to validate with: the builder's evaluation is not set")
        report = await self.trajectory_builder.evaluation.validate("select", epoch)
        return {"epoch": epoch, **report.as_validation()}

    def _calculate_validation_metrics(self, eval_output: EvaluationRunOutput) -> dict[str, Any]:
        """Returns mean, lowest and highest score of the reward function over an evaluation's scored items."""
        reward = self.run_config.reward_function.name if self.run_config.reward_function else None
        scores = [
            float(item.score)
            for name, output in eval_output.evaluation_results
            if reward is None or name == reward
            for item in output.eval_output_items
            if item.error is None and isinstance(item.score, int | float) and np.isfinite(item.score)
        ]
        return {
            "avg_reward": statistics.fmean(scores) if scores else None,
            "min_reward": min(scores, default=None),
            "max_reward": max(scores, default=None),
            "num_examples": len(scores),
        }

    def apply_curriculum_learning(
        self, trajectory_collection: TrajectoryCollection, epoch: int
    ) -> TrajectoryCollection:
        """Chooses the groups that an epoch trains on; a trainer with a curriculum overrides it."""
        raise NotImplementedError("Override to implement curriculum learning")

    def get_curriculum_state(self) -> dict[str, Any]:
        """Returns the curriculum's state, ready for JSON."""
        state = dict(self._curriculum_state or {})
        if "included_groups" in state:
            state["included_groups"] = sorted(state["included_groups"])
        return state


class Workflow(Protocol):
    """The agent: `workflow(item, llm, context)`, async or plain, returns its output."""

    def __call__(self, item: Any, llm: Any, context: Any) -> Awaitable[Any] | Any:
        """Runs one episode.

        Args:
            item: The example (`EvalInputItem`); `item.input_obj` is the question.
            llm: `llm.chat.completions.create(messages=...)`, awaitable in async workflows, blocking in plain ones.
            context: `seed`, `function(name)`, `mark(...)`, `fail(...)`.
        """
        ...


class DatasetLoader(ABC):
    """Rows of examples."""

    @abstractmethod
    def load(self) -> list[EvalInputItem]:
        """Returns every example.

        Raises:
            ConfigError: A file is missing, or rows are unusable; all of them at once, by line.
        """


class Evaluator(ABC):
    """Looks at an answer and returns a score."""

    @abstractmethod
    async def evaluate(self, item: EvalInputItem) -> EvalOutputItem:
        """Returns the score of one example; higher is better. A raised error makes the score missing."""


class EvaluationRunner(ABC):
    """Runs the workflow over examples and scores what it did; one concurrency limit for all calls.

    Attributes:
        epoch: The epoch that the episodes of `run_eval` belong to; the loop sets it.
    """

    epoch: int = 0

    @abstractmethod
    async def run_eval(self) -> EvaluationRunOutput:
        """Runs one generation over the training examples."""

    @abstractmethod
    async def collect(self, keys: Sequence[EpisodeKey]) -> list[EpisodeRecord]:
        """Runs these episodes and returns them finished and scored, in the order of `keys`."""

    @abstractmethod
    async def validate(self, split: str, epoch: int, phase: str = "validate") -> EvaluationReport:
        """Runs every example of a split and summarises the scores."""

    @abstractmethod
    def example_ids(self, split: str) -> list[str]:
        """Returns the ids of a split's examples."""

    def examples(self, split: str) -> list[EvalInputItem]:
        """Returns a split's examples with their rows.

        Raises:
            EvaluationError: This runner does not hand them out.
        """
        raise EvaluationError(f"{type(self).__name__} does not hand out its examples")

    def recorded(self, epoch: int) -> list[EpisodeRecord]:
        """Returns the collected episodes of an epoch that is over, from the journal, in the order of their keys.

        Raises:
            EvaluationError: This runner keeps no journal.
        """
        raise EvaluationError(f"{type(self).__name__} keeps no journal of what was collected before")

    def captured(self, call_id: str) -> ModelCall | None:
        """Returns a model call of this epoch's episodes by the id of its completion, or None if it is not known."""
        return None


class Algorithm(ABC):
    """Credit plus the name of a loss; holds no tensors, so that a job can be sent anywhere."""

    loss: LossSpec
    needs: Needs = Needs()
    needs_groups: bool = False
    """True if credit compares siblings: groups without spread carry no signal, single ones are refused."""
    offline: bool = False
    """True if tokens that nobody sampled can be trained on: `sampling_logprobs`, NaN for those, are not read."""

    def teaches(self, group: TrajectoryGroup) -> bool:
        """Returns False for a group of which nothing would be taken; an epoch of such is empty, no failed job."""
        return True

    def too_little(self, groups: Sequence[TrajectoryGroup]) -> str | None:
        """Returns why a job of these groups would train on too little, so the epoch is empty; None: it is enough."""
        return None

    @abstractmethod
    def build_samples(self, groups: Sequence[TrajectoryGroup]) -> list[TrainingSample]:
        """Returns the samples to train on, without credit."""

    @abstractmethod
    def credit(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Returns the advantages of each sample, `[T]`, 0 outside its mask."""


class PolicyServer(ABC):
    """Samples from the weights being trained. Weights change only while no reply is in flight.

    Attributes:
        tolerance: Most nats by which `sample` and `score` may differ on one token; the canary allows no more.
    """

    tolerance: float = 1e-4

    @property
    @abstractmethod
    def version(self) -> int:
        """The version of the weights that replies are drawn from now."""

    @property
    @abstractmethod
    def model_name(self) -> str:
        """The model's name, for `target_model` and the record."""

    @property
    def chat_template(self) -> str | None:
        """The template's text, which tells how the model writes tool calls; None: not known."""
        return None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the policies that this server trains and serves apart, in one version; empty: it is the only one."""
        return ()

    def named(self, name: str) -> PolicyServer:
        """Returns one of those policies: what `llms.<entry>.adapter: name` resolves to.

        Raises:
            ConfigError: There is none of that name.
        """
        message = f"{type(self).__name__} serves one policy, and none that is named {name}"
        raise ConfigError(Problem("llms", message, "leave `adapter` out, or use the trainer adapter `_type: local`"))

    @abstractmethod
    async def sample(self, request: ModelRequest) -> ModelReply:
        """Draws one reply; many may be asked for at once.

        Raises:
            ContextOverflow: The prompt does not fit the context.
        """

    @abstractmethod
    async def score(self, token_ids: Sequence[Sequence[int]]) -> list[FloatArray]:
        """Returns log p of each token given those before it, at temperature 1: one `[T]` each, 0 for the first."""

    async def encode(self, request: ModelRequest, reply: Message) -> TokenLogprobs | ChatPrompt:
        """Returns the tokens of a reply that nobody sampled, as if the policy had given it.

        Args:
            request: What is asked; how a reply is drawn does not matter.
            reply: The assistant message, tool calls included.

        Returns:
            The prompt's tokens, and the reply's with its end; log-probs are NaN and the version is -1. A policy that
            tells no tokens returns the prompt itself.

        Raises:
            ContextOverflow: Prompt and reply do not fit the context.
            EngineError: The template refuses the messages.
            BackendError: This policy server does not tell how it writes a reply.
        """
        raise BackendError(f"{type(self).__name__} cannot write given replies as tokens")

    @abstractmethod
    async def publish(self, version: int) -> None:
        """Opens admission on the weights of `version`; caches of older weights are dropped."""

    @abstractmethod
    async def fingerprint(self) -> str:
        """Returns a short hash of the weights as they are now: other weights, another hash."""


class ContextOverflow(Exception):
    """A prompt is longer than the policy's context; the runner records the episode as `context_overflow`."""


@runtime_checkable
class Journal(Protocol):
    """The record of a run; every call returns at once, `flush` waits until all is on disk."""

    def episode(self, record: EpisodeRecord) -> None:
        """Records one finished episode, missing ones too."""

    def stage(self, epoch: int, stage: str, data: dict[str, Any]) -> None:
        """Records that a stage of an epoch has ended."""

    def job(self, ref: TrainingJobRef, status: TrainingJobStatus, job_key: str) -> None:
        """Records where a job stands."""

    def policy_version(self, version: int, fingerprint: str, num_updates: int | None, checkpoint: str | None) -> None:
        """Records a version of the weights."""

    def flush(self) -> None:
        """Waits until everything recorded so far is on disk."""


__all__ = [
    "Algorithm",
    "ContextOverflow",
    "DatasetLoader",
    "EvaluationReport",
    "EvaluationRunner",
    "Evaluator",
    "Journal",
    "Needs",
    "PolicyServer",
    "Trainer",
    "TrainerAdapter",
    "TrajectoryBuilder",
    "Workflow",
]
