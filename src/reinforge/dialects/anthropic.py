"""Anthropic's Messages API (`/v1/messages`), whose content blocks become the messages of a chat, and back.

system "Be brief."                                     {"role": "system", "content": "Be brief."}
user: text "2 + 2?"                                    {"role": "user", "content": "2 + 2?"}
assistant: thinking "Hm.", text "Let me add.",         {"role": "assistant", "reasoning_content": "Hm.",
  tool_use add {"a": 2}                         <->     "content": "Let me add.", "tool_calls": [add {"a": 2}]}
user: tool_result "4"                                  {"role": "tool", "tool_call_id": ..., "content": "4"}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reinforge.dialects.chat_call import BadRequest, ChatCall, ReplyHead, encode_event, find_rest, split_text
from reinforge.dialects.client_tools import read_messages_tool, read_object, write_object
from reinforge.dialects.fields import Fields, Notes, describe, join_texts, keep_given, read_stop, read_texts
from reinforge.dialects.reply_tokens import read_tokens
from reinforge.types.request import Message, ReplyDelta

_READ = {"model", "messages", "system", "max_tokens", "temperature", "top_p", "top_k", "stop_sequences", "stream",
         "tools", "tool_choice", "thinking", "output_config", "output_format", "context_management"}  # fmt: skip
_REFUSED = {
    "mcp_servers": "there is no server to connect from; connect to MCP servers in the agent and pass their tools",
    "container": "there is no container; run the code in the agent",
}
_TOOL_FIELDS = {"type", "name", "description", "input_schema", "strict"}
_KEEPS_ALL = "clear_thinking_20251015"  # an edit of the context that deletes nothing with `keep: all`
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": ""}
_ERROR_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
                404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
                529: "overloaded_error"}  # fmt: skip


def read_request(body: Mapping[str, Any], *, omits_content: bool = False) -> ChatCall:
    fields = Fields(body, notes=Notes(omits_content))
    fields.refuse(_REFUSED)
    fields.note_unread(_READ)
    _check_edits(fields)
    tools, dropped = _read_tools(fields)
    choice = fields.nested("tool_choice") if tools else None
    thinking, output = _read_thinking(fields), fields.nested("output_config", {"effort", "format"})
    stops = read_stop(fields, "stop_sequences")
    arguments = keep_given(
        messages=read_messages(fields),
        max_tokens=fields.require("max_tokens", fields.integer("max_tokens", least=1)),
        temperature=fields.number("temperature"),
        top_p=fields.number("top_p"),
        stop=stops or None,
        tools=tools or None,
        tool_choice=None if choice is None else _read_tool_choice(choice),
        parallel_tool_calls=False if choice is not None and choice.flag("disable_parallel_tool_use") else None,
        response_format=_read_format(output, "format") or _read_format(fields, "output_format"),
        reasoning_effort=None if output is None else output.text("effort"),
        extra_body=keep_given(
            top_k=fields.integer("top_k", least=0),
            chat_template_kwargs=None if thinking is None else {"enable_thinking": thinking},
        )
        or None,
    )
    model = fields.require("model", fields.text("model"))
    return ChatCall(
        arguments, model, bool(fields.flag("stream")), {"stop_sequences": stops or []}, tuple(fields.notes.ignored),
        tuple(dropped),
    )  # fmt: skip


def write_answer(completion: Mapping[str, Any], call: ChatCall) -> dict[str, Any]:
    return build_message(completion, call.options["stop_sequences"])


def write_error(error: BadRequest) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _check_edits(fields: Fields) -> None:
    """Refuses edits of the conversation that would delete a part of what the agent sends."""
    management = fields.nested("context_management")
    for edit in management.objects("edits") if management is not None else ():
        kind = edit.require("type", edit.text("type"))
        if kind != _KEEPS_ALL or edit.value.get("keep") != "all":
            raise edit.bad("type", f"{describe(kind)} would delete a part of the conversation, which is used unchanged")


def _read_tools(fields: Fields) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the tools that the client runs, and the types of those that run on the vendor's servers."""
    functions, dropped = list[dict[str, Any]](), list[str]()
    for tool in fields.objects("tools"):
        if (function := read_messages_tool(tool)) is None:
            dropped.append(str(tool.value["type"]))
            continue
        tool.note_unread(_TOOL_FIELDS)
        functions.append(function)
    return functions, dropped


def _read_tool_choice(choice: Fields) -> str | dict[str, Any]:
    kind = choice.require("type", choice.choice("type", _TOOL_CHOICES))
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.require("name", choice.text("name"))}}
    return _TOOL_CHOICES[kind]


