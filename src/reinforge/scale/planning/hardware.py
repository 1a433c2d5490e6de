"""What GPUs do by their data sheets, and how much of that samplers and trainers are assumed to reach.

Of each assumption the source stands beside it. None of this was measured by us: `reinforge preflight --cluster` says
so, and a plan may replace every number.
"""

from __future__ import annotations

from dataclasses import dataclass

from reinforge.scale.planning.simulation import Costs, DriverCosts, SamplerCosts, TrainerCosts

GB = 1e9
BYTES_PER_WEIGHT = 2  # bfloat16, while sampling
BYTES_OF_STATE = {"full": 16, "lora": 2}
"""Bytes for each weight while training: float32 copies, gradient and two moments; of a frozen one bfloat16 alone."""
FLOPS_PER_WEIGHT = {"full": 6, "lora": 4}
"""Of a trained token: forward 2, and backward 2 each for inputs and weights; frozen weights need no gradient."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by its data sheet: dense bfloat16 products, memory, and its bandwidth."""

    memory_gb: float
    gb_per_s: float
    tflops: float


GPUS = {
    "a100": Gpu(80, 2039, 312),
    "h100": Gpu(80, 3350, 989),
    "h200": Gpu(141, 4800, 989),
    "b200": Gpu(180, 7700, 2250),
    "l40s": Gpu(48, 864, 362),
    "rtx4090": Gpu(24, 1008, 165),
}
"""NVIDIA's data sheets of A100 80GB SXM, H100 SXM, H200 SXM, B200 (of a DGX), L40S and the Ada architecture."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides how long it takes."""

    parameters: float
    kv_bytes: float  # keys and values of a token: layers x heads of keys and values x their size x 2 x 2 bytes


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the data sheet that are reached.

    With these, one H100 samples 10 k tokens/s of an 8 B model at 256 replies of 500 tokens of context; 12.5 k tokens/s
    were published for vLLM (docs/scale.md has the sources). torchtitan publishes 33 to 39 % of the peak for FSDP2 with
    8 B on 8 to 128 H100s.
    """

    bandwidth: float = 0.6
    products: float = 0.5
    training: float = 0.35


DRIVER = DriverCosts(
    call_s=1.2e-4, token_s=7e-8, message_s=4.4e-4, message_token_s=2e-6, episode_s=1.1e-4, journal_s=3e-5
)
"""Measured on a core that other programs used, too: `benchmarks/driver.py calls`, `server`, `scale_simulation.py`."""
STEP_OVERHEAD_S = 2e-3  # of a decode step beside the GPU's work: scheduling and launching
CHECK_S = 2.0  # pausing the samplers, and checking the new weights with some replies
LORA_SHARE = 0.01  # of the weights that are published with LoRA, about those of rank 32


def derive_sampler(model: ModelShape, gpu: Gpu, num_gpus: int, slots: int, shares: Shares) -> SamplerCosts:
    """Returns the costs of one replica, whose weights and work are divided among its GPUs."""
    bytes_per_s = num_gpus * gpu.gb_per_s * GB * shares.bandwidth
    token_s = 2 * model.parameters / (num_gpus * gpu.tflops * 1e12 * shares.products)
    return SamplerCosts(
        step_s=STEP_OVERHEAD_S + BYTES_PER_WEIGHT * model.parameters / bytes_per_s,
        sequence_s=token_s,
        prompt_token_s=token_s,
        context_token_s=model.kv_bytes / bytes_per_s,
        slots=slots,
    )


def derive_trainer(model: ModelShape, gpu: Gpu, num_gpus: int, mode: str, shares: Shares) -> TrainerCosts:
    """Returns the costs of all trainers: a pass for the log-probs before the job, and the training passes."""
    flops = (2 + FLOPS_PER_WEIGHT[mode]) * model.parameters
    return TrainerCosts(flops / (num_gpus * gpu.tflops * 1e12 * shares.training), shares_prompts=mode == "lora")


def count_context_tokens(model: ModelShape, gpu: Gpu, num_gpus: int) -> float:
    """Returns the tokens whose keys and values fit beside the weights of a replica, in nine tenths of its memory."""
    return (0.9 * num_gpus * gpu.memory_gb * GB - BYTES_PER_WEIGHT * model.parameters) / model.kv_bytes


def derive_costs(
    sampler: SamplerCosts,
    trainer: TrainerCosts,
    model: ModelShape,
    mode: str,
    *,
    num_nodes: int,
    storage_gb_per_s: float,
) -> Costs:
    """Returns the costs of a run whose weights go through shared storage: written once, read by each node."""
    published = BYTES_PER_WEIGHT * model.parameters * (LORA_SHARE if mode == "lora" else 1.0)
    publish_s = CHECK_S + (1 + num_nodes) * published / (storage_gb_per_s * GB)
    return Costs(sampler, DRIVER, trainer, publish_s, recompute=mode == "full")
