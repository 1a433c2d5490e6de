"""Episodes behind a gateway, and a raw client, for the tests of the gateway."""

import asyncio
import json

from reinforge.rollout.capture import AsyncLLM, Capture
from reinforge.rollout.http.endpoint import EpisodeEndpoint
from tests.doubles import PolicyModel, ScriptedPolicy

CHAT = {"model": "agent", "messages": [{"role": "user", "content": "2 + 2?"}]}


class HeldPolicy(ScriptedPolicy):
    """Answers once `release` is set, the n-th request with "reply n"; `asked` is set by the first one.

    Attributes:
        most: Most requests that were asked at the same time.
    """

    def __init__(self, *, held=True):
        super().__init__()
        self.asked, self.release, self.most, self._asked_now = asyncio.Event(), asyncio.Event(), 0, 0
        if not held:
            self.release.set()

    async def sample(self, request):
        number = len(self.requests)
        self.script = lambda request: f"reply {number}"
        reply = await super().sample(request)
        self._asked_now += 1
        self.most = max(self.most, self._asked_now)
        self.asked.set()
        try:
            await self.release.wait()
        finally:
            self._asked_now -= 1
        return reply


class Episode:
    """An episode whose entries of `llms` are one policy."""

    def __init__(self, policy=None, entries=("agent",), seed=7):
        self.policy = ScriptedPolicy() if policy is None else policy
        self.capture = Capture(seed=seed)
        handles = {name: AsyncLLM(name, PolicyModel(self.policy), self.capture, None) for name in entries}
        named = dict.fromkeys(entries, "scripted")
        self.capture.told.add("gpt-4o")
        self.endpoint = EpisodeEndpoint(handles.__getitem__, entries[0], named, self.capture)

    @property
    def replies(self):
        """The texts of the recorded calls."""
        return [call.reply.message["content"] for call in self.capture.calls]


def write_request(access, body=CHAT, *, path="/chat/completions", method="POST", **headers):
    """Returns the bytes of an HTTP request; keywords are headers, and None leaves one out."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    port = access.base_url.split(":")[2].partition("/")[0]
    base = "/" + access.base_url.split("/", 3)[3]
    named = {
        "host": f"127.0.0.1:{port}",
        "authorization": f"Bearer {access.api_key}",
        "content-length": str(len(content)),
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    target = path if path.startswith(("/v1", "/episodes", "/mcp")) else base + path
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in named.items() if value is not None)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "surrogateescape") + content


async def open_connection(access):
    host, port = access.base_url.removeprefix("http://").partition("/")[0].split(":")
    return await asyncio.open_connection(host, int(port))


async def read_response(reader, *, has_body=True):
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    length = int(headers.get("content-length", 0)) if has_body else 0
    return int(head[0].split()[1]), headers, await reader.readexactly(length)


async def ask(access, body=CHAT, *, method="POST", **keywords):
    """Sends one request over a connection of its own; returns status, headers and body of the response."""
    reader, writer = await open_connection(access)
    try:
        writer.write(write_request(access, body, method=method, **keywords))
        return await read_response(reader, has_body=method != "HEAD")
    finally:
        writer.close()


def text_of(body):
    return json.loads(body)["choices"][0]["message"]["content"]
