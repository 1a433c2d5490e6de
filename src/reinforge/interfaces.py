"""The interfaces that the components implement, on one page. Read this first.

    TrajectoryBuilder  runs the agent and returns trajectories
    TrainerAdapter     sends trajectories to a training backend
    Trainer            repeats the two over epochs
    Workflow           the agent: one call is one episode
    DatasetLoader      rows of examples
    Environment        what an agent acts in, for one episode; an EnvironmentSource has its tasks
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

What they start from, and what only some of them do, is in `port_bases.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload, runtime_checkable

from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.schema import Config, FinetuneConfig
from reinforge.errors import EvaluationError, Problem
from reinforge.port_bases import AdapterBase, BuilderBase, PolicyServerBase, RunnerBase, TrainerBase
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem, EvaluationReport, EvaluationRunOutput
from reinforge.types.job import TrainingJobRef, TrainingJobStatus
from reinforge.types.request import ModelReply, ModelRequest, ReplyPiece
from reinforge.types.sample import FloatArray, LossSpec, Needs, TrainingSample
from reinforge.types.tracking import MetricPoint, TrackedRun
from reinforge.types.trajectory import TrajectoryCollection, TrajectoryGroup
from reinforge.types.workflow import BoundWorkflow

if TYPE_CHECKING:
    from reinforge.types.environment import Observation, Reply, StepResult
    from reinforge.types.episode import EpisodeKey, EpisodeRecord


class TrajectoryBuilder(BuilderBase, ABC):
    """Runs the agent and turns its episodes into trajectories."""

    evaluation: EvaluationRunner | None = None  # runs and scores episodes; the run sets it before `initialize`
    requires_policy_llm: bool = False
    """True: an entry `_type: policy` must be configured, since its replies are what is trained."""

    def validate(
        self, config: Config, algorithm: Algorithm, examples: Sequence[EvalInputItem], row_locations: Mapping[str, str]
    ) -> list[Problem]:
        """Returns why this run cannot work, before any work starts; paths are relative to the builder's block.

        `row_locations` has file and line of each example by its id, as far as the loader knows them.
        """
        return []

    @abstractmethod
    async def start_run(self, run_id: str, meta: dict[str, Any] | None = None) -> None:
        """Starts a collection; `meta` has `epoch`, `run_id`, `trainer_config`, a refill `example_ids` and `round`."""

    @abstractmethod
    async def finalize(self, run_id: str, meta: dict[str, Any] | None = None) -> TrajectoryCollection:
        """Waits for the collection and returns every group, with or without signal."""

    async def compute_reward(self, output_item: EvalOutputItem, meta: dict[str, Any] | None = None) -> float | None:
        """Returns the reward of one score, or None where it is missing; see `is_resumable` for who calls it."""
        return output_item.as_reward()


class TrainerAdapter(AdapterBase, ABC):
    """Sends trajectories to a training backend and reports on the jobs."""

    trains_on: Literal["tokens", "messages"] = "tokens"
    """What it needs of a trained turn: its tokens as sampled, or the messages where no tokens are known."""
    serves_policy: bool = False
    """True: `policy()` works after `initialize`, so a run whose agent never calls it is refused."""

    def validate(self, run_config: FinetuneConfig) -> list[Problem]:
        """Returns the settings that this backend does not support, before anything is allocated."""
        return []

    @abstractmethod
    async def is_healthy(self) -> bool:
        """Returns True if the backend can take a job now."""

    @abstractmethod
    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        """Starts a job; submitting the same job key again returns the existing job."""

    @abstractmethod
    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Returns the status of a job; changes nothing."""

    @abstractmethod
    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        """Waits until a job has ended; `poll_interval` is in seconds, for a backend that must be polled."""

    def policy(self) -> PolicyServer | None:
        """Returns what `llms.<name>._type: policy` resolves to; None: this backend serves no policy."""
        return None


class Trainer(TrainerBase, ABC):
    """Repeats collecting and training over epochs."""

    trajectory_builder: TrajectoryBuilder
    trainer_adapter: TrainerAdapter
    is_resumable: bool = False  # True: `run` continues after the last finished epoch; False: a resumed run starts over
    collects_ahead: bool = False  # True: `run` may collect later epochs while a job trains (`limits.max_staleness`)

    async def bind_components(self, trajectory_builder: TrajectoryBuilder, trainer_adapter: TrainerAdapter) -> None:
        self.trajectory_builder, self.trainer_adapter = trajectory_builder, trainer_adapter

    @abstractmethod
    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        """Collects and trains once; None: nothing was submitted."""

    @abstractmethod
    async def run(self, num_epochs: int) -> list[TrainingJobStatus]: ...
    @abstractmethod
    async def get_metrics(self, run_id: str) -> dict[str, Any]: ...
    @abstractmethod
    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None: ...


