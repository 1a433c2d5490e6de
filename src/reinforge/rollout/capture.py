"""Records every model call of one episode exactly, and gives the agent OpenAI's chat shape.

The agent calls `llm.chat.completions.create(messages=..., ...)`; in async workflows the result is awaited, in plain
ones the call blocks. How replies of a trained policy are drawn is the run's decision: what the agent asks for
temperature, top_p, top_k and seed is overridden, since agents bring `temperature=0` and then all siblings are equal.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from reinforge.errors import CaptureError
from reinforge.interfaces import ContextOverflow
from reinforge.types.episode import Mark, ModelCall
from reinforge.types.request import Message, ModelReply, ModelRequest, SamplingParams, TokenLogprobs
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
        """Draws one reply."""


@dataclass(slots=True)
class ChatMessage:
    """`choices[0].message` of a completion."""

    role: str
    content: str | None
    tool_calls: list[dict[str, Any]] | None = None


@dataclass(slots=True)
class ChatChoice:
    """`choices[0]` of a completion; `logprobs` is the exact `TokenLogprobs`, `.content[i].logprob` works too."""

    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: TokenLogprobs | None


@dataclass(slots=True)
class ChatUsage:
    """Tokens of one call."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Tokens of prompt and reply."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(slots=True)
class ChatCompletion:
    """What `create` returns: the fields of OpenAI's object that agents read."""

    id: str
    model: str
    created: int
    choices: list[ChatChoice]
    usage: ChatUsage
    object: str = "chat.completion"


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

    async def call(self, name: str, model: ChatModel, request: ModelRequest) -> ChatCompletion:
        """Makes one model call and records it."""
        if self.closed:
            raise CaptureError("the episode has ended: its model handle cannot be used any more")
        index, functions, started = self.num_started, self.functions, time.time()
        self.num_started += 1
        self.pending += 1
        try:
            reply = await model.sample(request)
        except ContextOverflow:
            self.overflow = True
            raise
        finally:
            self.pending -= 1
        if self.closed:
            raise CaptureError("the episode has ended: its model handle cannot be used any more")
        call_id = f"call-{self.seed:x}-{index}"
        self.calls.append(ModelCall(call_id, name, model.model_name, request, reply, functions, started, time.time()))
        return completion_of(call_id, model.model_name, started, reply)


def completion_of(call_id: str, model: str, started_s: float, reply: ModelReply) -> ChatCompletion:
    """Returns a reply in the shape that agents read."""
    message = reply.message
    return ChatCompletion(
        id=call_id,
        model=model,
        created=int(started_s),
        choices=[
            ChatChoice(
                index=0,
                message=ChatMessage(message["role"], message.get("content"), message.get("tool_calls")),
                finish_reason=reply.finish_reason,
                logprobs=reply.tokens,
            )
        ],
        usage=ChatUsage(reply.num_prompt_tokens, reply.num_completion_tokens),
    )


_ACCEPTED_AND_UNUSED = frozenset({"model", "logprobs", "top_logprobs", "user", "metadata", "store", "timeout"})
_NEVER = frozenset({"extra_headers", "extra_query"})  # where it goes and with which key is the configuration's to say
_NOT_PASSED_ON = frozenset({"model", "logprobs", "top_logprobs", "timeout", "tools", "n", "stream"})


def build_request(
    messages: Sequence[Any],
    *,
    sampling: SamplingParams | None,
    seed: int,
    temperature: float | None = None,
    top_p: float | None = None,
    max_tokens: int | None = None,
    max_completion_tokens: int | None = None,
    stop: str | list[str] | None = None,
    tools: list[dict[str, Any]] | None = None,
    n: int = 1,
    stream: bool = False,
    passes_through: bool = False,
    **other: Any,
) -> ModelRequest:
    """Returns the request for one call in OpenAI's arguments.

    Args:
        messages: The history.
        sampling: The run's temperature, top_p and top_k for a trained policy; None: the agent's own count.
        seed: The call's own seed.
        temperature: Used where `sampling` is None.
        top_p: Used where `sampling` is None.
        max_tokens: Longest reply in tokens; the agent's own.
        max_completion_tokens: OpenAI's newer name of `max_tokens`.
        stop: Texts that end the reply; the agent's own.
        tools: Function definitions.
        n: Must be 1.
        stream: Must be False.
        passes_through: The model behind takes any argument of OpenAI's.
        other: Arguments of OpenAI's that do not change the reply are accepted; any other is refused.

    Raises:
        TypeError: An argument that would change the reply cannot be honoured.
    """
    refused = sorted(set(other) & _NEVER if passes_through else set(other) - _ACCEPTED_AND_UNUSED)
    if refused or n != 1 or stream:
        what = ", ".join(refused + (["n > 1"] if n != 1 else []) + (["stream"] if stream else []))
        raise TypeError(f"chat.completions.create cannot honour: {what}")
    if not messages:
        raise TypeError("chat.completions.create needs at least one message")
    base = sampling or SamplingParams(
        temperature=1.0 if temperature is None else temperature, top_p=1.0 if top_p is None else top_p
    )
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    limit = max_completion_tokens if max_completion_tokens is not None else max_tokens
    return ModelRequest(
        [as_message(m) for m in messages], replace(base, max_tokens=limit, stop=stops, seed=seed), tools
    )


def as_message(message: Any) -> Message:
    """Returns a message as a mapping; agents may append `choices[0].message` itself, ours or another library's."""
    if isinstance(message, ChatMessage):
        message = {"role": message.role, "content": message.content, "tool_calls": message.tool_calls}
    elif hasattr(message, "model_dump"):
        message = message.model_dump()
    return {key: value for key, value in dict(message).items() if value is not None or key == "content"}


def passed_on(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what an agent asked of a model that is no policy, as its endpoint is asked."""
    given = {key: value for key, value in arguments.items() if value is not None and key not in _NOT_PASSED_ON}
    further = given.pop("extra_body", {})
    return {**given, **further}


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

    async def _create(self, *, messages: Sequence[Any], seed: int | None = None, **arguments: Any) -> ChatCompletion:
        capture = self._capture
        if self._passes_through:
            asked = passed_on({**arguments, "seed": seed})
            request = build_request(messages, sampling=None, seed=seed or 0, passes_through=True, **arguments)
            return await capture.call(self.name, self.model, replace(request, arguments=asked))
        if seed is None or self._sampling is not None:  # a trained policy draws by the run's seed, not the agent's
            seed = call_seed(capture.seed, capture.num_started)
        request = build_request(messages, sampling=self._sampling, seed=seed, **arguments)
        return await capture.call(self.name, self.model, request)


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
