"""Records every model call of one episode, behind OpenAI's chat completions interface.

The agent calls `llm.chat.completions.create(messages=..., ...)`, which async workflows await and plain ones block on.
The run decides how a trained policy is sampled: it overrides the agent's temperature, top_p, top_k, min_p and seed,
since an agent with `temperature=0` would get equal siblings.

If a call has several choices (`n`), one of them becomes the turn: the choice that a later request contains after this
call's messages; else the choice whose text the agent returned; else the first, since the agent may have combined them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

from reinforge.dialects.tool_calls import find_bad_call
from reinforge.errors import BackendError, CaptureError, ContextOverflow, EngineError, MessagesRejected
from reinforge.interfaces import ChatModel
from reinforge.rollout.handle.arguments import CallArguments, read_arguments
from reinforge.rollout.handle.chat import build_forwarded_request, build_request, find_overridden, read_num_choices
from reinforge.rollout.handle.completion import ChatCompletion, build_completion
from reinforge.rollout.handle.interface import AsyncCompletions, BlockingCompletions, ChatNamespace, build_missing
from reinforge.rollout.history import NOTHING, CallMessages, EpisodeMessages, add_continued_turn
from reinforge.types.episode import Mark, ModelCall
from reinforge.types.request import Message, ModelReply, ModelRequest, SamplingParams, TokenLogprobs

logger = logging.getLogger(__name__)

CLIENT_CHARS = 40


@dataclass(frozen=True, slots=True)
class StartedCall:
    request: ModelRequest
    conversation: CallMessages
    index: int
    functions: tuple[str, ...]
    started_s: float


@dataclass(slots=True)
class Capture:
    """The model calls and marks of one episode so far."""

    seed: int  # the episode's sampling seed, which differs between siblings
    calls: list[ModelCall] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    functions: tuple[str, ...] = ()  # open function scopes, outermost first
    overflow: str | None = None  # how a prompt exceeded the context, even if the agent continued; None: none did
    bad_call: str | None = None
    """Why a tool call in the policy's latest replies is unusable; None: none is. An agent that fails on such a reply
    fails because of the policy."""
    lost_call: str | None = None
    """Why the latest model call got no reply, if the model's service is to blame; None: it got one. A client shows the
    agent an error of its own kind, so only this tells whose failure it is."""
    refused_call: str | None = None  # why the first refused model call was, even if the agent continued; None: none was
    waiting: str | None = None  # what the agent waited for when its time was up, such as a tool; None: not known
    sampling: SamplingParams | None = None  # how a trained policy is sampled; None: as in the run's other episodes
    omits_content: bool = False  # whether notes in brackets stand for images and files, which are refused otherwise
    told: set[str] = field(default_factory=set)
    """What the user was already told about the agent's requests; episodes of one run share it, and `ignored`."""
    ignored: list[str] = field(default_factory=list)  # fields of its requests that are not used
    prompts: Mapping[str, str] = field(default_factory=dict)  # what replaces texts of the agent, by name
    texts: dict[str, str] = field(default_factory=dict)
    """The texts that the agent asked for, by name, with its own wording; episodes of one run share it."""
    pending: int = 0
    num_started: int = 0
    closed: bool = False
    _undecided: tuple[ModelCall, ...] = ()
    conversations: EpisodeMessages = field(default_factory=EpisodeMessages)

    @contextmanager
    def function(self, name: str) -> Iterator[None]:
        """Opens a function scope; calls and marks inside it belong to the function."""
        outer, self.functions = self.functions, (*self.functions, name)
        try:
            yield
        finally:
            self.functions = outer

    def text(self, name: str, default: str) -> str:
        self.texts.setdefault(name, default)
        return self.prompts.get(name, default)

    def mark(self, data: Any = None, *, step_reward: float | None = None, call_id: str | None = None) -> None:
        """Marks the latest turn, or the turn of the call with this id.

        Raises:
            CaptureError: No call of this episode has that id.
        """
        if call_id is not None and all(call.call_id != call_id for call in self.calls):
            raise CaptureError(f'mark: this episode has no call with the id "{call_id}"; pass the `id` of a completion')
        self.marks.append(Mark(len(self.calls), step_reward, data, self.functions, time.time(), call_id))

    def refuse(self, reason: str) -> None:
        self.refused_call = self.refused_call or reason

    def ignore(self, names: Sequence[str], client: str) -> None:
        """Says once in a run of each field of a request that is not used."""
        if new := [name for name in names if name not in self.ignored]:
            self.ignored += new
            by = f" (of {client.split()[0][:CLIENT_CHARS]})" if client.strip() else ""
            logger.warning("ignored in the agent's requests%s: %s", by, ", ".join(new))

    def begin_call(
        self, model: ChatModel, request: ModelRequest, known: CallMessages = NOTHING, count: int = 0
    ) -> StartedCall:
        """Starts a call, whose first `count` messages are those of a known conversation."""
        self._check_open()
        request, conversation = self.conversations.begin(request, known, count, is_policy=model.is_policy)
        self._match_request(request.messages)
        self.bad_call = self.lost_call = None  # the agent went on
        started = StartedCall(request, conversation, self.num_started, self.functions, time.time())
        self.num_started += 1
        self.pending += 1
        return started

    def record_error(self, error: BaseException) -> None:
        self.pending -= 1
        if isinstance(error, ContextOverflow):
            self.overflow = self.overflow or str(error)
        elif isinstance(error, MessagesRejected):  # the agent's doing
            return
        elif isinstance(error, (BackendError, EngineError, ConnectionError)):
            self.lost_call = f"{type(error).__name__}: {error}"

    def record_replies(
        self, started: StartedCall, name: str, model: ChatModel, replies: Sequence[ModelReply]
    ) -> ChatCompletion:
        self.pending -= 1
        self._check_open()
        reply, *others = replies
        self.conversations.end(started.conversation, replies)
        if model.is_policy:
            failures = (each.failure or find_bad_call(each.message) for each in replies)
            self.bad_call = next((failure for failure in failures if failure is not None), self.bad_call)
        call = ModelCall(
            f"call-{self.seed:x}-{started.index}",
            name,
            model.model_name,
            started.request,
            reply,
            started.functions,
            started.started_s,
            time.time(),
            others=tuple(others),
        )
        self.calls.append(call)
        if others:
            self._undecided = (*self._undecided, call)
        return build_completion(call)

    def _check_open(self) -> None:
        if self.closed:
            raise CaptureError("the episode has ended; its model handle can no longer be used")

    def _match_request(self, messages: Sequence[Message]) -> None:
        for call in self._undecided:
            prompt = call.request.messages
            extends = list(messages[: len(prompt)]) == prompt
            new = messages[len(prompt) :] if extends else [message for message in messages if message not in prompt]
            index = next((i for message in new if (i := _find_choice(message, call)) is not None), None)
            if index is not None:
                call.choose(index)
                self._undecided = tuple(each for each in self._undecided if each is not call)

    def match_output(self, output: Any) -> None:
        """Selects the choices whose text the agent returned."""
        for call in self._undecided:
            index = _find_choice({"role": "assistant", "content": output}, call) if isinstance(output, str) else None
            if index is not None:
                call.choose(index)


