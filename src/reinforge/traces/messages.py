"""Messages of tracing tools and chat logs in OpenAI's format.

    LangChain    {"type": "human", "content": "hi"}                               =>  {"role": "user", "content": "hi"}
    GenAI span   {"role": "user", "parts": [{"type": "text", "content": "hi"}]}   =>  the same
    ShareGPT     {"from": "gpt", "value": "ho"}                                   =>  {"role": "assistant", ...}
    Anthropic    {"role": "user", "content": [{"type": "tool_result", ...}]}      =>  {"role": "tool", ...}

What was recorded is read leniently; what would change its meaning (an image, an unknown role) is refused with a reason,
as an `UnreadableRecordError`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from reinforge.bounded import load_json
from reinforge.traces.entries import UnreadableRecordError
from reinforge.types.request import Message

ROLES = {
    **dict.fromkeys(("user", "human", "humanmessage", "customer", "visitor", "prompter"), "user"),
    **dict.fromkeys(
        ("assistant", "ai", "gpt", "bot", "model", "chatbot", "chatgpt", "agent", "aimessage", "aimessagechunk"),
        "assistant",
    ),
    **dict.fromkeys(("system", "developer", "systemmessage", "instructions"), "system"),
    **dict.fromkeys(
        ("tool", "function", "ipython", "observation", "tool_response", "toolmessage", "functionmessage"), "tool"
    ),
}
"""Names of roles, in lower case, and the role in OpenAI's format."""
SYSTEM_FIELDS = ("system", "system_prompt", "instructions")  # fields of a request with its system prompt
_PROMPT_WORDS = re.compile(r'"(?:messages|role|content|parts|kwargs)"\s*:')
_REPLY_WORDS = re.compile(r'"(?:choices|generations|messages?|role|parts|kwargs|tool_calls|function_call)"\s*:')
_TEXT_BLOCKS = ("text", "input_text", "output_text")
_CALL_BLOCKS = ("tool_use", "tool_call", "tool-call", "function_call")
_RESULT_BLOCKS = ("tool_result", "tool_call_response", "tool-result", "function_call_output")
_THOUGHT_BLOCKS = ("thinking", "reasoning", "redacted_thinking")


def parse_json(value: Any) -> Any:
    """Returns what a JSON object or list in a string holds; any other value unchanged."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    try:
        return load_json(value)
    except ValueError:
        return value


def get_mapping(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns a field that is an object, or a string with one; an empty object for anything else."""
    value = parse_json(record.get(key))
    return value if isinstance(value, Mapping) else {}


def read_messages(value: Any) -> list[Message]:
    """Returns the messages of a prompt: a string, a message, a list, a list of lists, or an object with `messages`."""
    parsed = parse_json(value)
    if isinstance(value, str) and isinstance(parsed, list) and all(isinstance(each, str) for each in parsed):
        parsed = value  # the user may have written a list
    if isinstance(parsed, str):
        return [{"role": "user", "content": parsed}] if parsed else []
    try:
        return _read_prompt(parsed)
    except UnreadableRecordError:
        if isinstance(value, str) and not _PROMPT_WORDS.search(value):
            return [{"role": "user", "content": value}]  # a string that happens to be JSON
        raise


def _read_prompt(value: Any) -> list[Message]:
    if isinstance(value, Mapping):
        if _find_role(value) is None:
            return _read_prompt_object(value)
        value = [value]
    if not isinstance(value, list):
        raise UnreadableRecordError(f"expected messages, found {_describe(value)}")
    if value and isinstance(value[0], list) and not _is_pair(value[0]):
        if len(value) > 1:
            raise UnreadableRecordError(f"a batch of {len(value)} prompts, of which one call has one")
        value = value[0]  # LangChain's batches, of which a run has one
    items = (each for each in value if not (isinstance(each, Mapping) and each.get("type") == "reasoning"))
    return [message for each in items for message in read_message(each)]  # of OpenAI's responses: often encrypted


