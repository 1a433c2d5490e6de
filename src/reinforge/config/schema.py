"""The blocks of a configuration that apply to a whole run; each component has its own configuration class."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from reinforge.config.finetuning_blocks import Block as Block
from reinforge.config.finetuning_blocks import (
    GuardsConfig,
    LimitsConfig,
    OutcomesConfig,
    SamplingConfig,
    TranscriptsConfig,
)
from reinforge.config.policy import BatchConfig, OptimizerConfig, PolicyConfig, ScheduleConfig
from reinforge.errors import ConfigError, Problem
from reinforge.registry import TypedConfig

PARTIAL = "partial"
"""Key of the validation context under which a configuration may lack required components; see `config/partial.py`."""


class RewardFunctionConfig(Block):
    """The evaluator whose score is the reward."""

    name: str = Field(description="Name of an entry of eval.evaluators.")


class TrainerConfig(TypedConfig):
    """Base of every trainer's configuration."""

    reward: RewardFunctionConfig | None = Field(default=None, description="Set by the run from reward_function.")


class TrajectoryBuilderConfig(TypedConfig):
    """Base of every trajectory builder's configuration."""

    reward: RewardFunctionConfig | None = Field(default=None, description="Set by the run from reward_function.")


class TrainerAdapterConfig(TypedConfig):
    """Base of every trainer adapter's configuration."""

    reward: RewardFunctionConfig | None = Field(default=None, description="Set by the run from reward_function.")

    @property
    def served_models(self) -> tuple[str, ...]:
        """Names by which entries of `llms` may call the trained model, of which the first that any has counts."""
        return ()

    def prepare_restarts(self) -> Callable[[], None]:
        """Starts what the processes of a run with `--restarts` share; the result waits for it, before the first fork.

        It must leave no further thread in this process.
        """
        return lambda: None


class CallMatch(Block):
    """Requests of an agent that an entry of `llms` answers, whatever model they name: all that is set must hold."""

    model: str | None = Field(default=None, description="Pattern of the requested name, such as `claude-haiku-*`.")
    tools: bool | None = Field(default=None, description="Whether the request offers tools.")
    system: str | None = Field(default=None, description="In the first line of the system prompt, or of its blocks.")
    prompt: str | None = Field(default=None, description="In the first line of the last message.")
    properties: list[str] | None = Field(default=None, description="Properties of the JSON schema of the reply.")
    program: Literal["claude_code", "codex", "gemini_cli", "opencode", "qwen_code"] | None = Field(
        default=None, description="The calls that this program makes beside its work: titles, summaries, classifiers."
    )


class LLMConfig(TypedConfig):
    """Base of every entry of `llms`."""

    match: list[CallMatch] = Field(default=[], description="Requests that this entry answers: a block, or a list.")
    train: bool = Field(default=True, description="False: what the policy replies through this entry is not trained.")

    @field_validator("match", mode="before", json_schema_input_type=list[CallMatch] | CallMatch)
    @classmethod
    def _list_matches(cls, match: Any) -> Any:
        return match if isinstance(match, list) else [match]


class WorkflowConfig(TypedConfig):
    """Base of every workflow's configuration."""

    placement: Literal["driver", "processes", "ray"] = Field(
        default="driver",
        description="Where episodes run: `driver`: in the run's own process; `processes`: in other processes of this "
        "machine; `ray`: in processes on the nodes of a Ray cluster. Sampling and recording stay where they are.",
    )
    num_processes: int = Field(
        default=2,
        ge=1,
        le=4096,
        description="How many processes share the episodes, with a `placement` other than `driver`.",
    )

    def add_llms(self, llms: dict[str, LLMConfig]) -> list[str]:
        """Adds the entries of `llms` that the workflow brings along, and returns their names."""
        return []


class DatasetConfig(TypedConfig):
    """Base of every dataset's configuration."""