def _find_choice(message: Message, call: ModelCall) -> int | None:
    """Returns the index of the call's choice that equals a message, ignoring white space around the text."""

    def normalize(message: Message) -> tuple[Any, ...]:
        content = message.get("content")
        return (
            message.get("role"),
            content.strip() if isinstance(content, str) else content,
            message.get("tool_calls"),
        )

    return next((i for i, reply in enumerate(call.choices) if normalize(reply.message) == normalize(message)), None)


async def sample_choices(model: ChatModel, request: ModelRequest, n: int) -> list[ModelReply]:
    """Returns n replies to one request, by the model's own `sample_choices` or by n concurrent `sample` calls.

    The first reply uses the request's seed and is the one that n = 1 gives; the others use seeds derived from it. The
    engine prefills equal prompts that arrive together once.
    """
    if n == 1:
        return [await model.sample(request)]
    if (own := getattr(model, "sample_choices", None)) is not None:
        return list(await own(request, n))
    seed = request.sampling.seed
    seeds = [seed, *(None if seed is None else derive_call_seed(seed, index) for index in range(1, n))]
    requests = [replace(request, sampling=replace(request.sampling, seed=each)) for each in seeds]
    tasks = [asyncio.ensure_future(model.sample(each)) for each in requests]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:  # if one failed, the others are not needed
            task.cancel()


