"""Measures what the clients in this process cost: episodes with a model that replies instantly, scored and journalled.

    python benchmarks/capture.py

handle      the agent calls `llm.chat.completions.create`
transport   it hands requests made beforehand to the episode's transport: all that lies below a client
http        it posts JSON with `context.async_http_client()`
openai      it calls `context.async_openai()`
canned      requests to a transport that answers with a response made beforehand, outside of a run
sdk         the calls of `openai` to that transport, outside of a run

`(transport - canned) / handle` leaves out what the clients cost with any endpoint. The sides take turns.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import openai

from benchmarks.harness_overhead import EXAMPLES, GENERATIONS, run_round
from benchmarks.machine import describe, refuse_if_busy
from reinforge.rollout.http.clients import API_KEY, BASE_URL, build_transports, find_library

ROUNDS, LIMIT = 7, 1.15
EPISODES = EXAMPLES * GENERATIONS
PATH = f"{BASE_URL}/chat/completions"
LIBRARY = find_library()
BODY = json.dumps({"model": "agent", "messages": [{"role": "user", "content": "q"}]}).encode()
REQUEST = LIBRARY.Request("POST", PATH, content=BODY, headers={"content-type": "application/json"})
REPLY = {
    "id": "call-1", "object": "chat.completion", "created": 0, "model": "m",
    "usage": {"prompt_tokens": 48, "completion_tokens": 16, "total_tokens": 64},
    "choices": [{"index": 0, "finish_reason": "stop", "logprobs": None,
                 "message": {"role": "assistant", "content": "an answer", "refusal": None}}],
}  # fmt: skip
ANSWER = json.dumps(REPLY).encode()

Agent = Callable[[Any, Any, Any], Awaitable[Any]]


async def use_handle(item, llm, context):
    reply = await llm.chat.completions.create(messages=[{"role": "user", "content": item.input_obj}])
    return reply.choices[0].message.content


async def use_transport(item, llm, context):
    transport = build_transports(LIBRARY).asynchronous(lambda: context.endpoint)
    return json.loads((await transport.handle_async_request(REQUEST)).content)["choices"][0]["message"]["content"]


async def use_http(item, llm, context):
    body = {"model": "agent", "messages": [{"role": "user", "content": item.input_obj}]}
    return (await context.async_http_client().post(PATH, json=body)).json()["choices"][0]["message"]["content"]


async def use_openai(item, llm, context):
    return await ask(context.async_openai())


async def ask(client: Any) -> str:
    """Returns the answer to one question."""
    reply = await client.chat.completions.create(model="agent", messages=[{"role": "user", "content": "q"}])
    return reply.choices[0].message.content


class Canned(LIBRARY.AsyncBaseTransport):  # type: ignore[name-defined]
    """Answers each request with the same response."""

    async def handle_async_request(self, request):
        await request.aread()
        return LIBRARY.Response(200, headers={"content-type": "application/json"}, content=ANSWER, request=request)


async def send_canned() -> None:
    """Reads one response of the canned transport."""
    assert json.loads((await Canned().handle_async_request(REQUEST)).content)


async def use_sdk() -> None:
    """Makes one call with a client of its own."""
    client = LIBRARY.AsyncClient(transport=Canned())
    await ask(openai.AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0, http_client=client))


async def time_alone(call: Callable[[], Awaitable[None]]) -> float:
    """Returns the seconds of as many calls as there are episodes."""
    started = time.perf_counter()
    for _ in range(EPISODES):
        await call()
    return time.perf_counter() - started


AGENTS: dict[str, Agent] = {
    "handle": use_handle, "transport": use_transport, "http": use_http, "openai": use_openai,
}  # fmt: skip


def main() -> None:
    refuse_if_busy()
    alone = {"canned": send_canned, "sdk": use_sdk}
    times: dict[str, list[float]] = {name: [] for name in (*AGENTS, *alone)}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(ROUNDS + 1):
            for name in times:
                gc.collect()
                gc.freeze()  # else the side in which a full collection falls pays for the others' objects
                if name in AGENTS:
                    seconds = asyncio.run(run_round(Path(folder) / f"{name}-{number}", AGENTS[name]))
                else:
                    seconds = asyncio.run(time_alone(alone[name]))
                times[name].append(seconds)
    print(describe())
    print(f"openai {openai.__version__}; {EPISODES} episodes of one call, {ROUNDS} rounds after a warm-up")
    for name, rounds_s in times.items():
        values = [each / EPISODES * 1000 for each in rounds_s[1:]]
        print(
            f"{name:10} {statistics.median(values):6.3f} ms an episode (min {min(values):.3f}, max {max(values):.3f})"
        )
    rounds = zip(times["transport"][1:], times["canned"][1:], times["handle"][1:], strict=True)
    ratio = statistics.median((ours - canned) / handle for ours, canned, handle in rounds)
    print(f"(transport - canned) / handle: {ratio:.2f} (at most {LIMIT})")


if __name__ == "__main__":
    main()