class EnvironmentConfig(TypedConfig):
    """Base of every environment's configuration; `environment: TYPE:NAME` sets the type and its `main_key`."""

    main_key: ClassVar[str] = "name"
    install: ClassVar[str] = ""  # the command that installs what it needs; empty: nothing
    license: ClassVar[str] = ""
    metrics: ClassVar[tuple[str, ...]] = ()
    """Metrics that each of its episodes has beside the reward; the verdict uses the first."""
    is_concurrent: ClassVar[bool] = False
    """Whether a process works at several calls at a time, since most of each is waiting."""

    def find_interpreter(self, project_root: Path) -> str:
        """Returns the Python that runs its processes; a `ConfigError` if it is not there."""
        return sys.executable

    @classmethod
    def find_package(cls, name: str, called: str = "") -> Path:
        """Returns the folder of the package that it needs, without importing it; a `ConfigError` if it is missing."""
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ConfigError(Problem("_type", f"the package {called or name} is not installed", cls.install))
        return Path(spec.origin).parent

    @classmethod
    def list_names(cls) -> list[str]:
        """Returns the values of `main_key` that are known here; a `ConfigError` if its package is not installed."""
        return []

    num_workers: int = Field(default=2, ge=1, le=256, description="Processes that share the episodes' environments.")
    step_timeout_s: float = Field(default=60.0, gt=0, description="Seconds that a reset or a step may take.")
    memory_mb: int = Field(default=4096, ge=64, description="Memory that a process of environments may use, in MiB.")


class EvaluatorConfig(TypedConfig):
    """Base of every evaluator's configuration."""


class AlgorithmConfig(TypedConfig):
    """Base of every algorithm's configuration."""


class TrackerConfig(TypedConfig):
    """Base of every tracker's configuration."""


class LevelsConfig(Block):
    """Collects examples of the lowest level first, and those of the next level once the policy has learned these."""

    threshold: float = Field(
        default=0.7,
        description="Mean training reward of the examples of the highest level so far at which the next one is added.",
    )
    window: int = Field(default=2, ge=1, description="Epochs with such examples over which the mean is taken.")


class CurriculumLearningConfig(Block):
    """Trains on the easiest groups first and adds harder ones over the epochs."""

    enabled: bool = Field(default=False, description="Use the curriculum.")
    initial_percentile: float = Field(
        default=0.3, gt=0, le=1, description="Share of the groups to train on at the start."
    )
    increment_percentile: float = Field(default=0.2, gt=0, le=1, description="Share added by each expansion.")
    expansion_interval: int = Field(default=5, ge=1, description="Epochs between expansions.")
    min_reward_diff: float = Field(
        default=0.1,
        ge=0,
        description="A group whose highest and lowest reward differ by less than this has no training signal and is "
        "not trained on, with or without the curriculum.",
    )
    sort_ascending: bool = Field(default=False, description="Start with the hardest groups (lowest mean reward).")
    levels: LevelsConfig | None = Field(
        default=None,
        description="Use the `level` of the training rows, a whole number; null: train on all levels from the start.",
    )
    random_subsample: float | None = Field(
        default=None, gt=0, le=1, description="Share of the trajectories to keep in each group; null: all."
    )
    max_variance_subsample: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of the trajectories to train in each group, at least two: those of the highest and of the "
        "lowest rewards, whose variance is largest (PODS); null: all.",
    )
    collect_only_included: bool = Field(
        default=False,
        description="Run fewer episodes: skip an example if its last group would be outside the share. New examples, "
        "and those whose last group had no training signal, are always collected.",
    )


class FinetuneRunConfig(BaseModel):
    """Settings of one call of `finetune`; ignores unknown keys, as the NeMo Agent Toolkit does."""

    model_config = ConfigDict(extra="ignore", arbitrary_types_allowed=True)

    config_file: Path | BaseModel | None = Field(default=None, description="The YAML file, or a loaded configuration.")
    dataset: str | Path | None = Field(default=None, description="Dataset file that replaces the configured one.")
    result_json_path: str = Field(default="$", description="JSONPath into the response of a remote workflow.")
    endpoint: str | None = Field(default=None, description="URL of a remote workflow.")
    endpoint_timeout: int = Field(default=300, description="Seconds to wait for a remote workflow.")
    override: tuple[tuple[str, str], ...] = Field(default=(), description="Pairs of path and value.")
    validation_dataset: str | Path | None = Field(
        default=None, description="Dataset file for the select and confirm splits."
    )
    validation_interval: int = Field(default=5, ge=1, description="Epochs between validations.")
    validation_config_file: str | Path | None = Field(
        default=None, description="YAML file whose eval section is used for validation."
    )


