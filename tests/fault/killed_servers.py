"""Servers that can be killed: forked from one process that has imported everything, at one address each.

A module of such servers ends with `fork_servers(...)`, which forks one for each line `PORT FOLDER SITE` (with tabs) on
its standard input and writes its process id. `KilledServers` starts, kills and restarts them; SITE is the place at
which a server kills itself, `create_job:after` for example.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import openai

ROOT = Path(__file__).parents[2]


class QuickClient(openai.OpenAI):
    """The official client, which waits 50 ms before it tries again instead of up to 8 s."""

    def _calculate_retry_timeout(self, *arguments: Any, **settings: Any) -> float:
        return 0.05


@contextlib.contextmanager
def open_driver(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Yields the process of a module that forks servers, so that each starts without imports."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", module, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=environment) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


class KilledServers:
    """A server at one address that can be killed and started again, again and again.

    Args:
        driver: A process of `open_driver`.
        folder: The server's data.

    Attributes:
        num_kills: How often it was killed.
    """

    def __init__(self, driver: subprocess.Popen[str], folder: Path):
        self._driver, self.folder = driver, folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.num_kills, self._pid = 0, 0

    def start(self, site: str = "") -> None:
        """Starts a server that dies at a site; without one it lives."""
        assert self._driver.stdin is not None
        assert self._driver.stdout is not None
        self._driver.stdin.write(f"{self.port}\t{self.folder}\t{site}\n")
        self._driver.stdin.flush()
        self._pid = int(self._driver.stdout.readline())

    def wait_ready(self) -> None:
        """Returns once the server listens."""
        for _ in range(6000):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            time.sleep(0.01)
        raise AssertionError("the server does not listen after a minute")

    def kill(self) -> None:
        """Kills the server."""
        os.kill(self._pid, signal.SIGKILL)
        self.wait_end()
        self.num_kills += 1

    def wait_end(self) -> None:
        """Returns once the server is dead."""
        assert self._driver.stdout is not None
        assert self._driver.stdout.readline() == "ended\n"
        self._pid = 0

    def close(self) -> None:
        """Kills the server, if there is one."""
        if self._pid:
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

    def client(self) -> QuickClient:
        """Returns the official client, which sends a request again until it is answered."""
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


def fork_servers(serve: Callable[[Path, int, str], Coroutine[Any, Any, None]]) -> None:
    """Forks a server for each line on the standard input.

    Args:
        serve: Serves a folder at a port until the process is killed; the third argument is the site.
    """
    for line in sys.stdin:
        port, folder, site = line.rstrip("\n").split("\t")
        child = os.fork()
        if child == 0:
            os.close(0)
            os.open(os.devnull, os.O_RDONLY)
            asyncio.run(serve(Path(folder), int(port), site))
            os._exit(0)
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()
        os.waitpid(child, 0)
        sys.stdout.write("ended\n")
        sys.stdout.flush()
