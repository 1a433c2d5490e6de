"""OpenAI's chat completions (`/v1/chat/completions`).

    {"model": "m", "messages": [...], "stream": true}   ->  create(messages=[...]), its reply sent in pieces

Fields are read by type here; what they mean, and which of them can be honored, `create` decides. `return_token_ids`
adds `prompt_token_ids` and `choices[i].token_ids` to the response, and `return_tokens_as_token_ids` writes a token of
the log-probs as `token_id:ID`, as vLLM does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from reinforge.dialects.chat_call import DONE, BadRequest, ChatCall, ReplyHead, encode_event
from reinforge.dialects.chunks import SentChoice, build_head, split_completion
from reinforge.dialects.fields import Fields, Notes, describe, read_schema, read_stop
from reinforge.dialects.reply_tokens import read_tokens
from reinforge.types.request import ReplyDelta, TokenLogprobs

_OWN = {"model", "stream", "stream_options", "return_token_ids", "return_tokens_as_token_ids", "nvext"}
"""Fields that say how the response is written, or which model answers; `nvext` asks for another server's statistics."""
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def read_request(body: Mapping[str, Any], *, omits_content: bool = False) -> ChatCall:
    fields = Fields(body, notes=Notes(omits_content))
    arguments: dict[str, Any] = {}
    for name, value in fields.value.items():
        if value is not None and name not in _OWN:
            read = _READERS.get(name)
            arguments[name] = value if read is None else read(fields, name)
    if not arguments.get("messages"):
        raise fields.bad("messages", "expected at least one message")
    options = fields.nested("stream_options")
    given = {
        "include_usage": bool(options and options.flag("include_usage")),
        "logprobs": arguments.get("logprobs", False),
        "return_token_ids": bool(fields.flag("return_token_ids")),
        "tokens_as_ids": bool(fields.flag("return_tokens_as_token_ids")),
    }
    if given["tokens_as_ids"] and arguments.get("top_logprobs"):
        raise fields.bad("return_tokens_as_token_ids", "top_logprobs have strings, not ids: leave one of the two out")
    return ChatCall(arguments, fields.text("model") or "", stream=bool(fields.flag("stream")), options=given)


def _read_object(fields: Fields, name: str) -> Any:
    fields.nested(name)
    return fields.value[name]


def _read_messages(fields: Fields, name: str) -> Any:
    messages = fields.items(name)
    if fields.notes.omits_content and messages is not None:
        messages = [
            _omit_content(Fields(each, f"{name}[{index}]", fields.notes)) for index, each in enumerate(messages)
        ]
    for index, message in enumerate(messages or ()):
        is_text = isinstance(message, dict) and message.keys() == _TEXT_MESSAGE
        if not is_text or not isinstance(message["role"], str) or not isinstance(message["content"], str):
            _check_message(Fields(message, f"{name}[{index}]"))
    return messages


def _omit_content(message: Fields) -> Any:
    """Returns a message in which a note stands for each image, sound or file."""
    content = message.value.get("content")
    if not isinstance(content, list):
        return message.value
    parts = []
    for part in message.objects("content"):
        kind = part.text("type") or "text"
        is_text = kind in ("text", "refusal")
        parts.append(part.value if is_text else {"type": "text", "text": part.omit(kind.removesuffix("_url"))})
    return {**message.value, "content": parts}


def _check_message(message: Fields) -> None:
    message.require("role", message.text("role"))
    content = message.value.get("content")
    if isinstance(content, list):
        message.objects("content")
    elif content is not None and not isinstance(content, str):
        raise message.bad("content", f"expected a string, a list of parts, or null; found {describe(content)}")
    message.text("tool_call_id")
    message.text("reasoning_content")
    for call in message.objects("tool_calls"):
        function = call.nested("function")
        if function is not None:
            function.require("name", function.text("name"))
            function.text("arguments")


def _read_tools(fields: Fields, name: str) -> Any:
    for tool in fields.objects(name):
        _check_tool(tool)
    return fields.value[name]


def _check_tool(tool: Fields) -> None:
    if (kind := tool.text("type")) not in ("function", None):
        raise tool.bad("type", f'expected "function"; found {describe(kind)}, which only OpenAI itself runs')
    function = tool.require("function", tool.nested("function"))
    if not function.require("name", function.text("name")):
        raise function.bad("name", "expected the name of a function, found an empty string")
    function.text("description")
    read_schema(function, "parameters")


def _read_tool_choice(fields: Fields, name: str) -> Any:
    choice = fields.value[name]
    if not isinstance(choice, str | dict):
        raise fields.bad(name, f"expected a string or an object, found {describe(choice)}")
    return choice


