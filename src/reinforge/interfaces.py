"""The interfaces that the components implement, on one page. Read this first.

    TrajectoryBuilder  runs the agent and returns trajectories
    TrainerAdapter     sends trajectories to a training backend
    Trainer            repeats the two over epochs
    Workflow           the agent: one call is one episode
    DatasetLoader      rows of examples
    Evaluator          scores an answer
    GroupEvaluator     scores answers by comparing them with each other
    EvaluationRunner   runs the workflow over examples and scores the outcomes
    Algorithm          which tokens earn which credit, and the name of the loss
    Teacher            scores what the policy sampled
    PolicyServer       samples from the weights being trained
    ChatModel          a model behind an entry of `llms`
    Journal            the record of a run
    Tracker            shows the metrics of a run on a dashboard
    Builder            hands a component's factory the other components

Each has a handful of methods; a class that implements them works with all our other parts.
"""

from __future__ import annotations

import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload, runtime_checkable

from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.schema import (
    Config,
    CurriculumLearningConfig,
    FinetuneConfig,
    FinetuneRunConfig,
    TrainerAdapterConfig,
    TrainerConfig,
    TrajectoryBuilderConfig,
)
from reinforge.errors import BackendError, ConfigError, EvaluationError, Problem, describe_error
from reinforge.types.evaluation import (
    EvalInputItem,
    EvalOutputItem,
    EvaluationReport,
    EvaluationRunConfig,
    EvaluationRunOutput,
)
from reinforge.types.job import TrainingJobRef, TrainingJobStatus
from reinforge.types.request import ChatPrompt, Message, ModelReply, ModelRequest, ReplyPiece, TokenLogprobs
from reinforge.types.sample import FloatArray, LossSpec, Needs, TrainingSample
from reinforge.types.tracking import MetricPoint, TrackedRun
from reinforge.types.trajectory import CollectionPlan, TrajectoryCollection, TrajectoryGroup
from reinforge.types.workflow import BoundWorkflow

if TYPE_CHECKING:
    from reinforge.types.episode import EpisodeKey, EpisodeRecord, ModelCall

logger = logging.getLogger(__name__)

EVALUATION_OF_A_FILE = "reinforge.trainer.evaluate"
"""Has the `EvaluationRun` for a builder outside a run. It is made of these interfaces, so it is loaded on first use."""


