"""The routes of `reinforge serve --learn`.

POST   /v1/feedback              what a person or a program says of a chat or a session
GET    /v1/learn                 how much is kept for this API key, and how the comparisons of versions stand
POST   /v1/learn/run             starts a training now
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
from reinforge.learning.feedback import JUDGE, Feedback
from reinforge.learning.judge import Judge
from reinforge.learning.store import STORE, LearningStore, make_alias
from reinforge.learning.training import BLOCKS, TrainingStarter, read_train_config
from reinforge.routing.live_comparison import LiveCall, LiveScore
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
COUNT_S = 5.0  # seconds between two times at which new calls are counted, rated or not


class LearningApi(Feature):
    """Keeps chats and feedback in `learn.sqlite` of a folder, which this server alone may write to.

    Attributes:
        keeper: What the server's chats pass through.

    Args:
        versions: Feedback on their chats is passed to them, and promotes or stops their candidates.
    """

    def __init__(
        self,
        folder: Path,
        config: RecordConfig,
        token: str | None,
        versions: Iterable[LiveVersions] = (),
        trainings: TrainingStarter | None = None,
        judge: Judge | None = None,
    ):
        self._trainings, self._judge, self._stack = trainings, judge, contextlib.AsyncExitStack()
        self.store, self._versions = LearningStore(folder / STORE), {each.name: each for each in versions}
        self._writer = StoreWriter(self.store, config, self._find_split)
        self._recorder = Recorder(folder, config, writer=self._writer)
        self.keeper = StoreKeeper(self._recorder, token)
        self._thread, self._num_calls = ThreadPoolExecutor(1, "feedback"), 0
        self._tasks: list[asyncio.Task[None]] = []

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/feedback", self.add),
            web.get("/v1/learn", self.show),
            web.delete("/v1/learn/users/{user:.+}", self.remove_user),
            web.post("/v1/learn/run", self.train),
        ]

    def register_metrics(self, registry: Any) -> None:
        counts = self._recorder.counts
        registry.register(Counts("reinforge_records", "Calls by what became of their record", ("outcome",), counts))

    async def start(self) -> None:
        self._recorder.start()
        await self._rate_all()
        self._tasks.append(asyncio.create_task(self._clean()))
        self._tasks.append(asyncio.create_task(self._count_calls()))
        if self._trainings is not None:
            self._tasks.append(asyncio.create_task(self._trainings.run()))
        if self._judge is not None:
            self.store.compares_judged = self._judge.config.compare
            evaluator = await self._stack.enter_async_context(self._judge.open())
            self._tasks.append(asyncio.create_task(self._judge.run(evaluator, self._keep)))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()
        await asyncio.to_thread(self._recorder.close)
        await asyncio.to_thread(self._thread.shutdown)
        with contextlib.suppress(StorageError):  # it was said when it happened
            await asyncio.to_thread(self.store.close)

    async def _clean(self) -> None:
        while True:
            try:
                if await self._run(self._writer.remove_old):
                    await self._rate_all()
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

    def _find_split(self, asked: str, answered: str, conversation: str) -> tuple[int, int] | None:
        name, _, version = answered.partition("@")
        if asked not in ("", name) or (live := self._versions.get(name)) is None:
            return None
        split = live.find_split(conversation, int(version))
        return None if split is None else (split, int(version))

    async def _rate(self, scores: list[LiveScore], calls: list[LiveCall], *, are_all: bool = False) -> None:
        await asyncio.gather(*(live.rate(scores, calls, are_all=are_all) for live in self._versions.values()))

    def _read_calls(self, *, are_all: bool = False) -> list[LiveCall]:
        """Returns the calls that were added since the last time, or all; runs in the thread of the store."""
        calls = list[LiveCall]()
        if splits := [live.split for live in self._versions.values()]:
            calls, self._num_calls = self.store.read_calls(splits, 0 if are_all else self._num_calls)
        return calls

    async def _count_calls(self) -> None:
        while self._versions:
            await asyncio.sleep(COUNT_S)
            with contextlib.suppress(ApiError):  # a store that cannot be used was reported
                await self._rate([], await self._run(self._read_calls))

    async def _rate_all(self) -> None:
        """Counts the scores and calls that are kept, and no others."""
        if self._versions:
            kept = await self._run(lambda: (self.store.read_scores(), self._read_calls(are_all=True)))
            await self._rate(*kept, are_all=True)

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
        if given.source == JUDGE:
            raise ApiError(400, f"the source {JUDGE!r} is the server's own; send another name", param="source")
        return write_json(await self._keep(self.keeper.hash_key(request), given))

    async def _keep(self, key: str, given: Feedback) -> dict[str, Any]:
        """Returns the answer to feedback once it is on disk, and counts it."""

        def add() -> tuple[dict[str, Any], list[LiveScore], list[LiveCall]]:
            opinion = self._writer.mask(given.opinion)
            answer = self.store.add_feedback(key, given, opinion, self._writer.max_bytes * RESERVE)
            return answer, self.store.read_scores(key, given) if self._versions else [], self._read_calls()

        answer, scores, calls = await self._run(add)
        await self._rate(scores, calls)
        return answer

    async def show(self, request: web.Request) -> web.Response:
        key = self.keeper.hash_key(request)
        counts, calls = await self._run(lambda: (self.store.count(key), self._read_calls()))
        await self._rate([], calls)
        found = {"object": "learn", **counts}
        return write_json({**found, "versions": [await each.describe() for each in self._versions.values()]})

    async def remove_user(self, request: web.Request) -> web.Response:
        key = self.keeper.hash_key(request)
        user = make_alias(key, "user", request.match_info["user"])
        found = await self._run(lambda: self.store.remove_user(key, user))
        await self._rate_all()
        return write_json({"object": "user.deleted", **found})

    async def train(self, request: web.Request) -> web.Response:
        """Answers once the process of the training runs."""
        if self._trainings is None:
            raise ApiError(404, "this server trains nothing: it needs a `train:` block, and a folder of versions")
        await self._run(lambda: None)  # what has been said so far is trained on
        pid = await self._trainings.start()
        return write_json(self._trainings.describe(pid), 202)


async def make_learning(host: TrainingHost, config: Path, versions: Iterable[LiveVersions]) -> LearningApi:
    blocks, data_dir, folders = read_blocks(config, **BLOCKS), host.options.data_dir.absolute(), list(versions)
    if "compare" in blocks and not folders:
        fix = "serve a folder of versions, see `reinforge versions --help`, or delete the block"
        raise ConfigError(Problem("compare", "no folder of versions is served, so nothing is compared", fix))
    for live in folders:
        live.rule = blocks.get("compare")
    trainings = None
    if "train" in blocks:
        if len(folders) == 1:
            trainings = TrainingStarter(config, data_dir, folders[0].folder)
        elif blocks["train"].when is not None:
            fix = "make one and serve it: reinforge versions NAME --add RUN"
            raise ConfigError(Problem("train.when", "needs one folder of versions as the MODEL", fix, str(config)))
    judge = None
    if "judge" in blocks:
        judge = Judge(
            blocks["judge"], config, read_train_config(config).config if "train" in blocks else None, data_dir
        )
    return LearningApi(data_dir, blocks["record"], host.options.token, folders, trainings, judge)
