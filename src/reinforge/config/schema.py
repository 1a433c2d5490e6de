"""The run-wide blocks of a configuration; a component's own configuration stands beside the component."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from reinforge.registry import TypedConfig


class Block(BaseModel):
    """Base of the blocks: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


class RewardFunctionConfig(Block):
    """Names the evaluator whose score is the reward."""

    name: str = Field(description="An entry of eval.evaluators.")


class TrainerConfig(TypedConfig):
    """Base of every trainer's configuration."""

    reward: RewardFunctionConfig | None = Field(default=None, description="Set by the run from reward_function.")


class TrajectoryBuilderConfig(TypedConfig):
    """Base of every trajectory builder's configuration."""

    reward: RewardFunctionConfig | None = Field(default=None, description="Set by the run from reward_function.")


class TrainerAdapterConfig(TypedConfig):
    """Base of every trainer adapter's configuration."""

    reward: RewardFunctionConfig | None = Field(default=None, description="Set by the run from reward_function.")


class LLMConfig(TypedConfig):
    """Base of every entry of `llms`."""


class WorkflowConfig(TypedConfig):
    """Base of every workflow's configuration."""


class DatasetConfig(TypedConfig):
    """Base of every dataset's configuration."""


class EvaluatorConfig(TypedConfig):
    """Base of every evaluator's configuration."""


class AlgorithmConfig(TypedConfig):
    """Base of every algorithm's configuration."""


class CurriculumLearningConfig(Block):
    """Trains on the easiest groups first and widens the share as epochs pass."""

    enabled: bool = Field(default=False, description="Apply the curriculum.")
    initial_percentile: float = Field(default=0.3, gt=0, le=1, description="Share of groups at the start.")
    increment_percentile: float = Field(default=0.2, gt=0, le=1, description="Share added at each expansion.")
    expansion_interval: int = Field(default=5, ge=1, description="Epochs between expansions.")
    min_reward_diff: float = Field(
        default=0.1, ge=0, description="Groups whose highest and lowest reward differ by less carry no signal."
    )
    sort_ascending: bool = Field(default=False, description="Hardest (lowest mean reward) groups first.")
    random_subsample: float | None = Field(
        default=None, gt=0, le=1, description="Share of trajectories kept in each group."
    )
    collect_only_included: bool = Field(
        default=False,
        description="Save episodes: do not collect an example whose last group would be outside the share. Examples "
        "that are new, or whose last group carried no signal, are always collected.",
    )


class FinetuneRunConfig(BaseModel):
    """What one call of `finetune` adds to the file; unknown keys are ignored here, as in the reference."""

    model_config = ConfigDict(extra="ignore", arbitrary_types_allowed=True)

    config_file: Path | BaseModel | None = Field(default=None, description="The YAML file, or a loaded one.")
    dataset: str | Path | None = Field(default=None, description="Replaces the file's dataset.")
    result_json_path: str = Field(default="$", description="JSONPath into the answer of a remote workflow.")
    endpoint: str | None = Field(default=None, description="URL of a remote workflow.")
    endpoint_timeout: int = Field(default=300, description="Seconds to wait for a remote workflow.")
    override: tuple[tuple[str, str], ...] = Field(default=(), description="Pairs of path and value.")
    validation_dataset: str | Path | None = Field(default=None, description="Dataset to select and confirm on.")
    validation_interval: int = Field(default=5, ge=1, description="Epochs between validations.")
    validation_config_file: str | Path | None = Field(default=None, description="Another file's eval block.")


