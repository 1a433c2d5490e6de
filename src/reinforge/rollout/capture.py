"""Records every model call of one episode exactly, and gives the agent OpenAI's chat shape.

The agent calls `llm.chat.completions.create(messages=..., ...)`; in async workflows the result is awaited, in plain
ones the call blocks. How replies of a trained policy are drawn is the run's decision: what the agent asks for
temperature, top_p, top_k, min_p and seed is overridden, since agents bring `temperature=0` and then all siblings are
equal.

Of several choices (`n`) one is the turn: the one that a later request holds after this call's own messages, or else
whose text is what the agent returned, or else - nobody can tell, a majority may have been taken - the first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from reinforge.errors import CaptureError
from reinforge.interfaces import ContextOverflow
from reinforge.rollout.chat import MAX_CHOICES, ChatCompletion, build_request, completion_of, passed_on
from reinforge.types.episode import Mark, ModelCall
from reinforge.types.request import Message, ModelReply, ModelRequest, SamplingParams
from reinforge.types.seeding import stable_random


class ChatModel(Protocol):
    """A model behind an entry of `llms`."""

    @property
    def model_name(self) -> str:
        """The model's own name."""

    @property
    def is_policy(self) -> bool:
        """True if its replies are drawn from the weights being trained."""

    async def sample(self, request: ModelRequest) -> ModelReply:
        """Draws one reply.

        A model that has `sample_choices(request, n)` is asked for several replies by one call of that.
        """


@dataclass(slots=True)
class Capture:
    """What one episode did so far.

    Attributes:
        seed: Seed of this episode's draws: siblings differ here.
        calls: Finished model calls, in the order they ended.
        marks: What the agent marked.
        functions: Function scopes that are open, outermost first.
        overflow: True once a prompt was longer than the context.
        pending: Calls in flight.
        num_started: Calls started so far, finished or not.
    """

    seed: int
    calls: list[ModelCall] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    functions: tuple[str, ...] = ()
    overflow: bool = False
    pending: int = 0
    num_started: int = 0
    closed: bool = False
    _open: list[ModelCall] = field(default_factory=list)

    @contextmanager
    def function(self, name: str) -> Iterator[None]:
        """Opens a function scope: calls and marks inside belong to it."""
        outer, self.functions = self.functions, (*self.functions, name)
        try:
            yield
        finally:
            self.functions = outer

    def mark(self, data: Any = None, *, step_reward: float | None = None, call_id: str | None = None) -> None:
        """Marks something about a turn: the one before it, or that of a call by its id.

        Raises:
            CaptureError: No call of this episode has that id.
        """
        if call_id is not None and all(call.call_id != call_id for call in self.calls):
            raise CaptureError(f'mark: no call of this episode has the id "{call_id}"; give a completion\'s `id`')
        self.marks.append(Mark(len(self.calls), step_reward, data, self.functions, time.time(), call_id))

    async def call(self, name: str, model: ChatModel, request: ModelRequest, n: int = 1) -> ChatCompletion:
        """Makes one model call and records it.

        Args:
            name: The entry under `llms`.
            model: What stands behind it.
            request: What is asked.
            n: Choices to draw.
        """
        if self.closed:
            raise CaptureError("the episode has ended: its model handle cannot be used any more")
        self._went_on_with(request.messages)
        index, functions, started = self.num_started, self.functions, time.time()
        self.num_started += 1
        self.pending += 1
        try:
            replies = await draw_choices(model, request, n)
        except ContextOverflow:
            self.overflow = True
            raise
        finally:
            self.pending -= 1
        if self.closed:
            raise CaptureError("the episode has ended: its model handle cannot be used any more")
        call_id = f"call-{self.seed:x}-{index}"
        reply, *others = replies
        ended = time.time()
        call = ModelCall(
            call_id, name, model.model_name, request, reply, functions, started, ended, others=tuple(others)
        )
        self.calls.append(call)
        if others:
            self._open.append(call)
        return completion_of(call)

    def _went_on_with(self, messages: Sequence[Message]) -> None:
        """Looks in a new request for choices of earlier calls."""
        for call in self._open.copy():
            own = call.request.messages
            goes_on = list(messages[: len(own)]) == own
            new = messages[len(own) :] if goes_on else [message for message in messages if message not in own]
            found = next((i for message in new if (i := _index_of(message, call)) is not None), None)
            if found is not None:
                call.choose(found)
                self._open.remove(call)

    def returned(self, output: Any) -> None:
        """Looks for choices in what the agent returned."""
        for call in self._open:
            found = _index_of({"role": "assistant", "content": output}, call) if isinstance(output, str) else None
            if found is not None:
                call.choose(found)


def _index_of(message: Message, call: ModelCall) -> int | None:
    """Returns which choice of a call says the same as a message; white space around the text does not matter."""

    def said(message: Message) -> tuple[Any, ...]:
        content = message.get("content")
        return (
            message.get("role"),
            content.strip() if isinstance(content, str) else content,
            message.get("tool_calls"),
        )

    return next((i for i, reply in enumerate(call.choices) if said(reply.message) == said(message)), None)


