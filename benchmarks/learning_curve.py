"""The learning curve of SmolLM2-135M-Instruct in bfloat16 and in float32, on the word problems of the demo.

    python benchmarks/learning_curve.py                        three seeds, 10 epochs
    python benchmarks/learning_curve.py --seeds 0 --epochs 4   a shorter look
    python benchmarks/learning_curve.py --folder DIR           keep the runs, and reuse those that are complete

Prints the mean training reward over the seeds in each type, for parts of two epochs each, and the difference between
the types with its interval over the seeds. The types have the same examples in the same order. Nothing is timed, so it
may run beside other work.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import describe
from reinforge.config.loader import load_config
from reinforge.evaluation.statistics import compute_mean_interval, format_interval
from reinforge.runs.journal.reader import JournalReader
from reinforge.runs.progress import SilentProgress
from reinforge.tasks.word_problems import WORD_PROBLEMS
from reinforge.trainer.options import RunOptions
from reinforge.trainer.run import run_config

DTYPES = ("bfloat16", "float32")
PART = 2
"""Epochs per printed row."""


def train(folder: Path, name: str, seed: int, dtype: str, args: argparse.Namespace) -> list[float]:
    """Runs one training without a verdict and returns the mean reward of each epoch."""
    if not (folder / name / "summary.json").exists():
        settings = {
            "eval.general.dataset.num_confirm": 1,
            "finetuning.output_dir": folder,
            "trajectory_builders.groups.examples_per_epoch": args.examples,
            "finetuning.num_epochs": args.epochs,
            "finetuning.seed": seed,
            "finetuning.policy.dtype": dtype,
            "finetuning.run_configuration.validation_interval": args.epochs,
        }
        overrides = [(path, str(value)) for path, value in settings.items()]
        run_config(load_config(WORD_PROBLEMS, overrides=overrides), RunOptions(name, SilentProgress()))
    rows = JournalReader(folder / name).metrics(10**9)
    return [row.avg_reward for row in rows if row.avg_reward is not None]


def show(curves: dict[str, list[list[float]]], epochs: int) -> None:
    """Prints the curves of all types side by side, and the difference of each part over the seeds."""
    print(f"{'epochs':>8}  " + "  ".join(f"{dtype:>9}" for dtype in DTYPES) + "  difference, 95 % interval")
    for start in range(0, epochs, PART):
        means = {dtype: [statistics.fmean(curve[start : start + PART]) for curve in curves[dtype]] for dtype in DTYPES}
        differences = [low - full for low, full in zip(*means.values(), strict=True)]
        shown = "  ".join(f"{statistics.fmean(means[dtype]):9.3f}" for dtype in DTYPES)
        print(
            f"{start:>3} to {min(start + PART, epochs) - 1:<2}  {shown}  {format_difference(differences)}", flush=True
        )


def format_difference(differences: Sequence[float]) -> str:
    """Returns the mean of the seeds' differences with its interval."""
    return format_interval(*compute_mean_interval(differences))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--examples", type=int, default=16, help="problems of an epoch, each answered eight times")
    parser.add_argument("--folder", type=Path, help="folder of the runs; default: a temporary one")
    args = parser.parse_args()
    print(describe())
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        curves: dict[str, list[list[float]]] = {dtype: [] for dtype in DTYPES}
        for seed in args.seeds:
            for dtype in DTYPES:
                curves[dtype].append(train(folder, f"{dtype}-{seed}", seed, dtype, args))
        show(curves, args.epochs)


if __name__ == "__main__":
    main()
