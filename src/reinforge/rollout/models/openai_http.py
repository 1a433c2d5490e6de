"""HTTP calls to an OpenAI-compatible endpoint, with retries.

    response                                     result
    2xx                                          its text
    408, 409, 429, 5xx, none or a partial one    retried (after `retry-after` if given), then BackendUnavailable
    any other status, a redirect                 BackendError, without a retry

The key is sent in a header and redacted from every message. Redirects are not followed.
"""

from __future__ import annotations

import email.utils
import re
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import stamina
import yarl
from pydantic import SecretStr

from reinforge.bounded import load_json, replace_surrogates
from reinforge.errors import BackendError, BackendUnavailable, ConfigError, Problem
from reinforge.limits import get_limits
from reinforge.rollout.models.endpoint_config import EndpointConfig, is_metadata_host

T = TypeVar("T")

TOO_BUSY = 429
RETRYABLE_STATUSES = frozenset({408, 409, TOO_BUSY})
MAX_WAIT_S = 120.0  # if the server asks to wait longer than this, the call fails instead
CONNECT_S = 10.0
UPLOAD_S = 600.0  # minimum time limit of a file upload


class RetryableError(Exception):
    """A temporary failure; the call may be retried.

    Attributes:
        wait_s: Seconds that the server asks to wait; None: not given.
        was_refused: True if the call had no effect: there was no connection, or the server was too busy for it.
    """

    def __init__(
        self, message: str, wait_s: float | None = None, *, was_refused: bool = False, status: int | None = None
    ):
        super().__init__(message)
        self.wait_s, self.was_refused, self.status = wait_s, was_refused, status


class RequestRejected(BackendError):
    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class UnexpectedAnswer(BackendError):
    """An answer that is not what its endpoint promises; names the field and what was found instead."""


class OpenAIEndpoint:
    """The connections to one endpoint.

    Args:
        socket_path: The Unix domain socket at which the server listens; None: it listens at the URL's host.
    """

    def __init__(
        self, config: EndpointConfig, url: str, key: SecretStr | None = None, *, socket_path: Path | None = None
    ):
        if is_metadata_host(yarl.URL(url).host or ""):
            raise ConfigError(Problem("base_url", f"{url} is a link-local address or a cloud's metadata service"))
        self.config, self.url, self._key, self._socket_path = config, url, key, socket_path
        self._session: aiohttp.ClientSession | None = None

    async def call(self, method: str, path: str, **arguments: Any) -> str:
        return await self.retry(lambda: self.send(method, path, **arguments))

    async def retry(self, work: Callable[[], Awaitable[T]]) -> T:
        """Runs `work` and repeats it after a `RetryableError` or an odd answer, up to `max_retries` times."""
        attempts = self.config.max_retries + 1
        try:
            async for attempt in stamina.retry_context(
                on=_choose_backoff, attempts=attempts, timeout=None, wait_initial=0.5, wait_max=8.0, wait_jitter=0.25
            ):
                with attempt:
                    result = await work()
        except RetryableError as error:
            gave_up_early = error.wait_s is not None and error.wait_s > MAX_WAIT_S
            raise BackendUnavailable(f"{error}{'' if gave_up_early else f' ({attempts} attempts)'}") from None
        return result

    async def send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        file: tuple[str, bytes, Mapping[str, str]] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> str:
        """Makes one call and returns the text of a successful response.

        Args:
            file: Name, content and the other form fields of an upload; sent instead of JSON.

        Raises:
            RetryableError: The call failed temporarily.
            RequestRejected: The server rejected the request.
        """
        key = {"Authorization": f"Bearer {self._key.get_secret_value()}"} if self._key is not None else {}
        url = f"{self.url}{path}"
        limit_s = self.config.timeout_s if file is None else max(UPLOAD_S, self.config.timeout_s)
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=CONNECT_S)
        content: dict[str, Any] = {"json": body} if file is None else {"data": _build_form(*file)}
        try:
            async with self._get_session().request(
                method,
                url,
                params=query,
                headers={**key, **(headers or {})},
                timeout=timeout,
                allow_redirects=False,
                **content,
            ) as response:
                text = (await self._read(response)).decode("utf-8", "replace")
                status, received = response.status, dict(response.headers)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            what = f"no response within {limit_s:g} s" if isinstance(error, TimeoutError) else str(error)
            was_refused = isinstance(error, aiohttp.ClientConnectorError)
            raise RetryableError(
                self.redact(f"{url}: {what or type(error).__name__}"), was_refused=was_refused
            ) from None
        if 200 <= status < 300:
            return text
        message = self.redact(f"{url}: {status} {extract_error_message(text)}")
        lower = {key.lower(): value for key, value in received.items()}
        if 300 <= status < 400:
            raise RequestRejected(f"{message}: redirects are not followed; write the final URL", status)
        is_retryable = status in RETRYABLE_STATUSES or status >= 500
        if not {"true": True, "false": False}.get(lower.get("x-should-retry", ""), is_retryable):
            raise RequestRejected(message, status)
        wait_s = parse_retry_after(lower)
        if wait_s is not None and wait_s > MAX_WAIT_S:
            message += f"; the server asks to wait {wait_s:.0f} s, more than the maximum of {MAX_WAIT_S:.0f} s"
        raise RetryableError(message, wait_s, was_refused=status == TOO_BUSY, status=status)

    def redact(self, text: str) -> str:
        key = self._key.get_secret_value() if self._key is not None else ""
        return text.replace(key, "***") if key else text

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _get_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=self._connect(), cookie_jar=aiohttp.DummyCookieJar())
        return self._session

    def _connect(self) -> aiohttp.BaseConnector:
        limit = self.config.max_connections
        if self._socket_path is not None:
            return aiohttp.UnixConnector(str(self._socket_path), limit=limit)
        return aiohttp.TCPConnector(limit=limit, resolver=SafeResolver())

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        chunks, size = [], 0
        async for chunk in response.content.iter_chunked(1 << 16):
            chunks.append(chunk)
            size += len(chunk)
            if size > (most := get_limits().response_bytes):
                raise BackendError(f"{self.url}: the response is larger than {most >> 20} MiB")
        return b"".join(chunks)