class AsyncLLM:
    """The model handle of an async workflow: `await llm.chat.completions.create(messages=...)`.

    Args:
        sampling: The run's sampling settings for a trained policy; None: use the agent's.
    """

    __slots__ = (
        "__dict__", "__weakref__", "_capture", "_forwards_arguments", "_sampling", "chat", "model", "name",
    )  # fmt: skip

    def __init__(self, name: str, model: ChatModel, capture: Capture, sampling: SamplingParams | None):
        self.name, self.model, self._capture = name, model, capture
        self._sampling = sampling if model.is_policy else None
        self._forwards_arguments: bool = getattr(model, "forwards_arguments", False)
        self.chat = ChatNamespace(AsyncCompletions(self))

    @property
    def model_name(self) -> str:
        return self.model.model_name

    def __getattr__(self, name: str) -> NoReturn:
        raise build_missing(self, "the model handle", name, ("chat.completions", "model_name"))

    async def complete(self, messages: Sequence[Any] | None, arguments: CallArguments) -> ChatCompletion:
        n = read_num_choices(arguments)
        known, count = self._capture.conversations.find(messages, is_policy=self.model.is_policy)
        request = self._build_request(messages, arguments, known.sent[:count])
        call = self._capture.begin_call(self.model, request, known, count)
        del messages, arguments, request, known  # the request has copies, and the wait may be long
        try:
            if n == 1:  # without the frame of `sample_choices`: ten thousand episodes may wait here
                replies = [await self.model.sample(self._continue(call.request))]
            else:
                replies = await sample_choices(self.model, self._continue(call.request), n)
        except BaseException as error:
            self._capture.record_error(error)
            raise
        return self._record(call, replies)

    async def answer_beside(self, kind: Literal["embed", "count"], given: Mapping[str, Any]) -> Any:
        """Answers a request that is not a model call: an embedding, or a token count; None: the model cannot."""
        answer = getattr(self.model, "embed" if kind == "embed" else "count_prompt", None)
        if answer is None or kind == "embed":
            return None if answer is None else await answer(given)
        arguments = {name: value for name, value in given.items() if name != "messages"}
        return await answer(self._continue(self._build_request(given["messages"], read_arguments(arguments))))

    def _continue(self, request: ModelRequest) -> ModelRequest:
        return add_continued_turn(self.model, self.name, request, self._capture.calls)

    def _record(self, call: StartedCall, replies: Sequence[ModelReply]) -> ChatCompletion:
        completion = self._capture.record_replies(call, self.name, self.model, replies)
        if call.request.num_top_logprobs:
            self._warn_of_missing(completion)
        return completion

    def _build_request(
        self, messages: Sequence[Any] | None, arguments: CallArguments, known: Sequence[Message] = ()
    ) -> ModelRequest:
        if self._forwards_arguments:
            return build_forwarded_request(messages, arguments, known)
        seed = arguments.get("seed")
        if seed is None or self._sampling is not None:  # a trained policy uses the run's seed, not the agent's
            seed = derive_call_seed(self._capture.seed, self._capture.num_started)
        request = build_request(messages, arguments, sampling=self._sampling, seed=seed, known=known)
        if arguments.given:
            self._warn_of_unused(arguments)
        return request

    def blame_reply(self, reason: str) -> None:
        """Notes why the latest reply is unusable: an agent that fails on a trained policy's fails because of it."""
        if self.model.is_policy:
            self._capture.bad_call = reason

    def _warn_of_unused(self, arguments: CallArguments) -> None:
        overridden = find_overridden(arguments, self._sampling) if self._sampling is not None else {}
        for name in sorted(set(overridden) - self._capture.told):
            self._capture.told.add(name)
            asked, own = overridden[name]
            logger.warning(
                "the agent asks the policy for %s=%r, but the run samples it with %r; set finetuning.sampling.%s to "
                "change that", name, asked, own, name,
            )  # fmt: skip

    def _warn_of_missing(self, completion: ChatCompletion) -> None:
        found = completion.choices[0].logprobs
        if "top_logprobs" not in self._capture.told and not (isinstance(found, TokenLogprobs) and found.top_logprobs):
            self._capture.told.add("top_logprobs")
            logger.warning(
                "the agent asks for top_logprobs, but %s returns log-probs of the sampled tokens only: each "
                "logprobs.content[i].top_logprobs is empty", self.model_name,
            )  # fmt: skip


class BlockingLLM(AsyncLLM):
    def __init__(
        self,
        name: str,
        model: ChatModel,
        capture: Capture,
        sampling: SamplingParams | None,
        loop: asyncio.AbstractEventLoop,
    ):
        super().__init__(name, model, capture, sampling)
        self.chat = ChatNamespace(BlockingCompletions(self, loop))


def derive_call_seed(episode_seed: int, index: int) -> int:
    """Returns the seed of an episode's `index`-th model call: a 63-bit mix (SplitMix64, Steele et al. 2014)."""
    mask = (1 << 64) - 1
    z = (episode_seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1
