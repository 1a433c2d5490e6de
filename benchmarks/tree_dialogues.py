"""Trees of dialogues against single dialogues: sampled tokens per second, in alternating pairs in one process.

python benchmarks/tree_dialogues.py           3 replies per turn, 4 rounds, 16 concurrent trees, 16 tokens per reply

A tree with w replies per turn and r rounds has w + w^2 + ... + w^r replies; the other side runs as many dialogues of r
rounds as it takes to sample the same number. All questions differ, because the sampler has a prefix cache.
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
from reinforge.config.finetuning_blocks import LimitsConfig, OutcomesConfig, SamplingConfig
from reinforge.config.policy import PolicyConfig
from reinforge.engine import Engine
from reinforge.multiagent.agents import PureTextWholeAgent
from reinforge.multiagent.dialogue import Decision, Dialogue
from reinforge.multiagent.episode import ProtocolWorkflow
from reinforge.multiagent.protocol import AgentParameters
from reinforge.multiagent.protocols.nip import NIP, NIPConfig
from reinforge.rollout.runner import EpisodeRunner
from reinforge.rollout.workflow import bind_workflow
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from reinforge.types.evaluation import EvalInputItem
from tests.doubles import PolicyModel

QUESTION = "Case {}: the ledger says one thing and the receipt another; which of them is to be believed, and why?"
AGENTS = ("prover", "verifier")


class Talk(NIP):
    """Verifier and prover alternate for a fixed number of rounds; any reply is valid, and none decides."""

    def parse_decision(self, text: str) -> Decision | None:
        return None

    def check_reply(self, agent: str, text: str, dialogue: Dialogue) -> str | None:
        return None


def build_runner(engine: Engine, args: argparse.Namespace, *, width: int, concurrency: int) -> EpisodeRunner:
    parameters = {
        name: AgentParameters(prompt=f"You are the {name}. $question", max_tokens_per_message=args.tokens)
        for name in AGENTS
    }
    config = NIPConfig(agents=parameters, num_responses=width, max_message_rounds=args.rounds)
    agents = {name: PureTextWholeAgent(name, parameters[name], llm="policy") for name in AGENTS}
    return EpisodeRunner(
        bind_workflow(ProtocolWorkflow(Talk(config), agents)),
        {"policy": PolicyModel(engine.policy)},
        sampling=SamplingConfig(),
        limits=LimitsConfig(),
        outcomes=OutcomesConfig(retries=0),
        run_seed=0,
        max_concurrency=concurrency,
    )


async def skip_scoring(record: EpisodeRecord) -> None:
    """Does nothing: only the speed is measured."""


def measure_speed(runner: EpisodeRunner, numbers: Sequence[int]) -> tuple[float, int]:
    """Runs one dialogue per number and returns the sampled tokens per second and the number of replies."""
    items = [
        EvalInputItem(
            id=str(n), input_obj=QUESTION.format(n), expected_output_obj=None, full_dataset_entry={"id": str(n)}
        )
        for n in numbers
    ]
    episodes = [(EpisodeKey("collect", 0, str(item.id)), item) for item in items]
    started = time.perf_counter()
    records = asyncio.run(runner.run(episodes, skip_scoring, lambda record: None))
    seconds = time.perf_counter() - started
    failed = [record.reason for record in records if record.outcome.value != "ok"]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(records)} dialogues failed: {failed[0]}")
    calls = [call for record in records for call in record.calls]
    return sum(call.num_completion_tokens for call in calls) / seconds, len(calls)


def compare_speed(engine: Engine, args: argparse.Namespace) -> None:
    replies = sum(args.width**depth for depth in range(1, args.rounds + 1)) * args.trees
    flat_count = round(replies / args.rounds)
    trees = build_runner(engine, args, width=args.width, concurrency=args.trees)
    flat = build_runner(engine, args, width=1, concurrency=flat_count)
    next_number = 0
    speeds: dict[str, list[float]] = {"trees": [], "flat": []}
    counts: dict[str, int] = {}
    for pair in range(args.pairs + 1):  # the first pair is a warm-up
        sides = [("trees", trees, args.trees), ("flat", flat, flat_count)]
        for name, runner, count in sides if pair % 2 else sides[::-1]:
            speed, counts[name] = measure_speed(runner, range(next_number, next_number + count))
            next_number += count
            if pair:
                speeds[name].append(speed)
    print(
        f"{args.width} replies per turn, {args.rounds} rounds, {args.tokens} tokens per reply, {args.pairs} pairs; "
        f"{counts['trees']} replies in {args.trees} concurrent trees, {counts['flat']} in {flat_count} dialogues"
    )
    for name, values in speeds.items():
        show(f"{name}, tokens/s", values)
    ratios = [a / b for a, b in zip(speeds["trees"], speeds["flat"], strict=True)]
    show("trees / flat", ratios)
    print(f"within 15 %: {'yes' if statistics.median(ratios) >= 0.85 else 'no'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=3, help="replies per turn")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--trees", type=int, default=16, help="concurrent trees")
    parser.add_argument("--tokens", type=int, default=16, help="tokens per reply")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--size", choices=sorted(SIZES), default="1.7m")
    parser.add_argument("--max_num_seqs", type=int, default=128)
    parser.add_argument("--force", action="store_true", help="run even if the machine is busy")
    args = parser.parse_args()
    refuse_if_busy()
    print(describe())
    with random_model(SIZES[args.size]) as folder:
        policy = PolicyConfig(model=folder, max_num_seqs=args.max_num_seqs)
        with Engine.load(policy, seed=0, device="cpu") as engine:
            compare_speed(engine, args)


if __name__ == "__main__":
    main()
