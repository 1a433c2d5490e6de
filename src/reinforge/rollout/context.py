"""What a workflow knows about the episode that it runs in, and how code without that knowledge finds it.

The run sets `CURRENT_EPISODE` in the thread or task of each workflow. Tasks and `asyncio.to_thread` copy it; a thread
that an agent starts itself does not, and `threading.Thread(target=contextvars.copy_context().run, args=(work,))` does.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from reinforge.errors import CaptureError
from reinforge.rollout.capture import AsyncLLM, Capture
from reinforge.types.episode import ModelCall
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.seeding import stable_random
from reinforge.types.steps import REPORTED_REWARD

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

    from reinforge.rollout.gateway import EpisodeGateway
    from reinforge.rollout.http.endpoint import EpisodeEndpoint
    from reinforge.rollout.http.exchange import EndpointRequest, EndpointResponse

NO_EPISODE = (
    "clients of get_llm and of reinforge.current_..., and Context.get(), work inside an episode only, and this code "
    "runs in none; a thread that the agent starts itself needs a copy of the episode's context: "
    "threading.Thread(target=contextvars.copy_context().run, args=(work,))"
)


class EpisodeModels(Protocol):
    def create_handle(self, name: str) -> Any:
        """Returns the model handle of an entry of `llms`."""

    def open_endpoint(self) -> EpisodeEndpoint:
        """Returns what answers the episode's HTTP requests, once the first client needs it."""


class EpisodeContext:
    """A workflow's view of its episode.

    Attributes:
        seed: The environment's seed; equal for siblings, so that they face the same random events.
        is_training: True if the episode is collected for training; False in validations and the verdict.
        epoch: Its epoch, from 0; -1 for the baseline.
    """

    __slots__ = ("__dict__", "__weakref__", "_capture", "_models", "epoch", "example_id", "is_training", "seed")
    answer_environment: Callable[[EndpointRequest], Awaitable[EndpointResponse]] | None = None
    """Answers a program that plays the episode's environment; None: it has none."""

    def __init__(
        self,
        seed: int,
        example_id: str,
        capture: Capture,
        models: EpisodeModels,
        *,
        is_training: bool = True,
        epoch: int = 0,
    ):
        self.seed, self.example_id, self.is_training, self.epoch = seed, example_id, is_training, epoch
        self._capture, self._models = capture, models

    @property
    def functions(self) -> tuple[str, ...]:
        """The open function scopes, outermost first."""
        return self._capture.functions

    @property
    def calls(self) -> tuple[ModelCall, ...]:
        """The episode's finished model calls, in the order they ended."""
        return tuple(self._capture.calls)

    @property
    def refused_call(self) -> str | None:
        """Why the first refused model call was, such as one with an image; None: none was refused."""
        return self._capture.refused_call

    def random(self, *names: str | int) -> Random:
        """Returns a `random.Random` derived from the environment's seed, one stream per name."""
        return stable_random(self.seed, *names)

    def function(self, name: str) -> AbstractContextManager[None]:
        """Opens a function scope: `with context.function("plan"): ...`; `target_functions` filters by it."""
        return self._capture.function(name)

    def mark(self, data: Any = None, *, step_reward: float | None = None, call_id: str | None = None) -> None:
        """Marks a turn with a `step_reward` or a `TTCEventData`.

        Args:
            call_id: The `id` of the turn's completion; None: the latest turn.
        """
        self._capture.mark(data, step_reward=step_reward, call_id=call_id)

    def text(self, name: str, default: str) -> str:
        """Returns a text of the agent, such as its system prompt: the default, or what `prompts` has under its name."""
        return self._capture.text(name, default)

    def note_waiting(self, reason: str) -> None:
        """Notes what the agent waits for, in case that its time is up."""
        self._capture.waiting = reason

    def reward(self, value: float, **metrics: float) -> None:
        """Reports how good the episode was, and other numbers; the evaluator `reported_reward` scores the last report.

        Raises:
            ValueError: A number is not finite.
        """
        report = {"reward": float(value), **{name: float(number) for name, number in metrics.items()}}
        for name, number in report.items():
            if not math.isfinite(number):
                raise ValueError(f"context.reward: {name} is {number}, but a reward must be finite")
        self.mark({REPORTED_REWARD: report})

    def llm(self, name: str) -> AsyncLLM:
        llm: AsyncLLM = self._models.create_handle(name)
        return llm

    @cached_property
    def endpoint(self) -> EpisodeEndpoint:
        endpoint = self._models.open_endpoint()
        endpoint.answer_environment = self.answer_environment
        return endpoint

    def gateway(self) -> EpisodeGateway:
        """Opens a server on the loopback through which programs of any language reach this episode's models.

        `with context.gateway() as access: subprocess.run(command, env={**os.environ, **access.environment()})`; in an
        `async def` workflow `async with`.
        """
        from reinforge.rollout.gateway import EpisodeGateway  # imports the HTTP server

        return EpisodeGateway(self.endpoint)

    def openai(self, **options: Any) -> OpenAI:
        """Returns a client of the `openai` package whose calls are this episode's model calls; no server is involved.

        Use it in a plain workflow, or in a thread; in an `async def` use `async_openai`.

        Raises:
            ConfigError: The package is not installed.
        """
        return _build_client("openai", lambda: self.endpoint, options)

    def async_openai(self, **options: Any) -> AsyncOpenAI:
        """Returns the async client of the `openai` package, like `openai`; it works in any event loop."""
        return _build_client("async_openai", lambda: self.endpoint, options)

    def http_client(self, library: str | None = None, **options: Any) -> Any:
        """Returns an `httpx` client whose requests this episode answers, whatever their host.

        Pass it to a framework: `ChatOpenAI(model="agent", api_key="-", http_client=context.http_client())`.

        Args:
            library: `httpx` or `httpx2`; None: the one that the installed `openai` package uses.
            options: Other arguments of the library's `Client`.
        """
        return _build_client("http_client", lambda: self.endpoint, library, options)

    def async_http_client(self, library: str | None = None, **options: Any) -> Any:
        """Returns an `httpx.AsyncClient`, like `http_client`."""
        return _build_client("async_http_client", lambda: self.endpoint, library, options)


