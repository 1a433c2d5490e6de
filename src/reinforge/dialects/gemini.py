"""Gemini's API (`/v1beta/models/NAME:generateContent`), whose contents become the messages of a chat, and back.

systemInstruction "Be brief."                          {"role": "system", "content": "Be brief."}
user: text "2 + 2?"                                    {"role": "user", "content": "2 + 2?"}
model: thought "Hm.", text "Let me add.",              {"role": "assistant", "reasoning_content": "Hm.",
  functionCall add {"a": 2}                      <->     "content": "Let me add.", "tool_calls": [add {"a": 2}]}
user: functionResponse add {"output": "4"}             {"role": "tool", "tool_call_id": ..., "content": "4"}

The path names the model, and whether the reply is streamed: `:streamGenerateContent`, as server-sent events always.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from reinforge.dialects.chat_call import BadRequest, ChatCall, ReplyHead, encode_event, find_rest, split_text
from reinforge.dialects.client_tools import read_object, write_object
from reinforge.dialects.fields import Fields, Notes, describe, join_texts, keep_given, read_function, read_stop
from reinforge.types.request import Message, ReplyDelta

_READ = {"model", "stream", "contents", "systemInstruction", "tools", "toolConfig", "generationConfig"}
_REFUSED = {"cachedContent": "nothing is cached between episodes; send the whole conversation in contents"}
_READ_CONFIG = {
    "temperature", "topP", "topK", "maxOutputTokens", "stopSequences", "seed", "candidateCount", "presencePenalty",
    "frequencyPenalty", "responseMimeType", "responseSchema", "responseJsonSchema", "_responseJsonSchema",
    "responseModalities", "thinkingConfig",
}  # fmt: skip
_READ_FUNCTION = {"name", "description", "parameters", "parametersJsonSchema"}
_MODES = {"AUTO": "auto", "ANY": "required", "NONE": "none", "VALIDATED": "auto", "MODE_UNSPECIFIED": "auto"}
_LEVELS = {"MINIMAL": "minimal", "LOW": "low", "MEDIUM": "medium", "HIGH": "high", "THINKING_LEVEL_UNSPECIFIED": None}
_COUNTS = re.compile(r"(min|max)(Items|Length|Properties)")
_STATUSES = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND",
             429: "RESOURCE_EXHAUSTED", 503: "UNAVAILABLE"}  # fmt: skip


def open_fields(value: Any, path: str, notes: Notes) -> Fields:
    """Returns an object with its names in camel case; the API also takes `system_instruction` and the like."""
    fields = Fields(value, path, notes)
    fields.value = {re.sub(r"(?<=[a-z])_([a-z])", lambda found: found[1].upper(), k): v for k, v in value.items()}
    return fields


def _open(parent: Fields, name: str) -> Fields | None:
    found = parent.nested(name)
    return None if found is None else open_fields(found.value, found.path, found.notes)


def _open_all(parent: Fields, name: str) -> list[Fields]:
    return [open_fields(each.value, each.path, each.notes) for each in parent.objects(name)]


def read_request(body: Mapping[str, Any], *, omits_content: bool = False) -> ChatCall:
    """Returns the call that a body asks for, with the path's `model` and `stream`."""
    if isinstance(counted := body.get("generateContentRequest"), dict):
        body = {**counted, **{name: body[name] for name in ("model", "stream") if name in body}}
    fields = open_fields(body, "", Notes(omits_content))
    fields.refuse(_REFUSED)
    fields.note_unread(_READ)
    tools, dropped = _read_tools(fields)
    config = _open(fields, "generationConfig") or Fields({}, "generationConfig", fields.notes)
    config.note_unread(_READ_CONFIG)
    if config.value.get("responseModalities") not in (None, [], ["TEXT"]):
        raise config.bad("responseModalities", 'the model writes text only: leave it out, or pass ["TEXT"]')
    wanted = _read_format(config)
    arguments = keep_given(
        messages=read_messages(fields),
        max_tokens=config.integer("maxOutputTokens", least=1),
        temperature=config.number("temperature"),
        top_p=config.number("topP"),
        n=config.integer("candidateCount", least=1),
        stop=read_stop(config, "stopSequences") or None,
        seed=config.integer("seed"),
        presence_penalty=config.number("presencePenalty"),
        frequency_penalty=config.number("frequencyPenalty"),
        tools=tools or None,
        tool_choice=_read_tool_choice(fields) if tools else None,
        response_format=wanted.pop("response_format", None),
    )
    extra = keep_given(top_k=config.integer("topK", least=0), **_read_thinking(config), **wanted)
    arguments |= keep_given(extra_body=extra or None)
    model = fields.require("model", fields.text("model")).removeprefix("models/")
    return ChatCall(
        arguments, model, bool(fields.flag("stream")), ignored=tuple(fields.notes.ignored), dropped=tuple(dropped)
    )


