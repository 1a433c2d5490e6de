"""Who may read the pages: this user's browser, on this machine, with the key of this server.

    a page of another site, by DNS rebinding   its Host header names that site       -> 403
    a page of another site, by a request       there are no CORS headers, and the cookie is SameSite=Strict
    a program of another user of this machine  has no key                            -> 401
    text of a model in a page                  no inline script, no eval, no HTML from text (Trusted Types)

The key is in the address that the command prints. The first request trades it for a cookie.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping

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
"""Sent with every answer."""


class AccessKey:
    """The key of one server.

    Args:
        port: Its port; browsers send cookies to every port of a host, so the name of the cookie has it.
    """

    def __init__(self, port: int):
        self.value = secrets.token_urlsafe(24)
        self.cookie = f"reinforge-view-{port}"

    def accepts(self, given: str | None) -> bool:
        """True if this is the key."""
        return given is not None and hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self.value.encode())

    def find_in(self, cookies: Mapping[str, str]) -> bool:
        """True if a request's cookies hold the key."""
        return self.accepts(cookies.get(self.cookie))


def is_own_host(host: str) -> bool:
    """True if a Host header names this machine: `localhost:8000`, `127.0.0.1`."""
    return host.rpartition(":")[0 if ":" in host else 2].lower() in HOST_NAMES
