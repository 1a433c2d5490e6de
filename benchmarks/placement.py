"""What `workflow.placement: processes` gains or costs: the same training with and without it, in pairs.

    python benchmarks/placement.py [--task demo|tickets|busy] [--num_processes 1] [--pairs 5] [--epochs 6]

`busy` is the demo with an agent that computes for some milliseconds in Python before each game, as one that parses
documents or plays against an engine of its own. Figures are the wall time of the epochs, without loading, baseline and
verdict; the seeds are the same, so both sides play the same games.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import describe, refuse_if_busy
from benchmarks.sides import format_spread
from reinforge.config.loader import load_config
from reinforge.tasks.tic_tac_toe import DEMO
from reinforge.tasks.tickets import TICKETS
from reinforge.trainer.options import RunOptions
from reinforge.trainer.run import run_async

APART = {"START", "LOAD", "BASELINE", "CONFIRM_BASE", "CONFIRM_TUNED"}
"""Stages that are not compared: they hold the start of the processes, or are not training."""

BUSY = """
import time
from reinforge.tasks.tic_tac_toe.workflow import play

async def agent(item, llm, context):
    ends = time.thread_time() + {seconds}
    while time.thread_time() < ends:
        sum(range(1000))
    return await play(item, llm, context)
"""


def train(folder: Path, args: argparse.Namespace, *, placed: bool) -> tuple[float, int]:
    """Returns the seconds of the epochs of one short run, and the tokens that it sampled."""
    finetuning = {
        "num_epochs": args.epochs,
        "output_dir": str(folder),
        "run_configuration.validation_interval": args.epochs,
        "gate.num_samples": 1,
    }
    pairs = [(f"finetuning.{path}", str(value)) for path, value in finetuning.items()]
    if args.task == "busy":
        pairs.append(("workflow", "{_type: python, function: 'busy_agent:agent'}"))
    if placed:
        pairs += [("workflow.placement", "processes"), ("workflow.num_processes", str(args.num_processes))]
    root = folder if args.task == "busy" else None
    loaded = load_config(TICKETS if args.task == "tickets" else DEMO, overrides=pairs, project_root=root)
    options = RunOptions(run_name=f"{'placed' if placed else 'driver'}-{time.time_ns()}")
    summary = asyncio.run(run_async(loaded, options))
    seconds = sum(seconds for stage, seconds in summary.wall_time_s.items() if stage.upper() not in APART)
    return seconds, summary.tokens["completion"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=["demo", "tickets", "busy"], default="demo")
    parser.add_argument("--num_processes", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--busy_ms", type=float, default=10.0)
    parser.add_argument("--force", action="store_true", help="run although others use the machine")
    args = parser.parse_args()
    refuse_if_busy()
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "busy_agent.py").write_text(BUSY.format(seconds=args.busy_ms / 1000))
        tokens = {placed: train(Path(name), args, placed=placed)[1] for placed in (False, True)}  # warms up
        assert tokens[False] == tokens[True], "the placed agent plays other games"
        ratios = []
        for number in range(args.pairs):
            order = (True, False) if number % 2 else (False, True)
            seconds = {placed: train(Path(name), args, placed=placed)[0] for placed in order}
            ratios.append(seconds[False] / seconds[True])
            print(
                f"  pair {number + 1}: {seconds[False]:.1f} s in the driver, {seconds[True]:.1f} s placed", flush=True
            )
    print(describe())
    print(f"{args.task}, {args.epochs} epochs, {args.num_processes} processes, {args.pairs} pairs")
    print(f"in the driver / placed (above 1: placed is faster): {format_spread(ratios)}")


if __name__ == "__main__":
    main()
