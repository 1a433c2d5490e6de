"""Messages to tokens and back, through the tokenizer's own chat template; equal messages are rendered once."""

from __future__ import annotations

import functools
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from reinforge.errors import EngineError, boundary
from reinforge.types.request import Message, ModelRequest

CACHED_PROMPTS = 4096
"""Prompts, and replies, kept: agents ask the same opening again and again, and answer in a few tokens."""


class PromptRenderer:
    """Renders requests and reads replies with one tokenizer.

    Attributes:
        tokenizer: The Hugging Face tokenizer, with its chat template.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._cached: OrderedDict[Any, tuple[int, ...]] = OrderedDict()
        self._texts: dict[int, str] = {}
        self._lock = threading.Lock()
        self._read = functools.lru_cache(CACHED_PROMPTS)(self._decode)

    @property
    def chat_template(self) -> str | None:
        """The template's text; of several, the one for tools."""
        template = self.tokenizer.chat_template
        return template.get("tool_use", template.get("default")) if isinstance(template, dict) else template

    def render(self, request: ModelRequest) -> tuple[int, ...]:
        """Returns the prompt's tokens, ready for the assistant's reply; tokenised exactly once.

        Raises:
            EngineError: The template refuses the messages.
        """
        key = prompt_key(request)
        with self._lock:
            if key in self._cached:
                self._cached.move_to_end(key)
                return self._cached[key]
        token_ids = tuple(self._tokenise(self._text(request, request.messages, add_generation_prompt=True)))
        with self._lock:
            self._cached[key] = token_ids
            if len(self._cached) > CACHED_PROMPTS:
                self._cached.popitem(last=False)
        return token_ids

    def encode(
        self, request: ModelRequest, reply: Message, ends: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the prompt's tokens and those of a given reply, up to and with the token that ends it.

            the prompt alone "<user>2+3?<end><assistant>", with its reply "<user>2+3?<end><assistant>5<end> "
            => the tokens of "<user>2+3?<end><assistant>" and of "5<end>"; the space at the end is the template's

        Where the template writes no token that ends a reply, the tokenizer's is added.

        Args:
            request: What is asked.
            reply: The assistant message.
            ends: Tokens at which the sampler ends a reply.

        Raises:
            EngineError: The template refuses the messages, or does not go on from its own generation prompt.
        """
        asked = self._text(request, request.messages, add_generation_prompt=True)
        whole = self._text(request, [*request.messages, reply], add_generation_prompt=False)
        if not whole.startswith(asked):
            raise EngineError(
                "the chat template writes a reply in another way than it asks for one, so what the policy would have "
                f'to say is unclear: it asks by "...{asked[-40:]}" and then writes "...{whole[-80:]}"; '
                "finetuning.policy.chat_template can hold another template"
            )
        prompt, together = self.render(request), self._tokenise(whole)
        # a token across the border is none that the sampler could begin with: then the reply is read by itself
        joined = tuple(together[: len(prompt)]) == prompt
        token_ids = together[len(prompt) :] if joined else self._tokenise(whole[len(asked) :])
        last = max((place for place, token in enumerate(token_ids) if token in ends), default=None)
        if last is None:
            return prompt, (*token_ids, self.tokenizer.eos_token_id)
        return prompt, tuple(token_ids[: last + 1])

    def _text(self, request: ModelRequest, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        with boundary(EngineError, "render the chat template"):
            return self.tokenizer.apply_chat_template(
                [_with_parsed_arguments(message) for message in messages],
                tools=request.tools,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **request.template_kwargs,
            )

    def read(self, token_ids: Sequence[int]) -> str:
        """Returns the text of a reply, special tokens left out."""
        return self._read(tuple(token_ids))

    def _decode(self, token_ids: tuple[int, ...]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def texts(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """Returns the text of each token by itself, special tokens kept."""
        for token in token_ids:
            if token not in self._texts:
                self._texts[token] = self.tokenizer.decode([token])
        return tuple(self._texts[token] for token in token_ids)

    def _tokenise(self, text: str) -> list[int]:
        # the template has written the special tokens; the fast path skips three times the time of the work itself
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:
            return backend.encode(text, add_special_tokens=False).ids
        return self.tokenizer.encode(text, add_special_tokens=False)


def _with_parsed_arguments(message: Message) -> Message:
    """Returns a message whose tool calls hold arguments as mappings, as templates expect; OpenAI's shape is text.

    Arguments that are no JSON stay text, so that the model sees what was really said.
    """
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_parsed_call(call) for call in calls]}


def _parsed_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", {})
    try:
        arguments = json.loads(function["arguments"])
    except (KeyError, TypeError, ValueError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def prompt_key(request: ModelRequest) -> Any:
    """Returns what two requests with the same prompt have in common."""
    messages = request.messages
    if not request.tools and not request.template_kwargs and all(len(message) == 2 for message in messages):
        key = tuple((message.get("role"), message.get("content")) for message in messages)
        if all(isinstance(content, str) for _, content in key):
            return key
    return json.dumps([messages, request.tools, request.template_kwargs], sort_keys=True, default=repr)
