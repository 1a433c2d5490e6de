"""The router of a server, and a check of its promise while it serves.

    of the requests that are drawn     the student's reply is    loss
        kept by the threshold          sent to the client        1 - agreement with the upstream's, asked beside it
        not kept                       not sent                  0

Two tests watch these losses. That of the threshold asks for a stricter one, and begins again with it; that of all
requests so far is never reset, so that it stops the student's replies if stricter thresholds do not help.
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
from typing import Any

from pydantic import TypeAdapter

from reinforge.errors import ConfigError, Problem, StorageError, describe_error
from reinforge.files import read_json_file, write_json
from reinforge.routing.drift import BETS, DriftCheck
from reinforge.routing.router import Router
from reinforge.serving.metrics import Counts

logger = logging.getLogger(__name__)
MAX_CHECKS = 8
"""Most requests at a time that the upstream is asked for a check."""


@dataclass
class CheckState:
    """What a server remembers when it starts again."""

    router_sha256: str  # of the router as in its file
    of_threshold: DriftCheck  # the requests since the threshold last rose
    of_all: DriftCheck
    num_raised: int = 0  # how often the threshold rose

    @classmethod
    def load(cls, file: Path) -> CheckState:
        try:
            found = TypeAdapter(cls).validate_python(read_json_file(file))
            if len(found.of_threshold.sums) == len(found.of_all.sums) == len(BETS):
                return found
        except (OSError, ValueError):
            pass
        raise ConfigError(Problem("", f"{file} is not the state of a running check", "delete it to begin again"))


class RunningCheck:
    """Holds the router that decides which replies of the student are sent.

    Args:
        share: Of the requests that are drawn; 0: there is no check.
        file: Keeps the state over restarts; that of another router is not used.
    """

    def __init__(self, router: Router, share: float = 0.0, file: Path | None = None):
        self.router, self._share, self._file = router, share, file
        self.counts: Counter[str] = Counter()
        self._random = random.Random()  # independent of requests and replies
        self._running = set[asyncio.Task[None]]()
        self._saving: asyncio.Task[None] | None = None
        self._is_saved = True
        digest = hashlib.sha256(router.model_dump_json().encode()).hexdigest()
        self.state = CheckState(digest, DriftCheck(router.margin), DriftCheck(router.margin))
        if share and file is not None and file.exists() and (found := CheckState.load(file)).router_sha256 == digest:
            self.state = found
            for _ in range(found.num_raised):
                self.router = self.router.tighten()
        if self.is_stopped:
            logger.warning("nothing is answered locally, as %s says; delete it to begin again", file)

    @property
    def is_stopped(self) -> bool:
        return self.state.of_all.state == "stop"

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
        loss = float(self.router.keeps(confidence) and not agrees)  # the threshold may have risen in the meantime
        self.add("agreed" if agrees else "disagreed", loss)

    def add(self, outcome: str, loss: float) -> None:
        """Takes the loss of a request, in [0, 1]."""
        self.counts[outcome] += 1
        if self.is_stopped:
            return
        of_threshold, of_all = self.state.of_threshold, self.state.of_all
        is_high, why = of_threshold.add(loss) != "ok", "the upstream disagrees more often than the router promises"
        if of_all.add(loss) == "stop":
            while self.router.kept:
                self._tighten()
            logger.warning("%s (%d requests checked): nothing is answered locally now", why, of_all.num_checked)
        elif is_high and len(self.router.kept) > 1:  # at the strictest threshold, only the other test decides
            self._tighten()
            message = "%s (%d requests checked): the threshold rises to %.4g"
            logger.warning(message, why, of_threshold.num_checked, self.router.threshold)
            of_threshold.reset()
        self._is_saved = False
        if self._file is not None and self._saving is None:
            self._saving = asyncio.ensure_future(self._save(self._file))

    def _tighten(self) -> None:
        self.router, self.state.num_raised = self.router.tighten(), self.state.num_raised + 1

    async def _save(self, file: Path) -> None:
        try:
            while not self._is_saved:
                self._is_saved = True
                await asyncio.to_thread(write_json, file, asdict(self.state))
            self._saving = None
        except StorageError as error:  # the task stays, so that no other one is tried
            logger.warning("the state of the running check is not kept over restarts: %s", error)

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        if self._saving is not None:
            await self._saving

    def register_metrics(self, registry: Any) -> None:
        from prometheus_client import Gauge

        def add(name: str, text: str, read: Callable[[], float]) -> None:
            Gauge(f"reinforge_check_{name}", text, registry=registry).set_function(read)

        registry.register(Counts("reinforge_checks", "Checks by what came of them", ("outcome",), self.counts))
        add("threshold", "Least confidence that is sent; Inf: none", lambda: min(self.router.kept, default=math.inf))
        add("requests", "Requests checked", lambda: self.state.of_all.num_checked)
        state = "0: as calibrated, 1: the threshold has risen, 2: stopped"
        add("state", state, lambda: 2 if self.is_stopped else min(self.state.num_raised, 1))
