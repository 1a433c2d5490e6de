"""The client behind `_type: openai`: one POST, typed failures, retries that obey the server.

    answer                                       outcome
    200 and a chat completion                    ModelReply(tokens=None)
    408, 409, 429, 5xx, no or half an answer     tried again (after `retry-after` if given), then BackendUnavailable
    any other status, a redirect, no completion  BackendError, at once

The key travels in a header and is cut out of every message that could repeat it. Redirects are not followed.
"""

from __future__ import annotations

import email.utils
import json
import re
import socket
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
import stamina
from pydantic import SecretStr

from reinforge.errors import BackendError, BackendUnavailable
from reinforge.rollout.openai_llm import OpenAILLMConfig, is_metadata
from reinforge.types.request import Message, ModelReply, ModelRequest

AGAIN = frozenset({408, 409, 429})
MAX_WAIT_S = 120.0
"""A server that asks for a longer wait is not waited for."""
MAX_BYTES = 32 << 20
CONNECT_S = 10.0


class TryAgain(Exception):
    """A failure that may pass.

    Attributes:
        wait_s: Seconds that the server asks to wait; None: it does not say.
    """

    def __init__(self, message: str, wait_s: float | None = None):
        super().__init__(message)
        self.wait_s = wait_s


class OpenAIChat:
    """A model behind an endpoint; not a policy.

    Args:
        config: Name, limits and defaults.
        url: The endpoint, up to /v1.
        key: Sent as a bearer token.
    """

    is_policy = False
    passes_through = True

    def __init__(self, config: OpenAILLMConfig, url: str, key: SecretStr | None = None):
        self.config, self.url, self._key = config, url, key
        self._open: aiohttp.ClientSession | None = None

    @property
    def model_name(self) -> str:
        """The model's name at the endpoint."""
        return self.config.model_name

    @property
    def endpoint(self) -> str:
        """Where prompts are sent, for a person."""
        return self.url

    async def sample(self, request: ModelRequest) -> ModelReply:
        """Asks for one reply; its tokens are not known, so it is never trained.

        Raises:
            BackendUnavailable: No usable answer after every attempt.
            BackendError: An answer that trying again would not change.
        """
        return (await self.sample_choices(request, 1))[0]

    async def sample_choices(self, request: ModelRequest, n: int) -> list[ModelReply]:
        """Asks for n choices at once; the first one carries the tokens of all, which the endpoint counts together.

        Raises:
            BackendUnavailable: No usable answer after every attempt.
            BackendError: An answer that trying again would not change, or one of fewer choices.
        """
        body = body_of(self.config, request) | ({"n": n} if n > 1 else {})
        attempts = self.config.max_retries + 1
        try:
            async for attempt in stamina.retry_context(
                on=_wait, attempts=attempts, timeout=None, wait_initial=0.5, wait_max=8.0, wait_jitter=0.25
            ):
                with attempt:
                    answer = await self._post(body)
        except TryAgain as error:
            tried = "" if error.wait_s is not None and error.wait_s > MAX_WAIT_S else f" ({attempts} attempts)"
            raise BackendUnavailable(f"{error}{tried}") from None
        return self._replies(answer, n)

    async def close(self) -> None:
        """Closes the connections."""
        if self._open is not None:
            await self._open.close()
            self._open = None

    def _session(self) -> aiohttp.ClientSession:
        if self._open is None:
            self._open = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self.config.max_connections, resolver=SafeResolver()),
                timeout=aiohttp.ClientTimeout(total=self.config.timeout_s, sock_connect=CONNECT_S),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._open

    async def _post(self, body: dict[str, Any]) -> str:
        """Returns the text of an answer with status 200."""
        headers = {"Authorization": f"Bearer {self._key.get_secret_value()}"} if self._key is not None else {}
        url = f"{self.url}/chat/completions"
        try:
            async with self._session().post(url, json=body, headers=headers, allow_redirects=False) as response:
                text = (await self._read(response)).decode("utf-8", "replace")
                status, answered = response.status, dict(response.headers)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            what = f"no answer within {self.config.timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
            raise TryAgain(self._clean(f"{url}: {what or type(error).__name__}")) from None
        if status == 200:
            return text
        said = self._clean(f"{url}: {status} {what_is_said(text)}")
        lower = {key.lower(): value for key, value in answered.items()}
        if 300 <= status < 400:
            raise BackendError(f"{said}: redirects are not followed; set base_url to where it points")
        again = {"true": True, "false": False}.get(lower.get("x-should-retry", ""), status in AGAIN or status >= 500)
        if not again:
            raise BackendError(said)
        wait_s = asked_wait_s(lower)
        told = f"; it asks to wait {wait_s:.0f} s" if wait_s is not None and wait_s > MAX_WAIT_S else ""
        raise TryAgain(said + told, wait_s)

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        chunks, size = [], 0
        async for chunk in response.content.iter_chunked(1 << 16):
            chunks.append(chunk)
            size += len(chunk)
            if size > MAX_BYTES:
                raise BackendError(f"{self.url}: the answer is longer than {MAX_BYTES >> 20} MiB")
        return b"".join(chunks)

    def _replies(self, text: str, n: int) -> list[ModelReply]:
        """Returns the n replies that an answer holds."""
        try:
            answer = json.loads(text)
            choices = answer["choices"][:n]
            messages: list[Message] = [_message(choice["message"]) for choice in (choices[0], *choices[1:])]
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            told = self._clean(what_is_said(text))
            raise BackendError(f"{self.url}/chat/completions: the answer is no chat completion: {told}") from None
        if len(choices) < n:
            raise BackendError(f"{self.url}/chat/completions: {len(choices)} of n = {n} choices came back")
        usage = answer.get("usage") or {}
        prompt, completion = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
        return [
            ModelReply(message, str(choice.get("finish_reason") or "stop"), None, prompt, 0 if index else completion)
            for index, (message, choice) in enumerate(zip(messages, choices, strict=True))
        ]

    def _clean(self, text: str) -> str:
        """Returns text without the key, in case the server repeats it."""
        key = self._key.get_secret_value() if self._key is not None else ""
        return text.replace(key, "***") if key else text


