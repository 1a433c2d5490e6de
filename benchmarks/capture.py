"""Measures what the clients in this process cost: episodes with a model that replies instantly, scored and journalled.

    python benchmarks/capture.py

handle      the agent calls `llm.chat.completions.create`
transport   it hands requests made beforehand to the episode's transport: all that lies below a client
http        it posts JSON with `context.async_http_client()`
openai      it calls `context.async_openai()`
canned      it calls the handle, and sends a request to a transport that answers with a response made beforehand
sdk         it calls the handle, and `openai` with that transport

What the clients cost with any endpoint is `canned - handle` and `sdk - handle`: inside of a run, where their code is as
cold as it is for an agent. `(transport - (canned - handle)) / handle` leaves it out. The sides take turns.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import openai

from benchmarks.harness_overhead import EXAMPLES, GENERATIONS, run_round
from benchmarks.machine import describe, refuse_if_busy
from reinforge.rollout.http.clients import API_KEY, BASE_URL, build_classes, find_library

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
    transport = build_classes(LIBRARY).async_transport(lambda: context.endpoint)
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


async def use_canned(item, llm, context):
    await use_handle(item, llm, context)
    return json.loads((await Canned().handle_async_request(REQUEST)).content)["choices"][0]["message"]["content"]


async def use_sdk(item, llm, context):
    await use_handle(item, llm, context)
    client = LIBRARY.AsyncClient(transport=Canned())
    return await ask(openai.AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0, http_client=client))


AGENTS: dict[str, Agent] = {
    "handle": use_handle, "transport": use_transport, "http": use_http, "openai": use_openai,
    "canned": use_canned, "sdk": use_sdk,
}  # fmt: skip


def main() -> None:
    refuse_if_busy()
    times: dict[str, list[float]] = {name: [] for name in AGENTS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(ROUNDS + 1):
            for name, agent in AGENTS.items():
                gc.collect()
                gc.freeze()  # else the side in which a full collection falls pays for the others' objects
                times[name].append(asyncio.run(run_round(Path(folder) / f"{name}-{number}", agent)))
    print(describe())
    print(f"openai {openai.__version__}; {EPISODES} episodes of one call, {ROUNDS} rounds after a warm-up")
    for name, rounds_s in times.items():
        values = [each / EPISODES * 1000 for each in rounds_s[1:]]
        print(
            f"{name:10} {statistics.median(values):6.3f} ms an episode (min {min(values):.3f}, max {max(values):.3f})"
        )
    rounds = list(zip(*(times[name][1:] for name in ("handle", "transport", "canned", "sdk")), strict=True))
    ratios = sorted((ours - (canned - handle)) / handle for handle, ours, canned, _ in rounds)
    own = statistics.median(sdk - handle for handle, *_, sdk in rounds) / EPISODES * 1000
    print(f"the SDK's own cost: {own:.3f} ms a call")
    print(
        f"(transport - (canned - handle)) / handle: {statistics.median(ratios):.2f} "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f}; at most {LIMIT})"
    )


if __name__ == "__main__":
    main()
