"""Seconds of a run's epochs with and without sampling ahead, for agents whose tools take time and for one without.

python benchmarks/overlap.py                 max_staleness 0, 1 and 2; tools of 0 s, 1 s, and 1 s or (one in eight) 6 s
python benchmarks/overlap.py --lora          LoRA instead of full weights
python benchmarks/overlap.py --in_flight     long replies: new weights wait for them, or continue them
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import describe, refuse_if_busy
from benchmarks.sampler import SIZES, random_model
from reinforge.config.loader import build_config
from reinforge.runs.journal.reader import JournalReader
from reinforge.trainer.options import RunOptions
from reinforge.trainer.run import run_config

EXAMPLES, SIBLINGS, TURNS, NEW_TOKENS = 16, 8, 3, 24
LIMITS: dict[str, dict[str, Any]] = {
    f"max_staleness {number}": {"max_staleness": number, "max_refills": 0} for number in (0, 1, 2)
}
IN_FLIGHT: dict[str, dict[str, Any]] = {
    f"max_staleness 1, in_flight {name}": {"max_staleness": 1, "in_flight": name, "max_refills": 0}
    for name in ("wait", "keep")
}


def make_agent(
    find_wait_s: Callable[[str], float], find_tokens: Callable[[str], int] = lambda example: NEW_TOKENS
) -> Callable[..., Any]:
    """Returns an agent with a tool between its turns.

    Args:
        find_wait_s: Returns how long the tool takes, by the example's id.
        find_tokens: Returns how long a reply may be.
    """

    async def agent(item, llm, context):
        messages = [{"role": "user", "content": f"play at row {item.id} column 2, then at row 3 column 1"}]
        said = ""
        for turn in range(TURNS):
            if turn and (wait_s := find_wait_s(str(item.id))):
                await asyncio.sleep(wait_s)
            length = find_tokens(str(item.id))
            reply = await llm.chat.completions.create(messages=messages, max_tokens=length)
            said = reply.choices[0].message.content
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "the tool says 1 2 3"}]
        return said

    return agent


def share_of_vowels(output, expected):
    return sum(letter in "aeiou" for letter in output) / max(1, len(output))


AGENTS = {
    "no tools": make_agent(lambda example: 0.0),
    "tools of 1 s": make_agent(lambda example: 1.0),
    "tools of 1 s, one in eight of 6 s": make_agent(lambda example: 6.0 if int(example) % 8 == 0 else 1.0),
}

LONG_REPLIES = {
    "tools of 1 s, one in eight with replies of 400 tokens": make_agent(
        lambda example: 1.0, lambda example: 400 if int(example) % 8 == 0 else NEW_TOKENS
    )
}


def make_settings(
    model: str, folder: str, agent: Callable[..., Any], limits: dict[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    rows = [{"id": str(number), "question": f"say {number}"} for number in range(EXAMPLES + 8)]
    policy: dict[str, Any] = {"model": model, "max_num_seqs": 256, "optimizer": {"learning_rate": 1e-4}}
    if args.lora:
        policy["lora"] = {"r": 16}
    return {
        "llms": {"agent": {"_type": "policy"}},
        "workflow": {"_type": "python", "function": agent},
        "eval": {
            "general": {"max_concurrency": 1024, "dataset": {"_type": "rows", "rows": rows}},
            "evaluators": {"vowels": {"_type": "python", "function": share_of_vowels}},
        },
        "trajectory_builders": {
            "builder": {"_type": "group", "num_generations": SIBLINGS, "examples_per_epoch": EXAMPLES}
        },
        "trainer_adapters": {"adapter": {"_type": "local"}},
        "trainers": {"trainer": {"_type": "epoch"}},
        "finetuning": {
            "enabled": True,
            "trainer": "trainer",
            "trajectory_builder": "builder",
            "trainer_adapter": "adapter",
            "reward_function": {"name": "vowels"},
            "num_epochs": args.epochs,
            "output_dir": folder,
            "splits": {"train": EXAMPLES, "select": 4, "confirm": 4},
            "gate": {"allow_no_verdict": True},
            "policy": policy,
            "limits": limits,
            "device": "cpu",
        },
    }


def measure(settings: dict[str, Any], name: str) -> tuple[float, float, float]:
    """Returns seconds per epoch, the job's seconds per epoch, and the mean age of the trained tokens in versions."""
    run_config(build_config(settings), RunOptions(run_name=name))
    folder = Path(settings["finetuning"]["output_dir"]) / name
    ends = {(row.epoch, row.stage): row.at_s for row in JournalReader(folder).stages()}
    num_epochs = settings["finetuning"]["num_epochs"]
    first = ends[-1, "BASELINE"]
    job_s = [ends[epoch, "AWAIT"] - ends[epoch, "SUBMIT"] for epoch in range(num_epochs)]
    rows = [json.loads(line) for line in (folder / "training_metrics.jsonl").read_text().splitlines()]
    ages = [row.get("staleness", 0.0) for row in rows]
    return (
        (ends[num_epochs - 1, "ADOPT"] - first) / num_epochs,
        statistics.fmean(job_s),
        statistics.fmean(ages),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--in_flight", action="store_true")
    parser.add_argument("--force", action="store_true", help="measure although other load is on the machine")
    args = parser.parse_args()
    refuse_if_busy()
    print(f"{describe()}; {args.epochs} epochs of {EXAMPLES * SIBLINGS} episodes of {TURNS} turns")
    with random_model(SIZES["1.7m"]) as model, tempfile.TemporaryDirectory() as folder:
        agents, arms = (LONG_REPLIES, IN_FLIGHT) if args.in_flight else (AGENTS, LIMITS)
        for place, (agent_name, agent) in enumerate(agents.items()):
            found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in arms}
            for number in range(args.rounds):
                for arm, name in list(enumerate(arms))[:: 1 if number % 2 else -1]:
                    settings = make_settings(str(model), folder, agent, arms[name], args)
                    found[name].append(measure(settings, f"{place}-{number}-{arm}"))
            base = [epoch_s for epoch_s, _, _ in next(iter(found.values()))]
            for name, rows in found.items():
                epoch_s, job_s, age = (statistics.median(column) for column in zip(*rows, strict=True))
                ratios = sorted(a / b for a, (b, _, _) in zip(base, rows, strict=True))
                print(
                    f"{agent_name}: {name}: {epoch_s:.2f} s an epoch (its job {job_s:.2f} s), "
                    f"x {ratios[0]:.2f} / {statistics.median(ratios):.2f} / {ratios[-1]:.2f}; mean age {age:.2f}"
                )


if __name__ == "__main__":
    main()