class Workflow(Protocol):
    """The agent: `workflow(item, llm, context)`, async or plain, returns its output."""

    def __call__(self, item: Any, llm: Any, context: Any) -> Awaitable[Any] | Any:
        """Runs one episode.

        Args:
            item: The example (`EvalInputItem`); `item.input_obj` is the question.
            llm: `llm.chat.completions.create(messages=...)`, awaitable in async workflows, blocking in plain ones.
            context: `seed`, `function(name)`, `mark(...)`, `fail(...)`.
        """


class DatasetLoader(ABC):
    """Rows of examples."""

    @abstractmethod
    def load(self) -> list[EvalInputItem]:
        """Returns every example; a `ConfigError` lists all unusable rows by line."""


class Environment(ABC):
    """What an agent acts in, for one episode; `close` is called however the episode ends.

    An exception costs the episode, which is then missing; a `PolicyFailure` is a failure of the policy. Python's and
    NumPy's global random generators are this environment's own while one of its methods runs.
    """

    uses_global_random: bool = True  # False: it draws from generators of its own alone, which makes a call cheaper

    @abstractmethod
    async def reset(self, item: EvalInputItem, seed: int) -> Observation:
        """Starts the episode; equal items and seeds, and then equal replies, give equal observations."""

    @abstractmethod
    async def step(self, reply: Reply) -> StepResult: ...
    async def close(self) -> None:
        """Ends what the episode has started."""


class EnvironmentSource(DatasetLoader):
    """The tasks of a kind of environments, as rows, and an environment for each episode."""

    @abstractmethod
    def create(self) -> Environment:
        """Returns an environment for one episode of any of the tasks."""


class Evaluator(ABC):
    """Scores an answer."""

    reads_steps: bool = True  # False: it looks at the answer alone, and gets no `item.trajectory`
    needs_answer: bool = False  # True: an example without an expected answer gets no score
    is_function: bool = False  # True: a function of the user; without a score, its episode is a `reward_error`

    @abstractmethod
    async def evaluate(self, item: EvalInputItem) -> EvalOutputItem:
        """Returns the score of one example; higher is better. An exception makes the score missing."""


class GroupEvaluator(Evaluator):
    """Scores the answers to one example by comparing them; 0.5 means as good as what an answer was compared with.

    Siblings are compared with each other. An answer to a `select` or `confirm` example is compared with `reference`, so
    that validations and the verdict measure the same thing at every epoch.

    """

    reference: Literal["base", "expected"] = "base"
    """The base model's answer to the same example, which itself scores 0.5, or the example's expected answer."""

    @abstractmethod
    async def evaluate_group(self, items: Sequence[EvalInputItem]) -> list[EvalOutputItem]:
        """Returns the scores of two or more answers to one example, in their order; an exception: none has one."""

    async def evaluate(self, item: EvalInputItem) -> EvalOutputItem:
        """Returns the score of one answer in comparison with the expected answer."""
        if item.expected_output_obj is None:
            raise EvaluationError("it compares answers, and this example has no expected answer to compare with")
        alone = item.copy_with_updates(trajectory=[], expected_output_obj=None)  # a contestant is not an answer key
        reference = alone.copy_with_updates(output_obj=item.expected_output_obj)
        return (await self.evaluate_group([reference, alone]))[1]


class EvaluationRunner(RunnerBase, ABC):
    """Runs the workflow over examples and scores the outcomes; one concurrency limit for all calls."""

    epoch: int = 0  # the epoch that the episodes of `run_eval` belong to; the loop sets it

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
    def example_ids(self, split: str) -> list[str]: ...


class Algorithm(ABC):
    """Credit plus the name of a loss; holds no tensors, so that a job can be sent anywhere."""

    loss: LossSpec
    needs: Needs = Needs()  # what the engine computes before credit: old and reference log-probs, values
    needs_groups: bool = False
    """True: credit compares siblings; groups of one are refused, groups without spread skipped."""
    offline: bool = False
    """True: tokens that the policy did not sample can be trained; their `sampling_logprobs` are NaN."""
    teacher: Teacher | None = None  # its log-probs become the `ref_logprobs` of the samples

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
    def model_name(self) -> str: ...
    @property
    def is_policy(self) -> bool:
        """True if its replies are sampled from the weights being trained."""

    async def sample(self, request: ModelRequest) -> ModelReply: ...