@dataclass(frozen=True, slots=True)
class RunningEpisode:
    item: EvalInputItem
    context: EpisodeContext


CURRENT_EPISODE: ContextVar[RunningEpisode] = ContextVar("reinforge_episode")
"""The episode in which the current code runs."""


def get_episode() -> RunningEpisode:
    try:
        return CURRENT_EPISODE.get()
    except LookupError:
        raise CaptureError(NO_EPISODE) from None


def _build_client(kind: str, find: Callable[[], EpisodeEndpoint], *arguments: Any) -> Any:
    from reinforge.rollout.http import clients

    return getattr(clients, f"build_{kind}")(find, *arguments)


def current_openai(**options: Any) -> OpenAI:
    """Returns a client of the `openai` package that an agent may build once, before any episode.

    Each call is a model call of the episode in which it is made; see `EpisodeContext.openai`.

        client = reinforge.current_openai()

        def agent(item, llm, context):
            reply = client.chat.completions.create(model="agent", messages=[...])
    """
    return _build_client("openai", _find_current, options)


def current_async_openai(**options: Any) -> AsyncOpenAI:
    return _build_client("async_openai", _find_current, options)


def current_http_client(library: str | None = None, **options: Any) -> Any:
    """Returns an `httpx.Client` that an agent may build once; the episode in which a request is made answers it."""
    return _build_client("http_client", _find_current, library, options)


def current_async_http_client(library: str | None = None, **options: Any) -> Any:
    return _build_client("async_http_client", _find_current, library, options)


def current_text(name: str, default: str) -> str:
    """Returns `context.text(name, default)` of the episode in which the current code runs."""
    return get_episode().context.text(name, default)


def _find_current() -> EpisodeEndpoint:
    return get_episode().context.endpoint
