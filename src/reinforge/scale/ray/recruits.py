"""Starts workers: the first ones, and replacements of those that died. Ray decides where and when each one runs.

start -> Ray finds a place (perhaps only once a node joins) -> versions compared -> model loaded -> taken by the group
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray

from reinforge.config.policy import PolicyConfig
from reinforge.errors import BackendError, BackendUnavailable, ReinforgeError
from reinforge.scale.engine_worker import EngineWorker, PolicyDescription, find_differences, list_versions

MAX_CALLS = 16_384  # calls that may wait in one worker at a time: replies are requested one by one
NOT_IMPORTED = "failed to import on the worker"  # what Ray says if a node cannot import the class of a worker


@dataclass(frozen=True, slots=True)
class WorkerHandle:
    number: int  # its number, from 0, which no other worker of the run has had
    actor: Any
    is_near: bool  # True if it is on the driver's node, and so reads and writes the run folder itself
    pid: int
    host: str
    node: str = ""  # its node, by the first digits of Ray's id and the address, for messages

    def __str__(self) -> str:
        return f"worker {self.number} (process {self.pid}, node {self.node})"


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    policy: PolicyConfig
    settings: Mapping[str, Any]
    resources: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A worker whose model is loaded, with its policies by name."""

    worker: WorkerHandle
    policies: dict[str, PolicyDescription]


@dataclass(frozen=True, slots=True)
class Recruit:
    """A worker that was started: its actor, and the results of its first two calls once they exist."""

    number: int
    actor: Any
    process: Any
    loaded: Any


class Recruiter:
    """The workers that were started and do not belong to the group yet; any thread may call it."""

    def __init__(self, plan: WorkerPlan):
        self._plan, self._numbers, self._lock = plan, itertools.count(), threading.Lock()
        self._waiting: list[Recruit] = []
        self._is_closed = False
        self._versions = list_versions()
        rest = {name: value for name, value in plan.resources.items() if name not in ("CPU", "GPU")}
        self._actor_class = ray.remote(EngineWorker).options(
            num_cpus=plan.resources.get("CPU", 1),
            num_gpus=plan.resources.get("GPU", 0),
            resources=rest,
            max_concurrency=MAX_CALLS,
            max_restarts=0,
            scheduling_strategy="SPREAD",
        )

    def fill_up(self, count: int) -> None:
        """Asks Ray for workers until `count` are on their way; returns at once."""
        with self._lock:
            while len(self._waiting) < count and not self._is_closed:
                number = next(self._numbers)
                actor = self._actor_class.remote(number)
                process = actor.describe_process.remote()
                loaded = actor.load.remote(self._plan.policy, self._plan.settings)
                self._waiting.append(Recruit(number, actor, process, loaded))

    def wait_for_places(self, count: int, timeout_s: float | None) -> int:
        """Returns how many of those on their way have a process, after waiting until `count` of them do."""
        calls = [each.process for each in self._list()]
        if not calls:
            return 0
        return len(ray.wait(calls, num_returns=max(1, min(count, len(calls))), timeout=timeout_s)[0])

    def take(self, *, wait: bool) -> tuple[list[Newcomer], list[Exception]]:
        """Returns the workers whose model is loaded, and why others cannot be used.

        The workers count as being on their way until `remove`.
        """
        recruits = {each.loaded: each for each in self._list() if _is_ready(each.process)}
        if not recruits:
            return [], []
        newcomers, errors, placed = list[Newcomer](), list[Exception](), dict[Any, WorkerHandle]()
        for call, recruit in recruits.items():
            try:
                placed[call] = self._check(recruit)
            except (ReinforgeError, ray.exceptions.RayError) as error:
                self.dismiss(recruit)
                errors.append(explain_failure(error))
        calls = list(placed)
        ready = ray.wait(calls, num_returns=len(calls), timeout=None if wait else 0)[0] if calls else []
        for call in ready:
            try:
                newcomers.append(Newcomer(placed[call], ray.get(call)))
            except (ReinforgeError, ray.exceptions.RayError) as error:
                self.dismiss(recruits[call])
                errors.append(explain_failure(error))
        return sorted(newcomers, key=lambda each: each.worker.number), errors

    def dismiss(self, worker: Recruit | WorkerHandle) -> None:
        self.remove(worker.number)
        ray.kill(worker.actor)

    def remove(self, number: int) -> None:
        with self._lock:
            self._waiting = [each for each in self._waiting if each.number != number]

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            waiting, self._waiting = self._waiting, []
        for recruit in waiting:
            ray.kill(recruit.actor)

    def _list(self) -> list[Recruit]:
        with self._lock:
            return list(self._waiting)

    def _check(self, recruit: Recruit) -> WorkerHandle:
        node, pid, host, versions = ray.get(recruit.process)
        name = f"{node[:6]} ({host})"
        is_near = node == ray.get_runtime_context().get_node_id()
        if not is_near and (differences := find_differences(self._versions, versions)):  # here it is this installation
            raise BackendError(
                f"the node {name} has {', '.join(differences)}: install the same versions on all nodes, since workers "
                "must make the same weights"
            )
        return WorkerHandle(recruit.number, recruit.actor, is_near, pid, host, name)


def explain_failure(error: Exception) -> Exception:
    """Returns what kept a worker from starting, as this process would have raised it."""
    last = str(error).strip().splitlines()[-1:]  # above it are the traceback and the facts about the process
    if NOT_IMPORTED in str(error):
        return BackendError(
            f"a node of the cluster cannot import reinforge ({''.join(last)}): install the same reinforge, with the "
            "same libraries, on all nodes"
        )
    if isinstance(error, ray.exceptions.RayTaskError):
        return find_cause(error)
    if isinstance(error, ray.exceptions.RayActorError):
        return BackendUnavailable(f"a worker died while it loaded the model: {''.join(last)}")
    return error


def find_cause(error: Any) -> Exception:
    """Returns what a worker raised, as this process would have raised it."""
    cause = error.cause
    if isinstance(cause, Exception):
        return cause
    return ReinforgeError(f"a worker failed: {error}")


def _is_ready(call: Any) -> bool:
    return bool(ray.wait([call], timeout=0)[0])