def _read_thinking(fields: Fields) -> bool | None:
    """Returns whether the model is asked to think; None: its template decides. A budget is a wish, not a limit."""
    thinking = fields.nested("thinking", {"type", "budget_tokens"})
    if thinking is None:
        return None
    kind = thinking.require("type", thinking.choice("type", ("enabled", "disabled", "adaptive")))
    return None if kind == "adaptive" else kind == "enabled"


def _read_format(fields: Fields | None, name: str) -> dict[str, Any] | None:
    found = None if fields is None else fields.nested(name)
    if found is None:
        return None
    found.require("type", found.choice("type", ("json_schema",)))
    schema = found.require("schema", found.nested("schema")).value
    return {"type": "json_schema", "json_schema": {"name": "reply", "schema": dict(schema)}}


def read_messages(fields: Fields) -> list[Message]:
    messages: list[Message] = []
    if fields.value.get("system"):
        messages.append({"role": "system", "content": _read_text(fields, "system")})
    turns = fields.objects("messages")
    if not turns:
        raise fields.bad("messages", "expected at least one message")
    for turn in turns:
        role = turn.require("role", turn.choice("role", ("user", "assistant", "system")))
        if role == "assistant":
            messages.append(_read_reply(turn))
        else:
            messages += _read_turn(turn, role)
    return messages


def _read_text(fields: Fields, name: str) -> Any:
    return join_texts(read_texts(fields, name, _read_text_block, "blocks"))


def _read_text_block(block: Fields) -> str:
    """Returns the text of a block; what stands for one without text is a note in brackets."""
    kind = block.require("type", block.text("type"))
    match kind:
        case "text":
            return block.require("text", block.text("text"))
        case "image":
            return block.omit(kind)
        case "document":
            source = block.require("source", block.nested("source"))
            return source.text("data") or "" if source.value.get("type") == "text" else block.omit(kind)
        case "search_result":
            return _join(block, "content")
        case "compaction":
            return block.text("content") or ""
    block.note(kind)
    name = block.text("tool_name") or block.text("name")
    return f"[{kind}: {name}]" if name else f"[{kind}]"


def _join(block: Fields, name: str) -> str:
    return "".join(read_texts(block, name, _read_text_block, "blocks"))


def _read_turn(turn: Fields, role: str) -> list[Message]:
    """Returns a user's blocks in order: each tool result is a message of its own, texts in a row are one message."""
    if not isinstance(turn.value.get("content"), list):
        return [{"role": role, "content": turn.require("content", turn.text("content"))}]
    messages, texts = list[Message](), list[str]()
    for block in turn.objects("content"):
        if block.value.get("type") != "tool_result":
            texts.append(_read_text_block(block))
            continue
        if texts:
            messages.append({"role": role, "content": join_texts(texts)})
            texts = []
        call_id = block.require("tool_use_id", block.text("tool_use_id"))
        messages.append({"role": "tool", "tool_call_id": call_id, "content": _read_text(block, "content")})
    if texts or not messages:
        messages.append({"role": role, "content": join_texts(texts)})
    return messages


def _read_reply(turn: Fields) -> Message:
    content = turn.value.get("content")
    if not isinstance(content, list):
        return {"role": "assistant", "content": turn.require("content", turn.text("content"))}
    reply: Message = {"role": "assistant", "content": None}
    for block in turn.objects("content"):
        match block.value.get("type"):
            case "thinking":
                thought = block.require("thinking", block.text("thinking"))
                reply["reasoning_content"] = reply.get("reasoning_content", "") + thought
            case "tool_use":
                reply.setdefault("tool_calls", []).append(_read_call(block))
            case _:
                reply["content"] = (reply["content"] or "") + _read_text_block(block)
    if not reply.get("tool_calls") and reply["content"] is None:
        reply["content"] = ""
    return reply


def _read_call(block: Fields) -> dict[str, Any]:
    arguments = write_object(block.require("input", block.nested("input")).value)
    name = block.require("name", block.text("name"))
    call_id = block.require("id", block.text("id"))
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


Event = tuple[str, dict[str, Any]]

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_DELTAS = {"text": ("text", "text_delta"), "thinking": ("thinking", "thinking_delta")}