@runtime_checkable
class Teacher(Protocol):
    """A model that scores what the policy sampled; it has the policy's tokens."""

    @property
    def model_name(self) -> str: ...
    async def prepare(self, tokenizer: Any) -> None:
        """Loads or reaches the model; a `ConfigError` if its tokens are not those of the policy's tokenizer."""

    async def score_samples(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Returns log p of each trained token, `[T]`, 0 elsewhere: at its temperature, over its kept tokens."""


class PolicyServer(PolicyServerBase, ABC):
    """Samples from the weights being trained. Weights change only while no reply is in flight."""

    tolerance: float = 1e-4
    """Maximum nats by which `sample` and `score` may differ on one token; the canary allows no more."""

    @property
    @abstractmethod
    def version(self) -> int:
        """The version of the weights that replies are sampled from now."""

    @property
    @abstractmethod
    def model_name(self) -> str: ...
    @abstractmethod
    async def sample(self, request: ModelRequest) -> ModelReply:
        """Samples one reply; calls may run concurrently. A prompt beyond the context is a `ContextOverflow`."""

    async def stream(
        self, request: ModelRequest, markers: Sequence[str] = ()
    ) -> AsyncGenerator[ReplyPiece | ModelReply, None]:
        """Yields the tokens of one reply as they are sampled, if it can, and then the reply; closing it stops sampling.

        Args:
            markers: Strings whose special tokens stay in the text of the pieces.
        """
        yield await self.sample(request)

    @abstractmethod
    async def score(self, token_ids: Sequence[Sequence[int]]) -> list[FloatArray]:
        """Returns the log-prob of each token given those before it, at temperature 1: `[T]` each, 0 for the first."""

    @abstractmethod
    async def publish(self, version: int) -> None:
        """Admits requests on the weights of `version`; caches of older weights are dropped."""

    @abstractmethod
    async def fingerprint(self) -> str:
        """Returns a short hash of the current weights: other weights, another hash."""


@runtime_checkable
class ServesSeveral(Protocol):
    """A policy server of several policies, which are trained and served side by side."""

    @property
    def names(self) -> tuple[str, ...]: ...
    def get_policy(self, name: str) -> PolicyServer:
        """Returns one of the policies in `names`: what `llms.<entry>.adapter: name` resolves to."""


@runtime_checkable
class Journal(Protocol):
    """The record of a run; every call returns at once, `flush` waits until everything is on disk."""

    def record_episode(self, record: EpisodeRecord) -> None:
        """Records one finished episode, missing ones too."""

    def record_stage(self, epoch: int, stage: str, data: dict[str, Any]) -> None:
        """Records that a stage of an epoch has ended."""

    def record_job(self, ref: TrainingJobRef, status: TrainingJobStatus, job_key: str) -> None: ...
    def record_policy_version(
        self, version: int, fingerprint: str, num_updates: int | None, checkpoint: str | None
    ) -> None: ...
    def flush(self) -> None: ...


class Tracker(ABC):
    """Sends the metrics of a run to a dashboard; the run folder stays the record.

    The methods are called one after the other on their own thread. What they raise is logged once and never stops
    the run.
    """

    finish_s, stop_s = 30.0, 4.0
    """Seconds that a run waits for `finish` at its end, and when it was stopped; above 4 s a signal waits, too."""

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
        """Closes the run; `status` is `completed`, `failed`, `cancelled`, or `stopped`, which may be resumed."""


class Builder(Protocol):
    """Gives a component's factory the configuration and the other components; each is made once, on first use."""

    @property
    def loaded(self) -> LoadedConfig: ...
    @property
    def config(self) -> Config: ...
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

    def get_max_concurrency(self) -> int: ...
    async def get_workflow(self) -> BoundWorkflow: ...
    async def get_function(self, name: str) -> Any: ...
    async def get_dataset(self, file: str | Path | None = None) -> DatasetLoader:
        """Returns the dataset's loader; `file` replaces the configured file."""

    async def get_evaluator(self, name: str) -> Evaluator: ...
    async def get_algorithm(self) -> Algorithm: ...
    async def get_model_path(self) -> str | None:
        """Returns the folder or hub id of the model to train."""

    async def get_bundled(self, model: str, path: str = "model") -> str:
        """Returns the folder of `bundled:NAME`; any other model is returned unchanged."""

    def policy(self) -> PolicyServer | None:
        """Returns the policy server of the trainer adapter; None before it is initialized, or if it serves none."""