class OptimizerConfig(Block):
    """How weights move. A setting that the chosen optimizer does not read is refused unless it has its default."""

    READ_BY: ClassVar[dict[str, tuple[str, ...]]] = {
        "betas": ("adamw", "adam"),
        "eps": ("adamw", "adam", "rmsprop", "adagrad"),
        "momentum": ("sgd", "rmsprop"),
        "smoothing": ("rmsprop",),
    }

    name: Literal["adamw", "adam", "sgd", "rmsprop", "adagrad"] = Field(
        default="adamw", description="The optimizer; each but adam and adamw wants a learning rate of its own."
    )
    learning_rate: float = Field(default=1e-3, gt=0, description="Peak learning rate (1e-3 suits models from scratch).")
    betas: tuple[float, float] = Field(default=(0.9, 0.95), description="adamw, adam: decay of the two moments.")
    eps: float = Field(default=1e-8, gt=0, description="All but sgd: added to the root of the second moment.")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="sgd, rmsprop: share of the last move in the next.")
    smoothing: float = Field(default=0.99, ge=0, lt=1, description="rmsprop: decay of the mean square.")
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        description="On matrices only; adamw takes it off the weights, the others add it to gradients.",
    )
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients are scaled down to this norm.")

    @property
    def num_moments(self) -> int:
        """Numbers that the optimizer keeps for each weight."""
        averages = {"adamw": 2, "adam": 2, "sgd": 0, "rmsprop": 1, "adagrad": 1}
        return averages[self.name] + (self.momentum > 0)

    @model_validator(mode="after")
    def _settings_are_read(self) -> OptimizerConfig:
        for setting, readers in self.READ_BY.items():
            if self.name not in readers and getattr(self, setting) != type(self).model_fields[setting].default:
                raise PydanticCustomError(
                    "setting_not_read",
                    "{name} reads no {setting}; it belongs to {readers}",
                    {"name": self.name, "setting": setting, "readers": " and ".join(readers)},
                )
        return self


class ScheduleConfig(Block):
    """How the learning rate changes over the run."""

    name: Literal["constant", "linear", "cosine"] = Field(default="constant", description="Shape after the warm-up.")
    warmup_steps: int = Field(default=10, ge=0, description="Optimizer steps of linear warm-up, from lr/steps.")
    final_fraction: float = Field(default=0.1, ge=0, le=1, description="Share of the peak left at the run's end.")


class BatchConfig(Block):
    """How one job's samples become optimizer steps."""

    steps_per_job: int | None = Field(
        default=None, ge=1, description="Optimizer steps a pass; the samples are split evenly. Null: by batch_size."
    )
    batch_size: int = Field(default=64, ge=1, description="Samples per optimizer step where steps_per_job is null.")
    passes: int = Field(default=1, ge=1, description="Passes over the job's samples.")
    micro_batch_tokens: int = Field(
        default=8192, ge=1, description="Tokens, padding included, computed at once; bounds memory, not the result."
    )


class LoRAConfig(Block):
    """Low-rank adapters: a frozen model and a small part that learns. They want about ten times the learning rate."""

    rank: int = Field(default=16, ge=1, description="Rank of each adapter.")
    alpha: int = Field(default=32, ge=1, description="An adapter's output is multiplied by alpha / rank.")
    target_modules: Literal["all-linear"] | list[str] = Field(
        default="all-linear", description="Last parts of the names of linear layers, or all but the output layer."
    )


class CriticConfig(Block):
    """The value head, where the algorithm has one (`ppo`)."""

    learning_rate: float = Field(default=1e-3, gt=0, description="Peak learning rate of the value head.")
    shares_trunk: bool = Field(
        default=True, description="The critic's loss trains the policy's layers too; false: the head alone."
    )