def _read_prompt_object(value: Mapping[str, Any]) -> list[Message]:
    system = next((value[key] for key in SYSTEM_FIELDS if value.get(key)), None)
    for key in ("messages", "prompts", "input", "inputs", "prompt", "question", "query"):
        if value.get(key):
            messages = read_messages(value[key])
            return add_system([*_read_history(value, messages), *messages], system)
    raise UnreadableRecordError(f"no messages in the input (it has {_list_keys(value)})")


def _read_history(value: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    """Returns the earlier messages that LangChain keeps beside the question; none if the messages have them."""
    history = parse_json(value.get("chat_history") or value.get("history"))
    if not history or len(messages) > 1:
        return []
    if not isinstance(history, list):
        raise UnreadableRecordError("the input has its history as text; export it as messages")
    return _read_prompt(history)


def add_system(messages: list[Message], system: Any) -> list[Message]:
    """Returns messages that begin with the system prompt, a string or a list of blocks, unless they have one."""
    system = parse_json(system) if isinstance(system, str) and _PROMPT_WORDS.search(system) else system
    if not isinstance(system, str | list) or not system or (messages and messages[0]["role"] == "system"):
        return messages
    return [*read_message({"role": "system", "content": system}), *messages]


def _is_pair(value: Any) -> bool:
    is_pair = isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value)
    return is_pair and value[0].lower() in ROLES