class SplitsConfig(Block):
    """How examples are split, by their id. Shares apply to the examples left after the counts."""

    train: float = Field(default=0.6, gt=0, description="Share (≤ 1) or count (> 1) of examples to train on.")
    select: float = Field(
        default=0.15, gt=0, description="Share or count of examples for selecting the best checkpoint."
    )
    confirm: float = Field(
        default=0.25, gt=0, description="Share or count of examples for the verdict; used once, at the end."
    )
    key: str | None = Field(
        default=None,
        description="Field of the rows that holds train, select or confirm; replaces the shares. Or the field with the "
        "id: each id is then a separate example, even if rows differ in nothing else (the environment of an example "
        "is seeded by its id).",
    )
    group_key: str | None = Field(
        default="conversation",
        description="Column whose equal values keep rows in one split and count once in every interval, such as the "
        "conversation, the user, the document or the template that they come from; rows without it stand alone. Null: "
        "none.",
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        description="Decides which examples a split gets; null: finetuning.seed. Set it to compare runs of different "
        "seeds on the same examples.",
    )
    fixed: bool = Field(
        default=False,
        description="For a dataset that grows: hash of group_key and seed decide the split, in every run alike. "
        "Rows to train on that repeat a held-out question are left out: near ones with near_duplicates: group, none "
        "with allow.",
    )
    near_duplicates: Literal["warn", "group", "refuse", "allow"] = Field(
        default="warn",
        description="What to do about questions of select or confirm that nearly repeat one of train: warn; group: put "
        "them into one split; refuse: do not run; allow.",
    )
    near_duplicate_similarity: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description="Similarity from which two questions are near-duplicates: the share of their runs of five words "
        "that both have.",
    )


class GateConfig(Block):
    """When the trained model is promoted."""

    metric: str | None = Field(default=None, description="Evaluator that decides; null: the reward function.")
    reference: str | None = Field(
        default=None,
        description="Promote a model that is not worse than this by more than the margin: `logs`, the replies in the "
        "rows, or `llms.NAME`, which answers the confirm examples once. null: one that is better than the base.",
    )
    margin: float = Field(
        default=0.0,
        description="The confidence interval of the improvement must be above this. With a reference: the largest loss "
        "to accept, default 0.02.",
    )
    num_samples: int = Field(default=1, ge=1, description="Episodes per confirm example, for each of the two models.")
    guard_metrics: dict[str, float] = Field(
        default_factory=dict,
        description="Evaluator -> maximum drop: the confidence interval of its change must be above minus this.",
    )
    regression: Path | None = Field(default=None, description="File on whose examples the metric must not drop.")
    regression_margin: float = Field(
        default=0.02, gt=0, description="Its drop there must be below this, all its interval."
    )
    max_missing: float = Field(
        default=0.2,
        ge=0,
        le=1,
        description="Share of confirm examples that may be missing; if more are missing, there is no verdict.",
    )
    allow_no_verdict: bool = Field(
        default=False,
        description="Run even if the confirm examples are too few to ever show an improvement; false: do not start.",
    )

    @model_validator(mode="after")
    def _set_loss(self) -> GateConfig:
        if self.reference is not None:
            self.margin = self.margin if "margin" in self.model_fields_set else 0.02
            if self.margin <= 0:
                message = "margin must be above 0 with a reference: it is the largest loss to accept"
                raise PydanticCustomError("margin_is_a_loss", message)
        return self

    @property
    def smallest_gain(self) -> float:
        """What the improvement on the base must exceed."""
        return self.margin if self.reference is None else 0.0


class StagePolicyConfig(Block):
    """How a stage of a pipeline trains; keys that it leaves out are as in finetuning.policy."""

    optimizer: OptimizerConfig | None = Field(default=None, description="Replaces keys of policy.optimizer.")
    schedule: ScheduleConfig | None = Field(default=None, description="Replaces keys of policy.schedule.")
    batch: BatchConfig | None = Field(default=None, description="Replaces keys of policy.batch.")


class StageConfig(Block):
    """One stage of a pipeline; what it leaves out is as in `finetuning`."""

    num_epochs: int = Field(default=1, ge=1, description="Number of epochs of this stage.")
    algorithm: Any = Field(
        default=None, description="`_type` of an algorithm and its settings; null: finetuning.algorithm."
    )
    trajectory_builder: str | None = Field(
        default=None, description="Name of an entry of trajectory_builders; null: finetuning.trajectory_builder."
    )
    dataset: str | None = Field(
        default=None,
        description="File with the training examples of this stage, such as demonstrations; null: those of the run. "
        "Rows with the prompt or the conversation of a held-out example are left out.",
    )
    sampling: SamplingConfig | None = Field(
        default=None,
        description="Sampling of the episodes that this stage trains on; null: finetuning.sampling, as in validation.",
    )
    policy: StagePolicyConfig = Field(default_factory=StagePolicyConfig)
    start_from: Literal["last", "best"] = Field(
        default="last",
        description="Weights that the stage trains: `last`, those of the stage before; `best`, the checkpoint of all "
        "stages before with the highest score on `select`, which may be the untouched model.",
    )


