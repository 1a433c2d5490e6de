"""Lets in who may use a server: the Host and Origin headers of a request, and its key.

bound to 127.0.0.1   no key needed; Host must name this machine, so that no page in a browser gets in
bound elsewhere      a key is needed for every route but /healthz; Host is an IP address or a name that is allowed
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import socket
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from aiohttp import web

from reinforge.errors import ConfigError, Problem
from reinforge.rollout.http.access import HOST_NAMES, AccessKey, is_loopback, read_key, split_host
from reinforge.serving.routes import ApiError

OPEN_PATHS = frozenset({"/healthz"})  # paths that need no key
PAGE = "/"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:]+\])(:\d{1,5})?")
PREFLIGHT = {"access-control-allow-methods": "GET, POST, DELETE", "access-control-max-age": "600"}
SHARED = {"access-control-expose-headers": "retry-after, x-queue-position, x-request-id, x-should-retry"}
"""Sent to pages of allowed origins; never `access-control-allow-credentials`."""


class RequestGuard:
    """Decides who may use the server.

    Args:
        token: The key that every request must carry; None or empty: no key is needed.
        allowed_origins: Origins of other pages that may use the server, such as `https://chat.example.org`; they send
            the key in a header, and no cookie of theirs counts.
        key_header: The header with the key; None: those in which clients of model APIs send theirs.
    """

    def __init__(
        self,
        host: str,
        token: str | None,
        allowed_hosts: Iterable[str] = (),
        allowed_origins: Iterable[str] = (),
        key_header: str | None = None,
    ):
        self.is_local = is_loopback(host)
        if not self.is_local and not token:
            message = f"other machines can reach {host}, and no API key is set"
            fix = "pass --token_file FILE (created if it does not exist), or listen on 127.0.0.1"
            raise ConfigError(Problem("--host", message, fix))
        self.token = token or None
        named = {split_host(name) for name in allowed_hosts} | {host.strip("[]").lower()}
        self._hosts = named | HOST_NAMES | {"::1"} | (set() if self.is_local else _list_own_names())
        self._origins = {origin.strip().lower() for origin in allowed_origins}
        if wrong := next((origin for origin in self._origins if not _ORIGIN.fullmatch(origin)), None):
            fix = "list each one as https://HOST or https://HOST:PORT, without a path; there is no wildcard"
            raise ConfigError(Problem("--allowed_origins", f"{wrong!r} is not the origin of a page", fix))
        self._key: AccessKey | None = None
        self._key_header = key_header

    def open(self, port: int) -> None:
        self._key = None if self.token is None else AccessKey(port, self.token, "serve")

    def check(self, request: web.Request) -> None:
        self._check_host(request.headers)
        if self._key is None or request.path in OPEN_PATHS:
            return
        header = self._key_header
        given = read_key(request.headers) if header is None else request.headers.get(header, "")
        only_header = bool(given) or self._find_origin(request.headers) is not None
        if not (self._key.accepts(given) if only_header else self._key.find_in(request.cookies)):
            named = "`Authorization: Bearer TOKEN` or `x-api-key`" if header is None else f"`{header}: TOKEN`"
            message = f"the API key is wrong or missing; send {named}"
            raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    def _check_host(self, headers: Mapping[str, str]) -> None:
        host = headers.get("host", "")
        if not self._is_own(split_host(host)):
            fix = "use 127.0.0.1, or start the server with --allowed_hosts" if self.is_local else "see --allowed_hosts"
            raise ApiError(403, f"the Host header {host[:100]!r} names another machine; {fix}", code="forbidden_host")
        if self._find_origin(headers) is not None:
            return
        origin = headers.get("origin")
        is_foreign = origin is not None and origin.lower().partition("://")[2] != host.lower()
        is_link = headers.get("sec-fetch-mode") == "navigate"  # a form of another site has an Origin as well
        if is_foreign or (not is_link and headers.get("sec-fetch-site", "none") not in ("none", "same-origin")):
            raise ApiError(403, "requests from pages of other sites are refused", code="forbidden_origin")

    def _find_origin(self, headers: Mapping[str, str]) -> str | None:
        """Returns the allowed origin of the page that sends a request; None: it has another origin, or none."""
        origin = headers.get("origin", "")
        return origin if origin.lower() in self._origins else None

    def answer_preflight(self, request: web.Request) -> web.Response | None:
        """Returns the response to a browser that asks whether a page may send a request; None: this is not asked."""
        asked = request.headers
        if request.method != "OPTIONS" or "access-control-request-method" not in asked or not self._find_origin(asked):
            return None
        self._check_host(asked)
        headers = {"access-control-allow-headers": asked.get("access-control-request-headers", ""), **PREFLIGHT}
        return web.Response(status=204, headers=headers)

    async def share(self, request: web.Request, response: web.StreamResponse) -> None:
        """Lets pages of allowed origins read a response, whatever its status."""
        if self._origins:
            response.headers["vary"] = "origin"
        if (origin := self._find_origin(request.headers)) is not None:
            response.headers.update({"access-control-allow-origin": origin, **SHARED})

    def _is_own(self, name: str) -> bool:
        if name in self._hosts:
            return True
        if self.is_local:
            return False
        try:  # rebinding needs a name: an address in the Host header is the one that the client connected to
            return bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    def trade_key(self, request: web.Request) -> web.Response | None:
        """Returns the response that puts the key of the page's address into a cookie; None: it has no right key."""
        return self._key.trade(request) if self._key is not None and request.path == PAGE else None


def _list_own_names() -> set[str]:
    name = socket.gethostname().lower()
    return {name, f"{name}.local"}


OPTION = "--token_file"
MAX_BYTES = 4096
LEAST_CHARACTERS = 16  # shorter keys can be guessed


def read_token(name: str | None) -> str | None:
    """Returns the key in a file; makes the file, with a random key, if it does not exist.

    Args:
        name: The file; None: there is no key.
    """
    if name is None:
        return None
    file = Path(name).expanduser()
    try:
        if not file.exists():
            _make(file)
        mode = stat.S_IMODE(file.stat().st_mode)
        if os.name == "posix" and mode & 0o077:
            message = f"other users of this machine can read {file} (mode {mode:o})"
            raise ConfigError(Problem(OPTION, message, f"chmod 600 {file}, and put a new key into it"))
        with open(file, "rb") as opened:
            token = opened.read(MAX_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(Problem(OPTION, f"cannot read {file}: {error}")) from None
    if len(token) < LEAST_CHARACTERS or not token.isascii() or any(each.isspace() for each in token):
        message = f"{file} has no key of at least {LEAST_CHARACTERS} ASCII characters without spaces"
        raise ConfigError(Problem(OPTION, message, "remove the file, and the server creates one with a random key"))
    return token


def _make(file: Path) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as opened:
        opened.write(f"sk-reinforge-{secrets.token_urlsafe(32)}\n")
