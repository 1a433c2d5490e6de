"""Messages to tokens and back, by the tokenizer's own chat template; equal prompts are rendered once."""

from __future__ import annotations

import functools
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from reinforge.engine.model.preflight import CHAT_TEMPLATE
from reinforge.engine.model.template_budget import TemplateLimitReached
from reinforge.engine.model.template_sandbox import compile_chat_template
from reinforge.errors import ConfigError, EngineError, MessagesRejected, Problem, boundary
from reinforge.types.request import Message, ModelRequest

CACHED_PROMPTS = 4096
"""Prompts, and replies, in the cache: agents send the same first prompt again and again, and short replies recur."""

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which a message holds its reasoning; transformers gives templates the first two."""


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
        self._renders_tools = False
        self._decode_cached = functools.lru_cache(CACHED_PROMPTS)(self._decode)

    @property
    def chat_template(self) -> str | None:
        """The template's text; of several templates, the one for tools."""
        template = self.tokenizer.chat_template
        return template.get("tool_use", template.get("default")) if isinstance(template, dict) else template

    def render(self, request: ModelRequest) -> tuple[int, ...]:
        """Returns the prompt's tokens, ready for the assistant's reply; a prompt is tokenized exactly once.

        Raises:
            MessagesRejected: The template raises an error.
            ConfigError: The template takes too long or builds too much; or there are tools, and it ignores them.
            ValueError: A message has text that cannot be encoded.
        """
        key = build_prompt_key(request)
        with self._lock:
            if key in self._cached:
                self._cached.move_to_end(key)
                return self._cached[key]
        text = self._render_text(request, request.messages, add_generation_prompt=True)
        if request.tools and not self._renders_tools:
            self._check_tools(request, text)
        token_ids = tuple(self._tokenize(text))
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
            MessagesRejected: The template raises an error.
            EngineError: Its reply does not continue its generation prompt.
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
        try:
            with boundary(MessagesRejected, "cannot render the chat template"):
                return compile_chat_template(self.tokenizer.get_chat_template(tools=request.tools)).render(
                    {
                        **self.tokenizer.special_tokens_map,
                        **request.template_kwargs,
                        "messages": [build_template_message(message) for message in messages],
                        "tools": to_template_data(request.tools),
                        "documents": None,
                        "add_generation_prompt": add_generation_prompt,
                    }
                )
        except TemplateLimitReached as error:
            message = f"the chat template of {self.tokenizer.name_or_path} {error}"
            raise ConfigError(Problem(CHAT_TEMPLATE, message, "set another template")) from None

    def _check_tools(self, request: ModelRequest, text: str) -> None:
        """Refuses a request with tools whose prompt is the same without them: the policy would never see its tools."""
        try:
            alone = self._render_text(replace(request, tools=None), request.messages, add_generation_prompt=True)
        except (EngineError, ConfigError):  # a template for tools only
            alone = None
        if alone == text:
            message = f"the chat template of {self.tokenizer.name_or_path} ignores tools, but the agent passes some"
            fix = (
                "set a template that renders `tools` and that the model was trained with, or describe the tools in a "
                "message and do not pass them"
            )
            raise ConfigError(Problem(CHAT_TEMPLATE, message, fix))
        self._renders_tools = True

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
        if not text.isascii() and (found := _find_surrogate(text)) is not None:
            raise ValueError(
                f"the prompt has half of a surrogate pair (U+{ord(text[found]):04X}) at character {found}, which no "
                'tokenizer can encode; remove it in the agent: text.encode("utf-8", "replace").decode()'
            )
        # The template has written the special tokens; calling the backend saves three times what the work itself takes.
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:
            return backend.encode(text, add_special_tokens=False).ids
        return self.tokenizer.encode(text, add_special_tokens=False)


def _find_surrogate(text: str) -> int | None:
    """Returns the place of the first half of a surrogate pair; None: the text has none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def build_template_message(message: Message) -> Message:
    """Returns a message as a chat template gets it: plain data, without the fields that are None.

    Reasoning gets every name that templates read, and tool calls hold their arguments as mappings, as templates expect;
    OpenAI sends JSON text. Arguments that are not valid JSON stay text, so that the model sees what was written.
    """
    given: Message = {
        name: value if type(value) is str else to_template_data(value)
        for name, value in message.items()
        if value is not None
    }
    reasoning = next((given[name] for name in REASONING_FIELDS if name in given), None)
    if reasoning is not None:
        given = {"thinking": reasoning, **given, "reasoning_content": reasoning}
    if calls := given.get("tool_calls"):
        given["tool_calls"] = [_parse_call(call) for call in calls]
    return given


def _parse_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", {})
    try:
        arguments = json.loads(function["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def to_template_data(value: Any) -> Any:
    """Returns data of JSON's types, since a template could call the methods of other objects."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {to_template_data(name): to_template_data(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_template_data(entry) for entry in value]
    for kind in (str, int, float):
        if isinstance(value, kind):  # of a subclass, such as an enum
            return kind(str.__str__(value)) if kind is str else kind(value)
    return to_template_data(value.model_dump()) if hasattr(value, "model_dump") else f"<{type(value).__name__}>"


def build_prompt_key(request: ModelRequest) -> Any:
    """Returns a hashable key that two requests share if they have the same prompt."""
    messages = request.messages
    if not request.tools and not request.template_kwargs and all(len(message) == 2 for message in messages):
        key = tuple((message.get("role"), message.get("content")) for message in messages)
        if all(isinstance(content, str) for _, content in key):
            return key
    return json.dumps([messages, request.tools, request.template_kwargs], sort_keys=True, default=repr)
