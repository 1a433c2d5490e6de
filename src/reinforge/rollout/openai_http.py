"""Calls to an endpoint that speaks OpenAI's API: typed failures, and retries that obey the server.

    answer                                       outcome
    200                                          its text
    408, 409, 429, 5xx, no or half an answer     tried again (after `retry-after` if given), then BackendUnavailable
    any other status, a redirect                 BackendError, at once

The key travels in a header and is cut out of every message that could repeat it. Redirects are not followed.
"""

from __future__ import annotations

import email.utils
import json
import re
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import aiohttp
import stamina
from pydantic import SecretStr

from reinforge.errors import BackendError, BackendUnavailable
from reinforge.rollout.openai_config import EndpointConfig, is_metadata

T = TypeVar("T")

AGAIN = frozenset({408, 409, 429})
MAX_WAIT_S = 120.0
"""A server that asks for a longer wait is not waited for."""
MAX_BYTES = 32 << 20
CONNECT_S = 10.0
UPLOAD_S = 600.0
"""A file may take so long, however short the answers of other calls must be."""


class TryAgain(Exception):
    """A failure that may pass.

    Attributes:
        wait_s: Seconds that the server asks to wait; None: it does not say.
    """

    def __init__(self, message: str, wait_s: float | None = None):
        super().__init__(message)
        self.wait_s = wait_s


class Refused(BackendError):
    """An answer that trying again would not change.

    Attributes:
        status: The HTTP status.
    """

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class OpenAIEndpoint:
    """The connections to one endpoint.

    Args:
        config: Limits.
        url: The endpoint, up to /v1.
        key: Sent as a bearer token.
    """

    def __init__(self, config: EndpointConfig, url: str, key: SecretStr | None = None):
        self.config, self.url, self._key = config, url, key
        self._open: aiohttp.ClientSession | None = None

    async def call(self, method: str, path: str, **arguments: Any) -> str:
        """Makes a call that may be made twice and returns the text of its answer; arguments as of `once`.

        Raises:
            BackendUnavailable: No usable answer after every attempt.
            BackendError: An answer that trying again would not change.
        """
        return await self.retried(lambda: self.once(method, path, **arguments))

    async def retried(self, work: Callable[[], Awaitable[T]]) -> T:
        """Does `work`, which may raise `TryAgain`, as often as the configuration says.

        Raises:
            BackendUnavailable: Every attempt failed in a way that may pass.
        """
        attempts = self.config.max_retries + 1
        try:
            async for attempt in stamina.retry_context(
                on=_wait, attempts=attempts, timeout=None, wait_initial=0.5, wait_max=8.0, wait_jitter=0.25
            ):
                with attempt:
                    done = await work()
        except TryAgain as error:
            tried = "" if error.wait_s is not None and error.wait_s > MAX_WAIT_S else f" ({attempts} attempts)"
            raise BackendUnavailable(f"{error}{tried}") from None
        return done

    async def once(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        file: tuple[str, bytes, Mapping[str, str]] | None = None,
    ) -> str:
        """Makes one call and returns the text of an answer with status 200.

        Args:
            method: GET or POST.
            path: Below the endpoint's URL.
            query: Behind the `?`.
            body: Sent as JSON.
            file: Name, content and the other fields of a form; sent in place of JSON.

        Raises:
            TryAgain: A failure that may pass.
            Refused: An answer that trying again would not change.
        """
        headers = {"Authorization": f"Bearer {self._key.get_secret_value()}"} if self._key is not None else {}
        url = f"{self.url}{path}"
        limit_s = self.config.timeout_s if file is None else max(UPLOAD_S, self.config.timeout_s)
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=CONNECT_S)
        sent: dict[str, Any] = {"json": body} if file is None else {"data": _form(*file)}
        try:
            async with self._session().request(
                method, url, params=query, headers=headers, timeout=timeout, allow_redirects=False, **sent
            ) as response:
                text = (await self._read(response)).decode("utf-8", "replace")
                status, answered = response.status, dict(response.headers)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            what = f"no answer within {limit_s:g} s" if isinstance(error, TimeoutError) else str(error)
            raise TryAgain(self.clean(f"{url}: {what or type(error).__name__}")) from None
        if status == 200:
            return text
        said = self.clean(f"{url}: {status} {what_is_said(text)}")
        lower = {key.lower(): value for key, value in answered.items()}
        if 300 <= status < 400:
            raise Refused(f"{said}: redirects are not followed; set base_url to where it points", status)
        again = {"true": True, "false": False}.get(lower.get("x-should-retry", ""), status in AGAIN or status >= 500)
        if not again:
            raise Refused(said, status)
        wait_s = asked_wait_s(lower)
        told = f"; it asks to wait {wait_s:.0f} s" if wait_s is not None and wait_s > MAX_WAIT_S else ""
        raise TryAgain(said + told, wait_s)

    def clean(self, text: str) -> str:
        """Returns text without the key, in case the server repeats it."""
        key = self._key.get_secret_value() if self._key is not None else ""
        return text.replace(key, "***") if key else text

    async def close(self) -> None:
        """Closes the connections."""
        if self._open is not None:
            await self._open.close()
            self._open = None

    def _session(self) -> aiohttp.ClientSession:
        if self._open is None:
            self._open = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self.config.max_connections, resolver=SafeResolver()),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._open

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        chunks, size = [], 0
        async for chunk in response.content.iter_chunked(1 << 16):
            chunks.append(chunk)
            size += len(chunk)
            if size > MAX_BYTES:
                raise BackendError(f"{self.url}: the answer is longer than {MAX_BYTES >> 20} MiB")
        return b"".join(chunks)


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


def _form(name: str, content: bytes, fields: Mapping[str, str]) -> aiohttp.FormData:
    form = aiohttp.FormData(dict(fields))
    form.add_field("file", content, filename=name, content_type="application/jsonl")
    return form


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
