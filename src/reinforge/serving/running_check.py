"""The router of a server, and a check of its promise while it serves.

    of the requests that are drawn     the student's reply is    loss
        kept by the threshold          sent to the client        1 - agreement with the upstream's, asked beside it
        not kept                       not sent                  0

A test of each threshold watches the losses that it would have had. When that of the threshold in use says so, the
router takes the lowest one of which nothing speaks against the promise, so that a drift of some requests costs these.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from reinforge.errors import ConfigError, Problem, StorageError, describe_error
from reinforge.files import read_json_file, write_json
from reinforge.routing.drift import DriftCheck, choose_num_kept
from reinforge.routing.router import Router
from reinforge.serving.metrics import Counts

State = TypeVar("State")
logger = logging.getLogger(__name__)
MAX_CHECKS = 8
"""Most requests at a time that the upstream is asked for a check."""


class StateFile:
    """Keeps a dataclass over restarts of the server, in a thread, so that no request waits; None: it keeps nothing."""

    def __init__(self, path: Path | None):
        self._path = path
        self._saving: asyncio.Task[None] | None = None
        self._is_saved = True

    def load(self, default: State) -> State:
        """Returns what is kept, or else the default."""
        if self._path is None or not self._path.exists():
            return default
        try:
            return TypeAdapter(type(default)).validate_python(read_json_file(self._path))
        except (OSError, ValueError):
            problem = f"{self._path} is not a state that this server has kept"
            raise ConfigError(Problem("", problem, "delete it to begin again")) from None

    def save(self, state: Any) -> None:
        self._is_saved = False
        if self._path is not None and self._saving is None:
            self._saving = asyncio.ensure_future(self._save(self._path, state))

    async def _save(self, path: Path, state: Any) -> None:
        try:
            while not self._is_saved:
                self._is_saved = True
                await asyncio.to_thread(write_json, path, asdict(state))
            self._saving = None
        except StorageError as error:  # the task stays, so that no other one is tried
            logger.warning("a state is not kept over restarts: %s", error)

    async def close(self) -> None:
        if self._saving is not None:
            await self._saving


@dataclass
class CheckState:
    """What a server remembers when it starts again."""

    router_sha256: str  # of the router as in its file
    checks: list[DriftCheck]  # of its thresholds, the strictest first
    num_kept: int  # thresholds that are left, of which the last one is in use


class RunningCheck:
    """Holds the router that decides which replies of the student are sent.

    Args:
        share: Of the requests that are drawn; 0: there is no check.
        file: Keeps the state over restarts; that of another router is not used.
    """

    def __init__(self, router: Router, share: float = 0.0, file: Path | None = None):
        self._whole, self._share, self._file = router, share, StateFile(file)
        self.counts: Counter[str] = Counter()
        self._random = random.Random()  # independent of requests and replies
        self._running = set[asyncio.Task[None]]()
        digest = hashlib.sha256(router.model_dump_json().encode()).hexdigest()
        self.state = new = CheckState(digest, [DriftCheck(router.margin) for _ in router.kept], len(router.kept))
        found = self._file.load(new) if share else new
        if found.router_sha256 == digest and len(found.checks) == len(new.checks):
            self.state = found
        self.router = router.tighten(self.state.num_kept)
        if self.is_stopped:
            logger.warning("nothing is answered locally, as %s says; delete it to begin again", file)

    @property
    def is_stopped(self) -> bool:
        return not self.state.num_kept and bool(self._whole.kept)

    def draws(self) -> bool:
        """Returns True if a request takes part in the check."""
        return not self.is_stopped and self._random.random() < self._share

    def begin(self, compare: Coroutine[Any, Any, bool], confidence: float | None) -> None:
        """Compares a reply of the student, of this confidence, with the upstream's; no request waits for it."""
        if len(self._running) >= MAX_CHECKS:
            compare.close()
            self.counts["skipped"] += 1
            return
        self._running.add(task := asyncio.ensure_future(self._run(compare, confidence)))
        task.add_done_callback(self._running.discard)

    async def _run(self, compare: Coroutine[Any, Any, bool], confidence: float | None) -> None:
        try:
            agrees = await compare
        except Exception as error:  # noqa: BLE001  whatever the upstream answers, requests must pass
            self.counts["skipped"] += 1
            logger.debug("a check is skipped: %s", describe_error(error))
            return
        lost_at = -math.inf if agrees or confidence is None else confidence
        self.add("agreed" if agrees else "disagreed", lost_at)

    def add(self, outcome: str, lost_at: float = -math.inf) -> None:
        """Takes a checked request.

        Args:
            lost_at: Confidence of a reply with which the upstream disagrees; each threshold up to it loses 1.
        """
        self.counts[outcome] += 1
        state = self.state
        if self.is_stopped or not state.checks:
            return
        for threshold, check in zip(self._whole.kept, state.checks, strict=True):
            check.add(float(threshold <= lost_at))
        if (num_kept := choose_num_kept(state.checks[: state.num_kept])) != state.num_kept:
            state.num_kept, self.router = num_kept, self._whole.tighten(num_kept)
            in_use = self.router.threshold
            then = "nothing is answered locally now" if in_use is None else f"the threshold rises to {in_use:.4g}"
            why = "the upstream disagrees more often than the router promises"
            logger.warning("%s (%d requests checked): %s", why, state.checks[0].num_checked, then)
        self._file.save(state)

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._file.close()

    def register_metrics(self, registry: Any) -> None:
        from prometheus_client import Gauge

        def add(name: str, text: str, read: Callable[[], float]) -> None:
            Gauge(f"reinforge_check_{name}", text, registry=registry).set_function(read)

        registry.register(Counts("reinforge_checks", "Checks by what came of them", ("outcome",), self.counts))
        add("threshold", "Least confidence that is sent; Inf: none", lambda: min(self.router.kept, default=math.inf))
        add("requests", "Requests checked", lambda: max((each.num_checked for each in self.state.checks), default=0))
        state = "0: as calibrated, 1: the threshold has risen, 2: stopped"
        add("state", state, lambda: 2 if self.is_stopped else int(self.router.kept != self._whole.kept))