_TEXT_MESSAGE = {"role", "content"}
_READERS: dict[str, Callable[[Fields, str], Any]] = {
    "messages": _read_messages,
    "tools": _read_tools,
    "tool_choice": _read_tool_choice,
    "stop": read_stop,
    **dict.fromkeys(("n", "max_tokens", "max_completion_tokens"), partial(Fields.integer, least=1)),
    **dict.fromkeys(("seed", "top_k", "top_logprobs"), Fields.integer),
    **dict.fromkeys(("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty"), Fields.number),
    **dict.fromkeys(("logprobs", "parallel_tool_calls", "store"), Fields.flag),
    **dict.fromkeys(("logit_bias", "chat_template_kwargs", "response_format", "metadata"), _read_object),
}
"""How each field is read; other fields are passed on unchanged."""


def write_answer(completion: Mapping[str, Any], call: ChatCall) -> dict[str, Any]:
    usage = dict(completion["usage"])  # plain objects are written as JSON in a fifth of the time
    tokens = read_tokens(completion["choices"][0]) if call.options.get("return_token_ids") else None
    prompt = {} if tokens is None else {"prompt_token_ids": list(tokens.prompt_token_ids)}
    return {**completion, **prompt, "choices": _write_choices(completion, call), "usage": usage}


class ChatEvents:
    def __init__(self, call: ChatCall, head: ReplyHead | None = None):
        self._call, self._sent = call, dict[int, SentChoice]()
        self._include_usage = call.options.get("include_usage", False)
        self._head, self._first = dict[str, Any](), dict[str, Any]()
        if head is not None:
            self._head = build_head(head.build_completion(), include_usage=self._include_usage)
            with_ids = call.options.get("return_token_ids") and head.prompt_token_ids
            self._first = {"prompt_token_ids": list(head.prompt_token_ids)} if with_ids else {}
        self._waiting: dict[int, list[TokenLogprobs]] = {}

    def write(self, delta: ReplyDelta) -> bytes:
        """Returns the chunks of one piece: its text, and the tokens that no chunk had yet."""
        events = b"" if delta.index in self._sent else self._open(delta.index)
        if delta.tokens is not None:
            self._waiting.setdefault(delta.index, []).append(delta.tokens)
        texts = self._sent[delta.index].texts
        for name, text in (("reasoning_content", delta.reasoning), ("content", delta.content)):
            if text:
                texts[name] = texts.get(name, "") + text
                events += self._encode(delta.index, {name: text}, self._take_tokens(delta.index))
        return events

    def _open(self, index: int) -> bytes:
        self._sent[index] = SentChoice()
        return self._encode(index, {"role": "assistant", "content": ""}, {})

    def _encode(self, index: int, delta: dict[str, Any], tokens: dict[str, Any]) -> bytes:
        choice = {"index": index, "finish_reason": None, "logprobs": None, "delta": delta, **tokens}
        first, self._first = self._first, {}
        return encode_event({**self._head, **first, "choices": [choice]})

    def _take_tokens(self, index: int) -> dict[str, Any]:
        """Returns the log-probs and ids of the tokens that no chunk had yet, as far as the call asks for them."""
        options, taken = self._call.options, dict[str, Any]()
        pieces = self._waiting.pop(index, [])
        self._sent[index].num_tokens += sum(len(piece.token_ids) for piece in pieces)
        if options.get("logprobs"):
            read = [read_tokens({"logprobs": piece}) for piece in pieces]
            as_ids = options.get("tokens_as_ids", False)
            content = [entry for each in read if each is not None for entry in each.build_content(as_ids=as_ids)]
            taken["logprobs"] = {"content": content, "refusal": None}
        if options.get("return_token_ids"):
            taken["token_ids"] = [token for piece in pieces for token in piece.token_ids]
        return taken

    def finish(self, completion: Mapping[str, Any]) -> Iterator[bytes]:
        written, tokens = write_answer(completion, self._call), read_tokens(completion["choices"][0])
        texts = () if tokens is None else tokens.texts
        for chunk in split_completion(written, token_texts=texts, include_usage=self._include_usage, sent=self._sent):
            yield encode_event(chunk)
        yield DONE


def write_error(error: BadRequest) -> dict[str, Any]:
    kind = ERROR_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def _write_choices(completion: Mapping[str, Any], call: ChatCall) -> list[dict[str, Any]]:
    with_logprobs, with_ids = call.options.get("logprobs"), call.options.get("return_token_ids")
    choices = []
    for choice in completion["choices"]:
        written = {**choice, "message": {"refusal": None, **choice["message"]}, "logprobs": None}
        tokens = read_tokens(choice) if with_logprobs or with_ids else None
        if tokens is not None and with_logprobs:
            as_ids = call.options.get("tokens_as_ids", False)
            written["logprobs"] = {"content": tokens.build_content(as_ids=as_ids), "refusal": None}
        if tokens is not None and with_ids:
            written["token_ids"] = list(tokens.token_ids)
        choices.append(written)
    return choices


open_events = ChatEvents
