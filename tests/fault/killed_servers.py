"""Servers that can be killed: forked from one process that has imported everything, at one address each.

`KilledServers` starts, kills and restarts them; a site is the place at which a server kills itself, for example
`create_job:after`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.fault.kit import SERVER, start_server

if TYPE_CHECKING:
    import openai

Serve = Callable[[Path, int, str], Coroutine[Any, Any, None]]


def run(serve: Serve, folder: Path, port: int, site: str) -> None:
    """Serves in the child."""
    asyncio.run(serve(folder, port, site))


class KilledServers:
    """A server at one address that can be killed and started again, again and again.

    Args:
        serve: Serves a folder at a port until the process is killed; the third argument is the site.
        folder: The server's data.

    Attributes:
        num_kills: How often it was killed.
    """

    def __init__(self, serve: Serve, folder: Path):
        self._serve, self.folder = serve, folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.num_kills = 0
        self._process: Any = None

    def start(self, site: str = "") -> None:
        """Starts a server that dies at a site; without one it lives."""
        start_server()
        self._process = SERVER.Process(target=run, args=(self._serve, self.folder, self.port, site), daemon=True)
        self._process.start()

    def wait_ready(self) -> None:
        """Returns once the server listens."""
        for _ in range(6000):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            time.sleep(0.01)
        raise AssertionError("the server does not listen after a minute")

    def kill(self) -> None:
        """Kills the server."""
        self._process.kill()
        self.wait_end()
        self.num_kills += 1

    def wait_end(self) -> None:
        """Returns once the server is dead."""
        self._process.join()
        self._process = None

    def close(self) -> None:
        """Kills the server, if there is one."""
        if self._process is not None:
            self.kill()

    @contextlib.contextmanager
    def restarted_after(self, site: str, then: str = "") -> Iterator[None]:
        """Starts a server that dies at a site, and another one after it, during the block."""
        self.start(site)
        follower = threading.Thread(target=lambda: (self.wait_end(), self.start(then)))  # type: ignore[func-returns-value]
        follower.start()
        yield
        follower.join(30)
        assert not follower.is_alive(), f"the server has not died at {site}"

    @contextlib.contextmanager
    def killed_at_random(self, num_kills: int, longest_s: float) -> Iterator[threading.Event]:
        """Kills the server again and again during the block, each time up to `longest_s` seconds after its start.

        Yields:
            Set after the last kill.
        """
        rng, over, given_up = random.Random(7), threading.Event(), threading.Event()

        def kill_again_and_again() -> None:
            while self.num_kills < num_kills and not given_up.is_set():
                self.wait_ready()
                time.sleep(rng.uniform(0, longest_s))
                self.kill()
                self.start()
            over.set()

        killer = threading.Thread(target=kill_again_and_again)
        killer.start()
        try:
            yield over
        finally:
            given_up.set()
            killer.join()
        assert self.num_kills >= num_kills

    def client(self) -> openai.OpenAI:
        """Returns the official client, which sends a request again, 50 ms later, until it is answered."""
        import openai  # takes a server a second

        class QuickClient(openai.OpenAI):
            def _calculate_retry_timeout(self, *arguments: Any, **settings: Any) -> float:
                return 0.05

        return QuickClient(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="x", max_retries=2000)


def kill_at(target: Any, method: str, place: str, applies: Callable[..., bool] = lambda *arguments: True) -> None:
    """Makes this process kill itself before or after a call of a method.

    Args:
        target: The object, or the class, whose method it is.
        method: Its name.
        place: `before` or `after`.
        applies: Gets the arguments; False: this call is made as ever.
    """
    call = getattr(target, method)

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def die_or_call(*arguments: Any, **settings: Any) -> Any:
        if not applies(*arguments):
            return call(*arguments, **settings)
        if place == "before":
            die()
        made = call(*arguments, **settings)
        if not inspect.isawaitable(made):
            die()

        async def wait() -> None:
            await made
            die()

        return wait()

    setattr(target, method, die_or_call)