class PolicyConfig(Block):
    """The model that is trained."""

    model: str | None = Field(
        default=None, description="Folder, hub id, or the name of a bundled starter such as bundled:tic_tac_toe."
    )
    init: Literal["pretrained", "random"] = Field(
        default="pretrained", description="random: take only the configuration and draw the weights by the seed."
    )
    tokenizer: str | None = Field(default=None, description="Folder or hub id; null: the model's own.")
    chat_template: str | None = Field(default=None, description="A Jinja template or a file with one.")
    precision: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Type that the model computes with; the optimizer moves float32 copies of bfloat16 weights.",
    )
    activation_checkpointing: bool = Field(
        default=False,
        description="Keep only each layer's input for the backward pass and compute the rest again: less memory, about "
        "a third more time.",
    )
    max_context: int | None = Field(default=None, ge=2, description="Tokens of prompt and reply; null: the model's.")
    max_batch: int = Field(default=64, ge=1, description="Replies drawn at the same time.")
    kv_cache_mb: int = Field(
        default=512,
        ge=0,
        description="Most MiB of keys and values kept between the turns of conversations, so that a turn reads only "
        "what is new in its prompt; they go when weights change. 0: keep none. Without effect where deterministic.",
    )
    lora: LoRAConfig | None = Field(
        default=None, description="Train adapters; null: all weights. A folder of adapters brings its own."
    )
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    batch: BatchConfig = Field(default_factory=BatchConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)


class SamplingConfig(Block):
    """How replies are drawn in training and validation; these override what the agent asks for.

    What top_p, top_k and min_p leave is recorded with each token, and training compares log-probs over it; tokens drawn
    at temperature 0, or from more than 1024 that these left, are not trained.
    """

    temperature: float = Field(default=1.0, ge=0, description="0 takes the most likely token, and trains none.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus: the fewest tokens that reach this; 1: all.")
    top_k: int = Field(default=0, ge=0, description="Most likely tokens kept; 0: all.")
    min_p: float = Field(
        default=0.0, ge=0, le=1, description="Tokens kept: at least this share as likely as the likeliest; 0: all."
    )


class SplitsConfig(Block):
    """How the dataset's examples are divided, by example id; shares are of what is left after counts."""

    train: float = Field(default=0.6, gt=0, description="Share (≤ 1) or count (> 1) of examples to train on.")
    select: float = Field(default=0.15, gt=0, description="Share or count to choose the best checkpoint on.")
    confirm: float = Field(default=0.25, gt=0, description="Share or count for the verdict, looked at once.")
    key: str | None = Field(
        default=None, description="A field of the rows that says train, select or confirm; replaces the shares."
    )


class GateConfig(Block):
    """When the new model replaces the old one."""

    metric: str | None = Field(default=None, description="Evaluator that decides; null: the reward function's.")
    margin: float = Field(default=0.0, description="The interval of the improvement must lie above this.")
    draws: int = Field(default=1, ge=1, description="Episodes per confirm example and arm.")
    guard_metrics: dict[str, float] = Field(
        default_factory=dict, description="Evaluator -> largest loss allowed: its interval must lie above minus this."
    )
    max_missing: float = Field(
        default=0.2, ge=0, le=1, description="Share of confirm examples that may be missing; above it: no verdict."
    )


class OutcomesConfig(Block):
    """What an episode is worth when it does not end well."""

    policy_error: float = Field(default=0.0, description="Reward of an illegal act or an answer nobody can parse.")
    overlong: float = Field(default=0.0, description="Reward of a reply cut at max_tokens that made the agent fail.")
    context_overflow: float = Field(default=0.0, description="Reward of a prompt longer than the context.")
    policy_timeout: float = Field(default=0.0, description="Reward of an agent that talked past its time.")
    retries: int = Field(default=2, ge=0, description="Further attempts after the world failed.")
    max_missing: float = Field(
        default=0.5, ge=0, le=1, description="Share of a stage's episodes that may be missing before the run stops."
    )


