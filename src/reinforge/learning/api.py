"""The routes of `reinforge serve --learn`.

POST   /v1/feedback              what a person or a program says of a chat or a session
GET    /v1/learn                 how many chats and how much feedback are kept for this API key
DELETE /v1/learn/users/{user}    deletes a person's chats and feedback, and lists the versions trained on them
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web
from pydantic import ValidationError

from reinforge.errors import ConfigError, Problem, StorageError
from reinforge.learning.capture import StoreKeeper, StoreWriter
from reinforge.learning.feedback import Feedback
from reinforge.learning.store import STORE, LearningStore, make_alias
from reinforge.learning.training import BLOCKS, TrainingStarter
from reinforge.serving.live_versions import LiveVersions
from reinforge.serving.loading import TrainingHost
from reinforge.serving.metrics import Counts
from reinforge.serving.recording import RecordConfig, Recorder, read_blocks
from reinforge.serving.routes import ApiError, Feature, read_json, refuse_invalid, write_json

logger = logging.getLogger(__name__)
T = TypeVar("T")
RESERVE = 1.1
"""Feedback is taken until the store is this times as large as the size from which on no further chats are kept."""
CLEAN_S = 3600.0  # seconds between two times at which chats that are too old are deleted


class LearningApi(Feature):
    """Keeps chats and feedback in `learn.sqlite` of a folder, which this server alone may write to.

    Attributes:
        keeper: What the server's chats pass through.
    """

    def __init__(self, folder: Path, config: RecordConfig, token: str | None, trainings: TrainingStarter | None = None):
        self._trainings = trainings
        self.store = LearningStore(folder / STORE)
        self._writer = StoreWriter(self.store, config)
        self._recorder = Recorder(folder, config, writer=self._writer)
        self.keeper = StoreKeeper(self._recorder, token)
        self._thread = ThreadPoolExecutor(1, "feedback")
        self._tasks: list[asyncio.Task[None]] = []

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/feedback", self.add),
            web.get("/v1/learn", self.show),
            web.delete("/v1/learn/users/{user:.+}", self.remove_user),
        ]

    def register_metrics(self, registry: Any) -> None:
        counts = self._recorder.counts
        registry.register(Counts("reinforge_records", "Calls by what became of their record", ("outcome",), counts))

    async def start(self) -> None:
        self._recorder.start()
        self._tasks.append(asyncio.create_task(self._clean()))
        if self._trainings is not None:
            self._tasks.append(asyncio.create_task(self._trainings.run()))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._recorder.close)
        await asyncio.to_thread(self._thread.shutdown)
        with contextlib.suppress(StorageError):  # it was said when it happened
            await asyncio.to_thread(self.store.close)

    async def _clean(self) -> None:
        while True:
            try:
                await self._run(self._writer.remove_old)
            except ApiError as error:
                logger.warning("chats that are too old are not deleted: %s", error)
            await asyncio.sleep(CLEAN_S)

    async def _run(self, work: Callable[[], T]) -> T:
        """Returns what work on the store returns, after the chats that have finished so far are in it."""

        def run() -> T:
            self._recorder.flush()
            return work()

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, run)
        except StorageError as error:
            logger.debug("%s", error)
            raise ApiError(503, "the store cannot be used; nothing was changed", code="store_unavailable") from None

    async def add(self, request: web.Request) -> web.Response:
        """Answers once feedback is on disk."""
        body = await read_json(request)
        named = request.headers.get("idempotency-key")
        if named is not None and body.setdefault("key", named) != named:
            raise ApiError(400, "key and the header Idempotency-Key differ; send one of them", param="key")
        try:
            given = Feedback.model_validate(body)
        except ValidationError as error:
            raise refuse_invalid(error) from None
        key = self.keeper.hash_key(request)

        def add() -> dict[str, Any]:
            opinion = self._writer.mask(given.opinion)
            return self.store.add_feedback(key, given, opinion, self._writer.max_bytes * RESERVE)

        return write_json(await self._run(add))

    async def show(self, request: web.Request) -> web.Response:
        key = self.keeper.hash_key(request)
        return write_json({"object": "learn", **await self._run(lambda: self.store.count(key))})

    async def remove_user(self, request: web.Request) -> web.Response:
        key = self.keeper.hash_key(request)
        user = make_alias(key, "user", request.match_info["user"])
        return write_json({"object": "user.deleted", **await self._run(lambda: self.store.remove_user(key, user))})


async def make_learning(host: TrainingHost, config: Path, versions: Iterable[LiveVersions]) -> LearningApi:
    blocks, data_dir, folders = read_blocks(config, **BLOCKS), host.options.data_dir.absolute(), list(versions)
    trainings = None
    if "train" in blocks and blocks["train"].when is not None:
        if len(folders) != 1:
            fix = "make one and serve it: reinforge versions NAME --add RUN"
            raise ConfigError(Problem("train.when", "needs one folder of versions as the MODEL", fix, str(config)))
        trainings = TrainingStarter(config, data_dir, folders[0].folder)
    return LearningApi(data_dir, blocks["record"], host.options.token, trainings)