class TrajectoryBuilder(ABC):
    """Runs the agent and turns its episodes into trajectories.

    Attributes:
        evaluation: Runs and scores episodes; the run sets it before `initialize`.
        records: The episodes of the last collection; None: unknown, so missing ones are not counted.
        rewards_are_scores: False: rewards come with the data and say nothing about the policy; they are not reported.
        is_resumable: True: a resumed run may reuse journalled episodes, and the run calls `compute_reward`;
            False: a resumed run collects an open epoch again, and the builder calls `compute_reward` itself.
        requires_policy_llm: True: an entry `_type: policy` must be configured, since its replies are what is trained.
        first_epoch: The epoch that begins its first pass over the examples: 0, or the first of a pipeline's stage.
        collects_ahead: True: `start_run` may be called for later epochs before an earlier one is finalized, and
            `discard_run` ends what is not finalized.
    """

    collects_ahead: bool = False
    evaluation: EvaluationRunner | None = None
    records: list[EpisodeRecord] | None = None
    rewards_are_scores: bool = True
    is_resumable: bool = False
    requires_policy_llm: bool = False
    first_epoch: int = 0

    def __init__(self, trajectory_builder_config: TrajectoryBuilderConfig):
        self.trajectory_builder_config = trajectory_builder_config
        self.run_config: FinetuneConfig = None  # type: ignore[assignment]  # set by initialize

    def validate(
        self, config: Config, algorithm: Algorithm, examples: Sequence[EvalInputItem], row_locations: Mapping[str, str]
    ) -> list[Problem]:
        """Returns why this run cannot work, before any work starts; paths are relative to the builder's block.

        Args:
            config: The whole configuration.
            algorithm: What the trajectories are trained by.
            examples: The training examples.
            row_locations: File and line of each example by its id, as far as the loader knows them.
        """
        return []

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

    def plan(self, epoch: int) -> CollectionPlan | None:
        """Returns which episodes an epoch collects; None: unknown, so no example is skipped and nothing is refilled."""
        return None

    def further_examples(self, epoch: int, used: set[str], count: int) -> list[str]:
        """Returns up to `count` training examples that the epoch has not used yet, for a refill."""
        return []

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

    async def discard_run(self, run_id: str) -> None:
        """Stops a collection that was started and will not be finalized; does nothing unless overridden."""

    def take_notes(self) -> list[str]:
        """Returns, once, what the user should know about the last collection."""
        return []

    def example_rewards(self, groups: Sequence[TrajectoryGroup]) -> list[float]:
        """Returns the mean reward of each example of an epoch's groups; empty where rewards are no scores."""
        return [group.mean_reward for group in groups] if self.rewards_are_scores else []

    async def compute_reward(self, output_item: EvalOutputItem, meta: dict[str, Any] | None = None) -> float | None:
        """Returns the reward of one score, or None where it is missing; see `is_resumable` for who calls it."""
        return output_item.as_reward()

    def log_progress(self, run_id: str, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Reports on a collection; does nothing unless overridden."""

    async def cleanup(self) -> None:
        """Frees resources; does nothing unless overridden."""


class TrainerAdapter(ABC):
    """Sends trajectories to a training backend and reports on the jobs.

    Attributes:
        trains_on: What it needs of a trained turn: `tokens` as sampled, or `messages` where no tokens are known.
        serves_policy: True: `policy()` works after `initialize`, so a run whose agent never calls it is refused.
        trains_stages: True: jobs of different stages of a pipeline may differ in algorithm, optimizer and batches.
        serves_during_jobs: True: the policy samples from the published version while a job trains, so a run may collect
            later epochs meanwhile (`limits.max_staleness`).
        keeps_jobs: True: a submitted job lasts at the backend, so a resumed run hands its reference to `resubmit`;
            False: where the weights come from a checkpoint, later jobs count as not submitted.
    """

    trains_on: Literal["tokens", "messages"] = "tokens"
    serves_policy: bool = False
    trains_stages: bool = False
    serves_during_jobs: bool = False
    keeps_jobs: bool = False

    def __init__(self, adapter_config: TrainerAdapterConfig):
        self.adapter_config = adapter_config
        self.run_config: FinetuneConfig = None  # type: ignore[assignment]  # set by initialize

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Binds the run's configuration and allocates what the adapter needs."""
        self.run_config = run_config
        self.adapter_config.reward = run_config.reward_function

    async def prepare_training(self) -> None:
        """Loads what only training needs, such as a teacher; a run calls it after `initialize`, before any work.

        Raises:
            ConfigError: It cannot be used.
        """

    def validate(self, run_config: FinetuneConfig) -> list[Problem]:
        """Returns the settings that this backend cannot honour, before anything is allocated."""
        return []

    def effective_settings(self, run_config: FinetuneConfig) -> list[tuple[str, str]] | None:
        """Returns the backend's effective settings to print, as name and value; None: those of `policy`."""
        return None

    @abstractmethod
    async def is_healthy(self) -> bool:
        """Returns True if the backend can take a job now."""

    @abstractmethod
    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Starts a job; submitting the same job key again returns the existing job."""

    async def resubmit(self, trajectories: TrajectoryCollection, known: TrainingJobRef | None) -> TrainingJobRef:
        """Returns the job of a key that an earlier process of the run intended to submit.

        Args:
            trajectories: What to submit.
            known: The job, if that process stored it; None: it died before, so the job may exist or not.
        """
        return await self.submit(trajectories) if known is None else known

    @abstractmethod
    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Returns the status of a job; changes nothing."""

    @abstractmethod
    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        """Waits until a job has ended.

        Args:
            ref: The job.
            poll_interval: Seconds between polls, for a backend that must be polled.
        """

    def policy(self) -> PolicyServer | None:
        """Returns what `llms.<name>._type: policy` resolves to; None: this backend serves no policy."""
        return None

    async def save(self, folder: Path, version: int) -> bool:
        """Writes the weights to the new folder `folder`, which the run then makes durable; False: unsupported."""
        return False

    async def restore(self, folder: Path, version: int) -> bool:
        """Loads weights that `save` wrote and serves them as `version`; False: unsupported."""
        return False

    def log_progress(self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Reports on a job; does nothing unless overridden."""

    async def cleanup(self) -> None:
        """Frees resources; does nothing unless overridden."""


class Trainer(ABC):
    """Repeats collecting and training over epochs.

    Attributes:
        is_resumable: True: `run` continues after the last finished epoch; False: a resumed run starts over.
        collects_ahead: True: `run` may collect later epochs while a job trains (`limits.max_staleness`).
    """

    is_resumable: bool = False
    collects_ahead: bool = False

    def __init__(self, trainer_config: TrainerConfig, **kwargs: Any) -> None:
        self.trainer_config = trainer_config
        self.run_config: FinetuneConfig = None  # type: ignore[assignment]  # these are set by initialize
        self.curriculum_config: CurriculumLearningConfig = None  # type: ignore[assignment]
        self.trajectory_builder: TrajectoryBuilder = None  # type: ignore[assignment]  # and these by bind_components
        self.trainer_adapter: TrainerAdapter = None  # type: ignore[assignment]
        self._curriculum_state: dict[str, Any] = None  # type: ignore[assignment]

    async def bind_components(self, trajectory_builder: TrajectoryBuilder, trainer_adapter: TrainerAdapter) -> None:
        """Binds the two parts that the trainer drives."""
        self.trajectory_builder = trajectory_builder
        self.trainer_adapter = trainer_adapter

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

    @abstractmethod
    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        """Collects and trains once; None: nothing was submitted."""

    @abstractmethod
    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Runs all epochs and returns the status of every job."""

    @abstractmethod
    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        """Returns the metrics of a run so far."""

    @abstractmethod
    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Records the metrics of one epoch."""

    async def cleanup(self) -> None:
        """Frees the resources of builder and adapter; call it from an override."""
        for part in (self.trajectory_builder, self.trainer_adapter):
            if part is not None:
                await part.cleanup()

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
            ConfigError: A file is missing or rows are unusable; lists all of them by line.
        """


class Evaluator(ABC):
    """Scores an answer."""

    @abstractmethod
    async def evaluate(self, item: EvalInputItem) -> EvalOutputItem:
        """Returns the score of one example; higher is better. An exception makes the score missing."""


class GroupEvaluator(Evaluator):
    """Scores the answers to one example by comparing them; 0.5 means as good as what an answer was compared with.

    Siblings are compared with each other. An answer to a `select` or `confirm` example is compared with `reference`, so
    that validations and the verdict measure the same thing at every epoch.

    Attributes:
        reference: `base`: the base model's answer to the same example, which itself scores 0.5; `expected`: the
            example's expected answer.
    """

    reference: Literal["base", "expected"] = "base"

    @abstractmethod
    async def evaluate_group(self, items: Sequence[EvalInputItem]) -> list[EvalOutputItem]:
        """Returns the score of each of two or more answers to one example, in their order; an exception: none has one.

        Args:
            items: The example with each of the answers; `trajectory` has the steps that led to it.
        """

    async def evaluate(self, item: EvalInputItem) -> EvalOutputItem:
        """Returns the score of one answer in comparison with the expected answer.

        Raises:
            EvaluationError: The example has no expected answer.
        """
        if item.expected_output_obj is None:
            raise EvaluationError("it compares answers, and this example has no expected answer to compare with")
        alone = item.copy_with_updates(trajectory=[], expected_output_obj=None)  # a contestant is no answer key
        reference = alone.copy_with_updates(output_obj=item.expected_output_obj)
        return (await self.evaluate_group([reference, alone]))[1]


class EvaluationRunner(ABC):
    """Runs the workflow over examples and scores the outcomes; one concurrency limit for all calls.

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
        """Runs every example of a split and summarizes the scores."""

    @abstractmethod
    def example_ids(self, split: str) -> list[str]:
        """Returns the ids of a split's examples."""

    def examples(self, split: str) -> list[EvalInputItem]:
        """Returns a split's examples with their rows."""
        raise EvaluationError(f"{type(self).__name__} does not give access to its examples")

    def journalled_episodes(self, epoch: int) -> list[EpisodeRecord]:
        """Returns the collected episodes of a finished epoch from the journal, in the order of their keys."""
        raise EvaluationError(f"{type(self).__name__} keeps no journal of earlier epochs")

    def find_call(self, call_id: str) -> ModelCall | None:
        """Returns a model call of this epoch's episodes by the id of its completion, or None if it is unknown."""
        return None


class Algorithm(ABC):
    """Credit plus the name of a loss; holds no tensors, so that a job can be sent anywhere.

    Attributes:
        loss: The loss by name.
        needs: What the engine computes before credit: old and reference log-probs, values.
        needs_groups: True: credit compares siblings; groups of one are refused, groups without spread skipped.
        offline: True: tokens that the policy did not sample can be trained; their `sampling_logprobs` are NaN.
        teacher: Its log-probs become the `ref_logprobs` of the samples; None: there is no teacher.
    """

    loss: LossSpec
    needs: Needs = Needs()
    needs_groups: bool = False
    offline: bool = False
    teacher: Teacher | None = None

    def for_epoch(self, epoch: int | None) -> Algorithm:
        """Returns the algorithm that an epoch trains with; None: a job outside a run. By default always this one."""
        return self

    def has_signal(self, group: TrajectoryGroup) -> bool:
        """Returns False for a group that would contribute nothing; an epoch of such groups is skipped, not failed."""
        return True

    def skip_reason(self, groups: Sequence[TrajectoryGroup]) -> str | None:
        """Returns why these groups are too little to train on, so the epoch is skipped; None: they are enough."""
        return None

    @abstractmethod
    def build_samples(self, groups: Sequence[TrajectoryGroup]) -> list[TrainingSample]:
        """Returns the samples to train on, without credit."""

    @abstractmethod
    def credit(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Returns the advantages of each sample, `[T]`, 0 outside its mask."""


class ChatModel(Protocol):
    """A model behind an entry of `llms`; one with `sample_choices(request, n)` samples `n` replies in one call."""

    @property
    def model_name(self) -> str:
        """The model's own name."""

    @property
    def is_policy(self) -> bool:
        """True if its replies are sampled from the weights being trained."""

    async def sample(self, request: ModelRequest) -> ModelReply:
        """Samples one reply."""


@runtime_checkable
class Teacher(Protocol):
    """A model that scores what the policy sampled; it has the policy's tokens."""

    @property
    def model_name(self) -> str:
        """The model's own name."""

    async def prepare(self, tokenizer: Any) -> None:
        """Loads or reaches the model and compares its tokens with those of the policy's tokenizer.

        Raises:
            ConfigError: It has other tokens.
        """

    async def score_samples(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Returns log p of each sample's trained tokens, `[T]` each, 0 elsewhere.

        They are of the distribution that the token was sampled from: at its temperature, over its kept tokens.
        """


class PolicyServer(ABC):
    """Samples from the weights being trained. Weights change only while no reply is in flight.

    Attributes:
        tolerance: Most nats by which `sample` and `score` may differ on one token; the canary allows no more.
    """

    tolerance: float = 1e-4

    @property
    def history(self) -> str:
        """How earlier replies reach the model: `template`, or `splice` for one that reads `ModelRequest.continued`."""
        return "template"

    @property
    @abstractmethod
    def version(self) -> int:
        """The version of the weights that replies are sampled from now."""

    @property
    @abstractmethod
    def model_name(self) -> str:
        """The model's name, for `target_model` and the record."""

    @property
    def chat_template(self) -> str | None:
        """The text of the chat template, which defines how the model writes tool calls; None: unknown."""
        return None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the policies that this server trains and serves side by side; empty: there is only one."""
        return ()

    def get_policy(self, name: str) -> PolicyServer:
        """Returns one of those policies: what `llms.<entry>.adapter: name` resolves to.

        Raises:
            ConfigError: No policy has that name.
        """
        message = f"{type(self).__name__} serves a single policy, none named {name}"
        raise ConfigError(Problem("llms", message, "leave `adapter` out, or use the trainer adapter `_type: local`"))

    @abstractmethod
    async def sample(self, request: ModelRequest) -> ModelReply:
        """Samples one reply; calls may run concurrently.

        Raises:
            ContextOverflow: The prompt does not fit the context.
        """

    async def stream(
        self, request: ModelRequest, markers: Sequence[str] = ()
    ) -> AsyncGenerator[ReplyPiece | ModelReply, None]:
        """Yields the tokens of one reply as they are sampled, and then the reply.

        A policy server that cannot do this yields the reply alone. Sampling stops when the generator is closed.

        Args:
            request: The request.
            markers: Texts whose special tokens stay in the text of the pieces.

        Raises:
            ContextOverflow: The prompt does not fit the context.
        """
        yield await self.sample(request)

    @abstractmethod
    async def score(self, token_ids: Sequence[Sequence[int]]) -> list[FloatArray]:
        """Returns the log-prob of each token given those before it, at temperature 1: `[T]` each, 0 for the first."""

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

    @abstractmethod
    async def publish(self, version: int) -> None:
        """Admits requests on the weights of `version`; caches of older weights are dropped."""

    @abstractmethod
    async def fingerprint(self) -> str:
        """Returns a short hash of the current weights: other weights, another hash."""


@runtime_checkable
class Journal(Protocol):
    """The record of a run; every call returns at once, `flush` waits until everything is on disk."""

    def record_episode(self, record: EpisodeRecord) -> None:
        """Records one finished episode, missing ones too."""

    def record_stage(self, epoch: int, stage: str, data: dict[str, Any]) -> None:
        """Records that a stage of an epoch has ended."""

    def record_job(self, ref: TrainingJobRef, status: TrainingJobStatus, job_key: str) -> None:
        """Records the status of a job."""

    def record_policy_version(
        self, version: int, fingerprint: str, num_updates: int | None, checkpoint: str | None
    ) -> None:
        """Records a version of the weights."""

    def flush(self) -> None:
        """Waits until everything recorded so far is on disk."""


class Tracker(ABC):
    """Sends the metrics of a run to a dashboard; the run folder stays the record.

    The methods are called one after the other on a thread of their own. What they raise is said once and never stops
    the run.
    """

    @abstractmethod
    def start(self, run: TrackedRun) -> Mapping[str, int] | None:
        """Opens the run at the dashboard, also again after it was stopped.

        Returns:
            The last step of each metric that the dashboard has, by name; points up to it are not sent again, and all
            others are, also those that an earlier process sent and the dashboard lost. None: the dashboard cannot
            tell, so the run's own record of what was sent decides.
        """

    @abstractmethod
    def log(self, point: MetricPoint) -> None:
        """Sends metrics; the steps of one metric rise."""

    @abstractmethod
    def finish(self, status: str) -> None:
        """Closes the run at the dashboard.

        Args:
            status: `completed`, `failed`, `cancelled`, or `stopped`, which may be resumed.
        """


class Builder(Protocol):
    """Gives a component's factory the configuration and the other components; each is made once, on first use."""

    @property
    def loaded(self) -> LoadedConfig:
        """The configuration with the place of each setting."""

    @property
    def config(self) -> Config:
        """The whole configuration."""

    @property
    def project_root(self) -> Path:
        """The folder that relative paths and `module:name` start from."""

    @overload
    async def get_llm(self, name: str) -> ChatModel: ...

    @overload
    async def get_llm(self, name: str, wrapper_type: str) -> Any: ...

    async def get_llm(self, name: str, wrapper_type: str | None = None) -> Any:
        """Returns the `ChatModel` behind an entry of `llms`, or, with `wrapper_type`, its client for a framework.

        Raises:
            ConfigError: There is no client for that framework.
        """

    def get_max_concurrency(self) -> int:
        """Returns how many episodes run at a time."""

    async def get_workflow(self) -> BoundWorkflow:
        """Returns the agent."""

    async def get_function(self, name: str) -> Any:
        """Returns a component of `functions`."""

    async def get_dataset(self, file: str | Path | None = None) -> DatasetLoader:
        """Returns the dataset's loader; `file` replaces the configured file."""

    async def get_evaluator(self, name: str) -> Evaluator:
        """Returns an evaluator."""

    async def get_algorithm(self) -> Algorithm:
        """Returns the run's algorithm."""

    async def get_model_path(self) -> str | None:
        """Returns the folder or hub id of the model to train."""

    async def get_bundled(self, model: str, path: str = "model") -> str:
        """Returns the folder of `bundled:NAME`; any other model is returned unchanged."""

    def policy(self) -> PolicyServer | None:
        """Returns the policy server of the trainer adapter; None before it is initialized, or if it serves none."""