class LimitsConfig(Block):
    """Bounds of a run."""

    max_minutes: float | None = Field(default=None, gt=0, description="Stop resumably after this long.")
    max_tokens: int | None = Field(default=None, gt=0, description="Stop resumably after this many sampled tokens.")
    episode_timeout_s: float = Field(default=120.0, gt=0, description="Seconds an episode may take.")
    evaluator_timeout_s: float = Field(
        default=120.0, gt=0, description="Seconds an evaluator may take for one answer; then the score is missing."
    )
    stage_timeout_s: float = Field(
        default=600.0, gt=0, description="Seconds without progress before the watchdog speaks."
    )
    max_refills: int = Field(default=1, ge=0, description="Further collections of an epoch whose groups lack signal.")
    min_groups: float = Field(
        default=0.25, ge=0, le=1, description="Share of an epoch's groups that must carry signal, else refill."
    )
    max_empty_updates: int = Field(default=3, ge=1, description="Epochs in a row that train nothing before it stops.")
    max_refused_steps: int = Field(
        default=3,
        ge=1,
        description="Optimizer steps in a row whose numbers were not finite, and which were not made, before it stops.",
    )


class TranscriptsConfig(Block):
    """What is written of dialogues of several agents for a person to read, below the run folder."""

    save: bool = Field(default=True, description="Write `transcripts/` while the run goes on.")
    format: Literal["yaml", "json"] = Field(default="yaml", description="Of the files.")
    max_episodes: int = Field(default=32, ge=1, description="Episodes in each file, the first by example and draw.")


class FinetuneConfig(Block):
    """What to train, on which reward, for how long."""

    enabled: bool = Field(default=False, description="False: refuse to run.")
    trainer: str | None = Field(default=None, description="An entry of trainers.")
    trajectory_builder: str | None = Field(default=None, description="An entry of trajectory_builders.")
    trainer_adapter: str | None = Field(default=None, description="An entry of trainer_adapters.")
    reward_function: RewardFunctionConfig | None = Field(default=None, description="The evaluator that is the reward.")
    target_functions: list[str] = Field(
        default_factory=lambda: ["<workflow>"], description="Functions whose model calls are trained."
    )
    target_model: str | None = Field(default=None, description="Entry of llms (or model name) that is trained.")
    curriculum_learning: CurriculumLearningConfig = Field(default_factory=CurriculumLearningConfig)
    num_epochs: int = Field(default=1, ge=1, description="Times to collect and train.")
    output_dir: Path = Field(default=Path("./.reinforge/runs"), description="Folder of the run folders.")
    run_configuration: FinetuneRunConfig | None = Field(default=None, description="Set by the command line.")
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    algorithm: Any = Field(default=None, description="`_type` of an algorithm and its settings; null: grpo.")
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    splits: SplitsConfig = Field(default_factory=SplitsConfig)
    gate: GateConfig = Field(default_factory=GateConfig)
    outcomes: OutcomesConfig = Field(default_factory=OutcomesConfig)
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    transcripts: TranscriptsConfig = Field(default_factory=TranscriptsConfig)
    seed: int = Field(default=0, ge=0, description="Every random choice of the run derives from it.")
    deterministic: bool = Field(
        default=False,
        description="Bit-identical on one machine, also after a stop: one thread, each prompt read alone; slower.",
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = Field(default="auto", description="Where the policy lives.")

    @model_validator(mode="after")
    def _enabled_needs_components(self) -> FinetuneConfig:
        if self.enabled:
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
    """What every evaluation shares."""

    max_concurrency: int = Field(default=8, ge=1, description="Episodes that run at the same time.")
    output_dir: Path | None = Field(default=None, description="Where `eval` writes its files; null: beside the run.")
    dataset: Any = Field(default=None, description="`_type` of a dataset and its settings.")


class EvalConfig(Block):
    """The dataset and the evaluators."""

    general: EvalGeneralConfig = Field(default_factory=EvalGeneralConfig)
    evaluators: dict[str, Any] = Field(default_factory=dict, description="Evaluators by name.")


Section = Annotated[dict[str, Any], Field(default_factory=dict)]


class Config(Block):
    """A whole configuration; components are instances of their own configuration classes."""

    llms: Section
    functions: Section
    workflow: Any = None
    eval: EvalConfig = Field(default_factory=EvalConfig)
    trajectory_builders: Section
    trainer_adapters: Section
    trainers: Section
    finetuning: FinetuneConfig = Field(default_factory=FinetuneConfig)
