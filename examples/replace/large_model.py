"""A stand-in for an expensive model: chat completions by rules, with errors, after a delay; streams and tool calls.

python large_model.py --port 9000 --delay 0.3 --noise 0.02

What is right, it knows from `jobs.py`.
"""

import argparse
import asyncio
import json
import random
import socket

from aiohttp import web
from jobs import find_job, read_answers

CHARACTERS_PER_TOKEN = 4


class LargeModel:
    def __init__(self, delay_s, noise):
        self.delay_s, self.noise, self.rng, self.count = delay_s, noise, random.Random(1), 0

    async def answer(self, request):
        body = await request.json()
        await asyncio.sleep(self.delay_s * self.rng.uniform(0.7, 1.5))
        message = self.choose(body["messages"])
        self.count += 1
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        sent, sampled = (len(json.dumps(each)) // CHARACTERS_PER_TOKEN + 1 for each in (body, message))
        usage = {"prompt_tokens": sent, "completion_tokens": sampled, "total_tokens": sent + sampled}
        whole = {"id": f"chatcmpl-{self.count}", "created": 0, "model": body["model"], "usage": usage}
        if body.get("stream"):
            return await self.stream(request, whole, message, reason)
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return web.json_response({**whole, "object": "chat.completion", "choices": [choice]})

    def choose(self, messages):
        """Returns the right message, or, with the probability of the noise, that of another request."""
        answers = read_answers(find_job(messages))
        right = answers[messages[-1]["content"]]
        if self.rng.random() >= self.noise:
            return right
        return next(each for each in iter(lambda: self.rng.choice(list(answers.values())), None) if each != right)

    async def stream(self, request, whole, message, reason):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls") or ())]
        first = {**message, "tool_calls": calls} if calls else message
        usage = whole.pop("usage")
        for delta, ended in ((first, None), ({}, reason)):
            choice = {"index": 0, "delta": delta, "finish_reason": ended}
            await send(response, {**whole, "object": "chat.completion.chunk", "choices": [choice]})
        await send(response, {**whole, "object": "chat.completion.chunk", "choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response


async def send(response, chunk):
    await response.write(b"data: %b\n\n" % json.dumps(chunk).encode())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=9000, help="0: any free one")
    parser.add_argument("--delay", type=float, default=0.3, help="seconds before a reply, about")
    parser.add_argument("--noise", type=float, default=0.02, help="share of replies that are wrong")
    options = parser.parse_args()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", LargeModel(options.delay, options.noise).answer)
    with socket.create_server(("127.0.0.1", options.port)) as listening:
        print(f"OPENAI_BASE_URL=http://127.0.0.1:{listening.getsockname()[1]}/v1", flush=True)
        web.run_app(app, sock=listening, access_log=None, print=None)


if __name__ == "__main__":
    main()
