"""Who may reach a server of ours: its own user's programs and browser, with its key, under a name of this machine.

    a page of another site, by DNS rebinding   its Host header names that site       -> 403
    a page of another site, by a request       no CORS headers by default, and the cookie is SameSite=Strict
    a program of another user of this machine  has no key                            -> 401
    text of a model in a page                  no inline script, no eval, no HTML from text (Trusted Types)

For pages, the key is in the address that the command prints. The first request trades it for a cookie.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import secrets
from collections.abc import Mapping

from aiohttp import web
from aiohttp.web_request import BaseRequest

from reinforge.bounded import encode_any
from reinforge.dialects.chat_call import BadRequest

LOOPBACK = "127.0.0.1"
HOST_NAMES = frozenset({LOOPBACK, "localhost"})
"""Names that a browser on this machine has for this server; the port may be another one, forwarded by ssh."""
KEY = "key"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
REPORT_POLICY = "sandbox; default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
"""Of `report.html`, whose style sheet is in the file."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Sent with every page."""


class AccessKey:
    def __init__(self, port: int, value: str | None = None, server: str = "view"):
        self.value = value or secrets.token_urlsafe(24)
        # browsers send cookies to every port of a host
        self.cookie = f"reinforge-{server}-{port}"

    def accepts(self, given: str | None) -> bool:
        return given is not None and hmac.compare_digest(encode_any(given), self.value.encode())

    def find_in(self, cookies: Mapping[str, str]) -> bool:
        return self.accepts(cookies.get(self.cookie))

    def trade(self, request: web.Request) -> web.Response | None:
        """Returns the response that moves the key from a page's address into a cookie; None: it is not there.

        Example: `/compare?run=a&run=b&key=KEY` -> `/compare?run=a&run=b`; an episode's own `key` stays, too.
        """
        query = [(name, value) for name, value in request.query.items() if name != KEY or not self.accepts(value)]
        if len(query) == len(request.query):
            return None
        response = web.Response(status=303, headers={**HEADERS, "Location": str(request.rel_url.with_query(query))})
        response.set_cookie(self.cookie, self.value, httponly=True, samesite="Strict", path="/")
        return response


def is_own_host(host: str) -> bool:
    """True if a Host header names this machine: `localhost:8000`, `127.0.0.1`."""
    return host.rpartition(":")[0 if ":" in host else 2].lower() in HOST_NAMES


def is_loopback(address: str) -> bool:
    """True if only this machine can connect to an address: `127.0.0.1`, `::1`, `localhost`."""
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return address.lower() == "localhost"


def split_host(host: str) -> str:
    """Returns the name in a Host header, in lower case and without port and brackets.

    Example: "LocalHost:8000" -> "localhost"; "[::1]:8000" -> "::1"; "::1" -> "::1".
    """
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return (host if host.count(":") > 1 else host.partition(":")[0]).lower()


def read_key(headers: Mapping[str, str]) -> str:
    """Returns the key that a program sends: `Authorization: Bearer KEY`, or a header of its own; empty: none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return next((headers[name] for name in ("x-api-key", "api-key", "x-goog-api-key") if headers.get(name)), "")


async def read_body(request: BaseRequest, *, max_bytes: int, timeout_s: float, expects: bool = False) -> bytes:
    """Returns the whole body of a request.

    Args:
        expects: Tell a client that asks for it (`Expect: 100-continue`) to send its body; aiohttp's applications do so
            themselves.
    """
    if not request.can_read_body:
        return b""
    too_long = BadRequest(f"the body is longer than {max_bytes} bytes", status=413, code="request_too_large")
    if request.content_length is not None and request.content_length > max_bytes:
        raise too_long
    if expects and request.headers.get("expect", "").lower() == "100-continue" and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > max_bytes:
                    raise too_long
    except TimeoutError:
        message = f"the body did not arrive within {timeout_s:g} s"
        raise BadRequest(message, status=408, code="request_timeout") from None
    except web.RequestPayloadError as error:
        raise BadRequest(f"the body is not valid HTTP: {error}", status=400) from None
    return bytes(body)