def read_message(value: Any) -> list[Message]:
    """Returns a message; several for one whose content has results of several tools."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value):
        value = {"role": value[0], "content": value[1]}  # LangChain's pairs of role and text
    if not isinstance(value, Mapping):
        raise UnreadableRecordError(f"expected a message, found {_describe(value)}")
    role = _find_role(value)
    if role is None:
        if value.get("type") in _CALL_BLOCKS:
            return [{"role": "assistant", "content": None, "tool_calls": [_read_call(value)]}]
        if value.get("type") in _RESULT_BLOCKS:
            return [_read_result(value)]
        named = value.get("role") or value.get("from") or value.get("type")
        raise UnreadableRecordError(
            f"unknown role {named!r}" if named else f"a message without a role ({_list_keys(value)})"
        )
    body = value.get("kwargs") or value.get("data") or value
    return _read_body(role, body if isinstance(body, Mapping) else value)


def _find_role(value: Mapping[str, Any]) -> str | None:
    names = [value.get("role"), value.get("from"), value.get("sender"), value.get("author"), value.get("type")]
    body = value.get("kwargs")
    if isinstance(body, Mapping):  # LangChain: {"lc": 1, "type": "constructor", "id": [.., "HumanMessage"], "kwargs"}
        names = [body.get("type"), *reversed([each for each in value.get("id") or [] if isinstance(each, str)])]
    for name in names:
        name = name.get("role") if isinstance(name, Mapping) else name
        if isinstance(name, str) and name.lower() in ROLES:
            return ROLES[name.lower()]
    return None


def _read_body(role: str, body: Mapping[str, Any]) -> list[Message]:
    content = next(
        (body[key] for key in ("content", "parts", "value", "text", "message") if body.get(key) is not None), None
    )
    extra = body.get("additional_kwargs")
    extra = extra if isinstance(extra, Mapping) else {}
    texts, calls, results, thought = _read_content(content)
    calls += [_read_call(call) for call in body.get("tool_calls") or extra.get("tool_calls") or () if not calls]
    legacy = body.get("function_call") or extra.get("function_call")
    if not calls and isinstance(legacy, Mapping):
        calls = [_read_call(legacy)]
    if results and calls:
        raise UnreadableRecordError("a message has both tool calls and their results")
    if results:  # Anthropic: results of tools, then what the user says
        return [*results, *([{"role": role, "content": "\n".join(texts)}] if texts and role != "tool" else [])]
    message: Message = {"role": role, "content": "\n".join(texts) if texts else None if calls else ""}
    if calls and role == "assistant":
        message["tool_calls"] = calls
    if role == "assistant" and isinstance(thought := body.get("reasoning_content") or thought, str) and thought:
        message["reasoning_content"] = thought
    if role == "tool":
        message["tool_call_id"] = str(body.get("tool_call_id") or body.get("id") or f"call_{body.get('name', '')}")
    if isinstance(body.get("weight"), int | float) and role == "assistant":
        message["weight"] = body["weight"]
    return [message]


def _read_content(content: Any) -> tuple[list[str], list[dict[str, Any]], list[Message], str]:
    texts, calls, results, thoughts = list[str](), list[dict[str, Any]](), list[Message](), list[str]()
    if isinstance(content, Mapping) and "parts" in content:
        content = content["parts"]  # ChatGPT's own export
    for block in content if isinstance(content, list) else [content]:
        if block is None:
            continue
        if isinstance(block, str):
            texts.append(block)
            continue
        if not isinstance(block, Mapping):
            raise UnreadableRecordError(f"a message's content is {_describe(block)}, not text")
        kind = block.get("type")
        if kind in _CALL_BLOCKS:
            calls.append(_read_call(block))
        elif kind in _RESULT_BLOCKS:
            results.append(_read_result(block))
        elif kind in _THOUGHT_BLOCKS:
            thoughts.append(str(block.get("thinking") or block.get("content") or block.get("text") or ""))
        elif kind in _TEXT_BLOCKS or kind is None:
            text = block.get("text", block.get("content"))
            if not isinstance(text, str):
                raise UnreadableRecordError(f"a part of a message has no text (it has {_list_keys(block)})")
            texts.append(text)
        else:
            raise UnreadableRecordError(
                f"a message has a part of the type {kind}; only text and tool calls can be trained"
            )
    return texts, calls, results, "\n".join(thoughts)


def _read_call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name := function.get("name") or call.get("toolName"), str):
        raise UnreadableRecordError(f"a tool call has no name: {_describe(call)}")
    given: Any = next((function[key] for key in ("arguments", "args", "input") if function.get(key) is not None), {})
    arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    id_ = call.get("id") or call.get("call_id") or call.get("toolCallId") or f"call_{name}"
    return {"id": str(id_), "type": "function", "function": {"name": name, "arguments": arguments}}


def _read_result(block: Mapping[str, Any]) -> Message:
    keys = ("response", "result", "content", "output")
    found = next((block[key] for key in keys if block.get(key) is not None), "")
    if isinstance(found, list) and all(isinstance(part, Mapping) and "text" in part for part in found):
        found = "\n".join(str(part["text"]) for part in found)
    text = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
    id_ = block.get("tool_use_id") or block.get("call_id") or block.get("toolCallId") or block.get("id") or "call"
    return {"role": "tool", "tool_call_id": str(id_).strip(), "content": text}


def read_reply(value: Any) -> Message:
    """Returns the reply of a model call: a string, a message, or an answer of a model's API."""
    is_text = isinstance(value, str) and not _REPLY_WORDS.search(value)  # the agent may have answered in JSON
    message = None if is_text else _find_reply(parse_json(value))
    if message is None and isinstance(value, str) and value.strip():
        return {"role": "assistant", "content": value}  # a string that happens to be JSON
    if message is None:
        raise UnreadableRecordError(f"no reply in the output ({_describe(value)})")
    if not message.get("content") and not message.get("tool_calls"):
        raise UnreadableRecordError("the reply is empty")
    return message


