"""A stand-in for a large model's server: what it answers is in the request's last message."""

import asyncio
import contextlib
import json

from aiohttp import web

from reinforge.serving.app import ServeApp
from reinforge.serving.models import ServedModels
from reinforge.serving.recording import RecordConfig, Recorder
from reinforge.serving.upstream import KEY_HEADER, UpstreamApi

USAGE = {"prompt_tokens": 8, "completion_tokens": 2, "total_tokens": 10}
HEADERS = {"x-request-id": "req_upstream", "x-ratelimit-remaining-requests": "7"}


class LargeModel:
    """Speaks chat completions over real sockets; keeps what it gets in `requests`."""

    def __init__(self):
        self.requests, self.closed = [], 0

    async def __aenter__(self):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/api/v1"
        return self

    async def __aexit__(self, *exc_info):
        await self._runner.cleanup()

    async def answer(self, request):
        body = await request.read()
        self.requests.append((request.method, request.raw_path, request.headers.copy(), body))
        if request.method != "POST" or not request.path.endswith("/chat/completions"):
            return web.Response(status=201, body=b"\x00bytes" + body, headers={**HEADERS, "content-type": "image/png"})
        asked = json.loads(body)
        last = asked["messages"][-1]["content"]
        if last == "busy":
            error = {"error": {"message": "slow down", "type": "rate_limit"}}
            return web.json_response(error, status=429, headers={**HEADERS, "retry-after": "7"})
        if last == "broken":
            return web.Response(status=500, text="<html>oops</html>", content_type="text/html")
        if last == "wrong":
            return web.Response(body=b'{"choices": [', content_type="application/json")
        reason = "length" if last == "long" else "stop"
        text = f"echo {last}"
        if asked.get("stream"):
            return await self.stream(request, text, reason)
        message = {"role": "assistant", "content": text}
        whole = {"id": "c1", "object": "chat.completion", "model": "large-1", "usage": USAGE}
        whole["choices"] = [{"index": 0, "message": message, "finish_reason": reason}]
        found = json.dumps(whole).encode()
        return web.Response(body=found, headers=HEADERS, content_type="application/json")

    async def stream(self, request, text, reason):
        response = web.StreamResponse(headers={**HEADERS, "content-type": "text/event-stream"})
        await response.prepare(request)
        try:
            for number, piece in enumerate([text[:3], text[3:]]):
                delta = {"content": piece} | ({"role": "assistant"} if not number else {})
                chunk = {"id": "c2", "model": "large-1", "choices": [{"index": 0, "delta": delta}]}
                await response.write(b"data: %b\n\n" % json.dumps(chunk).encode())
                if text == "echo cut":
                    request.transport.abort()
                    return response
                await asyncio.sleep(60 if text == "echo never" and number else 0.02)
        except asyncio.CancelledError:
            self.closed += 1
            raise
        end = {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}], "usage": USAGE}
        await response.write(b"data: %b\n\ndata: [DONE]\n\n" % json.dumps(end).encode())
        await response.write_eof()
        return response


@contextlib.asynccontextmanager
async def pass_on(url, folder=None, *, project_root=None, token=None, **record):
    """Yields a server before `url`, and its recorder."""
    recorder = None
    if folder is not None:
        recorder = Recorder(folder, RecordConfig(**record), project_root=project_root)
    app = ServeApp(ServedModels(), chat=UpstreamApi(url, recorder), key_header=KEY_HEADER, token=token)
    async with app:
        yield app, recorder


def read_records(folder):
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
