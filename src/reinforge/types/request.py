"""One model call: the request of the agent, the reply of the policy, and the exact tokens of the reply."""

from __future__ import annotations

import contextlib
import struct
from array import array
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, overload

from reinforge.types.supports import Supports

Message = dict[str, Any]
"""A chat message in OpenAI's format: `{"role": ..., "content": ..., "tool_calls": ..., "tool_call_id": ...}`."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of one reply.

    top_p, top_k and min_p each filter the whole vocabulary after temperature; a token must pass all three.
    """

    temperature: float = 1.0  # divides the logits; 0 takes the most likely token
    top_p: float = 1.0  # keeps the smallest set of tokens with at least this total probability, in (0, 1]; 1 keeps all
    top_k: int = 0  # keeps the k most likely tokens; 0 keeps all
    min_p: float = 0.0  # keeps the tokens at least this share as likely as the most likely one, in [0, 1]; 0 keeps all
    max_tokens: int | None = None  # longest reply in tokens; None: up to the context limit
    stop: tuple[str, ...] = ()  # texts at which the reply ends; the text itself is removed
    seed: int | None = None
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that the reply has it already, in [-2, 2]."""
    presence_penalty: float = 0.0  # subtracted once from the logit of each token that the reply has already, in [-2, 2]
    logit_bias: tuple[tuple[int, float], ...] = ()  # pairs of a token id and what is added to its logit, in [-100, 100]
    stop_token_ids: tuple[int, ...] = ()  # further tokens that end the reply, as its last one
    ignore_eos: bool = False  # the tokens that end a reply otherwise do not


class TokenIds(Sequence[int]):
    """The prompt of one call, as the beginning of the tokens that the calls of a conversation share.

    Example: the prompts (1, 2) and (1, 2, 3, 4) of two calls are the first 2 and the first 4 of one array [1, 2, 3, 4].
    """

    __slots__ = ("_count", "_shared")

    def __init__(self, shared: array[int], count: int):
        self._shared, self._count = shared, count

    @classmethod
    def share(cls, ids: Sequence[int], earlier: Sequence[int] = ()) -> TokenIds:
        """Returns token ids that use the array of `earlier` ones, extended, if they continue it.

        Raises:
            struct.error: They are not 32-bit integers.
        """
        if isinstance(ids, TokenIds):
            return ids
        new = array("i", struct.pack(f"{len(ids)}i", *ids))  # three times as fast as `array("i", ids)`
        if isinstance(earlier, TokenIds):
            shared = earlier._shared
            count = min(len(shared), len(new))
            if shared[:count] == new[:count]:
                shared.extend(new[count:])
                return cls(shared, len(new))
        return cls(new, len(new))

    def to_array(self) -> array[int]:
        return self._shared[: self._count]

    def tolist(self) -> list[int]:
        return self.to_array().tolist()

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        found = self.to_array()[index]
        return tuple(found) if isinstance(found, array) else found

    def __iter__(self) -> Iterator[int]:
        return iter(self.to_array())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenIds):
            return self.to_array() == other.to_array()
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The exact tokens of one sampled reply.

    There are three kinds of log-probs, which are equal at temperature 1 without a sampling filter. Raw: of the model's
    softmax, from `PolicyServer.score`. After temperature: `logprobs`. Processed: after temperature and normalized over
    the kept tokens, `processed_logprobs`; training uses these.

    Example: p = [0.5, 0.3, 0.2] after temperature, top_k 2, the second token sampled
        => logprobs (log 0.3,), processed_logprobs (log 0.375,), supports counts [2], token_ids [0, 1]
    """

    prompt_token_ids: Sequence[int]  # the whole prompt: a tuple, or `TokenIds`, which equals one
    token_ids: tuple[int, ...]  # the sampled tokens, including the end-of-turn token if it was sampled
    logprobs: tuple[float, ...]
    """log p of each sampled token after temperature and before any sampling filter; as long as `token_ids`. NaN for
    tokens that were not sampled, such as those of a dataset."""
    policy_version: int = 0  # version of the weights, as reported by the sampler; -1 for a reply that was not sampled
    finish_reason: str = "stop"  # `stop`, `length` or `tool_calls`
    temperature: float = 1.0
    restricted: bool = False
    """True if top-p, top-k, min-p, a grammar, a banned token or greedy decoding excluded tokens, or a penalty or bias
    changed the logits. Such a token is trained over the kept tokens in `supports`, and not at all if those are not
    recorded."""
    texts: tuple[str, ...] = ()  # text of each sampled token, for `.content`; may be empty
    processed_logprobs: tuple[float, ...] = ()
    """log p of each sampled token in the distribution that it was sampled from: over the kept tokens, and after
    penalties and biases; empty unless `restricted`, since it would equal `logprobs`."""
    supports: Supports | None = None
    """The kept tokens of each position; None unless `restricted`, for greedy decoding (one kept token has no gradient),
    after penalties and biases, and if the policy server does not report them."""
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    """The most likely tokens of each position, in falling order, of the distribution that `logprobs` are of; empty
    unless the request asks for them. For the agent: no record keeps them."""
    later_versions: tuple[tuple[int, int], ...] = ()
    """Position and version: which newer weights sampled the tokens from that one on, in order; empty: `policy_version`
    sampled all (`limits.in_flight`)."""

    def __post_init__(self) -> None:
        if type(self.prompt_token_ids) is list:  # read from JSON
            object.__setattr__(self, "prompt_token_ids", tuple(self.prompt_token_ids))

    def share_prompt(self, earlier: Sequence[int]) -> None:
        """Keeps the prompt as the continuation of an earlier one, if it is that; it stays equal to what it was."""
        with contextlib.suppress(struct.error):  # of a policy server of the user, which may report anything
            object.__setattr__(self, "prompt_token_ids", TokenIds.share(self.prompt_token_ids, earlier))

    def list_versions(self) -> list[int]:
        """Returns the version of the weights that sampled each token.

        Example: 4 tokens, `policy_version` 2, `later_versions` ((3, 3),) -> 2 2 2 3.
        """
        starts = [*(start for start, _ in self.later_versions), len(self.token_ids)]
        versions = [self.policy_version] * starts[0]
        for (start, version), end in zip(self.later_versions, starts[1:], strict=True):
            versions += [version] * (end - start)
        return versions

    @property
    def content(self) -> list[TokenLogprob]:
        texts = self.texts or ("",) * len(self.token_ids)
        tops = self.top_logprobs or ((),) * len(self.token_ids)
        return [TokenLogprob(*each) for each in zip(texts, self.logprobs, tops, strict=True)]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token of `TokenLogprobs.content`; `token_id` is -1 where it is unknown."""

    token: str
    logprob: float
    top_logprobs: tuple[TokenLogprob, ...] = ()
    token_id: int = -1


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The exact prompt of a reply whose sampler does not report tokens."""

    messages: tuple[Message, ...]  # all messages of the prompt, in OpenAI's format
    tools: tuple[dict[str, Any], ...] | None = None
    policy_version: int = 0  # version of the weights, as reported by the sampler; -1 for a reply that was not sampled
    finish_reason: str = "stop"  # `stop`, `length` or `tool_calls`


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a reply must match, enforced while it is sampled."""

    kind: Literal["json_schema", "regex", "lark"]  # `json_schema`, `regex` or `lark`: the language of `text`
    text: str  # A JSON schema as JSON text, a regular expression, or a grammar in llguidance's dialect of Lark


@dataclass(frozen=True, slots=True)
class ContinuedTurn:
    """An earlier call of the conversation that a request continues, as it was sampled."""

    num_messages: int  # how many messages of the request it covers: those of its own request, and its reply
    token_ids: tuple[int, ...]  # the tokens of its prompt and its reply


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request to a model: messages, tools and sampling settings."""

    messages: list[Message]  # the whole conversation, in OpenAI's format
    sampling: SamplingParams = SamplingParams()
    tools: list[dict[str, Any]] | None = None  # function definitions in OpenAI's format, or None
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # extra arguments of the chat template
    arguments: dict[str, Any] | None = None
    """The caller's own arguments in OpenAI's format, for models behind an endpoint; None: use `sampling`."""
    tool_choice: str = "auto"
    """`auto`; `none`: the reply calls no tool; `required`: it calls at least one; any other text: it calls the tool of
    this name."""
    parallel_tool_calls: bool = True  # False if the reply may call one tool at most
    grammar: Grammar | None = None  # what the reply must match; None: it is free
    prompt: str | tuple[int, ...] | None = None
    """The whole prompt as text or token ids, for calls without a chat template, whose `messages` are for the record;
    None: the chat template renders the messages."""
    continued: ContinuedTurn | None = None
    """The earlier call that the messages continue, for a policy that splices histories; None: unknown, or there is
    none."""
    num_top_logprobs: int = 0  # how many of the most likely tokens the reply names at each position


