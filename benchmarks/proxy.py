"""Measures `reinforge serve --upstream --record`: 64 streams at once, against direct calls and LiteLLM's proxy.

    python benchmarks/proxy.py                  ours against direct calls to a stand-in for a large model
    python benchmarks/proxy.py --rounds 3       fewer rounds

The stand-in, the proxies and the clients are separate processes. The stand-in waits 300 ms and then sends 16 pieces,
one every 20 ms. In each round, direct calls and each proxy take turns in changing order; 64 clients each make 4 calls,
which begin at different times. Figures are medians of the rounds with the lowest and the highest: milliseconds that a
call takes longer than a direct one, until its first byte and until its last (differences of the percentiles), and the
ratio of the medians. Every stream is compared with the bytes that the stand-in sent. LiteLLM's proxy runs if it is
installed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

STREAMS, EACH, PIECES, FIRST_S, PIECE_S = 64, 4, 16, 0.3, 0.02
READY_S = 60.0
WORDS = ["the", "small", "model", "answers"] * 4


def build_events() -> list[bytes]:
    """Returns the events of one stream."""
    deltas: list[dict[str, Any]] = [{"content": f"{WORDS[number]} "} for number in range(PIECES)]
    choices = [[{"index": 0, "delta": delta, "finish_reason": None}] for delta in deltas]
    choices.append([{"index": 0, "delta": {}, "finish_reason": "stop"}])
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "large"}
    return [b"data: %b\n\n" % json.dumps({**head, "choices": each}).encode() for each in choices] + [
        b"data: [DONE]\n\n"
    ]


async def answer(request: web.Request) -> web.StreamResponse:
    """Answers as a large model: a pause, then pieces."""
    await request.read()
    await asyncio.sleep(FIRST_S)
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for event in build_events():
        await response.write(event)
        await asyncio.sleep(PIECE_S)
    return response


async def run_upstream(port: int) -> None:
    """Serves until its input ends."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.to_thread(sys.stdin.read)


def find_port() -> int:
    """Returns a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def run_beside(command: list[str], port: int) -> Iterator[str]:
    """Starts a server, waits until it takes connections, and stops it at the end; yields its URL."""
    environment = {**os.environ, "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"}  # it refuses without
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, **quiet)
    try:
        deadline = time.monotonic() + READY_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{command[:4]} did not start") from None
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


async def load(url: str) -> tuple[list[float], list[float], int]:
    """Returns the seconds until the first and the last byte of each call, and how many streams were not as sent."""
    firsts, lasts, wrong, sent = list[float](), list[float](), 0, b"".join(build_events())
    offsets = random.Random(0)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def chat(client: int) -> None:
            nonlocal wrong
            await asyncio.sleep(offsets.random() * FIRST_S)
            for turn in range(EACH):
                messages = [{"role": "user", "content": f"question {client} {turn}"}]
                body = {"model": "large", "messages": messages, "stream": True}
                started, pieces = time.perf_counter(), bytearray()
                async with session.post(
                    f"{url}/v1/chat/completions", json=body, headers={"authorization": "Bearer sk-benchmark"}
                ) as response:
                    async for piece in response.content.iter_any():
                        if not pieces:
                            firsts.append(time.perf_counter() - started)
                        pieces += piece
                lasts.append(time.perf_counter() - started)
                wrong += bytes(pieces) != sent

        await asyncio.gather(*map(chat, range(STREAMS)))
    return firsts, lasts, wrong


def percentile(values: list[float], share: float) -> float:
    """Returns a percentile in milliseconds."""
    return 1000 * sorted(values)[min(len(values) - 1, int(share * len(values)))]


def show(values: list[float], digits: int = 1) -> str:
    """Returns the median with the lowest and the highest."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main() -> None:
    """Runs the comparison, or one of its servers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--upstream", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.upstream:
        asyncio.run(run_upstream(args.upstream))
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = [find_port() for _ in range(3)]
        upstream = stack.enter_context(run_beside([sys.executable, __file__, "--upstream", str(ports[0])], ports[0]))
        ours = [sys.executable, "-m", "reinforge", "serve", "--upstream", f"{upstream}/v1", "--port", str(ports[1])]
        sides = {"direct": upstream}
        sides["reinforge"] = stack.enter_context(run_beside([*ours, "--record", str(folder / "logs")], ports[1]))
        if (litellm := shutil.which("litellm")) is not None:
            entry = {"model": "openai/large", "api_base": f"{upstream}/v1", "api_key": "sk-benchmark"}
            config = folder / "litellm.json"  # JSON is YAML
            config.write_text(json.dumps({"model_list": [{"model_name": "large", "litellm_params": entry}]}))
            command = [litellm, "--config", str(config), "--port", str(ports[2])]
            sides["litellm"] = stack.enter_context(run_beside(command, ports[2]))
        compare(sides, args.rounds)
        lines = [len(path.read_text().splitlines()) for path in (folder / "logs").glob("*.jsonl")]
        print(f"reinforge recorded {sum(lines)} of {STREAMS * EACH * (args.rounds + 1)} calls")


def compare(sides: dict[str, str], rounds: int) -> None:
    """Prints how much longer calls take through each proxy."""
    found: dict[str, dict[str, list[float]]] = {}
    broken = dict.fromkeys(sides, 0)
    for number in range(-1, rounds):  # the first warms up
        order = list(sides) if number % 2 else list(reversed(sides))
        times = {}
        for name in order:
            firsts, lasts, wrong = asyncio.run(load(sides[name]))
            times[name] = (firsts, lasts)
            broken[name] += wrong
        for name in sides if number >= 0 else ():
            figures = found.setdefault(name, {})
            for what, place in (("first", 0), ("last", 1)):
                for share in (0.5, 0.99):
                    own, direct = (percentile(times[each][place], share) for each in (name, "direct"))
                    figures.setdefault(f"{what} p{100 * share:g}", []).append(own - direct)
            ratio = percentile(times[name][1], 0.5) / percentile(times["direct"][1], 0.5)
            figures.setdefault("ratio", []).append(ratio)
    for name, figures in found.items():
        if name != "direct":
            added = ", ".join(f"{what} +{show(each)} ms" for what, each in figures.items() if what != "ratio")
            print(f"{name}: {added}; ratio {show(figures['ratio'], 3)}; {broken[name]} streams not as sent")


if __name__ == "__main__":
    main()