def build_message(completion: Mapping[str, Any], stop_sequences: Sequence[str]) -> dict[str, Any]:
    choice, usage = completion["choices"][0], completion["usage"]
    reason, stopped_by = _STOP_REASONS.get(choice["finish_reason"], "end_turn"), None
    if reason == "end_turn" and (stopped_by := _find_stop(choice, stop_sequences)) is not None:
        reason = "stop_sequence"
    return {
        "id": f"msg_{completion['id']}",
        "type": "message",
        "role": "assistant",
        "model": completion["model"],
        "content": _build_blocks(choice["message"]),
        "stop_reason": reason,
        "stop_sequence": stopped_by,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


def _find_stop(choice: Mapping[str, Any], stop_sequences: Sequence[str]) -> str | None:
    """Returns the stop string that the sampled tokens end with and the reply's text does not; None: none or unknown."""
    tokens = read_tokens(choice) if stop_sequences else None
    sampled = "".join(tokens.texts) if tokens is not None else ""
    content = choice["message"].get("content") or ""
    return next((each for each in stop_sequences if each in sampled and each not in content), None)


def _build_blocks(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    blocks = list[dict[str, Any]]()
    if reasoning := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    if text := message.get("content") or message.get("refusal"):
        blocks.append({"type": "text", "text": text})
    return blocks + [_build_call(call) for call in message.get("tool_calls") or ()]


def _build_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    given = read_object(function.get("arguments") or "{}")
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": given}


class MessageEvents:
    """Writes the events of a message, block by block: texts in pieces as they come, the rest once it is finished."""

    def __init__(self, call: ChatCall, head: ReplyHead | None = None):
        self._stop_sequences, self._head = call.options["stop_sequences"], head
        self._has_started = False
        self._sent: dict[str, str] = {}
        self._open: str | None = None
        self._index = -1

    def write(self, delta: ReplyDelta) -> bytes:
        return b"".join(_encode(event) for event in self._write(delta))

    def finish(self, completion: Mapping[str, Any]) -> Iterator[bytes]:
        for event in self._finish(build_message(completion, self._stop_sequences)):
            yield _encode(event)

    def _write(self, delta: ReplyDelta) -> Iterator[Event]:
        yield from self._start()
        for kind, text in (("thinking", delta.reasoning), ("text", delta.content)):
            if text:
                if self._open != kind:
                    empty = {"signature": ""} if kind == "thinking" else {}
                    yield from self._begin_block({"type": kind, _DELTAS[kind][0]: "", **empty})
                yield self._write_text(kind, text)

    def _start(self, message: Mapping[str, Any] | None = None) -> Iterator[Event]:
        if self._has_started:
            return
        self._has_started = True
        if message is None:
            assert self._head is not None
            message = build_message(self._head.build_completion(), self._stop_sequences)
        started = {**message, "content": [], "stop_reason": None, "stop_sequence": None}
        yield "message_start", {"message": {**started, "usage": {**message["usage"], "output_tokens": 0}}}

    def _begin_block(self, block: Mapping[str, Any]) -> Iterator[Event]:
        yield from self._end_block()
        self._index, self._open = self._index + 1, block["type"]
        self._sent.setdefault(block["type"], "")
        yield "content_block_start", {"index": self._index, "content_block": _empty(block)}

    def _end_block(self) -> Iterator[Event]:
        if self._open is not None:
            self._open = None
            yield "content_block_stop", {"index": self._index}

    def _write_text(self, kind: str, text: str) -> Event:
        field, name = _DELTAS[kind]
        self._sent[kind] += text
        return "content_block_delta", {"index": self._index, "delta": {"type": name, field: text}}

    def _finish(self, message: Mapping[str, Any]) -> Iterator[Event]:
        yield from self._start(message)
        for block in message["content"]:
            kind = block["type"]
            if kind == "tool_use":
                yield from self._begin_block(block)
                for piece in split_text(json.dumps(block["input"], ensure_ascii=False)):
                    delta = {"type": "input_json_delta", "partial_json": piece}
                    yield "content_block_delta", {"index": self._index, "delta": delta}
                continue
            if kind in self._sent and self._open != kind:  # it was sent, and ended
                continue
            if self._open != kind:
                yield from self._begin_block(block)
            for piece in split_text(find_rest(block[_DELTAS[kind][0]], self._sent[kind])):
                yield self._write_text(kind, piece)
        yield from self._end_block()
        ending = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
        yield "message_delta", {"delta": ending, "usage": message["usage"]}
        yield "message_stop", {}


def _encode(event: Event) -> bytes:
    name, data = event
    return encode_event({"type": name, **data}, name)


def _empty(block: Mapping[str, Any]) -> dict[str, Any]:
    return {**block, "input": {}} if block["type"] == "tool_use" else {**block, _DELTAS[block["type"]][0]: ""}


open_events = MessageEvents
