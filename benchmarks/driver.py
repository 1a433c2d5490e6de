"""What the driver spends on a model call beside the model: capture, rewards, messages, JSON, journal and export.

    python benchmarks/driver.py calls
    python benchmarks/driver.py memory [--episodes 500]

calls    CPU time of the process for one more call of an episode, by the tokens of its prompt and its reply: where every
         prompt is new, and in a conversation, whose calls add a reply and a message of 24 tokens to the history. The
         reply is made beforehand. The bytes of its row in the journal stand beside those of what is new in a call as
         JSON (its messages, reply, token ids and log-probs), compressed by zstandard at level 3.
memory   Episodes of 32 turns (250/48) that wait for their 33rd reply, all in flight at once: memory of the process for
         each, where the tokens of every reply come as new objects, as from a sampler in another process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import random
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import psutil
import zstandard

from benchmarks.harness_overhead import Constant
from benchmarks.machine import describe, refuse_if_busy
from reinforge.config.finetuning_blocks import LimitsConfig, OutcomesConfig, SamplingConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.evaluation.run import DatasetEvaluation
from reinforge.rollout.runner import EpisodeRunner
from reinforge.rollout.workflow import bind_workflow
from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.progress import SilentProgress
from reinforge.trainer.builders.group import GroupTrajectoryBuilder, GroupTrajectoryBuilderConfig
from reinforge.trainer.context import RunContext
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.request import ModelReply, TokenLogprobs

SIZES = [(250, 48), (8000, 2000)]
MESSAGE = 24
GENERATIONS, CONCURRENCY, ROUNDS = 4, 64, 7
NUM_SCRIPTS = 8
VOCABULARY = 152_000


@dataclass
class Turn:
    """One call of a script: the new message of the agent, and the reply."""

    message: dict[str, str]
    reply: ModelReply
    new_prompt: tuple[int, ...]


def write_text(rng: random.Random, words: Sequence[str], num_tokens: int) -> str:
    return " ".join(rng.choices(words, k=num_tokens))


def write_script(seed: int, prompt: int, reply: int, turns: int, *, grows: bool) -> list[Turn]:
    """Returns the calls of an episode; each continues the one before it if the history `grows`."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    letters = "etaoinshrdlucmfwyp"
    words = ["".join(rng.choices(letters, k=rng.randint(1, 7))) for _ in range(3000)]
    script, history = list[Turn](), list[int]()
    for number in range(turns):
        count = MESSAGE if grows and number else prompt
        new = [*map(int, numbers.zipf(1.3, count) % VOCABULARY)]
        history = [*history, *new] if grows else new
        ids = tuple(map(int, numbers.zipf(1.3, reply) % VOCABULARY))
        logprobs = tuple(np.minimum(0, numbers.normal(-1, 1, reply)).astype(np.float32).tolist())
        said = {"role": "assistant", "content": write_text(rng, words, reply)}
        tokens = TokenLogprobs(tuple(history), ids, logprobs, texts=("word ",) * reply)
        asked = {"role": "user", "content": write_text(rng, words, count)}
        script.append(Turn(asked, ModelReply(said, "stop", tokens, len(history), reply), tuple(new)))
        history += ids
    return script


class Scripted:
    """A model whose next reply the agent has set."""

    is_policy, model_name = True, "scripted"

    def __init__(self, scripts: list[list[Turn]]):
        self.scripts = scripts
        self.next: ModelReply | None = None

    async def sample(self, request: Any) -> ModelReply:
        assert self.next is not None
        return self.next


def make_agent(model: Scripted, turns: int, *, grows: bool) -> Callable[..., Any]:
    async def agent(item, llm, context):
        script, messages = model.scripts[int(item.id) % NUM_SCRIPTS], []
        for turn in script[:turns]:
            messages = [*messages, dict(turn.message)] if grows else [dict(turn.message)]
            model.next = turn.reply  # the call asks at once, before another task has its turn
            reply = await llm.chat.completions.create(messages=messages)
            if grows:
                messages = [*messages, {"role": "assistant", "content": reply.choices[0].message.content}]
        return "done"

    return agent


def build(folder: Path, model: Any, agent: Any, examples: int, concurrency: int) -> tuple[RunContext, Any]:
    items = [
        EvalInputItem(id=i, input_obj=f"q{i}", expected_output_obj="a", full_dataset_entry={}) for i in range(examples)
    ]
    runner = EpisodeRunner(
        bind_workflow(agent),
        {"agent": model},
        sampling=SamplingConfig(),
        limits=LimitsConfig(),
        outcomes=OutcomesConfig(),
        run_seed=0,
        max_concurrency=concurrency,
    )
    context = RunContext("r", RunJournal(folder), SilentProgress(), LimitsConfig())
    builder = GroupTrajectoryBuilder(GroupTrajectoryBuilderConfig(num_generations=GENERATIONS), ["agent"])
    scorer = Constant()
    scorer.reads_steps = False
    builder.evaluation = DatasetEvaluation(
        runner,
        {"train": items},
        {"reward": scorer},
        reward_metric="reward",
        outcomes=OutcomesConfig(),
        listener=context.record_episode,
    )
    return context, builder


async def run_round(folder: Path, model: Scripted, turns: int, examples: int, *, grows: bool) -> tuple[float, float]:
    """Returns the CPU seconds of collecting, with the journal, and of the export."""
    context, builder = build(folder, model, make_agent(model, turns, grows=grows), examples, CONCURRENCY)
    await builder.initialize(FinetuneConfig(reward_function={"name": "reward"}))
    gc.collect()
    started = time.process_time()
    await builder.start_run("r", {"epoch": 0})
    collection = await builder.finalize("r", {"epoch": 0})
    context.journal.flush()
    collected = time.process_time() - started
    assert collection.num_trajectories == examples * GENERATIONS
    context.journal.export_epoch(0)
    exported = time.process_time() - started - collected
    context.journal.close()
    return collected, exported


