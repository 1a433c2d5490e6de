"""The engine on a GPU, with random weights: decode steps, and a GRPO step against TRL.

    python benchmarks/gpu.py decode --size 135m --rows 1 16 64 256    recorded steps, launched ones, and `generate`
    python benchmarks/gpu.py grpo --size 0.5b                         a step with LoRA against TRL's `GRPOTrainer`

decode: prompts of 128 tokens, 128 new ones, bfloat16, no adapter; tokens per second of wall time. The three ways take
turns on the same weights. The share of the GPU's limit is the least time in which its own best kernels multiply and
read all weights once a step, divided by the time of a step.

grpo: 16 groups of 8 replies of 128 tokens to prompts of 128, LoRA of rank 16, bfloat16, one AdamW step, with everything
that an epoch of `reinforge finetune` does. TRL runs `GRPOTrainer.train()` with `generate`, without vLLM and without
gradient checkpointing. Each side runs in its own process; the two take turns.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks import our_side, trl_side
from benchmarks.decode import find_share
from benchmarks.grpo_vs_trl import print_side
from benchmarks.machine import Limits, refuse_if_busy
from benchmarks.pretrained import LORA, TRL_MODES, print_ratios
from benchmarks.sampler import generate_all, make_prompts, sample_all
from benchmarks.sides import alternate, format_spread, start_side
from benchmarks.workload import TOKENIZER, Shape, make_model
from reinforge.config.policy import PolicyConfig
from reinforge.engine import Engine
from reinforge.engine.sampling.decode_graphs import DecodeGraphs
from reinforge.engine.sampling.fast_llama import FastLlama

VOCABULARY = {"135m": 49_152, "0.5b": 151_936, "1.5b": 151_936}
PROMPT, NEW = 128, 128


def measure_gpu() -> Limits:
    """Returns what the GPU can do at most in bfloat16: a large square product, and reading memory."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    numbers = torch.ones(2**30, device="cuda")
    product_s, read_s = _time(lambda: torch.mm(a, b)), _time(numbers.sum)
    return Limits(2 * 8192**3 / product_s, numbers.nbytes / read_s)


def _time(run: Callable[[], object], count: int = 10) -> float:
    run()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(count):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / count


def compare_decoding(folder: Path, args: argparse.Namespace) -> None:
    """Prints the tokens per second of each way to decode."""
    limits = measure_gpu()
    print(f"{torch.cuda.get_device_name()}: {limits.flops / 1e12:.0f} TFLOP/s, {limits.bandwidth / 1e12:.2f} TB/s")
    policy = PolicyConfig(
        model=str(folder),
        tokenizer=str(folder / TOKENIZER),
        dtype="bfloat16",
        max_num_seqs=max(args.rows),
        max_model_len=PROMPT + args.new,
    )
    started = time.perf_counter()
    with Engine.load(policy, seed=0, device="cuda") as engine:
        print(f"loaded in {time.perf_counter() - started:.1f} s")
        fast = engine.policy.sampler._prefiller.fast_llama
        if fast is None:
            raise SystemExit("the model is not decoded by fast_llama.py")
        graphs = fast.graphs
        for rows in args.rows:
            _compare_rows(engine, fast, graphs, rows, args, limits)


def _compare_rows(
    engine: Engine, fast: FastLlama, graphs: DecodeGraphs | None, rows: int, args: argparse.Namespace, limits: Limits
) -> None:
    ways = {"recorded": graphs, "launched": None, "generate": None}
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(args.pairs + 1):
        prompts = make_prompts(rows, PROMPT, engine.model.vocab_size, seed=number)
        for name, own in ways.items():
            fast.graphs = own
            engine.policy.sampler.call(engine.policy.sampler._prefix_cache.clear)
            run = generate_all if name == "generate" else sample_all
            torch.cuda.synchronize()
            started = time.perf_counter()
            count = run(engine, prompts, args.new)
            torch.cuda.synchronize()
            if number:  # the first of each records steps and prepares libraries
                speeds[name].append(count / (time.perf_counter() - started))
    print(f"{rows} rows, tokens per second")
    for name, values in speeds.items():
        print(f"  {name:<9}", format_spread(values, digits=0))
    ours, plain, theirs = speeds.values()
    print("  recorded / launched", format_spread([a / b for a, b in zip(ours, plain, strict=True)]))
    print("  recorded / generate", format_spread([a / b for a, b in zip(ours, theirs, strict=True)]))
    shares = [find_share(engine, rows, own, limits) for own in ours]
    print("  share of the GPU's limit", format_spread(shares), flush=True)


def compare_steps(folder: Path, shape: Shape, args: argparse.Namespace) -> None:
    """Prints the time of whole GRPO steps of both sides."""
    policy = {"lora": LORA, "batch": {"steps_per_job": 1, "micro_batch_tokens": args.tokens}, "dtype": "bfloat16"}
    options = {
        **TRL_MODES["bfloat16"],
        "use_cpu": False,
        "micro_batch": args.tokens // (PROMPT + NEW),
        "lora": {**LORA, "target_modules": "all-linear"},
    }
    sides = [
        start_side("reinforge", our_side.run, folder, shape, policy, "cuda"),
        start_side("trl", trl_side.run, folder, shape, options),
    ]
    try:
        alternate(sides, args.pairs, warm_up=2)
    finally:
        for side in sides:
            side.stop()
    for side in sides:
        print_side(side, shape)
    print_ratios(*sides)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("decode", "grpo"))
    parser.add_argument("--size", choices=tuple(VOCABULARY), default="0.5b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--new", type=int, default=NEW, help="tokens that are decoded")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32 * (PROMPT + NEW), help="tokens that are trained at once")
    parser.add_argument("--force", action="store_true", help="run even if the machine is busy")
    args = parser.parse_args()
    refuse_if_busy()
    shape = Shape(PROMPT, NEW, groups=16, size=args.size, vocabulary=VOCABULARY[args.size])
    with tempfile.TemporaryDirectory() as name:
        folder = make_model(Path(name) / "model", shape)
        if args.what == "decode":
            compare_decoding(folder, args)
        else:
            compare_steps(folder, shape, args)


if __name__ == "__main__":
    main()
