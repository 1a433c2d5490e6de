"""Trees of dialogues against as many flat ones: sampled tokens a second, in alternating pairs of one process.

python benchmarks/tree_dialogues.py           3 replies a round, 4 rounds, 16 trees in flight, 16 tokens a reply

A tree of w replies a round and r rounds has w + w^2 + ... + w^r replies; its flat side is so many dialogues of r rounds
that as many replies are sampled. Every dialogue of a pair is about a question that no other is about, since the sampler
keeps the keys and values of what it has read.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import describe, refuse_if_busy
from benchmarks.sampler import SIZES, random_model, show
from reinforge.config.schema import LimitsConfig, OutcomesConfig, PolicyConfig, SamplingConfig
from reinforge.engine import Engine
from reinforge.multiagent.agent_parameters import AgentParameters
from reinforge.multiagent.agents import PureTextWholeAgent
from reinforge.multiagent.dialogue import Decision, Dialogue
from reinforge.multiagent.episode import ProtocolWorkflow
from reinforge.multiagent.protocols import NIP, NIPConfig
from reinforge.rollout.runner import EpisodeRunner
from reinforge.rollout.workflow import bind_workflow
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from reinforge.types.evaluation import EvalInputItem
from tests.doubles import PolicyModel

QUESTION = "Case {}: the ledger says one thing and the receipt another; which of them is to be believed, and why?"
AGENTS = ("prover", "verifier")


class Talk(NIP):
    """Rounds of a verifier and a prover that end when they are over, whatever is said."""

    def decision_of(self, text: str) -> Decision | None:
        return None

    def refuse(self, agent: str, text: str, dialogue: Dialogue) -> str | None:
        return None


def runner_of(engine: Engine, args: argparse.Namespace, *, width: int, at_once: int) -> EpisodeRunner:
    given = {
        name: AgentParameters(prompt=f"You are the {name}. $question", max_tokens_per_message=args.tokens)
        for name in AGENTS
    }
    config = NIPConfig(agents=given, num_responses=width, max_message_rounds=args.rounds)
    agents = {name: PureTextWholeAgent(name, parameters, llm="policy") for name, parameters in given.items()}
    return EpisodeRunner(
        bind_workflow(ProtocolWorkflow(Talk(config), agents)),
        {"policy": PolicyModel(engine.policy)},
        sampling=SamplingConfig(),
        limits=LimitsConfig(),
        outcomes=OutcomesConfig(retries=0),
        run_seed=0,
        max_concurrency=at_once,
    )


async def no_score(record: EpisodeRecord) -> None:
    """Speed alone is measured."""


def sampled_tokens_s(runner: EpisodeRunner, numbers: Sequence[int]) -> tuple[float, int]:
    """Returns sampled tokens a second and how many replies there were; a dialogue for each number."""
    items = [
        EvalInputItem(
            id=str(n), input_obj=QUESTION.format(n), expected_output_obj=None, full_dataset_entry={"id": str(n)}
        )
        for n in numbers
    ]
    episodes = [(EpisodeKey("collect", 0, str(item.id)), item) for item in items]
    started = time.perf_counter()
    records = asyncio.run(runner.run(episodes, no_score, lambda record: None))
    seconds = time.perf_counter() - started
    failed = [record.reason for record in records if record.outcome.value != "ok"]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(records)} dialogues failed: {failed[0]}")
    calls = [call for record in records for call in record.calls]
    return sum(call.num_completion_tokens for call in calls) / seconds, len(calls)


def compare(engine: Engine, args: argparse.Namespace) -> None:
    replies = sum(args.width**depth for depth in range(1, args.rounds + 1)) * args.trees
    flat_count = round(replies / args.rounds)
    trees = runner_of(engine, args, width=args.width, at_once=args.trees)
    flat = runner_of(engine, args, width=1, at_once=flat_count)
    next_number = 0
    found: dict[str, list[float]] = {"trees": [], "flat": []}
    counts: dict[str, int] = {}
    for pair in range(args.pairs + 1):  # the first warms up
        sides = [("trees", trees, args.trees), ("flat", flat, flat_count)]
        for name, runner, count in sides if pair % 2 else sides[::-1]:
            speed, counts[name] = sampled_tokens_s(runner, range(next_number, next_number + count))
            next_number += count
            if pair:
                found[name].append(speed)
    print(
        f"{args.width} replies a round, {args.rounds} rounds, {args.tokens} tokens a reply, {args.pairs} pairs; "
        f"{counts['trees']} replies of {args.trees} trees in flight, {counts['flat']} of {flat_count} flat dialogues"
    )
    for name, speeds in found.items():
        show(f"{name}, tokens/s", speeds)
    ratios = [a / b for a, b in zip(found["trees"], found["flat"], strict=True)]
    show("trees / flat", ratios)
    print(f"within 15 %: {'yes' if statistics.median(ratios) >= 0.85 else 'no'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=3, help="replies of each round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--trees", type=int, default=16, help="in flight at the same time")
    parser.add_argument("--tokens", type=int, default=16, help="of a reply")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--size", choices=sorted(SIZES), default="1.7m")
    parser.add_argument("--max_batch", type=int, default=128)
    parser.add_argument("--force", action="store_true", help="run although the machine is busy")
    args = parser.parse_args()
    refuse_if_busy()
    print(describe())
    with random_model(SIZES[args.size]) as folder:
        policy = PolicyConfig(model=folder, max_batch=args.max_batch)
        with Engine.load(policy, seed=0, device="cpu") as engine:
            compare(engine, args)


if __name__ == "__main__":
    main()
