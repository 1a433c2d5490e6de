"""Agents on the nodes of a Ray cluster: the program of a worker in an actor, whose lines come and go by calls.

write       one call of the actor for each line
readline    one call that waits in the actor until there are lines, and returns all of them
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from reinforge.errors import ConfigError
from reinforge.rollout.isolation.containment import create_loop, run_loop
from reinforge.rollout.isolation.processes import kill_descendants
from reinforge.rollout.isolation.threads import run_in_daemon_thread
from reinforge.rollout.isolation.worker import Link, serve
from reinforge.rollout.isolation.worker_protocol import Message, decode
from reinforge.scale.ray.cluster import RayConnection, check_ray

MAX_CALLS = 16_384  # lines that may be on their way to one worker
LEAST = {"CPU": 0.01}
"""What the cluster must have. A worker reserves nothing: agents wait for the model most of the time."""
KILL_S = 1.0  # seconds that an actor gets to kill what its agents have started


class AgentHost:
    """Runs the program of a worker; its methods are called by Ray, as an actor with an event loop.

    The agents have a loop and thread of their own, so that one that blocks does not keep the actor from answering.
    """

    def __init__(self, path: Sequence[str]):
        sys.path += [each for each in path if each not in sys.path]
        self._link: Link | None = None
        self._lines: list[bytes] = []
        self._has_lines = asyncio.Event()

    async def deliver(self, line: bytes) -> None:
        """Takes a line from the run; the first one says what to load."""
        if self._link is not None:
            self._link.receive(line)
            return
        here = asyncio.get_running_loop()

        def write(sent: bytes) -> None:
            here.call_soon_threadsafe(self._put, sent)

        self._link = Link(write, create_loop())
        threading.Thread(target=_serve, args=(self._link, decode(line)), name="agents", daemon=True).start()

    async def collect(self) -> list[bytes]:
        await self._has_lines.wait()
        lines, self._lines = self._lines, []
        self._has_lines.clear()
        return lines

    async def end(self) -> None:
        kill_descendants()
        os._exit(0)

    def _put(self, line: bytes) -> None:
        self._lines.append(line)
        self._has_lines.set()


def _serve(link: Link, start: Message) -> None:
    try:
        run_loop(link.loop, link.loop.create_task(serve(link, start)))
    except BaseException:  # noqa: BLE001  such as an agent that has closed the files of the process
        os._exit(1)
    # it has refused the agent: the run reads why, and ends this process


class RayTransport:
    def __init__(self, actor: Any):
        self._actor = actor
        self._lines: deque[bytes] = deque()
        self._end: str | None = None

    @property
    def is_alive(self) -> bool:
        return self._end is None

    async def write(self, line: bytes) -> None:
        await self._call(self._actor.deliver, line)

    async def readline(self) -> bytes:
        if not self._lines:
            self._lines.extend(await self._call(self._actor.collect))
        return self._lines.popleft()

    async def _call(self, method: Any, *arguments: Any) -> Any:
        import ray

        try:
            return await method.remote(*arguments)
        except ray.exceptions.RayError as error:
            self._end = self._end or " ".join(f"the worker on the Ray cluster died: {error}".split())
            raise ConnectionError(self._end) from None

    async def describe_end(self) -> str:
        return self._end or "the worker on the Ray cluster died"

    def kill(self) -> None:
        """Kills the actor with everything that it has started."""
        import ray

        self._end = self._end or "the run stopped the process"
        if not ray.is_initialized():
            return
        self._actor.end.remote()
        timer = threading.Timer(KILL_S, _kill, [self._actor])  # one that holds the interpreter does not end itself
        timer.daemon = True
        timer.start()


def _kill(actor: Any) -> None:
    import ray

    if ray.is_initialized():
        ray.kill(actor)


class RayAgents:
    """The workers of one agent on a cluster, which is connected to when the first one is needed.

    Args:
        address: Host and port of a running cluster; None: the one that this process is connected to, or else one on
            this machine.
    """

    def __init__(self, address: str | None):
        self._address = address
        self._connection: RayConnection | None = None
        self._lock = asyncio.Lock()

    async def open(self) -> RayTransport:
        async with self._lock:
            if self._connection is None:
                self._connection = await run_in_daemon_thread(
                    lambda: RayConnection(self._address, 1, LEAST), "ray-agents"
                )
        import ray

        actor_class = ray.remote(AgentHost).options(
            num_cpus=0, max_concurrency=MAX_CALLS, max_restarts=0, scheduling_strategy="SPREAD"
        )
        return RayTransport(actor_class.remote(sys.path))

    async def close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await run_in_daemon_thread(connection.close, "ray-close")


def start_agents(address: str | None) -> RayAgents:
    """Returns what opens agents on the nodes of a Ray cluster; an address of None is a cluster on this machine."""
    if problems := check_ray(address):
        raise ConfigError(problems)
    return RayAgents(address)