class SafeResolver(aiohttp.ThreadedResolver):
    """Refuses names that lead to a link-local address, also if they did not a moment ago."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[aiohttp.abc.ResolveResult]:
        """Returns the addresses of a host."""
        found = await super().resolve(host, port, family)
        if any(is_metadata(entry["host"]) for entry in found):
            raise OSError(f"{host} leads to a link-local address, which is never called")
        return found


def body_of(config: OpenAILLMConfig, request: ModelRequest) -> dict[str, Any]:
    """Returns the JSON of one call: the configuration's defaults, then what the caller asked for."""
    defaults = {"temperature": config.temperature, "top_p": config.top_p, "max_tokens": config.max_tokens}
    asked = request.arguments
    if asked is None:
        sampling = request.sampling
        asked = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p if sampling.top_p < 1 else None,
            "max_tokens": sampling.max_tokens,
            "stop": list(sampling.stop) or None,
            "seed": sampling.seed,
        }
    if asked.get("max_completion_tokens") is not None:
        del defaults["max_tokens"]
    given = {key: value for key, value in {**defaults, **_given(asked)}.items() if value is not None}
    tools = {"tools": request.tools} if request.tools else {}
    return {"model": config.model_name, "messages": request.messages, **config.extra_body, **given, **tools}


def _message(said: Mapping[str, Any]) -> Message:
    further = {key: said[key] for key in ("tool_calls", "refusal") if said.get(key)}
    return {"role": "assistant", "content": said.get("content"), **further}


def _given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if value is not None}


def _wait(error: Exception) -> bool | float:
    """Tells stamina whether to try again: True for its own backoff, or the seconds that the server asks for."""
    if not isinstance(error, TryAgain):
        return False
    if error.wait_s is None:
        return True
    return error.wait_s if error.wait_s <= MAX_WAIT_S else False


def asked_wait_s(headers: Mapping[str, str]) -> float | None:
    """Returns the seconds of `retry-after-ms` or `retry-after` (seconds or a date); None where neither is usable."""
    try:
        return max(0.0, float(headers["retry-after-ms"]) / 1000)
    except (KeyError, ValueError):
        pass
    value = headers.get("retry-after", "")
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


def what_is_said(text: str) -> str:
    """Returns what an error's body says, in one short line: OpenAI's error object, or the first words of any text."""
    try:
        error = json.loads(text)
        error = error.get("error", error.get("detail", error.get("message", error)))
        if isinstance(error, dict):
            error = ": ".join(str(error[key]) for key in ("code", "message") if error.get(key)) or error
        text = str(error)
    except (ValueError, AttributeError, RecursionError):
        pass
    words = " ".join(re.sub(r"<[^>]*>", " ", text).split())
    return words[:300] or "an empty answer"


def _count(usage: Any, name: str) -> int:
    value = usage.get(name) if isinstance(usage, Mapping) else None
    return value if isinstance(value, int) and value > 0 else 0