CLIENT: ContextVar[int] = ContextVar("reinforge_client", default=0)
"""The client of a server for whom requests are made; 0: there are no clients that compete."""


@dataclass(frozen=True, slots=True)
class ReplyPiece:
    """The newest tokens of a reply that is being sampled."""

    text: str
    """What they add to its text. A character whose tokens are not all there, and what may be the beginning of a stop
    text, is left for a later piece."""
    tokens: TokenLogprobs  # the new tokens alone, with the whole prompt


@dataclass(frozen=True, slots=True)
class ReplyDelta:
    """What a piece adds to the message: the reply's reasoning, or its text."""

    content: str = ""  # added to `content`
    reasoning: str = ""  # added to `reasoning_content`
    tokens: TokenLogprobs | None = None  # the new tokens alone; None: the model reports none
    index: int = 0  # of the choice


@dataclass(frozen=True, slots=True)
class ModelReply:
    """The reply of a model."""

    message: Message  # the assistant message: `role`, `content`, and `tool_calls` if there are any
    finish_reason: str  # `stop`, `length` or `tool_calls`
    tokens: TokenLogprobs | None  # the exact tokens; None if the model does not report them
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    policy_version: int | None = None
    """Version of the weights of a policy that does not report tokens; None: not a policy, or see `tokens`."""
    failure: str | None = None  # why what the model wrote as a tool call is unusable and stayed text; None: nothing is
    logprobs: dict[str, Any] | None = None
    """What a model behind an endpoint returned of its reply, in OpenAI's format: `content` with a log-prob for each
    token, and `token_ids` and `prompt_token_ids` where the endpoint has them; None: it returned none. The embedded
    engine never trains on it."""
    raw_text: str | None = None
    """The reply with its special tokens, as the model wrote it, from which tool calls and reasoning are parsed; None:
    the model does not report it."""
    worker: str = field(default="", compare=False)  # that sampled it; empty: there is one place to sample from

    @property
    def version(self) -> int | None:
        """Version of the policy weights that sampled the reply, or began to; None if unknown or not a policy."""
        return self.policy_version if self.tokens is None else self.tokens.policy_version

    @property
    def newest_version(self) -> int | None:
        later = () if self.tokens is None else self.tokens.later_versions
        return later[-1][1] if later else self.version
