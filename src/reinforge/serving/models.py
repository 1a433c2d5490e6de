"""The models that a server answers with, by name.

    models.add("run-1", policy)        chat/completions with "model": "run-1" from now on
    models.find("run-1")               the model behind the name
    await models.remove("run-1")       no new calls; returns when the last one in flight has ended

Several names may lead to one policy, and the policies of one engine batch their replies together.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field

from reinforge.errors import ConfigError, Problem, did_you_mean
from reinforge.interfaces import PolicyServer
from reinforge.rollout.http.exchange import describe_model
from reinforge.rollout.models.policy_llm import PolicyLLM
from reinforge.serving.routes import ApiError
from reinforge.types.episode import ModelCall
from reinforge.types.request import ModelReply, ModelRequest
from reinforge.types.sample import FloatArray

NAMES_SHOWN = 20  # maximum names of models in a message
WatchCall = Callable[[ModelCall, "ServedModel"], None]  # called for every finished call
FindPolicy = Callable[[str], "PolicyServer | ServedModel | None"]
"""Returns the policy of a name that no model has, or the model of which it is another name; None: it does not know the
name either."""
ChooseModel = Callable[[str], "ServedModel"]  # returns the model that answers a conversation; "": it has no name


def list_names(names: Sequence[str]) -> str:
    """Returns the names of models for a message, the first `NAMES_SHOWN` of them."""
    num_more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {num_more} more" if num_more > 0 else "") or "none"


@dataclass(eq=False)
class ServedModel:
    """One name and the policy behind it."""

    name: str
    policy: PolicyServer
    root: str | None = None  # the model that it was trained from; None: unknown, or it was not trained here
    close: Callable[[], Awaitable[None]] | None = None  # frees the model once it is removed; None: its owner does
    created_s: float = field(default_factory=time.time)  # Unix time at which it was added

    def __post_init__(self) -> None:
        self.llm = PolicyLLM(lambda: self.policy)
        self.num_in_flight = 0
        self.idle = asyncio.Event()
        self.idle.set()

    @contextmanager
    def use(self) -> Iterator[None]:
        """Keeps the model while a call to it is in flight."""
        self.num_in_flight += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.num_in_flight -= 1
            if not self.num_in_flight:
                self.idle.set()

    def describe(self) -> dict[str, object]:
        described: dict[str, object] = describe_model(self.name, int(self.created_s))
        return {**described, "root": self.root or self.name, "version": self.policy.version}


class OnDemandPolicy(PolicyServer):
    """Fixed weights that are in memory while a call needs them; all else is as with another policy of their model."""

    def __init__(self, base: PolicyServer):
        self._base = base
        self.tolerance = base.tolerance

    @abstractmethod
    def use(self) -> AbstractAsyncContextManager[PolicyServer]:
        """Yields the policy of the weights, which stay in memory inside the block."""

    @property
    def model_name(self) -> str:
        return self._base.model_name

    @property
    def chat_template(self) -> str | None:
        return self._base.chat_template

    @property
    def history(self) -> str:
        return self._base.history

    async def sample(self, request: ModelRequest) -> ModelReply:
        async with self.use() as policy:
            return await policy.sample(request)

    async def score(self, token_ids: Sequence[Sequence[int]]) -> list[FloatArray]:
        async with self.use() as policy:
            return await policy.score(token_ids)

    async def publish(self, version: int) -> None:
        """Does nothing: the weights never change."""

    async def fingerprint(self) -> str:
        async with self.use() as policy:
            return await policy.fingerprint()


class ServedModels:
    """All models of one server; use it in one event loop."""

    def __init__(self) -> None:
        self._models: dict[str, ServedModel] = {}
        self._splits: dict[str, ChooseModel] = {}
        self._finders: list[FindPolicy] = []
        self._watchers: list[WatchCall] = []

    @property
    def names(self) -> tuple[str, ...]:
        return (*self._splits, *self._models)

    def describe(self) -> list[dict[str, object]]:
        """Returns what there is under each name; several models may answer to one."""
        return [self.find(name).describe() | {"id": name, "display_name": name} for name in self.names]

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(tuple(self._models.values()))

    def __contains__(self, name: str) -> bool:
        return name in self._models or name in self._splits

    def add(
        self,
        name: str,
        policy: PolicyServer,
        *,
        root: str | None = None,
        close: Callable[[], Awaitable[None]] | None = None,
    ) -> ServedModel:
        """Serves a policy under a name, which clients write as `model`, at once."""
        if name in self:
            raise ConfigError(Problem("model", f"a model is already served as {name!r}", "choose another name"))
        self._models[name] = model = ServedModel(name, policy, root, close)
        return model

    def add_split(self, name: str, choose: ChooseModel) -> None:
        """Answers a name by one of several models, which `choose` returns for each conversation."""
        if name in self:
            raise ConfigError(Problem("model", f"a model is already served as {name!r}", "choose another name"))
        self._splits[name] = choose

    def add_finder(self, find: FindPolicy) -> None:
        """Answers names that no model has; finders are asked in the order in which they were added."""
        self._finders.append(find)

    def watch(self, watcher: WatchCall) -> None:
        """Registers a callback for finished calls, which should return at once."""
        self._watchers.append(watcher)

    def report(self, call: ModelCall, model: ServedModel) -> None:
        for watcher in self._watchers:
            watcher(call, model)

    def find(self, name: str, conversation: str = "") -> ServedModel:
        """Returns the model of a name; an empty name is the only model, if there is only one.

        Args:
            conversation: What tells conversations apart, for names that several models answer to; "": unknown.
        """
        if not name:
            own = [*self._splits, *(each for each in self._models if each.partition("@")[0] not in self._splits)]
            name = own[0] if len(own) == 1 else name
        if (choose := self._splits.get(name)) is not None:
            return choose(conversation)
        if (model := self._models.get(name)) is not None:
            return model
        for find in self._finders:
            if name and (found := find(name)) is not None:
                return found if isinstance(found, ServedModel) else ServedModel(name, found)
        names = self.names
        raise ApiError(
            404,
            f"the model {name[:200]!r} does not exist{did_you_mean(name, names)}; this server has: {list_names(names)}",
            param="model",
            code="model_not_found",
        )

    async def remove(self, name: str) -> None:
        """Stops serving a name; returns when the calls in flight have ended and the model is closed."""
        model = self._models.pop(name, None)
        if model is None:
            raise ApiError(404, f"the model {name[:200]!r} does not exist", param="model", code="model_not_found")
        await model.idle.wait()
        if model.close is not None:
            await model.close()

    async def close(self) -> None:
        for name in list(self._models):
            await self.remove(name)
