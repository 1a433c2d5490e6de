"""Turns the messages that an agent passes into plain data that a chat template renders.

{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    => {"role": "user", "content": "ab"}
choices[0].message                       => the same as a dict, without fields that are None
{"role": "user", "content": [{"type": "image_url", ...}]}   refused: the model reads text only

Messages for a model behind an endpoint keep their blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reinforge.errors import InvalidCall
from reinforge.rollout.handle.completion import to_plain_data
from reinforge.types.request import Message

_TEXT_BLOCKS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of blocks of text, and the field that holds it."""
_MEDIA = {"image": "an image", "audio": "audio", "video": "a video", "file": "a file", "document": "a document"}


def normalize_message(message: Any) -> Message:
    """Returns a message as plain data; agents may also pass message objects such as `choices[0].message`."""
    if hasattr(message, "model_dump"):
        message = message.model_dump()
    plain = {key: value for key, value in dict(message).items() if value is not None or key == "content"}
    return plain if all(isinstance(value, str | None) for value in plain.values()) else to_plain_data(plain)


def send_messages(messages: Sequence[Any]) -> list[Any]:
    """Returns messages as plain data, for the run; what is no message stays as it is, for the run to refuse."""
    if not _is_list(messages):
        return to_plain_data(messages)
    is_message = (hasattr(each, "model_dump") or isinstance(each, Mapping) for each in messages)
    return [normalize_message(each) if known else each for each, known in zip(messages, is_message, strict=True)]


def read_messages(messages: Sequence[Any]) -> list[Message]:
    """Returns the messages for a model in this process, which reads text only; blocks of text become one text."""
    if not messages or (type(messages) is not list and not _is_list(messages)):
        found = type(messages).__name__ if messages else "none"
        raise _error("messages", f'needs a list of at least one message: [{{"role": "user", ...}}], found {found}')
    return [_read_message(message, index) for index, message in enumerate(messages)]


def _is_list(messages: Any) -> bool:
    return isinstance(messages, Sequence) and not isinstance(messages, (str, bytes))


def _read_message(message: Any, index: int) -> Message:
    if type(message) is dict and len(message) == 2:  # nearly always, and there is nothing to read
        content, role = message.get("content"), message.get("role")
        if type(content) is str and type(role) is str and role != "function":
            return dict(message)
    try:
        read = normalize_message(message)
    except (TypeError, ValueError):
        found = f"is a {type(message).__name__}"
        raise _error(f"messages[{index}]", f'{found}; expected {{"role": ..., "content": ...}}') from None
    content = read.get("content")
    if isinstance(content, list):
        path = f"messages[{index}].content"
        read["content"] = "".join(_read_block(block, f"{path}[{number}]") for number, block in enumerate(content))
    elif content is not None and not isinstance(content, str):
        raise _error(
            f"messages[{index}].content", f"is a {type(content).__name__}; expected a text or a list of blocks"
        )
    role = read.get("role")
    if not isinstance(role, str):
        raise _error(f"messages[{index}].role", f"is {role!r}; expected system, user, assistant or tool")
    if read.get("content") is None:
        if role != "assistant":  # templates would write it as the text "None"
            found = "is null" if "content" in read else "is missing"
            raise _error(f"messages[{index}].content", f"{found}; expected a text or a list of blocks")
        read["content"] = None
    if role == "function" or "function_call" in read:
        what = 'has the role "function"' if role == "function" else "has a function_call"
        raise _error(f"messages[{index}]", f'{what}, which OpenAI has replaced: use tool_calls and the role "tool"')
    return read


def _read_block(block: Any, path: str) -> str:
    if isinstance(block, str):
        return block
    kind = block.get("type") if isinstance(block, dict) else None
    text = block.get(_TEXT_BLOCKS[kind]) if isinstance(block, dict) and kind in _TEXT_BLOCKS else None
    if isinstance(text, str):
        return text
    what = next((name for part, name in _MEDIA.items() if part in str(kind)), "no text")
    raise _error(
        path,
        f"is a block of the type {kind!r}, which is {what}, but the model in this process reads text only: describe "
        "its content as text, or send it to a model behind an endpoint (llms: `_type: openai`)",
    )


def _error(path: str, message: str) -> InvalidCall:
    return InvalidCall(f"chat.completions.create: {path} {message}", path)