def read_replies(value: Any, prompt: list[Message]) -> list[Message]:
    """Returns what an output adds to its prompt: the reply, with the tool calls and results before it.

    prompt [user];  {"messages": [user, assistant (calls a tool), tool, assistant]}  =>  [assistant, tool, assistant]
    """
    parsed = parse_json(value)
    listed = parsed.get("messages") if isinstance(parsed, Mapping) else parsed
    if isinstance(listed, list) and all(isinstance(each, Mapping) and _find_role(each) for each in listed):
        messages = _read_prompt(listed)
        said = [[(each["role"], each.get("content")) for each in side] for side in (messages[: len(prompt)], prompt)]
        repeats = len(messages) > len(prompt) and said[0] == said[1]
        added = messages[len(prompt) :] if repeats else messages
        roles = [message["role"] for message in added]
        if "tool" in roles and {roles[0], roles[-1]} == {"assistant"} and set(roles) == {"assistant", "tool"}:
            return added
    return [read_reply(value)]


def _find_reply(value: Any) -> Message | None:
    if isinstance(value, list):
        return _find_reply_in_list(value)
    if not isinstance(value, Mapping):
        return None
    for key in ("choices", "generations"):
        if value.get(key):
            return _find_reply(value[key])
    if _find_role(value) is None or isinstance(value.get("message"), Mapping):
        if "parts" in value or ("content" in value and ("tool_calls" in value or len(value) == 1)):
            return _as_reply(read_message({**value, "role": "assistant"}))
        for key in ("message", "messages", "output", "completion", "response", "answer", "text", "result", "content"):
            found = value.get(key)
            if isinstance(found, str) and found:
                return _find_reply(parse_json(found)) or {"role": "assistant", "content": found}
            if found and (reply := _find_reply(found)) is not None:
                return reply
        return None
    return _as_reply(read_message(value))


def _find_reply_in_list(items: list[Any]) -> Message | None:
    if items and isinstance(items[0], list):
        return _find_reply_in_list(items[0])
    maps = [item for item in items if isinstance(item, Mapping)]
    if any(item.get("type") in _CALL_BLOCKS + _TEXT_BLOCKS + _THOUGHT_BLOCKS and "role" not in item for item in maps):
        blocks = [part for item in maps for part in _list_blocks(item)]
        return _as_reply(_read_body("assistant", {"content": blocks}))
    found = [reply for item in maps if (reply := _find_reply(item)) is not None]
    if maps and ("finish_reason" in maps[0] or "message" in maps[0] or "index" in maps[0]):
        return next(iter(found), None)  # choices: the first is what the agent got
    return next(reversed(found), None)


def _list_blocks(item: Mapping[str, Any]) -> list[Any]:
    if item.get("type") == "message" and isinstance(item.get("content"), list):
        return list(item["content"])
    return [] if item.get("type") == "reasoning" and not (item.get("text") or item.get("content")) else [item]


def _as_reply(messages: Iterable[Message]) -> Message | None:
    return next((message for message in messages if message["role"] == "assistant"), None)


def read_tools(value: Any) -> list[dict[str, Any]] | None:
    """Returns function definitions in OpenAI's format, from a list or by name; None if there are none."""
    value = parse_json(value)
    if isinstance(value, Mapping):
        value = [{"name": name, **each} for name, each in value.items() if isinstance(each, Mapping)]
    tools = []
    for tool in value if isinstance(value, list) else ():
        tool = parse_json(tool)
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            continue
        definition: dict[str, Any] = {"name": function["name"]}
        if isinstance(function.get("description"), str):
            definition["description"] = function["description"]
        definition["parameters"] = parse_json(
            function.get("parameters") or function.get("input_schema") or {"type": "object", "properties": {}}
        )
        tools.append({"type": "function", "function": definition})
    return tools or None


def _describe(value: Any) -> str:
    if value is None or value in ("", [], {}):
        return "nothing"
    return _list_keys(value) if isinstance(value, Mapping) else f"{type(value).__name__} {str(value)[:40]!r}"


def _list_keys(value: Mapping[str, Any]) -> str:
    return ", ".join(sorted(map(str, value))[:8]) or "no fields"