class SafeResolver(aiohttp.ThreadedResolver):
    """Blocks host names that resolve to a link-local address, on every lookup (DNS rebinding)."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[aiohttp.abc.ResolveResult]:
        addresses = await super().resolve(host, port, family)
        if any(is_metadata_host(entry["host"]) for entry in addresses):
            raise OSError(f"{host} resolves to a link-local address, which is blocked")
        return addresses


def _build_form(name: str, content: bytes, fields: Mapping[str, str]) -> aiohttp.FormData:
    form = aiohttp.FormData(dict(fields))
    form.add_field("file", content, filename=name, content_type="application/jsonl")
    return form


def _choose_backoff(error: Exception) -> bool | float:
    """Returns whether stamina retries: True with its own backoff, or the seconds that the server asks to wait."""
    if isinstance(error, UnexpectedAnswer):  # may be a proxy's
        return True
    if not isinstance(error, RetryableError):
        return False
    if error.wait_s is None:
        return True
    return error.wait_s if error.wait_s <= MAX_WAIT_S else False


def parse_retry_after(headers: Mapping[str, str]) -> float | None:
    """Returns the seconds from `retry-after-ms` or `retry-after` (seconds or a date); None if neither is valid."""
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
    except (ValueError, TypeError, OverflowError):
        return None


def extract_error_message(text: str) -> str:
    """Returns the message of an error response in one line: from OpenAI's error object, or the start of the text.

    Works in linear time on any text: a body may have 32 MiB, and this runs on the event loop.
    """
    try:
        error = load_json(text)
        error = error.get("error", error.get("detail", error.get("message", error)))
        if isinstance(error, dict):
            error = ": ".join(str(error[key]) for key in ("code", "message") if error.get(key)) or error
        text = str(error)
    except (ValueError, AttributeError):
        pass
    words = " ".join(re.sub(r"<[^<>]*>", " ", replace_surrogates(text[: get_limits().error_bytes])).split())
    return words[:300] or "an empty response"
