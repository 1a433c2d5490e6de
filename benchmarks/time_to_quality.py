"""Seconds of training until tic-tac-toe is won three times in four: the bundled agent, ours against TRL's GRPO.

    python benchmarks/time_to_quality.py [--seeds 3] [--quality 0.75]

Both begin with the bundled starter and play the demo's games for the demo's reward by the demo's recipe (demo.yml);
both are looked at every 2 epochs on the same 500 games against a random opponent, drawn at temperature 1. Loading and
evaluations are not in the time. Ours is `reinforge finetune` with journal and canary; TRL's plays whole games by its
`rollout_func` and trains a row for each move (trl_games.py). Each run has a process of its own; the sides take turns.
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
from benchmarks.sides import spread
from reinforge.config.loader import load_config
from reinforge.runs.progress import SilentProgress
from reinforge.tasks.tic_tac_toe import DEMO
from reinforge.tasks.tic_tac_toe.dataset import TicTacToeDataset
from reinforge.tasks.tic_tac_toe.starter import ensure_starter
from reinforge.trainer.run import RunOptions, run_config

APART = {"LOAD", "BASELINE", "VALIDATE"}
"""Stages that are not in the time."""

Tell = Callable[[float, int, float], None]
"""Takes seconds, epochs done and the win rate."""


class Watch(SilentProgress):
    """Times the run's stages and hands on its validations."""

    def __init__(self, tell: Tell):
        self.tell = tell
        self._spent_s, self._since_s = 0.0, 0.0
        self._stage = "LOAD"

    def stage(self, epoch: int | None, stage: str, total: int | None) -> None:
        """Ends the stage before and begins another."""
        now = time.perf_counter()
        if self._stage not in APART:
            self._spent_s += now - self._since_s
        self._stage, self._since_s = stage, now

    def validation(self, epoch: int, report: dict[str, Any]) -> None:
        """Hands on how often the agent won."""
        self.tell(self._spent_s, epoch + 1, report["summaries"]["win"]["mean"])


def overrides(folder: Path, seed: int, interval: int) -> list[tuple[str, str]]:
    """Returns what differs from the demo."""
    return [
        ("finetuning.output_dir", str(folder)),
        ("finetuning.seed", str(seed)),
        ("finetuning.run_configuration.validation_interval", str(interval)),
        ("trainers.epochs.save_every", "1000"),
    ]


def run_ours(tell: Tell, seed: int, interval: int, generations: int) -> None:
    loaded = load_config(DEMO, overrides=overrides(Path.cwd(), seed, interval))
    run_config(loaded, RunOptions(run_name="benchmark", progress=Watch(tell)))


def run_theirs(tell: Tell, seed: int, interval: int, generations: int) -> None:
    config = load_config(DEMO, overrides=overrides(Path.cwd(), seed, interval)).config
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
    trl_games.train(ensure_starter(), splits["train"], splits["select"], settings, tell)


def _serve(connection: Connection, run: Callable[..., None], *args: Any) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        run(lambda *figures: connection.send(figures), *args)
    connection.send(None)


def time_one(name: str, run: Callable[..., None], args: argparse.Namespace, seed: int) -> float | None:
    """Returns the seconds until the first evaluation that is good enough; None: it was not within the limit."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, run, seed, args.interval, args.trl_generations), daemon=True)
    process.start()
    theirs.close()
    best, seen, started = 0.0, "", time.monotonic()
    try:
        while ours.poll(max(0.0, args.limit_s - (time.monotonic() - started))):
            try:
                figures = ours.recv()
            except (EOFError, ConnectionError):
                raise SystemExit(f"{name}: its process ended; what it said stands above") from None
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
        help="times that TRL plays in an epoch, each before its share of steps",
    )
    parser.add_argument("--limit_s", type=float, default=600, help="seconds of one run, all included")
    parser.add_argument("--force", action="store_true", help="run although the machine is busy")
    args = parser.parse_args()
    refuse_if_busy()
    print(describe())
    ensure_starter()
    found: dict[str, list[float | None]] = {"reinforge": [], "trl": []}
    sides = [("reinforge", run_ours), ("trl", run_theirs)]
    for seed in range(args.seeds):
        for name, run in sides if seed % 2 == 0 else sides[::-1]:
            found[name].append(time_one(name, run, args, seed))
    ratios = [b / a for a, b in zip(found["reinforge"], found["trl"], strict=True) if a is not None and b is not None]
    for name, values in found.items():
        reached = [value for value in values if value is not None]
        middle = f"median {statistics.median(reached):.1f} s" if reached else "never"
        print(f"{name}: {len(reached)} of {len(values)} seeds reached {args.quality:g}, {middle}")
    if ratios:
        print(f"trl / reinforge: {spread(ratios, ' x')}")


if __name__ == "__main__":
    main()
