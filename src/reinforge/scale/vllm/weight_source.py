"""Lets vLLM servers on other machines fetch new weights from this one, so that the two need no folder in common.

A server is told a random path and the digest of each file by its own API, reads the files over HTTP, and compares them.
"""

from __future__ import annotations

import hashlib
import secrets
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from reinforge.errors import ConfigError, Problem


@dataclass(frozen=True)
class OfferedFiles:
    """The files of a folder, for programs that know the URL.

    Attributes:
        url: Of the folder.
        digests: SHA-256 of each file in hexadecimal, by its name.
    """

    url: str
    digests: Mapping[str, str]


def read_address(listen: str) -> tuple[str, int]:
    """Returns the host and the port of `HOST:PORT`; raises ValueError."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise ValueError(f"{listen!r} is not HOST:PORT, such as 10.0.0.5:9000")
    if (host := host.strip("[]")) in ("0.0.0.0", "::"):
        raise ValueError(f"{listen!r} names every address of this machine, not one that servers can be told")
    return host, int(port)


class WeightSource:
    """The folders that are offered.

    Args:
        listen: `HOST:PORT` of this machine; None: the address from which it reaches a server, and any free port.
    """

    def __init__(self, listen: str | None):
        self._listen = None if listen is None else read_address(listen)
        self._listeners: dict[str, ThreadingHTTPServer] = {}
        self._offered: dict[Path, tuple[str, dict[str, str]]] = {}  # the folder's random path, and its digests
        self._lock = threading.Lock()

    def offer(self, folder: Path, server_url: str) -> OfferedFiles:
        """Offers the files of a folder to a server, under the same path as long as the folder exists."""
        with self._lock:
            address = self._start(server_url)
            if folder not in self._offered:
                token = secrets.token_hex(16)
                files = sorted(each for each in folder.iterdir() if each.is_file())
                self._offered[folder] = token, {each.name: _compute_digest(each) for each in files}
            token, digests = self._offered[folder]
        return OfferedFiles(f"{address}/{token}", digests)

    def withdraw(self, folder: Path) -> None:
        with self._lock:
            self._offered.pop(folder, None)

    def find(self, path: str) -> Path | None:
        """Returns the offered file of a request's path; None: there is none."""
        token, _, name = path.removeprefix("/").partition("/")
        with self._lock:
            found = (each for each, (own, digests) in self._offered.items() if own == token and name in digests)
            folder = next(found, None)
        return None if folder is None else folder / name

    def _start(self, server_url: str) -> str:
        host, port = self._listen or (_find_own_address(server_url), 0)
        if host not in self._listeners:
            try:
                listener = _Listener((host, port), self)
            except OSError as error:
                message = f"cannot listen at {host}:{port}: {error.strerror or error}"
                raise ConfigError(Problem("sampler.listen", message, "name a free port of this machine")) from None
            threading.Thread(target=listener.serve_forever, name="vllm-weight-source", daemon=True).start()
            self._listeners[host] = listener
        host_name = f"[{host}]" if ":" in host else host
        return f"http://{host_name}:{self._listeners[host].server_address[1]}"

    def close(self) -> None:
        for listener in self._listeners.values():
            listener.shutdown()
            listener.server_close()


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], source: WeightSource):
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.source = source
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs nothing: a server that stops reading says why by its own API."""


class _Handler(BaseHTTPRequestHandler):
    server: _Listener
    timeout = 600

    def do_GET(self) -> None:
        path = self.server.source.find(self.path)
        if path is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        with path.open("rb") as file:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Length", str(path.stat().st_size))
            self.end_headers()
            self.connection.sendfile(file)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""


def _compute_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _find_own_address(url: str) -> str:
    """Returns the address of this machine from which a server is reached; nothing is sent."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        message = f"no address of this machine can be found by which {host} could reach it: {error}"
        raise ConfigError(Problem("sampler.listen", message, "set it to HOST:PORT of this machine")) from None
