"""OpenAI's chat completions (`/v1/chat/completions`).

    {"model": "m", "messages": [...], "stream": true}   ->  create(messages=[...]), its reply sent in pieces

Fields are read by type here; what they mean, and which of them can be honoured, `create` decides. `return_token_ids`
adds `prompt_token_ids` and `choices[i].token_ids` to the response, as vLLM does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from reinforge.dialects.chat_call import BadRequest, ChatCall
from reinforge.dialects.chunks import split_completion
from reinforge.dialects.events import DONE, encode_event
from reinforge.dialects.fields import Fields, describe, read_schema, read_stop
from reinforge.dialects.reply_tokens import read_tokens

_OWN = {"model", "stream", "stream_options", "return_token_ids"}
"""Fields that say how the response is written, or which model answers."""
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def read_request(body: Mapping[str, Any]) -> ChatCall:
    """Returns the call that a body asks for.

    Args:
        body: The decoded JSON.

    Raises:
        BadRequest: A field is wrong.
    """
    fields = Fields(body)
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
    }
    return ChatCall(arguments, fields.text("model") or "", stream=bool(fields.flag("stream")), options=given)


def _read_count(fields: Fields, name: str) -> Any:
    return fields.integer(name, least=1)


def _read_object(fields: Fields, name: str) -> Any:
    fields.nested(name)
    return fields.value[name]


def _read_messages(fields: Fields, name: str) -> Any:
    messages = fields.items(name)
    for index, message in enumerate(messages or ()):
        is_text = isinstance(message, dict) and message.keys() == _TEXT_MESSAGE
        if not is_text or not isinstance(message["role"], str) or not isinstance(message["content"], str):
            _check_message(Fields(message, f"{name}[{index}]"))
    return messages


def _check_message(message: Fields) -> None:
    message.require("role", message.text("role"))
    content = message.value.get("content")
    if isinstance(content, list):
        message.objects("content")
    elif content is not None and not isinstance(content, str):
        raise message.bad("content", f"expected text, a list of parts, or null; found {describe(content)}")
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
        raise function.bad("name", "expected the name of a function, found an empty text")
    function.text("description")
    read_schema(function, "parameters")


def _read_tool_choice(fields: Fields, name: str) -> Any:
    choice = fields.value[name]
    if not isinstance(choice, str | dict):
        raise fields.bad(name, f"expected a text or an object, found {describe(choice)}")
    return choice


_TEXT_MESSAGE = {"role", "content"}
_READERS: dict[str, Callable[[Fields, str], Any]] = {
    "messages": _read_messages,
    "tools": _read_tools,
    "tool_choice": _read_tool_choice,
    "stop": read_stop,
    **dict.fromkeys(("n", "max_tokens", "max_completion_tokens"), _read_count),
    **dict.fromkeys(("seed", "top_k", "top_logprobs"), Fields.integer),
    **dict.fromkeys(("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty"), Fields.number),
    **dict.fromkeys(("logprobs", "parallel_tool_calls", "store"), Fields.flag),
    **dict.fromkeys(("logit_bias", "chat_template_kwargs", "response_format", "metadata"), _read_object),
}
"""How each field is read; other fields are passed on as they are."""


def write_answer(completion: Mapping[str, Any], call: ChatCall) -> dict[str, Any]:
    """Returns the body of the response.

    Args:
        completion: The chat completion.
        call: The call that it answers.
    """
    usage = dict(completion["usage"])  # plain objects are written as JSON in a fifth of the time
    choices = _write_choices(completion, call)
    return {**completion, **_write_prompt(completion, call), "choices": choices, "usage": usage}


def write_events(completion: Mapping[str, Any], call: ChatCall) -> Iterator[bytes]:
    """Yields the events of a streamed response.

    Args:
        completion: The chat completion.
        call: The call that it answers.
    """
    written = write_answer(completion, call)
    tokens = read_tokens(completion["choices"][0])
    texts = () if tokens is None else tokens.texts
    chunks = split_completion(written, token_texts=texts, include_usage=call.options.get("include_usage", False))
    for chunk in chunks:
        yield encode_event(chunk)
    yield DONE


def write_error(error: BadRequest) -> dict[str, Any]:
    """Returns the body of a response that says what is wrong."""
    kind = ERROR_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def _write_prompt(completion: Mapping[str, Any], call: ChatCall) -> dict[str, Any]:
    tokens = read_tokens(completion["choices"][0]) if call.options.get("return_token_ids") else None
    return {} if tokens is None else {"prompt_token_ids": list(tokens.prompt_token_ids)}


def _write_choices(completion: Mapping[str, Any], call: ChatCall) -> list[dict[str, Any]]:
    with_logprobs, with_ids = call.options.get("logprobs"), call.options.get("return_token_ids")
    choices = []
    for choice in completion["choices"]:
        written = {**choice, "message": {"refusal": None, **choice["message"]}, "logprobs": None}
        tokens = read_tokens(choice) if with_logprobs or with_ids else None
        if tokens is not None and with_logprobs:
            written["logprobs"] = {"content": tokens.build_content(), "refusal": None}
        if tokens is not None and with_ids:
            written["token_ids"] = list(tokens.token_ids)
        choices.append(written)
    return choices