def _read_tools(fields: Fields) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the functions, and the names of the tools that Google's servers would run."""
    functions, dropped = list[dict[str, Any]](), list[str]()
    for tool in _open_all(fields, "tools"):
        dropped += [name for name in tool.value if name != "functionDeclarations"]
        for declaration in _open_all(tool, "functionDeclarations"):
            declaration.note_unread(_READ_FUNCTION)
            name = "parametersJsonSchema"
            if (schema := declaration.nested("parameters")) is not None:
                name, declaration.value = "parameters", {**declaration.value, "parameters": _read_schema(schema.value)}
            functions.append(read_function(declaration, name))
    return functions, dropped


def _read_schema(schema: Any) -> Any:
    """Returns a schema of the API's own kind as a JSON schema.

    Example: {"type": "ARRAY", "items": {"type": "STRING"}, "minItems": "1", "nullable": true} ->
    {"type": ["array", "null"], "items": {"type": "string"}, "minItems": 1}.
    """
    if not isinstance(schema, dict):
        return schema
    read: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "type":
            kind = str(value).lower()
            read[key] = [kind, "null"] if schema.get("nullable") else kind
        elif key in ("properties", "$defs") and isinstance(value, dict):
            read[key] = {name: _read_schema(each) for name, each in value.items()}
        elif key in ("items", "additionalProperties"):
            read[key] = _read_schema(value)
        elif key in ("anyOf", "prefixItems") and isinstance(value, list):
            read[key] = [_read_schema(each) for each in value]
        elif _COUNTS.fullmatch(key) and isinstance(value, str) and value.isdecimal():
            read[key] = int(value)
        elif key not in ("nullable", "propertyOrdering", "example"):
            read[key] = value
    return read


def _read_tool_choice(fields: Fields) -> Any:
    found = _open(fields, "toolConfig")
    choice = None if found is None else _open(found, "functionCallingConfig")
    if choice is None:
        return None
    choice.note_unread(("mode", "allowedFunctionNames"))
    mode = _MODES[(choice.choice("mode", _MODES) or "AUTO")]
    functions = [
        {"type": "function", "function": {"name": each}} for each in choice.items("allowedFunctionNames") or ()
    ]
    if not functions or mode == "none":
        return mode
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": functions}}


def _read_format(config: Fields) -> dict[str, Any]:
    kind = config.text("responseMimeType") or "text/plain"
    found = config.nested("responseJsonSchema") or config.nested("_responseJsonSchema")
    schema = None if found is None else dict(found.value)
    if schema is None and (own := config.nested("responseSchema")) is not None:
        schema = _read_schema(own.value)
    match kind:
        case "text/plain":
            return {}
        case "text/x.enum" if schema and schema.get("enum"):
            return {"guided_choice": schema["enum"]}
        case "application/json" if schema is None:
            return {"response_format": {"type": "json_object"}}
        case "application/json":
            return {"response_format": {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}}}
    allowed = "text/plain, application/json, or text/x.enum with a schema that has an enum"
    raise config.bad("responseMimeType", f"expected {allowed}; found {describe(kind)}")


def _read_thinking(config: Fields) -> dict[str, Any]:
    """Returns what the template gets. A budget is a wish, not a limit; 0 means no thinking, and -1 is the default."""
    thinking = _open(config, "thinkingConfig")
    if thinking is None:
        return {}
    thinking.note_unread(("thinkingBudget", "thinkingLevel", "includeThoughts"))
    budget, level = thinking.integer("thinkingBudget"), thinking.choice("thinkingLevel", _LEVELS)
    switch = None if budget is None or budget < 0 else {"enable_thinking": budget > 0}
    return {"chat_template_kwargs": switch, "reasoning_effort": None if level is None else _LEVELS[level]}


def read_messages(fields: Fields) -> list[Message]:
    messages, waiting = list[Message](), list[tuple[str, str]]()
    if (system := fields.value.get("systemInstruction")) is not None:
        if isinstance(system, str):
            system = {"parts": [{"text": system}]}
        content = open_fields(system, "systemInstruction", fields.notes)
        if "text" in content.value:
            content.value = {"parts": [content.value]}
        messages.append({"role": "system", "content": join_texts([_read_text(p) for p in _open_all(content, "parts")])})
    turns = _open_all(fields, "contents")
    if not turns:
        raise fields.bad("contents", "expected at least one content")
    for turn in turns:
        if (turn.choice("role", ("user", "model", "function")) or "user") == "model":
            messages.append(_read_reply(turn, waiting))
        else:
            messages += _read_turn(turn, waiting)
    return messages


def _read_turn(turn: Fields, waiting: list[tuple[str, str]]) -> list[Message]:
    """Returns a user's parts in order: each function's response is a message, texts in a row are one message."""
    messages, texts = list[Message](), list[str]()
    for part in _open_all(turn, "parts"):
        if (response := _open(part, "functionResponse")) is None:
            texts.append(_read_text(part))
            continue
        if texts:
            messages.append({"role": "user", "content": join_texts(texts)})
            texts = []
        messages.append(_read_response(response, waiting))
    if texts or not messages:
        messages.append({"role": "user", "content": join_texts(texts)})
    return messages


