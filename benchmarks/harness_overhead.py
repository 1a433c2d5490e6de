"""Measures the harness's overhead: episodes per second with a model that replies instantly and with the journal.

    python benchmarks/harness_overhead.py
    python benchmarks/harness_overhead.py --against FOLDER

Covers collecting and scoring episodes and building trajectories: 200 examples x 4 generations at concurrency 64. For
comparison, NeMo Agent Toolkit reached 390 episodes/s on a similar machine, with an in-process model and no journal;
that figure was recorded earlier and is not measured here. `--against` takes the folder of another checkout and runs
rounds of both versions alternately, each in a process of its own.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import reinforge
from benchmarks.machine import describe, refuse_if_busy
from benchmarks.sides import Side, Turns, alternate, compute_ratios, format_spread, start_side
from reinforge.config.finetuning_blocks import LimitsConfig, OutcomesConfig, SamplingConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.evaluation.run import DatasetEvaluation
from reinforge.interfaces import Evaluator
from reinforge.rollout.runner import EpisodeRunner
from reinforge.rollout.workflow import bind_workflow
from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.progress import SilentProgress
from reinforge.trainer.builders.group import GroupTrajectoryBuilder, GroupTrajectoryBuilderConfig
from reinforge.trainer.context import RunContext
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem
from reinforge.types.request import ModelReply, TokenLogprobs

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES, GENERATIONS, CONCURRENCY, ROUNDS, PAIRS = 200, 4, 64, 7, 15
TOOLKIT_RATE = 390


class Instantaneous:
    """A model that replies instantly with 16 tokens to a prompt of 48."""

    is_policy = True
    model_name = "instantaneous"
    tokens = TokenLogprobs(tuple(range(48)), tuple(range(16)), (-0.5,) * 16)
    reply = ModelReply({"role": "assistant", "content": "an answer"}, "stop", tokens, 48, 16)

    async def sample(self, request):
        return self.reply


class Constant(Evaluator):
    """Scores 1."""

    async def evaluate(self, item):
        return EvalOutputItem(id=item.id, score=1.0, reasoning=None)


async def agent(item, llm, context):
    reply = await llm.chat.completions.create(messages=[{"role": "user", "content": item.input_obj}])
    return reply.choices[0].message.content


async def run_round(folder: Path, workflow: Callable[..., Any] = agent) -> float:
    """Returns the seconds of collecting EXAMPLES x GENERATIONS episodes, including the journal."""
    items = [
        EvalInputItem(id=i, input_obj=f"q{i}", expected_output_obj="a", full_dataset_entry={}) for i in range(EXAMPLES)
    ]
    runner = EpisodeRunner(
        bind_workflow(workflow),
        {"agent": Instantaneous()},
        sampling=SamplingConfig(),
        limits=LimitsConfig(),
        outcomes=OutcomesConfig(),
        run_seed=0,
        max_concurrency=CONCURRENCY,
    )
    context = RunContext("r", RunJournal(folder), SilentProgress(), LimitsConfig())
    builder = GroupTrajectoryBuilder(GroupTrajectoryBuilderConfig(num_generations=GENERATIONS), ["agent"])
    builder.evaluation = DatasetEvaluation(
        runner,
        {"train": items},
        {"reward": Constant()},
        reward_metric="reward",
        outcomes=OutcomesConfig(),
        listener=context.record_episode,
    )
    await builder.initialize(FinetuneConfig(reward_function={"name": "reward"}))
    started = time.perf_counter()
    await builder.start_run("r", {"epoch": 0})
    collection = await builder.finalize("r", {"epoch": 0})
    context.journal.flush()
    seconds = time.perf_counter() - started
    assert collection.num_trajectories == EXAMPLES * GENERATIONS
    context.journal.close()
    return seconds


def play(turns: Turns, checkout: str) -> None:
    """Measures one round at each turn, with the version of a checkout."""
    assert Path(reinforge.__file__).is_relative_to(checkout), f"{reinforge.__file__} is not in {checkout}"
    number = 0
    while True:
        turns.begin()
        asyncio.run(run_round(Path(f"r{(number := number + 1)}").absolute()))
        turns.end()


def start_version(name: str, checkout: Path) -> Side:
    """Starts a process that imports reinforge from a checkout: it takes over the `sys.path` of this moment."""
    sys.path.insert(0, str(checkout / "src"))
    try:
        return start_side(name, play, str(checkout))
    finally:
        sys.path.remove(str(checkout / "src"))


def compare(checkout: Path) -> None:
    """Prints how this version compares with that of another checkout, above 1 where this one is faster."""
    ours, theirs = start_version("this version", ROOT), start_version("the other", checkout.resolve())
    try:
        alternate([ours, theirs], PAIRS)
    finally:
        for side in (ours, theirs):
            side.stop()
    print(describe())
    for side in (ours, theirs):
        rates = [EXAMPLES * GENERATIONS / seconds for seconds in side.seconds]
        print(f"{side.name}: {format_spread(rates, ' episodes/s', 0)}")
    for part, named in ((None, "time"), ("cpu", "CPU time")):
        print(f"the other's {named} / this version's: {format_spread(compute_ratios(ours, theirs, part))}")


def main() -> None:
    refuse_if_busy()
    if "--against" in sys.argv:
        return compare(Path(sys.argv[sys.argv.index("--against") + 1]))
    with tempfile.TemporaryDirectory() as folder:
        seconds = [asyncio.run(run_round(Path(folder) / str(number))) for number in range(ROUNDS + 1)][1:]
    rates = sorted(EXAMPLES * GENERATIONS / each for each in seconds)
    print(describe())
    print(
        f"{EXAMPLES} examples x {GENERATIONS}, concurrency {CONCURRENCY}, journal on, {ROUNDS} rounds after a warm-up"
    )
    print(f"episodes/s: median {statistics.median(rates):.0f}, min {rates[0]:.0f}, max {rates[-1]:.0f}")
    ratio = statistics.median(rates) / TOOLKIT_RATE
    print(f"{ratio:.1f} x NeMo Agent Toolkit ({TOOLKIT_RATE} episodes/s without a journal)")


if __name__ == "__main__":
    main()