def measure(size: tuple[int, int], few: int, many: int, examples: int, *, grows: bool) -> None:
    """Prints the milliseconds and the bytes of each of the calls between `few` and `many`."""
    scripts = [write_script(seed, *size, many, grows=grows) for seed in range(NUM_SCRIPTS)]
    model, found = Scripted(scripts), dict[int, list[tuple[float, float, int]]]()
    with tempfile.TemporaryDirectory() as folder:
        for number, turns in itertools.product(range(ROUNDS + 1), (few, many)):
            path = Path(folder) / f"{number}-{turns}"
            seconds = asyncio.run(run_round(path, model, turns, examples, grows=grows))
            with contextlib.closing(sqlite3.connect(path / "run.sqlite")) as db:
                [[num_bytes]] = db.execute("SELECT sum(length(data)) FROM episodes")
            found.setdefault(turns, []).append((*seconds, num_bytes))
    calls = examples * GENERATIONS * (many - few)
    columns = {turns: list(zip(*rounds[1:], strict=True)) for turns, rounds in found.items()}
    call_ms, export_ms = (1e3 * (min(columns[many][part]) - min(columns[few][part])) / calls for part in (0, 1))
    pairs = zip(columns[many][0], columns[few][0], strict=True)
    spread = sorted(1e3 * (one - other) / calls for one, other in pairs)
    added = (columns[many][2][0] - columns[few][2][0]) / calls
    new = (compress_new(scripts, many) - compress_new(scripts, few)) / NUM_SCRIPTS / (many - few)
    kind = "a conversation" if grows else "new prompts"
    print(
        f"{size[0]:>5}/{size[1]:<5} {kind:<15} calls {few + 1:>2} to {many:>2}: {call_ms:.3f} ms a call "
        f"({spread[0]:.3f} to {spread[-1]:.3f}), export {export_ms:.3f} ms; journal {added:,.0f} bytes a call, "
        f"{added / new:.2f} x what is new as compressed JSON ({new:,.0f})",
        flush=True,
    )


def compress_new(scripts: list[list[Turn]], turns: int) -> int:
    compressor, total = zstandard.ZstdCompressor(level=3), 0
    for script in scripts:
        new = [
            {
                "messages": [turn.message], "reply": turn.reply.message, "prompt_token_ids": turn.new_prompt,
                "token_ids": turn.reply.tokens.token_ids, "logprobs": turn.reply.tokens.logprobs,
            }
            for turn in script[:turns]
        ]  # fmt: skip
        total += len(compressor.compress(json.dumps(new, separators=(",", ":")).encode()))
    return total


class Waiting(Scripted):
    """Sends new objects, and does not answer the last call until it is told to."""

    def __init__(self, scripts: list[list[Turn]], turns: int):
        super().__init__(scripts)
        self.turns, self.num_waiting, self.answered = turns, 0, asyncio.Event()

    async def sample(self, request: Any) -> ModelReply:
        turn = (len(request.messages) - 1) // 2
        if turn == self.turns:
            self.num_waiting += 1
            await self.answered.wait()
        assert self.next is not None
        reply, tokens = self.next, self.next.tokens
        assert tokens is not None
        sent = json.loads(json.dumps([list(tokens.prompt_token_ids), tokens.token_ids, tokens.logprobs, tokens.texts]))
        said = {"role": "assistant", "content": str(reply.message["content"].encode(), "utf-8")}
        return ModelReply(said, "stop", TokenLogprobs(*map(tuple, sent[:3]), texts=tuple(sent[3])), 1, len(sent[1]))


async def measure_memory(episodes: int) -> None:
    turns = 32
    scripts = [write_script(seed, *SIZES[0], turns + 1, grows=True) for seed in range(NUM_SCRIPTS)]
    model = Waiting(scripts, turns)
    with tempfile.TemporaryDirectory() as folder:
        examples = episodes // GENERATIONS
        context, builder = build(
            Path(folder) / "r", model, make_agent(model, turns + 1, grows=True), examples, episodes
        )
        await builder.initialize(FinetuneConfig(reward_function={"name": "reward"}))
        gc.collect()
        before = psutil.Process().memory_info().rss
        await builder.start_run("r", {"epoch": 0})
        while model.num_waiting < episodes:
            await asyncio.sleep(0.1)
        gc.collect()
        each = (psutil.Process().memory_info().rss - before) / episodes
        print(f"{episodes:,} episodes of {turns} turns in flight: {each / 1024:,.0f} KiB; 10,000: {each / 1e5:.1f} GB")
        model.answered.set()
        await builder.finalize("r", {"epoch": 0})
        context.journal.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["calls", "memory"])
    parser.add_argument("--episodes", type=int, default=500)
    parser.add_argument("--force", action="store_true", help="measure although others use the machine")
    args = parser.parse_args()
    refuse_if_busy()
    print(describe())
    if args.what == "memory":
        asyncio.run(measure_memory(args.episodes))
        return
    for size, few, many, examples in ((SIZES[0], 1, 5, 50), (SIZES[1], 1, 3, 8)):
        measure(size, few, many, examples, grows=False)
    for size, few, many, examples in ((SIZES[0], 1, 5, 50), (SIZES[0], 5, 32, 8), (SIZES[1], 1, 3, 8)):
        measure(size, few, many, examples, grows=True)


if __name__ == "__main__":
    main()