async def draw_choices(model: ChatModel, request: ModelRequest, n: int) -> list[ModelReply]:
    """Returns n replies to one request: by the model's own `sample_choices`, or drawn beside each other.

    The first has the request's seed and is the reply that n = 1 gives, each further one a seed derived from it. An
    engine that sees equal prompts at the same time reads them once.
    """
    if n == 1:
        return [await model.sample(request)]
    if (several := getattr(model, "sample_choices", None)) is not None:
        return list(await several(request, n))
    seed = request.sampling.seed
    seeds = [seed, *(None if seed is None else call_seed(seed, index) for index in range(1, n))]
    requests = [replace(request, sampling=replace(request.sampling, seed=own)) for own in seeds]
    tasks = [asyncio.ensure_future(model.sample(own)) for own in requests]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:  # one has failed: nobody waits for the others
            task.cancel()


class _Completions:
    """`llm.chat.completions`."""

    def __init__(self, create: Callable[..., Any]):
        self.create = create


class _Chat:
    """`llm.chat`."""

    def __init__(self, create: Callable[..., Any]):
        self.completions = _Completions(create)


class AsyncLLM:
    """The handle of an async workflow: `await llm.chat.completions.create(messages=...)`."""

    def __init__(self, name: str, model: ChatModel, capture: Capture, sampling: SamplingParams | None):
        self.name, self.model, self._capture = name, model, capture
        self._sampling = sampling if model.is_policy else None
        self._passes_through: bool = getattr(model, "passes_through", False)
        self.chat = _Chat(self._create)

    @property
    def model_name(self) -> str:
        """The model's own name."""
        return self.model.model_name

    async def _create(
        self, *, messages: Sequence[Any], seed: int | None = None, n: int | None = None, **arguments: Any
    ) -> ChatCompletion:
        capture, n = self._capture, 1 if n is None else n
        if not 1 <= n <= MAX_CHOICES:
            raise TypeError(f"chat.completions.create takes n from 1 to {MAX_CHOICES}, not {n}")
        if self._passes_through:
            asked = passed_on({**arguments, "seed": seed})
            request = build_request(messages, sampling=None, seed=seed or 0, passes_through=True, **arguments)
            return await capture.call(self.name, self.model, replace(request, arguments=asked), n)
        if seed is None or self._sampling is not None:  # a trained policy draws by the run's seed, not the agent's
            seed = call_seed(capture.seed, capture.num_started)
        further = arguments.pop("extra_body", None) or {}
        request = build_request(messages, sampling=self._sampling, seed=seed, **arguments, **further)
        return await capture.call(self.name, self.model, request, n)


class BlockingLLM(AsyncLLM):
    """The handle of a plain workflow: the call blocks its thread."""

    def __init__(
        self,
        name: str,
        model: ChatModel,
        capture: Capture,
        sampling: SamplingParams | None,
        loop: asyncio.AbstractEventLoop,
    ):
        super().__init__(name, model, capture, sampling)
        self._loop = loop
        self.chat = _Chat(self._create_blocking)

    def _create_blocking(self, *, messages: Sequence[Any], **arguments: Any) -> ChatCompletion:
        return asyncio.run_coroutine_threadsafe(self._create(messages=messages, **arguments), self._loop).result()


def call_seed(episode_seed: int, index: int) -> int:
    """Returns the seed of an episode's `index`-th model call: a 63-bit mix (SplitMix64, Steele et al. 2014)."""
    mask = (1 << 64) - 1
    z = (episode_seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1


class EpisodeContext:
    """What a workflow is told about its episode.

    Attributes:
        seed: Seed of the episode's world; equal for siblings, so that they meet the same luck.
        example_id: The example's id.
        is_training: True while episodes are collected to be trained on; False in validations and the verdict.
    """

    def __init__(
        self,
        seed: int,
        example_id: str,
        capture: Capture,
        handles: Callable[[str], AsyncLLM],
        *,
        is_training: bool = True,
    ):
        self.seed, self.example_id, self.is_training = seed, example_id, is_training
        self._capture, self._handles = capture, handles

    def random(self, *names: str | int) -> Any:
        """Returns a `random.Random` of the world's, one stream per name."""
        return stable_random(self.seed, *names)

    def function(self, name: str) -> Any:
        """Opens a function scope: `with context.function("plan"): ...`; `target_functions` filters by it."""
        return self._capture.function(name)

    def mark(self, data: Any = None, *, step_reward: float | None = None, call_id: str | None = None) -> None:
        """Marks a turn with a `step_reward` or a `TTCEventData`.

        Args:
            data: Whatever is worth keeping.
            step_reward: Reward of the turn.
            call_id: The `id` of the completion that the turn is; None: the one before.
        """
        self._capture.mark(data, step_reward=step_reward, call_id=call_id)

    def llm(self, name: str) -> AsyncLLM:
        """Returns the handle of another entry of `llms`."""
        return self._handles(name)
