"""The configuration of the embedded backend."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from reinforge.config.schema import TrainerAdapterConfig
from reinforge.scale.vllm.config import VLLMSamplerConfig
from reinforge.types.sharding import Sharding


class LocalAdapterConfig(TrainerAdapterConfig, name="local"):
    """Trains in this process; model, optimizer and batches are configured in `finetuning.policy`."""

    model_config = ConfigDict(hide_input_in_errors=True)  # the key of a sampler must not end up in a message

    fine_tune_from_scratch: bool = Field(
        default=False,
        description="Start each job from the run's first weights instead of the previous job's; for algorithms that "
        "imitate samples or compare pairs, such as expert_iteration and malt.",
    )
    sampler: VLLMSamplerConfig | None = Field(
        default=None,
        description="`_type: vllm`: a vLLM server samples the replies, and gets the weights after each job. Null: the "
        "embedded sampler, in this process.",
    )
    sharding: Sharding = Field(
        default="auto",
        description="How several processes (of torchrun, or of `_type: ray`) hold the model while they train. "
        "replicate: each a whole copy. full: weights, gradients and optimizer state are divided among them. auto: full "
        "only if one of them has too little memory for the whole.",
    )
    peer_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="How long one of several processes waits for the others before it takes them as gone; longer than "
        "the slowest needs for its part of an optimizer step.",
    )
