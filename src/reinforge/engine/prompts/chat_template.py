"""Messages to tokens and back, by the tokenizer's own chat template; equal prompts are rendered once."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reinforge.bounded import load_json
from reinforge.engine.model.preflight import CHAT_TEMPLATE
from reinforge.engine.prompts.template_budget import TemplateLimitReached
from reinforge.engine.prompts.template_sandbox import compile_chat_template
from reinforge.engine.prompts.tokenization import CACHED_ENTRIES, LONG_TEXT, TextTokenizer, TokenCache, check_surrogates
from reinforge.errors import (
    ChatTemplateError,
    ConfigError,
    ContextOverflow,
    EngineError,
    MessagesRejected,
    Problem,
    boundary,
)
from reinforge.limits import get_limits
from reinforge.types.request import ContinuedTurn, Grammar, Message, ModelRequest

if TYPE_CHECKING:
    from reinforge.engine.prompts.reply_text import TextStream

SHORT_REPLY = 512  # tokens; the texts of longer replies are not cached

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which a message holds its reasoning; transformers gives templates the first two."""

_DEVELOPER = re.compile("""['"]developer['"]""")


class PromptRenderer:
    """Renders requests to tokens and decodes replies with one tokenizer.

    Attributes:
        history: `template`: the template renders whole conversations; `splice`: a prompt continues the sampled tokens.

    Args:
        ends: Tokens at which the sampler ends a reply.
    """

    def __init__(self, tokenizer: Any, ends: Sequence[int] = (), *, history: str = "template"):
        self.tokenizer, self.history = tokenizer, history
        self._ends, self._special_ids = frozenset(ends), find_special_ids(tokenizer)
        self._added_ids: dict[str, int] = dict(getattr(tokenizer, "added_tokens_encoder", None) or {})
        self._arguments_are_text = False
        self._prompts, self._text_tokenizer = TokenCache(), TextTokenizer(tokenizer)
        self._texts: dict[int, str] = {}
        self._renders_tools = False
        self._decode_cached = functools.lru_cache(CACHED_ENTRIES)(self._decode)

    @property
    def chat_template(self) -> str | None:
        template = self.tokenizer.chat_template
        return template.get("tool_use", template.get("default")) if isinstance(template, dict) else template

    def render(self, request: ModelRequest, max_tokens: int | None = None) -> tuple[int, ...]:
        """Returns the prompt's tokens, ready for the assistant's reply; a prompt is tokenized exactly once.

        Args:
            max_tokens: Refuse text that certainly has more tokens, before it is tokenized; None: tokenize any.

        Raises:
            ContextOverflow: It has more than `max_tokens`.
            MessagesRejected: The template raises an error.
            ChatTemplateError: The template takes too long or builds too much; or there are tools, and it ignores them.
            ValueError: A message has text that cannot be encoded, or the prompt is empty.
        """
        if request.prompt is not None:
            return self._tokenize_prompt(request.prompt, max_tokens)
        if request.continued is not None and self.history == "splice":
            spliced = self._continue(request, request.continued)
            if spliced is not None:
                return spliced
        key = build_prompt_key(request)
        if (known := self._prompts.find(key)) is not None:
            return known
        text = self._render_text(request, request.messages, add_generation_prompt=True)
        if request.tools and not self._renders_tools:
            self._check_tools(request, text)
        self._check_length(text, max_tokens)
        token_ids = tuple(self._text_tokenizer.tokenize(text))
        self._prompts.add(key, token_ids, len(text) + len(str(key)))  # a template may show less than the messages hold
        return token_ids

    def _tokenize_prompt(self, prompt: str | tuple[int, ...], max_tokens: int | None) -> tuple[int, ...]:
        """Returns the tokens of a raw prompt; a string gets what the tokenizer puts before every text."""
        if isinstance(prompt, str):
            if len(prompt) > (most := get_limits().prompt_chars):
                raise ValueError(f"the prompt has {len(prompt)} characters, the limit is {most}")
            check_surrogates(prompt)
            self._check_length(prompt, max_tokens)
            prompt = tuple(self.tokenizer.encode(prompt))
        if not prompt:
            raise ValueError("the prompt is empty; it needs at least one token")
        return prompt

    def _check_length(self, text: str, max_tokens: int | None) -> None:
        if max_tokens is None or len(text) <= LONG_TEXT:
            return
        if (
            len(text) > 2 * self._longest_token * max_tokens
        ):  # twice: a tokenizer may join two characters into one first
            message = f"the prompt has {len(text):,} characters, but the limit is {max_tokens} tokens"
            raise ContextOverflow(f"{message} (max_model_len) of at most {self._longest_token} characters")

    @functools.cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.tokenizer.get_vocab()))

    def _continue(self, request: ModelRequest, continued: ContinuedTurn) -> tuple[int, ...] | None:
        """Returns the earlier call's tokens and those of the new messages; None: the template must render it all."""
        last = continued.token_ids[-1]
        ended = last in self._ends
        texts = self.decode_each([*self._ends])
        from reinforge.engine.prompts.reply_text import build_continuation  # for `history: splice` alone

        new = build_continuation(
            lambda messages, prompt: self._render_text(request, messages, add_generation_prompt=prompt),
            request.messages,
            continued.num_messages,
            self.decode_each([last])[0] if ended else None,
            texts,
        )
        if new is None:
            return None
        before = self.decode_each([last])[0] if ended else ""
        tokens = self._text_tokenizer.tokenize(before + new)  # tokenized as behind that end, which is cut off again
        if ended and tokens[:1] == [last]:
            tokens = tokens[1:]
        elif ended:
            tokens = self._text_tokenizer.tokenize(new)
        return (*continued.token_ids, *tokens)

    def bind_grammar(self, grammar: Grammar) -> Grammar:
        if grammar.kind != "lark":
            return grammar
        from reinforge.engine.sampling.grammar import bind_markers  # for grammars alone

        return replace(grammar, text=bind_markers(grammar.text, self._added_ids))

    def encode(
        self, request: ModelRequest, reply: Message, ends: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the prompt's tokens and those of a given reply, up to and including the token that ends it.

            the prompt alone "<user>2+3?<end><assistant>", with its reply "<user>2+3?<end><assistant>5<end> "
            => the tokens of "<user>2+3?<end><assistant>" and of "5<end>"; the trailing space is the template's

        Where the template writes no token that ends a reply, the tokenizer's end token is appended.

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
        prompt, whole = self.render(request), self._text_tokenizer.tokenize(whole_text)
        # The sampler cannot begin with a token that spans prompt and reply, so the reply is then tokenized by itself.
        continues = tuple(whole[: len(prompt)]) == prompt
        token_ids = whole[len(prompt) :] if continues else self._text_tokenizer.tokenize(whole_text[len(prompt_text) :])
        last = max((place for place, token in enumerate(token_ids) if token in ends), default=None)
        if last is None:
            return prompt, (*token_ids, self.tokenizer.eos_token_id)
        return prompt, tuple(token_ids[: last + 1])

    def _render_text(self, request: ModelRequest, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """Renders messages; a template that takes arguments of tool calls as text only, gets text from then on."""
        has_calls = any(message.get("tool_calls") for message in messages)
        if not (has_calls and self._arguments_are_text):
            try:
                return self._render_once(request, messages, build_template_message, add_generation_prompt)
            except MessagesRejected:
                if not has_calls:
                    raise
        rendered = self._render_once(request, messages, build_plain_message, add_generation_prompt)
        self._arguments_are_text = True
        return rendered

    def _render_once(
        self,
        request: ModelRequest,
        messages: Sequence[Message],
        build: Callable[[Message], Message],
        add_generation_prompt: bool,
    ) -> str:
        try:
            with boundary(MessagesRejected, "cannot render the chat template"):
                template = self.tokenizer.get_chat_template(tools=request.tools)
                named = messages if _DEVELOPER.search(template) else [_rename_developer(each) for each in messages]
                return compile_chat_template(template).render(
                    {
                        **self.tokenizer.special_tokens_map,
                        **request.template_kwargs,
                        "messages": [build(message) for message in named],
                        "tools": to_template_data(request.tools),
                        "documents": None,
                        "add_generation_prompt": add_generation_prompt,
                    }
                )
        except TemplateLimitReached as error:
            message = f"the chat template of {self.tokenizer.name_or_path} {error}"
            raise ChatTemplateError(Problem(CHAT_TEMPLATE, message, "set another template")) from None

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
            raise ChatTemplateError(Problem(CHAT_TEMPLATE, message, fix))
        self._renders_tools = True

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of a reply, without special tokens."""
        decode = self._decode_cached if len(token_ids) <= SHORT_REPLY else self._decode
        return decode(tuple(token_ids))

    def _decode(self, token_ids: tuple[int, ...]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def open_text(self, markers: Sequence[str] = (), stop: Sequence[str] = ()) -> TextStream:
        """Returns what decodes a reply while it is sampled.

        Args:
            markers: Texts whose special tokens stay in the reply's text, such as the start of a tool call.
            stop: Texts at which it ends.
        """
        from reinforge.engine.prompts.reply_text import TextStream  # for readers of streams alone

        texts = zip(self._special_ids, self.decode_each([*self._special_ids]), strict=True)
        special = {token: text if any(text in each for each in markers) else "" for token, text in texts}
        return TextStream(self._decode_plain, special, stop)

    def _decode_plain(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def decode_raw(self, token_ids: Sequence[int]) -> str | None:
        """Returns the text of a reply with its special tokens, without the one that ended it.

        None: there are none, so that `decode` gives the same text.
        """
        if token_ids and token_ids[-1] in self._ends:
            token_ids = token_ids[:-1]
        if self._special_ids.isdisjoint(token_ids):
            return None
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))

    def decode_each(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """Returns the text of each token by itself, special tokens included."""
        for token in token_ids:
            if token not in self._texts:
                self._texts[token] = self.tokenizer.decode([token])
        return tuple(self._texts[token] for token in token_ids)


def find_special_ids(tokenizer: Any) -> frozenset[int]:
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    special = {token for token, content in added.items() if getattr(content, "special", False)}
    return frozenset(special | set(getattr(tokenizer, "all_special_ids", ())))


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


def build_plain_message(message: Message) -> Message:
    """Returns a message as OpenAI sends it, which some templates need: arguments as text, a missing content as none."""
    given = {"content": None, **build_template_message(message)}
    if calls := message.get("tool_calls"):
        given["tool_calls"] = to_template_data(calls)
    return given


def _rename_developer(message: Message) -> Message:
    """Returns a message of the role `developer` as one of `system`, of which it is OpenAI's newer name.

    Templates that do not know it would drop it, or write a role that the model has never seen.
    """
    return {**message, "role": "system"} if message.get("role") == "developer" else message


def _parse_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", {})
    try:
        arguments = load_json(function["arguments"])
    except (KeyError, TypeError, ValueError):
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
    # in the order of the keys, which templates show: `tojson` writes them as they come
    return json.dumps([messages, request.tools, request.template_kwargs], default=repr)
