"""Serves a folder of versions while it changes.

    support              the promoted version, or the candidate for its share of the conversations
    support@candidate    the candidate
    support@3            any version; one that is neither promoted, candidate nor next for a rollback is in memory
                         only while a call needs it

The server looks at `versions.json` ten times a second. A version answers once it is loaded; calls in flight end with
the version that they began with, which is then freed.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from aiohttp import web

from reinforge.errors import ConfigError, Problem, ReinforgeError, describe_error
from reinforge.files import find_damage
from reinforge.interfaces import PolicyServer
from reinforge.routing.live_comparison import LiveCall, LiveComparison, LiveResult, LiveScore, LiveTest
from reinforge.serving.loading import ModelLoader
from reinforge.serving.models import NAMES_SHOWN, OnDemandPolicy, ServedModel, ServedModels
from reinforge.serving.routes import ApiError, Feature
from reinforge.serving.version_folder import Cause, VersionFolder, VersionState
from reinforge.types.seeding import stable_seed

logger = logging.getLogger(__name__)
POLL_S = 0.1
CANDIDATE = "candidate"
COMPARISON = "comparison"
"""Who promotes or stops a candidate in the log, where its scores decide."""


_NUMBER = re.compile(r"[1-9]\d{0,8}", re.ASCII)


def _draw(state: VersionState, conversation: str) -> int:
    if state.candidate is None or not conversation:
        return state.promoted
    return state.candidate if stable_seed(state.seed, conversation) < state.share * 2**63 else state.promoted


class VersionPolicy(OnDemandPolicy):
    """A version that is in memory while a call needs it."""

    def __init__(self, base: PolicyServer, live: LiveVersions, number: int):
        super().__init__(base)
        self._live, self._number = live, number

    def use(self) -> AbstractAsyncContextManager[PolicyServer]:
        return self._live.hold(self._number)

    @property
    def version(self) -> int:
        return self._number

    @property
    def model_name(self) -> str:
        return f"{self._live.name}@{self._number}"


class LiveVersions(Feature):
    """The versions of one folder, behind their names.

    Attributes:
        rule: When the scores of conversations promote or stop a candidate; None: only people do.
    """

    def __init__(self, folder: VersionFolder, models: ServedModels, loader: ModelLoader, rule: LiveTest | None = None):
        self.folder, self.name = folder, folder.name
        self._models, self._loader, self.rule = models, loader, rule
        self._loaded: dict[int, ServedModel] = {}
        self._wanted: set[int] = set()  # stay in memory
        self._loading = asyncio.Lock()
        self._seen: tuple[int, int] | None = None
        self._newest = VersionState(0)  # as in the folder
        self._tasks: set[asyncio.Task[None]] = set()
        self._comparison, self._compared = LiveComparison(rule), -1  # and the seed of its split
        self._pause: str | None = None  # the newest that was logged
        self.state = self._newest
        """Which versions answer: as in the folder, but for those that cannot be loaded, or not yet."""

    def routes(self) -> list[web.RouteDef]:
        return []

    async def open(self) -> None:
        """Loads the promoted version, which answers from then on; the others follow when the server starts."""
        self._seen, state = self._look(), self.folder.read()
        async with self._loading:
            await self._load(state.promoted)
        self._models.add_split(self.name, self._choose)
        self._models.add_finder(self._find)
        self._take(state)

    async def start(self) -> None:
        self._begin(self._load_others(self._newest))
        self._begin(self._follow())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def draw(self, conversation: str) -> int:
        """Returns the version that answers a conversation; "": it has no name, and gets the promoted one."""
        return _draw(self.state, conversation)

    def find_split(self, conversation: str, version: int) -> int | None:
        """Returns the seed of the split that drew the version of a conversation; None: there is none, or another did.

        Any thread may call it.
        """
        state = self.state
        is_drawn = state.candidate is not None and conversation and _draw(state, conversation) == version
        return state.seed if is_drawn else None

    @property
    def split(self) -> int:
        """The seed of the present split."""
        return self._newest.seed

    async def rate(
        self, scores: Sequence[LiveScore], calls: Sequence[LiveCall] = (), *, are_all: bool = False
    ) -> LiveResult | None:
        """Takes scores of conversations, in place of earlier ones, and further calls. Promotes or stops if decided.

        Those of another split do not count: the candidate, or what it is compared with, was another.

        Args:
            are_all: Other scores and calls are forgotten.

        Returns:
            How the comparison stands; None: there is none.
        """
        state = self._newest
        if (comparison := self._find_comparison(is_new=are_all)) is None:
            return None
        for each in scores:
            if each.split == state.seed:
                is_candidate = each.version == state.candidate
                comparison.put(each.conversation, each.user, each.score, is_candidate=is_candidate)
        for call in calls:
            if call.split == state.seed:
                comparison.guards.put(call, is_candidate=call.version == state.candidate)
        if comparison.paused not in (None, self._pause):
            self._pause = comparison.paused
            logger.warning("%s@%d: promotion is paused: %s", self.name, state.candidate, self._pause)
        return await self._decide()

    def _find_comparison(self, *, is_new: bool = False) -> LiveComparison | None:
        """Returns the scores of the present candidate, which may not be loaded yet; None: nothing is compared."""
        if self._newest.candidate is None or self.rule is None:
            return None
        if is_new or self._compared != self._newest.seed:
            self._comparison, self._compared = LiveComparison(self.rule), self._newest.seed
        return self._comparison

    async def _decide(self) -> LiveResult | None:
        """Promotes or stops a candidate that is loaded, if its scores decide; what fails is tried again by the next."""
        state = self._newest
        comparison, candidate = self._find_comparison(), state.candidate
        if comparison is None or candidate is None or self.state is not state:
            return None
        result = comparison.judge()
        if result.outcome != "continue":
            evidence = {**asdict(result), "served": state.promoted, "rule": comparison.rule.model_dump()}
            cause = Cause(result.reason, COMPARISON, evidence, seen=state)
            promotes = result.outcome == "promote"
            change = partial(self.folder.promote, candidate) if promotes else self.folder.stop_candidate
            try:
                await asyncio.to_thread(change, cause)
            except ReinforgeError as error:
                logger.error("%s@%d: %s, but: %s", self.name, candidate, result.reason, describe_error(error))
        return result

    async def describe(self) -> dict[str, Any]:
        """Returns which versions answer, how the comparison stands, and the newest decision of one."""
        state, comparison = self._newest, self._find_comparison()
        now: dict[str, Any] | None = None
        if comparison is not None:
            result = comparison.judge()
            names = "outcome", "reason", "difference", "ci_low", "ci_high", "paused"
            now = {name: getattr(result, name) for name in names}
            now |= {"candidate": comparison.describe_version(is_candidate=True)}
            now |= {"served": comparison.describe_version(is_candidate=False)}
            now |= {"guards": {name: asdict(each) for name, each in result.guards.items()}}
        log = await asyncio.to_thread(self.folder.read_log)
        decision = next((asdict(each) for each in reversed(log) if each.by == COMPARISON), None)
        head = {"name": self.name, "promoted": state.promoted, "candidate": state.candidate, "share": state.share}
        return {**head, "comparison": now, "decision": decision}

    def _choose(self, conversation: str) -> ServedModel:
        return self._loaded[self.draw(conversation)]

    def _find(self, name: str) -> ServedModel | None:
        base, _, version = name.partition("@")
        if base != self.name:
            return None
        number = self.state.candidate if version == CANDIDATE else int(version) if _NUMBER.fullmatch(version) else None
        if number in self._loaded:
            return self._loaded[number]
        numbers = self.folder.numbers()
        if number is None or number not in numbers:
            what = "has no candidate now" if version == CANDIDATE else f"has no version {version[:20]!r}"
            listed = ", ".join(f"{self.name}@{each}" for each in numbers[-NAMES_SHOWN:])
            message = f"the model {self.name} {what}; this server has: {self.name}, {listed}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return ServedModel(f"{self.name}@{number}", VersionPolicy(self._choose("").policy, self, number), self.name)

    @asynccontextmanager
    async def hold(self, number: int) -> AsyncIterator[PolicyServer]:
        """Yields the policy of a version, which stays in memory inside the block."""
        with ExitStack() as call:
            async with self._loading:
                model = await self._load(number)
                call.enter_context(model.use())
            yield model.policy
        self._free()

    async def _load(self, number: int) -> ServedModel:
        """Returns a version, loaded if it is not yet; `_loading` must be held."""
        if (model := self._loaded.get(number)) is not None:
            return model
        path, name = self.folder.path(number), f"{self.name}@{number}"
        if (damage := await asyncio.to_thread(find_damage, path)) is not None:
            fix = f"promote another one: reinforge rollback {self.folder.folder} --to N"
            raise ConfigError(Problem("", f"version {number} of {self.name} is damaged: {damage}", fix))
        await self._loader.load(name, path, self.name, self.folder.read_version(number).settings)
        self._loaded[number] = model = self._models.find(name)
        return model

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            if (found := self._look()) == self._seen:
                continue
            self._seen = found
            try:
                state = self.folder.read()
                if state.promoted not in self._loaded:
                    async with self._loading:
                        await self._load(state.promoted)
            except Exception as error:  # noqa: BLE001  whatever is in the folder, the server keeps running
                logger.error("%s@%d keeps answering: %s", self.name, self.state.promoted, describe_error(error))
                continue
            self._take(state)
            self._begin(self._load_others(state))

    def _look(self) -> tuple[int, int] | None:
        """Returns what changes with every replacement of the state; None: the file is missing."""
        with suppress(OSError):
            found = self.folder.state_file.stat()
            return found.st_mtime_ns, found.st_ino
        return None

    def _take(self, state: VersionState) -> None:
        """Lets the versions of a state answer; a candidate that is not loaded yet does not."""
        if self.state.promoted not in (0, state.promoted):
            logger.warning("%s is version %d now, after %d", self.name, state.promoted, self.state.promoted)
        self._newest = state
        self.state = state if state.candidate in self._loaded else replace(state, candidate=None)

    async def _load_others(self, state: VersionState) -> None:
        """Loads the candidate, which then gets its share, and the version that a rollback would promote."""
        others = state.candidate, await asyncio.to_thread(self.folder.find_earlier)
        if self._newest is state:
            self._wanted = {each for each in others if each is not None}
        for number in others:
            if number is None or number in self._loaded or self._newest is not state:
                continue
            try:
                async with self._loading:
                    await self._load(number)
            except Exception as error:  # noqa: BLE001  as above
                logger.error("%s@%d is not served: %s", self.name, number, describe_error(error))
        if self._newest is state:
            self._take(state)
            await self._decide()  # scores that came before the candidate was loaded
        self._free()

    def _free(self) -> None:
        """Frees the versions that nothing needs any more, once their calls in flight have ended."""
        for number, model in self._loaded.items():
            if not self._is_wanted(number):
                self._begin(self._unload(number, model))

    def _is_wanted(self, number: int) -> bool:
        return number in self._wanted or number in (self.state.promoted, self._newest.promoted, self._newest.candidate)

    async def _unload(self, number: int, model: ServedModel) -> None:
        await model.idle.wait()
        async with self._loading:
            if self._is_wanted(number) or model.num_in_flight or self._loaded.get(number) is not model:
                return
            del self._loaded[number]
            await self._loader.unload(model.name)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(task := asyncio.ensure_future(work))
        task.add_done_callback(self._tasks.discard)