class FinetuneConfig(Block):
    """What to train, with which reward, for how long."""

    enabled: bool = Field(default=False, description="Must be true for a run to start.")
    trainer: str | None = Field(default=None, description="Name of an entry of trainers.")
    trajectory_builder: str | None = Field(default=None, description="Name of an entry of trajectory_builders.")
    trainer_adapter: str | None = Field(default=None, description="Name of an entry of trainer_adapters.")
    reward_function: RewardFunctionConfig | None = Field(
        default=None, description="The evaluator whose score is the reward."
    )
    target_functions: list[str] = Field(
        default_factory=lambda: ["<workflow>"], description="Functions whose model calls are trained on."
    )
    target_model: str | None = Field(default=None, description="Entry of llms (or model name) to train.")
    curriculum_learning: CurriculumLearningConfig = Field(default_factory=CurriculumLearningConfig)
    num_epochs: int = Field(
        default=1,
        ge=1,
        description="Number of epochs; each collects episodes and trains on them. With a pipeline: the sum of those of "
        "its stages.",
    )
    pipeline: dict[str, StageConfig] = Field(
        default_factory=dict,
        description="Stages by name, in their order; each trains the model of the stage before. Empty: one stage, with "
        "the settings of `finetuning`.",
    )
    output_dir: Path = Field(default=Path("./.reinforge/runs"), description="Folder that contains the run folders.")
    run_configuration: FinetuneRunConfig | None = Field(default=None, description="Set by the command line.")
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    algorithm: Any = Field(default=None, description="`_type` of an algorithm and its settings; null: grpo.")
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    splits: SplitsConfig = Field(default_factory=SplitsConfig)
    gate: GateConfig = Field(default_factory=GateConfig)
    outcomes: OutcomesConfig = Field(default_factory=OutcomesConfig)
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    transcripts: TranscriptsConfig = Field(default_factory=TranscriptsConfig)
    guards: GuardsConfig = Field(default_factory=GuardsConfig)
    trackers: dict[str, Any] = Field(
        default_factory=dict, description="Dashboards that the metrics also go to, by name, each with a `_type`."
    )
    seed: int = Field(default=0, ge=0, description="Seed of every random choice of the run.")
    deterministic: bool = Field(
        default=False,
        description="Bit-identical results on one machine, even after a resume; slower: one thread, and one prompt per "
        "prefill.",
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = Field(default="auto", description="Device of the policy.")

    @model_validator(mode="after")
    def _complete(self, info: ValidationInfo) -> FinetuneConfig:
        """Counts the epochs of a pipeline; raises if something that fine-tuning needs is missing."""
        if self.pipeline:
            self.num_epochs = sum(stage.num_epochs for stage in self.pipeline.values())
        if self.enabled and PARTIAL not in (info.context or {}):
            names = ("trainer", "trajectory_builder", "trainer_adapter", "reward_function")
            missing = [name for name in names if getattr(self, name) is None]
            if missing:
                raise PydanticCustomError(
                    "enabled_needs_components",
                    "finetuning is enabled, so these are required: {missing}",
                    {"missing": ", ".join(missing)},
                )
        return self


class EvalGeneralConfig(Block):
    """Settings of every evaluation."""

    max_concurrency: int = Field(default=8, ge=1, description="Maximum number of episodes to run at the same time.")
    output_dir: Path | None = Field(
        default=None,
        description="Folder for the result files of `eval`: workflow_output.json, and EVALUATOR_output.json of each "
        "evaluator; null: none are written.",
    )
    dataset: Any = Field(default=None, description="`_type` of a dataset and its settings.")


class EvalConfig(Block):
    """The dataset and the evaluators."""

    general: EvalGeneralConfig = Field(default_factory=EvalGeneralConfig)
    evaluators: dict[str, Any] = Field(default_factory=dict, description="Evaluators by name.")


Section = Annotated[dict[str, Any], Field(default_factory=dict)]


class Config(Block):
    """A whole configuration; each component is an instance of its configuration class."""

    llms: Section
    functions: Section
    workflow: Any = None
    environment: Any = None
    prompts: dict[str, str] = Field(
        default_factory=dict,
        description="Texts that replace the agent's own, by the name in `context.text(name, ...)`.",
    )
    eval: EvalConfig = Field(default_factory=EvalConfig)
    trajectory_builders: Section
    trainer_adapters: Section
    trainers: Section
    finetuning: FinetuneConfig = Field(default_factory=FinetuneConfig)
