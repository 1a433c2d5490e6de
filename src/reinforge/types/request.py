"""One model call: what an agent asks, what the policy answers, and the exact tokens of that answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from reinforge.types.supports import Supports

Message = dict[str, Any]
"""A chat message in OpenAI's shape: `{"role": ..., "content": ..., "tool_calls": ..., "tool_call_id": ...}`."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one reply is drawn.

    A word has to pass top_p, top_k and min_p, each of which looks at all words after temperature.

    Attributes:
        temperature: Divides the logits; 0 takes the most likely token.
        top_p: Keeps the smallest set of tokens whose probability reaches it, in (0, 1]; 1 keeps all.
        top_k: Keeps the k most likely tokens; 0 keeps all.
        min_p: Keeps the tokens at least this share as likely as the most likely one, in [0, 1]; 0 keeps all.
        max_tokens: Longest reply in tokens; None: up to the context's end.
        stop: Texts at which the reply ends; the text itself is cut off.
        seed: Makes the draw reproducible; None: from the sampler's own stream.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None

    @property
    def restricts_support(self) -> bool:
        """True if some tokens could not be drawn, so that log-probs of the full softmax are not the sampler's."""
        return self.temperature == 0 or self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The exact tokens of one sampled reply.

    A log-prob has three forms, which differ only where the request asks for it. *Raw*, of the model's softmax as it is:
    `PolicyServer.score`. After temperature: `logprobs`, which at temperature 1 are the raw ones. *Processed*, of what
    the token was drawn from, after temperature and over its support alone: `processed_logprobs`. Training compares the
    last.

    Example: p = [0.5, 0.3, 0.2] after temperature, top_k 2, the second word drawn
        => logprobs (log 0.3,), processed_logprobs (log 0.375,), supports counts [2], token_ids [0, 1]

    Attributes:
        prompt_token_ids: Every token that the model saw before the reply.
        token_ids: The sampled tokens, the end-of-turn token included if it was sampled.
        logprobs: log p of each sampled token after temperature, before any restriction of the support; as long as
            `token_ids`. NaN where nobody sampled it.
        policy_version: The version of the weights that the *sampler* reports; -1 where nobody sampled the reply.
        finish_reason: `stop`, `length` or `tool_calls`.
        temperature: The temperature the tokens were drawn at.
        restricted: True if top-p, top-k, min-p or greedy decoding cut the support; such a token is trained over the
            support that `supports` records, and not at all where that records none.
        texts: The text of each sampled token, for readers of `.content`; may be empty.
        processed_logprobs: log p of each sampled token over its support; empty where no support was cut, since it
            would be `logprobs`.
        supports: The words that each sampled token was drawn from; None where no support was cut, for greedy decoding
            (a support of one word teaches nothing), and from policy servers that do not tell.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_version: int = 0
    finish_reason: str = "stop"
    temperature: float = 1.0
    restricted: bool = False
    texts: tuple[str, ...] = ()
    processed_logprobs: tuple[float, ...] = ()
    supports: Supports | None = None

    @property
    def content(self) -> list[TokenLogprob]:
        """The same in OpenAI's shape: `.content[i].token`, `.content[i].logprob`."""
        texts = self.texts or ("",) * len(self.token_ids)
        return [TokenLogprob(text, logprob) for text, logprob in zip(texts, self.logprobs, strict=True)]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token of `TokenLogprobs.content`."""

    token: str
    logprob: float
    top_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What is known of a reply whose sampler tells no tokens: exactly what it answered.

    Attributes:
        messages: Everything that the model was shown, in OpenAI's shape.
        tools: Function definitions that it was offered, or None.
        policy_version: The version of the weights that the *sampler* reports; -1 where nobody sampled the reply.
        finish_reason: `stop`, `length` or `tool_calls`.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None = None
    policy_version: int = 0
    finish_reason: str = "stop"


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """What a policy is asked: messages, tools and how to draw.

    Attributes:
        messages: The whole history in OpenAI's shape.
        sampling: How the reply is drawn, the run's overrides already applied.
        tools: Function definitions in OpenAI's shape, or None.
        template_kwargs: Further arguments of the chat template.
        arguments: What the caller itself asked for, in OpenAI's arguments, for a model behind an endpoint of its own;
            None: `sampling` says everything.
    """

    messages: list[Message]
    sampling: SamplingParams = SamplingParams()
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ModelReply:
    """What a policy answers.

    Attributes:
        message: The assistant message: `role`, `content`, and `tool_calls` if there are any.
        finish_reason: `stop`, `length` or `tool_calls`.
        tokens: The exact tokens; None if the model behind the port does not tell them.
        num_prompt_tokens: Tokens of the prompt.
        num_completion_tokens: Tokens of the reply.
        policy_version: Where a policy does not tell its tokens, the version of the weights that it sampled from; None:
            no policy, or the tokens say it.
    """

    message: Message
    finish_reason: str
    tokens: TokenLogprobs | None
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    policy_version: int | None = None

    @property
    def version(self) -> int | None:
        """The version of the policy's weights that the reply was drawn from; None where no policy said it."""
        return self.policy_version if self.tokens is None else self.tokens.policy_version