def _read_response(response: Fields, waiting: list[tuple[str, str]]) -> Message:
    """Returns the result of a call; without an id it answers the first call of its function that none has answered."""
    name = response.require("name", response.text("name"))
    call_id = response.text("id")
    found = next((each for each in waiting if call_id in (None, each[0]) and each[1] == name), None)
    if found is not None:
        waiting.remove(found)
    value = response.require("response", response.nested("response")).value
    whole = value.get("output") if value.keys() == {"output"} else None
    content = whole if isinstance(whole, str) else json.dumps(value, ensure_ascii=False)
    content += "".join(_read_text(part) for part in _open_all(response, "parts"))
    return {"role": "tool", "tool_call_id": found[0] if found else call_id or name, "content": content}


def _read_reply(turn: Fields, waiting: list[tuple[str, str]]) -> Message:
    reply: Message = {"role": "assistant", "content": None}
    for part in _open_all(turn, "parts"):
        if (call := _open(part, "functionCall")) is not None:
            calls = reply.setdefault("tool_calls", [])
            name = call.require("name", call.text("name"))
            call_id = call.text("id") or f"{turn.path}-{len(calls)}"
            given = call.nested("args")
            arguments = write_object({} if given is None else given.value)
            calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
            waiting.append((call_id, name))
        elif part.flag("thought"):
            reply["reasoning_content"] = reply.get("reasoning_content", "") + _read_text(part)
        else:
            reply["content"] = (reply["content"] or "") + _read_text(part)
    if not reply.get("tool_calls") and reply["content"] is None:
        reply["content"] = ""
    return reply


def _read_text(part: Fields) -> str:
    """Returns the text of a part; what stands for one without text is a note in brackets."""
    if (text := part.text("text")) is not None:
        return text
    for name in ("inlineData", "fileData"):
        if (media := _open(part, name)) is not None:
            kind = (media.text("mimeType") or "").partition("/")[0]
            return media.omit(kind if kind in ("image", "audio", "video") else "file", "mimeType")
    kinds = [name for name in part.value if name not in ("thought", "thoughtSignature")]
    for kind in kinds:
        part.note(kind)
    return "".join(f"[{kind}]" for kind in kinds)


_REASONS = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS", "content_filter": "SAFETY"}


def write_answer(completion: Mapping[str, Any], call: ChatCall) -> dict[str, Any]:
    usage = completion["usage"]
    candidates = [
        {
            **_build_candidate(choice["index"], _build_parts(choice["message"])),
            "finishReason": _REASONS.get(choice["finish_reason"], "OTHER"),
        }
        for choice in completion["choices"]
    ]
    counts = {
        "promptTokenCount": usage["prompt_tokens"],
        "candidatesTokenCount": usage["completion_tokens"],
        "totalTokenCount": usage["total_tokens"],
    }
    head = {"modelVersion": completion["model"], "responseId": completion["id"]}
    return {"candidates": candidates, "usageMetadata": counts, **head}


def write_error(error: BadRequest) -> dict[str, Any]:
    status = _STATUSES.get(error.status, "INVALID_ARGUMENT" if error.status < 500 else "INTERNAL")
    return {"error": {"code": error.status, "message": error.message, "status": status}}


def _build_candidate(index: int, parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"content": {"role": "model", "parts": parts}, "index": index}


def _build_parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    parts = list[dict[str, Any]]()
    if reasoning := message.get("reasoning_content"):
        parts.append({"text": reasoning, "thought": True})
    if text := message.get("content") or message.get("refusal"):
        parts.append({"text": text})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        given = read_object(function.get("arguments") or "{}")
        parts.append({"functionCall": {"id": call["id"], "name": function["name"], "args": given}})
    return parts or [{"text": ""}]


class ContentEvents:
    """Writes a reply in pieces: texts as they come, then the calls, the reason of the end and the usage."""

    def __init__(self, call: ChatCall, head: ReplyHead | None = None):
        self._call, self._head = call, {} if head is None else {"modelVersion": head.model, "responseId": head.call_id}
        self._sent: dict[tuple[int, bool], str] = {}

    def write(self, delta: ReplyDelta) -> bytes:
        pieces = ((True, delta.reasoning), (False, delta.content))
        return b"".join(self._write_text(delta.index, thinks, text) for thinks, text in pieces if text)

    def finish(self, completion: Mapping[str, Any]) -> Iterator[bytes]:
        answer = write_answer(completion, self._call)
        self._head = {name: answer[name] for name in ("modelVersion", "responseId")}
        for candidate in answer["candidates"]:
            calls = []
            for part in candidate["content"]["parts"]:
                if "functionCall" in part:
                    calls.append(part)
                    continue
                key = candidate["index"], bool(part.get("thought"))
                for piece in split_text(find_rest(part["text"], self._sent.get(key, ""))):
                    yield self._write_text(*key, piece)
            candidate["content"]["parts"] = calls or [{"text": ""}]
        yield encode_event(answer)

    def _write_text(self, index: int, thinks: bool, text: str) -> bytes:
        self._sent[index, thinks] = self._sent.get((index, thinks), "") + text
        part = {"text": text, **({"thought": True} if thinks else {})}
        return encode_event({"candidates": [_build_candidate(index, [part])], **self._head})


open_events = ContentEvents
