"""What the journal and a checkpoint after every job cost the demo: the same training with and without them, in pairs.

    python benchmarks/durability.py [--pairs 5] [--epochs 8]

Without: episodes, stages and jobs are counted and forgotten, and no weights are written. Figures are the wall time of
everything from the baseline to the last validation.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import describe, refuse_if_busy
from reinforge.config.loader import load_config
from reinforge.runs.checkpoints import Checkpoints
from reinforge.runs.journal.writer import JournalWriter
from reinforge.tasks.tic_tac_toe import DEMO
from reinforge.trainer.options import RunOptions
from reinforge.trainer.run import run_async

APART = {"LOAD", "CONFIRM_BASE", "CONFIRM_TUNED"}
"""Stages that are not compared: a run that keeps no weights has no verdict."""

kept_s: list[float] = []


class Forgetful(JournalWriter):
    """Takes everything and records nothing."""

    def put(self, work):
        pass


async def keeps_nothing(self, adapter, version, state=None):
    return None


async def timed_keep(self, adapter, version, state=None, keep=Checkpoints.write):
    started = time.perf_counter()
    kept = await keep(self, adapter, version, state)
    kept_s.append(time.perf_counter() - started)
    return kept


def train(folder: Path, epochs: int, *, durable: bool) -> float:
    """Returns the seconds of one short demo."""
    overrides = {
        "num_epochs": epochs,
        "output_dir": str(folder),
        "run_configuration.validation_interval": epochs,
        "gate.num_samples": 1,
    }
    pairs = [(f"finetuning.{path}", str(value)) for path, value in overrides.items()]
    loaded = load_config(DEMO, overrides=[*pairs, ("trainers.epochs.save_every", "1")])
    options = RunOptions(run_name=f"{'durable' if durable else 'bare'}-{time.time_ns()}")
    writer = JournalWriter if durable else Forgetful
    keep = timed_keep if durable else keeps_nothing
    with (
        mock.patch("reinforge.runs.journal.journal.JournalWriter", writer),
        mock.patch.object(Checkpoints, "write", keep),
    ):
        summary = asyncio.run(run_async(loaded, options))
    return sum(seconds for stage, seconds in summary.wall_time_s.items() if stage.upper() not in APART)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--force", action="store_true", help="run although others use the machine")
    args = parser.parse_args()
    refuse_if_busy()
    with tempfile.TemporaryDirectory() as name:
        train(Path(name), 1, durable=True)  # makes the starter, and warms everything up
        kept_s.clear()
        ratios = []
        for number in range(args.pairs):
            order = (True, False) if number % 2 else (False, True)
            seconds = {durable: train(Path(name), args.epochs, durable=durable) for durable in order}
            ratios.append(seconds[True] / seconds[False])
            print(f"pair {number}: {seconds[False]:.1f} s without, {seconds[True]:.1f} s with", flush=True)
    print(describe())
    print(f"{args.epochs} epochs of the demo, a checkpoint after every job, {args.pairs} pairs")
    print(f"with / without: median {statistics.median(ratios):.3f}, min {min(ratios):.3f}, max {max(ratios):.3f}")
    print(f"one checkpoint: median {1000 * statistics.median(kept_s):.0f} ms, max {1000 * max(kept_s):.0f} ms")


if __name__ == "__main__":
    main()
