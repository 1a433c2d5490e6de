"""Measures the gateway: added latency behind a slow model, and throughput in front of one that replies instantly.

    python benchmarks/gateway.py

The server, with one episode per access, runs in this process; the load comes from a second one, which has a connection
for each of 64 open episodes and sends the next request when the response has come. Each reply is recorded in its
episode as in a run. The load speaks HTTP/1.1 over plain sockets, since a client library would be slower than the server
on a machine with two cores; `--client aiohttp` measures with that one.

    added latency   seconds from the request to the whole response, less the model's 0.2 s; episodes start at random
    throughput      responses a second
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import aiohttp

EPISODES, UPSTREAM_S, ROUNDS = 64, 0.2, 5
SLOW_S, FAST_S, WARM_S = 6.0, 4.0, 0.5
BODY = json.dumps(
    {
        "model": "agent",
        "messages": [
            {"role": "system", "content": "You answer questions about numbers. Use at most ten words."},
            {"role": "user", "content": "What is the sum of 17 and 25, and is it larger than their difference?"},
        ],
        "temperature": 1.0,
        "max_tokens": 64,
    }
).encode()


async def _ask_plainly(url: str, key: str, end_s: float, wait_s: float) -> list[tuple[float, float]]:
    """Returns when each response had come and the seconds that it took, over one connection."""
    host, _, path = url.removeprefix("http://").partition("/")
    name, port = host.split(":")
    head = (
        f"POST /{path}/chat/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\naccept: */*\r\ncontent-length: {len(BODY)}\r\n\r\n"
    )
    request, taken = head.encode() + BODY, []
    reader, writer = await asyncio.open_connection(name, int(port))
    await asyncio.sleep(wait_s)
    while time.perf_counter() < end_s:
        started = time.perf_counter()
        writer.write(request)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200"), answer
        length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await reader.readexactly(length)
        ended = time.perf_counter()
        taken.append((ended, ended - started))
    writer.close()
    return taken


async def _ask_by_aiohttp(url: str, key: str, end_s: float, wait_s: float) -> list[tuple[float, float]]:
    headers, taken = {"authorization": f"Bearer {key}", "content-type": "application/json"}, []
    async with aiohttp.ClientSession(headers=headers) as session:
        await asyncio.sleep(wait_s)
        while time.perf_counter() < end_s:
            started = time.perf_counter()
            async with session.post(f"{url}/chat/completions", data=BODY) as response:
                assert response.status == 200
                await response.read()
            ended = time.perf_counter()
            taken.append((ended, ended - started))
    return taken


async def load(accesses: list[list[str]], seconds: float, spread_s: float, client: str) -> None:
    """Prints the seconds that each response took, as JSON, without those of the first moments."""
    ask = _ask_by_aiohttp if client == "aiohttp" else _ask_plainly
    rng, started = random.Random(0), time.perf_counter()
    asking = [ask(url, key, started + WARM_S + seconds, rng.random() * spread_s) for url, key in accesses]
    taken = [each for one in await asyncio.gather(*asking) for each in one]
    print(json.dumps([latency for ended, latency in taken if ended >= started + WARM_S]))


class SlowModel:
    """A model that replies after some seconds, with 16 tokens to a prompt of 48."""

    is_policy = True
    model_name = "slow"

    def __init__(self, seconds: float):
        from reinforge.types.request import ModelReply, TokenLogprobs

        self.seconds = seconds
        texts = tuple(f"word{number % 10} " for number in range(16))
        tokens = TokenLogprobs(tuple(range(48)), tuple(range(16)), (-0.5,) * 16, texts=texts)
        self.reply = ModelReply({"role": "assistant", "content": "".join(texts)}, "stop", tokens, 48, 16)

    async def sample(self, request):
        if self.seconds:
            await asyncio.sleep(self.seconds)
        return self.reply


async def measure(upstream_s: float, seconds: float, client: str, spread_s: float) -> tuple[list[float], float]:
    """Returns the latencies of one round, and the CPU seconds that the server took for each request."""
    from reinforge.rollout.capture import AsyncLLM, Capture
    from reinforge.rollout.gateway import Gateway
    from reinforge.rollout.http.endpoint import EpisodeEndpoint

    model = SlowModel(upstream_s)
    async with Gateway() as gateway:
        accesses, captures = [], [Capture(seed=number) for number in range(EPISODES)]
        for capture in captures:
            handle = AsyncLLM("agent", model, capture, None)
            endpoint = EpisodeEndpoint(lambda name, handle=handle: handle, "agent", {"agent": "slow"}, capture)
            accesses.append(gateway.attach(endpoint))
        job = json.dumps([[[access.base_url, access.api_key] for access in accesses], seconds, spread_s, client])
        process = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--load", stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        started = time.process_time()
        out, _ = await process.communicate(job.encode())
        used = time.process_time() - started
        assert process.returncode == 0
    return json.loads(out), used / sum(len(capture.calls) for capture in captures)


def describe_ms(values: list[float]) -> str:
    """Returns the median and the 99th percentile in milliseconds."""
    ranked = sorted(values)
    return f"p50 {1e3 * statistics.median(ranked):.2f} ms, p99 {1e3 * ranked[int(0.99 * len(ranked))]:.2f} ms"


def main() -> None:
    from benchmarks.machine import describe, refuse_if_busy

    refuse_if_busy()
    client = "aiohttp" if "aiohttp" in sys.argv else "plain"
    print(describe())
    print(f"{EPISODES} open episodes, {ROUNDS} rounds, the load ({client} client) from a second process")
    for spread_s, what in ((UPSTREAM_S, "started at random"), (0.0, "all started at once")):
        rounds = [asyncio.run(measure(UPSTREAM_S, SLOW_S, client, spread_s))[0] for _ in range(ROUNDS)]
        added = [latency - UPSTREAM_S for each in rounds for latency in each]
        print(f"added latency behind a model of {1e3 * UPSTREAM_S:.0f} ms, {what}: {describe_ms(added)}")
    runs = [asyncio.run(measure(0.0, FAST_S, client, 0.0)) for _ in range(ROUNDS)]
    rates = sorted(len(latencies) / FAST_S for latencies, _ in runs)
    used_us = 1e6 * statistics.median(used for _, used in runs)
    print(
        f"throughput in front of an instantaneous model: median {statistics.median(rates):.0f} requests/s, "
        f"min {rates[0]:.0f}, max {rates[-1]:.0f}; {used_us:.0f} us of the server's CPU per request"
    )


if __name__ == "__main__":
    if "--load" in sys.argv:
        asyncio.run(load(*json.load(sys.stdin)))
    else:
        main()
