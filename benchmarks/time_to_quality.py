"""Seconds of training until the bundled agent wins 75 % of its tic-tac-toe games: reinforge against TRL's GRPO.

    python benchmarks/time_to_quality.py [--seeds 3] [--quality 0.75]

Both start from the bundled starter and use the games, the reward and the recipe of the demo (demo.yml). Both are
evaluated every 2 epochs on the same 500 games against a random opponent, sampled at temperature 1. Loading and
evaluation are excluded from the time. reinforge runs `reinforge finetune` with journal and canary; TRL plays games in
its `rollout_func` and trains one row per move (trl_games.py). Each run has its own process; the sides alternate.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import trl_games
from benchmarks.machine import describe, refuse_if_busy
from benchmarks.sides import format_spread
from reinforge.config.loader import load_config
from reinforge.runs.progress import SilentProgress
from reinforge.runs.rows import ValidationRow
from reinforge.tasks.starters import Recipe, ensure_built
from reinforge.tasks.tic_tac_toe import DEMO
from reinforge.tasks.tic_tac_toe.dataset import TicTacToeDataset
from reinforge.tasks.tic_tac_toe.starter import generate_random_moves, make_tokenizer
from reinforge.trainer.options import RunOptions
from reinforge.trainer.run import run_config

EXCLUDED_STAGES = {"LOAD", "BASELINE", "VALIDATE"}
"""Stages excluded from the time."""

ReportWinRate = Callable[[float, int, float], None]
"""Called with the seconds of training, the epochs done and the win rate."""


class StageTimer(SilentProgress):
    """Times the run's training stages and reports the win rate of each validation."""

    def __init__(self, report: ReportWinRate):
        self.report = report
        self._spent_s, self._since_s = 0.0, 0.0
        self._stage = "LOAD"

    def stage(self, epoch: int | None, stage: str, total: int | None) -> None:
        """Ends the previous stage and starts another."""
        now = time.perf_counter()
        if self._stage not in EXCLUDED_STAGES:
            self._spent_s += now - self._since_s
        self._stage, self._since_s = stage, now

    def validation(self, row: ValidationRow) -> None:
        """Reports the win rate."""
        self.report(self._spent_s, row.epoch + 1, row.summaries["win"].mean or 0.0)


def build_starter() -> Path:
    return ensure_built("tic_tac_toe", Recipe(), make_tokenizer, generate_random_moves)


def build_overrides(folder: Path, seed: int, interval: int) -> list[tuple[str, str]]:
    """Returns the settings that differ from the demo."""
    return [
        ("finetuning.output_dir", str(folder)),
        ("finetuning.seed", str(seed)),
        ("finetuning.run_configuration.validation_interval", str(interval)),
        ("trainers.epochs.save_every", "1000"),
    ]


def run_reinforge(report: ReportWinRate, seed: int, interval: int, generations: int) -> None:
    loaded = load_config(DEMO, overrides=build_overrides(Path.cwd(), seed, interval))
    run_config(loaded, RunOptions(run_name="benchmark", progress=StageTimer(report)))


def run_trl(report: ReportWinRate, seed: int, interval: int, generations: int) -> None:
    config = load_config(DEMO, overrides=build_overrides(Path.cwd(), seed, interval)).config
    finetuning, builder = config.finetuning, config.trajectory_builders["groups"]
    rows = TicTacToeDataset(config.eval.general.dataset).rows()
    splits = {split: [row for row in rows if row["split"] == split] for split in ("train", "select")}
    settings = {
        "seed": seed,
        "epochs": finetuning.num_epochs,
        "examples": builder.examples_per_epoch,
        "steps": finetuning.policy.batch.steps_per_job,
        "generations": generations,
        "interval": interval,
        "learning_rate": finetuning.policy.optimizer.learning_rate,
        "warmup": finetuning.policy.schedule.warmup_steps,
        "final": finetuning.policy.schedule.final_fraction,
    }
    trl_games.train(build_starter(), splits["train"], splits["select"], settings, report)


def _run_in_process(connection: Connection, run: Callable[..., None], *args: Any) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        run(lambda *figures: connection.send(figures), *args)
    connection.send(None)


def measure_time_to_quality(name: str, run: Callable[..., None], args: argparse.Namespace, seed: int) -> float | None:
    """Returns the seconds of training until the first evaluation of the quality; None if not within the limit."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe()
    process = context.Process(
        target=_run_in_process, args=(sender, run, seed, args.interval, args.trl_generations), daemon=True
    )
    process.start()
    sender.close()
    best, seen, started = 0.0, "", time.monotonic()
    try:
        while receiver.poll(max(0.0, args.limit_s - (time.monotonic() - started))):
            try:
                figures = receiver.recv()
            except (EOFError, ConnectionError):
                raise SystemExit(f"{name}: its process ended; see its output above") from None
            if figures is None:
                break
            seconds, epochs, wins = figures
            best, seen = max(best, wins), f"{seen} {wins:.3f}"
            if wins >= args.quality:
                print(f"  {name}, seed {seed}: {seconds:.1f} s, epoch {epochs}:{seen}", flush=True)
                return seconds
    finally:
        process.kill()
        process.join()
    print(f"  {name}, seed {seed}: not reached, best {best:.3f}:{seen}", flush=True)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quality", type=float, default=0.75)
    parser.add_argument("--interval", type=int, default=2, help="epochs between evaluations")
    parser.add_argument(
        "--trl_generations",
        type=int,
        default=1,
        help="how often TRL collects games in an epoch, each time for its share of the steps",
    )
    parser.add_argument("--limit_s", type=float, default=600, help="limit of one run in seconds, everything included")
    parser.add_argument("--force", action="store_true", help="run even if the machine is busy")
    args = parser.parse_args()
    refuse_if_busy()
    print(describe())
    build_starter()
    seconds: dict[str, list[float | None]] = {"reinforge": [], "trl": []}
    sides = [("reinforge", run_reinforge), ("trl", run_trl)]
    for seed in range(args.seeds):
        for name, run in sides if seed % 2 == 0 else sides[::-1]:
            seconds[name].append(measure_time_to_quality(name, run, args, seed))
    pairs = zip(seconds["reinforge"], seconds["trl"], strict=True)
    ratios = [trl / ours for ours, trl in pairs if ours is not None and trl is not None]
    for name, values in seconds.items():
        reached = [value for value in values if value is not None]
        middle = f"median {statistics.median(reached):.1f} s" if reached else "never"
        print(f"{name}: {len(reached)} of {len(values)} seeds reached {args.quality:g}, {middle}")
    if ratios:
        print(f"trl / reinforge: {format_spread(ratios, ' x')}")


if __name__ == "__main__":
    main()
