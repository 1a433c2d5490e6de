"""One GRPO step against TRL's `GRPOTrainer`: the same model, prompts, reward and optimizer, with exact token counts.

    python benchmarks/grpo_vs_trl.py --shape a               prompt 48, reply 64
    python benchmarks/grpo_vs_trl.py --shape b --size 13m    agentic: prompt 400, reply 16
    python benchmarks/grpo_vs_trl.py --shape c               4 turns, each with 120 new context and 16 sampled tokens
    python benchmarks/grpo_vs_trl.py --shape reply           short prompts, long replies: 16 and 128
    python benchmarks/grpo_vs_trl.py --shape turns8          8 short turns: 60 new and 8 sampled tokens each
    python benchmarks/grpo_vs_trl.py --shape turns32         32 turns with results of tools: 40 and 12
    python benchmarks/grpo_vs_trl.py --shape long            16 episodes: prompt 4,000, reply 200
    python benchmarks/grpo_vs_trl.py --shape vocabulary      shape b with a vocabulary of 152 k, for peak memory
    python benchmarks/grpo_vs_trl.py --growth                reinforge only: 64, 256 and 1024 episodes per step

A step samples 64 episodes in groups of 8, scores them and makes one AdamW step (float32, gradient norm 1, no reference
model). reinforge runs one epoch of `reinforge finetune` with capture, journal and canary. TRL runs one step of
`GRPOTrainer.train()`: without gradient checkpointing (its default), with `generate` (its continuous batching,
`--trl paged`, is slower on a CPU) and all 64 rows in one batch. `--micro_batch 16` accumulates gradients instead: the
same speed with a third of the memory. Each side runs in its own process, and the two take turns (sides.py).
Where there are turns, TRL uses a `rollout_func`, which processes the whole history again in every turn. It trains each
episode as one row with masked context, or (`--row_per_turn`) each turn as a row.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import our_side, trl_side
from benchmarks.machine import describe, refuse_if_busy
from benchmarks.sides import Side, alternate, compute_ratios, format_spread, start_side
from benchmarks.workload import Shape, make_model

SHAPES = {
    "a": Shape(prompt=48, reply=64),
    "b": Shape(prompt=400, reply=16),
    "c": Shape(prompt=120, reply=16, context=120, turns=4),
    "reply": Shape(prompt=16, reply=128),
    "turns8": Shape(prompt=60, reply=8, context=60, turns=8),
    "turns32": Shape(prompt=40, reply=12, context=40, turns=32),
    "long": Shape(prompt=4000, reply=200, groups=2),
    "vocabulary": Shape(prompt=400, reply=16, vocabulary=152_000),
}
TRL_MODES: dict[str, dict[str, Any]] = {
    "generate": {},
    "paged": {"use_transformers_continuous_batching": True},
    "checkpointing": {"gradient_checkpointing": True},
}
GROWTH = (1, 4, 16)
MANY_TURNS = 16
"""Rows that TRL trains at once where there are turns: all rows of one turn each need more memory than small machines
have."""


def compare_with_trl(folder: Path, shape: Shape, args: argparse.Namespace) -> None:
    micro_batch = args.micro_batch or (MANY_TURNS if shape.turns > 1 else None)
    options = {**TRL_MODES[args.trl], "micro_batch": micro_batch}
    sides = [
        start_side("reinforge", our_side.run, folder, shape),
        start_side("trl", trl_side.run, folder, shape, options),
    ]
    if args.row_per_turn:
        by_turn = {**options, "row_per_turn": True}
        sides.append(start_side("trl, row per turn", trl_side.run, folder, shape, by_turn))
    try:
        alternate(sides, args.pairs)
    finally:
        for side in sides:
            side.stop()
    ours, *others = sides
    for side in sides:
        print_side(side, shape)
    for other in others:
        for part in (None, "sampling", "training", "cpu"):
            label = {None: "whole step", "cpu": "CPU time"}.get(part, part)
            print(f"{other.name} / reinforge, {label}: {format_spread(compute_ratios(ours, other, part), ' x')}")
        print(f"reinforge / {other.name}, peak memory above the loaded model: {ours.peak / other.peak:.2f} x")


def print_side(side: Side, shape: Shape) -> None:
    speeds = [shape.episodes / seconds for seconds in side.seconds]
    print(
        f"{side.name}: {format_spread(speeds, digits=1)} episodes/s; {statistics.median(side.seconds):.3f} s per step"
    )
    num_sampled = shape.episodes * shape.reply * shape.turns
    print(
        f"    sampling {statistics.median(side.parts['sampling']):.3f} s "
        f"({num_sampled / statistics.median(side.parts['sampling']):,.0f} tokens/s), "
        f"training {statistics.median(side.parts['training']):.3f} s, "
        f"CPU {statistics.median(side.parts['cpu']):.3f} s, "
        f"peak memory {side.peak / 2**20:,.0f} MiB above {side.parts['loaded'][0] / 2**20:,.0f} MiB"
    )
    stages = {
        name: statistics.median(values) for name, values in side.parts.items() if name.isupper()
    }  # reinforge only
    if stages:
        print("    " + ", ".join(f"{name} {1000 * seconds:.0f} ms" for name, seconds in stages.items()))


def measure_growth(folder: Path, shape: Shape, args: argparse.Namespace) -> None:
    shapes = [replace(shape, groups=shape.groups * factor) for factor in GROWTH]
    sides = [start_side(f"{grown.episodes} episodes", our_side.run, folder, grown) for grown in shapes]
    try:
        alternate(sides, args.pairs)
    finally:
        for side in sides:
            side.stop()
    for side, grown in zip(sides, shapes, strict=True):
        each = [1000 * seconds / grown.episodes for seconds in side.seconds]
        against = [
            (b / grown.episodes) / (a / shape.episodes) for a, b in zip(sides[0].seconds, side.seconds, strict=True)
        ]
        growth = format_spread(against, " x")
        print(f"{side.name}: {format_spread(each, ' ms')} per episode; against {shape.episodes}: {growth}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="a")
    parser.add_argument("--size", choices=("1.7m", "13m"), default="1.7m")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--row_per_turn", action="store_true", help="also against TRL with each turn as a row")
    parser.add_argument("--growth", action="store_true", help="time per episode as their number grows, reinforge only")
    parser.add_argument("--trl", choices=tuple(TRL_MODES), default="generate", help="how TRL runs")
    parser.add_argument(
        "--micro_batch", type=int, default=None, help="rows that TRL trains at once (default: all; 16 with turns)"
    )
    parser.add_argument("--force", action="store_true", help="run even if the machine is busy")
    args = parser.parse_args()
    refuse_if_busy()
    print(describe())
    shape = replace(SHAPES[args.shape], size=args.size)
    print(
        f"{shape.turns} turn(s), prompt {shape.prompt}, reply {shape.reply}, {shape.groups} groups of {shape.group}, "
        f"model {shape.size}, vocabulary {shape.vocabulary:,}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        with ProcessPoolExecutor(1, get_context("spawn")) as maker:
            maker.submit(make_model, folder, shape).result()
        (measure_growth if args.growth else compare_with_trl)(folder, shape, args)


if __name__ == "__main__":
    main()
