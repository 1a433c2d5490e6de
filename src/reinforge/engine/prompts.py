"""Messages to tokens and back, through the tokenizer's own chat template; equal messages are rendered once."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from reinforge.errors import EngineError, boundary
from reinforge.types.request import ModelRequest

CACHED_PROMPTS = 4096
"""Prompts kept; agents ask the same opening again and again."""


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
        with boundary(EngineError, "render the chat template"):
            text = self.tokenizer.apply_chat_template(
                request.messages,
                tools=request.tools,
                add_generation_prompt=True,
                tokenize=False,
                **request.template_kwargs,
            )
            token_ids = tuple(self._tokenise(text))
        with self._lock:
            self._cached[key] = token_ids
            if len(self._cached) > CACHED_PROMPTS:
                self._cached.popitem(last=False)
        return token_ids

    def read(self, token_ids: Sequence[int]) -> str:
        """Returns the text of a reply, special tokens left out."""
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


def prompt_key(request: ModelRequest) -> Any:
    """Returns what two requests with the same prompt have in common."""
    messages = request.messages
    if not request.tools and not request.template_kwargs and all(len(message) == 2 for message in messages):
        key = tuple((message.get("role"), message.get("content")) for message in messages)
        if all(isinstance(content, str) for _, content in key):
            return key
    return json.dumps([messages, request.tools, request.template_kwargs], sort_keys=True, default=repr)
