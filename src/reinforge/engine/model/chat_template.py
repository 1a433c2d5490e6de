"""Messages to tokens and back, by the tokenizer's own chat template; equal prompts are rendered once."""

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
"""Prompts, and replies, in the cache: agents send the same first prompt again and again, and short replies recur."""


class PromptRenderer:
    """Renders requests to tokens and decodes replies with one tokenizer.

    Attributes:
        tokenizer: The Hugging Face tokenizer, with its chat template.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._cached: OrderedDict[Any, tuple[int, ...]] = OrderedDict()
        self._texts: dict[int, str] = {}
        self._lock = threading.Lock()
        self._decode_cached = functools.lru_cache(CACHED_PROMPTS)(self._decode)

    @property
    def chat_template(self) -> str | None:
        """The template's text; of several templates, the one for tools."""
        template = self.tokenizer.chat_template
        return template.get("tool_use", template.get("default")) if isinstance(template, dict) else template

    def render(self, request: ModelRequest) -> tuple[int, ...]:
        """Returns the prompt's tokens, ready for the assistant's reply; a prompt is tokenized exactly once.

        Raises:
            EngineError: The template rejects the messages.
        """
        key = build_prompt_key(request)
        with self._lock:
            if key in self._cached:
                self._cached.move_to_end(key)
                return self._cached[key]
        token_ids = tuple(self._tokenize(self._render_text(request, request.messages, add_generation_prompt=True)))
        with self._lock:
            self._cached[key] = token_ids
            if len(self._cached) > CACHED_PROMPTS:
                self._cached.popitem(last=False)
        return token_ids

    def encode(
        self, request: ModelRequest, reply: Message, ends: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the prompt's tokens and those of a given reply, up to and including the token that ends it.

            the prompt alone "<user>2+3?<end><assistant>", with its reply "<user>2+3?<end><assistant>5<end> "
            => the tokens of "<user>2+3?<end><assistant>" and of "5<end>"; the trailing space is the template's

        Where the template writes no token that ends a reply, the tokenizer's end token is appended.

        Args:
            request: The prompt.
            reply: The assistant message.
            ends: Tokens at which the sampler ends a reply.

        Raises:
            EngineError: The template rejects the messages, or its reply does not continue its generation prompt.
        """
        prompt_text = self._render_text(request, request.messages, add_generation_prompt=True)
        whole_text = self._render_text(request, [*request.messages, reply], add_generation_prompt=False)
        if not whole_text.startswith(prompt_text):
            raise EngineError(
                "the chat template's rendering of a reply does not continue its generation prompt, so the tokens that "
                f'the policy would have sampled are unclear: the prompt ends with "...{prompt_text[-40:]}", but with '
                f'the reply the text ends with "...{whole_text[-80:]}"; '
                "set another template with finetuning.policy.chat_template"
            )
        prompt, whole = self.render(request), self._tokenize(whole_text)
        # The sampler cannot begin with a token that spans prompt and reply, so the reply is then tokenized by itself.
        continues = tuple(whole[: len(prompt)]) == prompt
        token_ids = whole[len(prompt) :] if continues else self._tokenize(whole_text[len(prompt_text) :])
        last = max((place for place, token in enumerate(token_ids) if token in ends), default=None)
        if last is None:
            return prompt, (*token_ids, self.tokenizer.eos_token_id)
        return prompt, tuple(token_ids[: last + 1])

    def _render_text(self, request: ModelRequest, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        with boundary(EngineError, "cannot render the chat template"):
            return self.tokenizer.apply_chat_template(
                [_parse_tool_arguments(message) for message in messages],
                tools=request.tools,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **request.template_kwargs,
            )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of a reply, without special tokens."""
        return self._decode_cached(tuple(token_ids))

    def _decode(self, token_ids: tuple[int, ...]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def decode_each(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """Returns the text of each token by itself, special tokens included."""
        for token in token_ids:
            if token not in self._texts:
                self._texts[token] = self.tokenizer.decode([token])
        return tuple(self._texts[token] for token in token_ids)

    def _tokenize(self, text: str) -> list[int]:
        # The template has written the special tokens; calling the backend saves three times what the work itself takes.
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:
            return backend.encode(text, add_special_tokens=False).ids
        return self.tokenizer.encode(text, add_special_tokens=False)


def _parse_tool_arguments(message: Message) -> Message:
    """Returns a message whose tool calls hold arguments as mappings, as templates expect; OpenAI sends JSON text.

    Arguments that are not valid JSON stay text, so that the model sees exactly what was written.
    """
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_parse_call(call) for call in calls]}


def _parse_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", {})
    try:
        arguments = json.loads(function["arguments"])
    except (KeyError, TypeError, ValueError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def build_prompt_key(request: ModelRequest) -> Any:
    """Returns a hashable key that two requests share if they have the same prompt."""
    messages = request.messages
    if not request.tools and not request.template_kwargs and all(len(message) == 2 for message in messages):
        key = tuple((message.get("role"), message.get("content")) for message in messages)
        if all(isinstance(content, str) for _, content in key):
            return key
    return json.dumps([messages, request.tools, request.template_kwargs], sort_keys=True, default=repr)
