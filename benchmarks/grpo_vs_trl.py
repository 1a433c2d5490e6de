"""One GRPO step against TRL's `GRPOTrainer`: the same model folder, prompts, reward and optimizer, token counts exact.

    python benchmarks/grpo_vs_trl.py --shape a               prompt 48, reply 64
    python benchmarks/grpo_vs_trl.py --shape b --size 13m    agentic: prompt 400, reply 16
    python benchmarks/grpo_vs_trl.py --shape c               4 turns, 120 new context tokens and 16 drawn a turn
    python benchmarks/grpo_vs_trl.py --memory                shape b with a vocabulary of 152 k: look at the peak
    python benchmarks/grpo_vs_trl.py --growth                ours alone: 64, 256 and 1024 episodes a step

A step draws 64 episodes in groups of 8, scores them and makes one AdamW step (fp32, gradient norm 1, no reference).
Ours is an epoch of `reinforge finetune` with capture, journal and canary. TRL's is a step of `GRPOTrainer.train()`:
gradient checkpointing (its default) off, `generate` (its continuous batching, `--trl paged`, is slower on a CPU), one
batch of all 64 rows. `--micro_batch 16` accumulates gradients instead: as fast, and a third of the memory.
Each side has its own process, and they take turns (sides.py).
In shape C TRL plays by its `rollout_func`, which reads the whole history again in every turn, and trains each episode
as one row with masked context, or (`row per turn`) each turn as a row.
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
from benchmarks.sides import Side, alternate, ratios, spread, start
from benchmarks.words import Shape, make_model

SHAPES = {
    "a": Shape(prompt=48, reply=64),
    "b": Shape(prompt=400, reply=16),
    "c": Shape(prompt=120, reply=16, context=120, turns=4),
    "memory": Shape(prompt=400, reply=16, vocabulary=152_000),
}
TRL_MODES: dict[str, dict[str, Any]] = {
    "generate": {},
    "paged": {"use_transformers_continuous_batching": True},
    "checkpointing": {"gradient_checkpointing": True},
}
GROWTH = (1, 4, 16)
MANY_TURNS = 16
"""Rows that TRL trains at once in shape C: 256 rows of a turn each would take more memory than small machines have."""


def compare(folder: Path, shape: Shape, args: argparse.Namespace) -> None:
    micro_batch = args.micro_batch or (MANY_TURNS if shape.turns > 1 else None)
    options = {**TRL_MODES[args.trl], "micro_batch": micro_batch}
    sides = [start("reinforge", our_side.run, folder, shape), start("trl", trl_side.run, folder, shape, options)]
    if shape.turns > 1:
        by_turn = {**options, "row_per_turn": True}
        sides.append(start("trl, row per turn", trl_side.run, folder, shape, by_turn))
    try:
        alternate(sides, args.pairs)
    finally:
        for side in sides:
            side.stop()
    ours, *others = sides
    for side in sides:
        tell(side, shape)
    for other in others:
        for part in (None, "sampling", "training", "cpu"):
            told = {None: "a step", "cpu": "processor time"}.get(part, part)
            print(f"{other.name} / reinforge, {told}: {spread(ratios(ours, other, part), ' x')}")
        print(f"reinforge / {other.name}, peak memory beyond the loaded model: {ours.peak / other.peak:.2f} x")


def tell(side: Side, shape: Shape) -> None:
    speeds = [shape.episodes / seconds for seconds in side.seconds]
    print(f"{side.name}: {spread(speeds, digits=1)} episodes/s; {statistics.median(side.seconds):.3f} s a step")
    drawn = shape.episodes * shape.reply * shape.turns
    print(
        f"    sampling {statistics.median(side.parts['sampling']):.3f} s "
        f"({drawn / statistics.median(side.parts['sampling']):,.0f} tokens/s), "
        f"training {statistics.median(side.parts['training']):.3f} s, "
        f"processors {statistics.median(side.parts['cpu']):.3f} s, peak memory {side.peak / 2**20:,.0f} MiB"
    )
    stages = {name: statistics.median(values) for name, values in side.parts.items() if name.isupper()}  # ours
    if stages:
        print("    " + ", ".join(f"{name} {1000 * seconds:.0f} ms" for name, seconds in stages.items()))


def grow(folder: Path, shape: Shape, args: argparse.Namespace) -> None:
    shapes = [replace(shape, groups=shape.groups * factor) for factor in GROWTH]
    sides = [start(f"{grown.episodes} episodes", our_side.run, folder, grown) for grown in shapes]
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
        print(f"{side.name}: {spread(each, ' ms')} an episode; against {shape.episodes}: {spread(against, ' x')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("a", "b", "c"), default="a")
    parser.add_argument("--size", choices=("1.7m", "13m"), default="1.7m")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--memory", action="store_true", help="shape b, vocabulary 152 k")
    parser.add_argument("--growth", action="store_true", help="time an episode as episodes grow, ours alone")
    parser.add_argument("--trl", choices=tuple(TRL_MODES), default="generate", help="how TRL runs")
    parser.add_argument(
        "--micro_batch", type=int, default=None, help="rows that TRL trains at once; default: all, in shape c 16"
    )
    parser.add_argument("--force", action="store_true", help="run although the machine is busy")
    args = parser.parse_args()
    refuse_if_busy()
    print(describe())
    shape = replace(SHAPES["memory" if args.memory else args.shape], size=args.size)
    print(
        f"{shape.turns} turn(s), prompt {shape.prompt}, reply {shape.reply}, {shape.groups} groups of {shape.group}, "
        f"model {shape.size}, vocabulary {shape.vocabulary:,}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        with ProcessPoolExecutor(1, get_context("spawn")) as maker:
            maker.submit(make_model, folder, shape).result()
        (grow if args.growth else compare)(folder, shape, args)


if __name__ == "__main__":
    main()
