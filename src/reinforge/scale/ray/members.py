"""The workers that hold the current weights: which are alive, which train together, and how others replace them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray

from reinforge.errors import BackendUnavailable, ReinforgeError
from reinforge.scale.engine_group import EngineRouter
from reinforge.scale.ray.cluster import describe_room
from reinforge.scale.ray.recruits import Newcomer, Recruiter, WorkerHandle, explain_failure, find_cause
from reinforge.types.sample import Sharding

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
PEER_FAILED = "PeerFailed"  # name of the error of a worker that only failed because another did
MAX_FAILURES = 3  # replacements in a row that cannot be used; after them no further one is started
GRACE_S = 30.0
"""How long workers may take to answer, once one of them has lost another, before they are asked for a sign."""
SIGN_S = 10.0  # how long a worker may take to answer a `ping`, whatever else it does
RESUME = "resume the run with --resume, which starts all workers again"


class WorkerLost(BackendUnavailable):
    """A worker, or its connection to the others, died during a job; the job can run again."""


class WeightsLost(BackendUnavailable):
    """All workers died, and no checkpoint has the weights that they had."""


@dataclass(frozen=True, slots=True)
class GroupSize:
    num_workers: int
    min_workers: int
    placement_timeout_s: float


class Members:
    """The living workers. They change only here; any thread may call it."""

    def __init__(self, recruiter: Recruiter, size: GroupSize, prepare: Callable[[WorkerHandle], None]):
        self._recruiter, self._size, self._prepare = recruiter, size, prepare
        self._workers: dict[int, WorkerHandle] = {}
        self._lock = threading.RLock()
        self._num_failures, self._last_failure = 0, ""
        self._has_given_up, self._lost_weights = False, ""
        self.router = EngineRouter(())
        self.ranks: tuple[int, ...] = ()  # numbers of the workers that are connected for training
        self.sharding: Sharding = "replicate"
        self._shards_lost = False

    @property
    def has_lost_shards(self) -> bool:
        return self.sharding == "full" and (self._shards_lost or not set(self.ranks) <= self._workers.keys())

    def require_shards(self) -> None:
        if self.has_lost_shards:
            raise BackendUnavailable(
                "the model and its optimizer state were sharded across the workers (sharding: full), and the shard of "
                f"one is lost; {RESUME}, from the last checkpoint"
            )

    def lose_shards(self) -> None:
        self._shards_lost = True

    @property
    def workers(self) -> list[WorkerHandle]:
        return [worker for _, worker in sorted(self._workers.items())]

    def list_connected(self, *, strict: bool = True) -> list[WorkerHandle]:
        """Returns the workers that train together, by rank."""
        found = [each for each in map(self._workers.get, self.ranks) if each is not None]
        if len(found) < (len(self.ranks) if strict else 1):
            raise WorkerLost(f"{len(self.ranks) - len(found)} of the workers that train together have died")
        return found

    def find(self, number: int) -> WorkerHandle | None:
        return self._workers.get(number)

    @property
    def is_connected(self) -> bool:
        return tuple(sorted(self._workers)) == self.ranks

    def add(self, workers: Iterable[WorkerHandle]) -> None:
        for worker in workers:
            self._workers[worker.number] = worker
            self._recruiter.remove(worker.number)
            self.router.add(worker.number)

    def lose(self, worker: WorkerHandle) -> None:
        """Takes out a worker whose process has died, and asks Ray for another one."""
        if self._workers.pop(worker.number, None) is None:
            return
        self.router.remove(worker.number)
        with suppress(ray.exceptions.RayError, ValueError):  # a node that only cannot be reached may come back
            ray.kill(worker.actor)
        logger.warning("%s died; %d of %d workers are left", worker, len(self._workers), self._size.num_workers)
        self._recruit()

    def _recruit(self) -> None:
        if self._num_failures < MAX_FAILURES and self.sharding != "full":
            self._recruiter.fill_up(self._size.num_workers - len(self._workers))

    def fill_up(self, at_least: int | None = None) -> None:
        """Lets the replacements take part that are ready; waits for some if too few workers are left."""
        self.require_shards()
        if self.sharding == "full":
            return
        needed = self._size.min_workers if at_least is None else at_least
        with self._lock:
            if self._lost_weights:
                raise WeightsLost(self._lost_weights)
            self._admit(*self._recruiter.take(wait=False))
            while len(self._workers) < max(1, needed):
                timeout_s = 0.0 if self._has_given_up else self._size.placement_timeout_s  # the others wait no longer
                if not self._recruiter.wait_for_places(needed - len(self._workers), timeout_s):
                    self._has_given_up = True
                    raise BackendUnavailable(self._explain_shortage())
                self._admit(*self._recruiter.take(wait=True))
            self._has_given_up = False

    def _explain_shortage(self) -> str:
        count, size = len(self._workers), self._size
        if self._num_failures >= MAX_FAILURES:
            reason = f"{self._num_failures} replacements in a row could not be used: {self._last_failure}"
        else:
            room = describe_room()
            reason = f"Ray has placed no other in {size.placement_timeout_s:g} s (placement_timeout_s); {room}"
        return f"only {count} workers are left, and min_workers is {size.min_workers}; {reason}; {RESUME}"

    def _admit(self, newcomers: Sequence[Newcomer], errors: Sequence[Exception]) -> None:
        failures = list(errors)
        for worker in (each.worker for each in newcomers):
            try:
                self._prepare(worker)
            except WeightsLost as loss:
                self._lost_weights = str(loss)
                self._recruiter.dismiss(worker)
                raise
            except (ReinforgeError, ray.exceptions.RayError) as error:
                self._recruiter.dismiss(worker)
                failures.append(explain_failure(error))
            else:
                self._num_failures = 0
                self.add([worker])
                logger.warning("%s joined; there are %d of %d", worker, len(self._workers), self._size.num_workers)
        for failure in failures:
            self._num_failures, self._last_failure = self._num_failures + 1, str(failure)
            logger.warning("a replacement cannot be used: %s", failure)
        if failures and self._num_failures >= MAX_FAILURES:
            logger.warning("no further replacement is started, since %d in a row failed", self._num_failures)
        self._recruit()

    def connect(self) -> None:
        """Connects the living workers for training, in the order of their numbers."""
        workers = self.workers
        host = LOOPBACK if all(each.is_near for each in workers) else workers[0].host
        port = self.collect([(workers[0], workers[0].actor.listen.remote(host))])[0]
        calls = [(each, each.actor.join.remote(rank, len(workers), (host, port))) for rank, each in enumerate(workers)]
        self.sharding = self.collect(calls)[0]
        self.ranks = tuple(each.number for each in workers)

    def collect(self, calls: Sequence[tuple[WorkerHandle, Any]], *, strict: bool = True) -> list[Any]:
        """Waits for all calls and returns their results."""
        results, errors, lost = [], list[BaseException](), list[WorkerHandle]()
        silent = _find_silent(calls, any_failure=self.sharding == "full")
        for worker, call in calls:
            if call in silent:
                logger.warning("%s does not respond, and the others lost their connections to it", worker)
                lost.append(worker)
                self.lose(worker)
                continue
            try:
                results.append(ray.get(call))
            except ray.exceptions.RayTaskError as error:
                errors.append(find_cause(error))
            except ray.exceptions.RayActorError:
                lost.append(worker)
                self.lose(worker)
        if lost and (strict or not results):
            numbers = ", ".join(str(each.number) for each in lost)
            raise WorkerLost(f"worker {numbers} ended")
        causes = [each for each in errors if type(each).__name__ != PEER_FAILED]
        if errors and not causes:
            raise WorkerLost(f"the workers lost their connections: {errors[0]}")
        if causes:
            raise causes[0]
        return results

    def close(self) -> None:
        self._recruiter.close()
        for worker in self.workers:
            ray.kill(worker.actor)
        self._workers.clear()


def _find_silent(calls: Sequence[tuple[WorkerHandle, Any]], *, any_failure: bool) -> list[Any]:
    """Waits for calls; returns those of workers that do not respond when another has long lost a worker in an exchange.

    A worker that is busy with its share answers a `ping`, and its call is waited for.

    Args:
        any_failure: A worker that fails for any reason may have left the others in the middle of an exchange, in which
            they stay: none that has not answered is waited for.
    """
    waiting, deadline = [call for _, call in calls], None
    while waiting:
        timeout_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        done, waiting = ray.wait(waiting, num_returns=1, timeout=timeout_s)
        if not done:
            silent = waiting if any_failure else _find_unresponsive(calls, waiting)
            if silent:
                return silent
            deadline = time.monotonic() + GRACE_S
        elif deadline is None and _has_lost_peer(done[0], any_failure=any_failure):
            deadline = time.monotonic() + GRACE_S
    return []


def _find_unresponsive(calls: Sequence[tuple[WorkerHandle, Any]], waiting: Sequence[Any]) -> list[Any]:
    signs = {worker.actor.ping.remote(): call for worker, call in calls if call in waiting}
    _, missing = ray.wait(list(signs), num_returns=len(signs), timeout=SIGN_S)
    return [signs[sign] for sign in missing]


def _has_lost_peer(call: Any, *, any_failure: bool) -> bool:
    try:
        ray.get(call)
    except ray.exceptions.RayTaskError as error:
        return any_failure or type(find_cause(error)).__name__ == PEER_FAILED
    except ray.exceptions.RayError:
        return False
    return False
