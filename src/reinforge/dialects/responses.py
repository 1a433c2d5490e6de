"""OpenAI's Responses API (`/v1/responses`), whose items become the messages of a chat, and back.

    instructions "Be brief."                            {"role": "system", "content": "Be brief."}
    {"role": "user", "content": "2 + 2?"}               {"role": "user", "content": "2 + 2?"}
    reasoning "Hm.", message "Let me add.",             {"role": "assistant", "reasoning_content": "Hm.",
      function_call add {"a": 2}              <->        "content": "Let me add.", "tool_calls": [add {"a": 2}]}
    function_call_output "4"                            {"role": "tool", "tool_call_id": ..., "content": "4"}

Nothing is stored: the client sends the whole conversation with each call, which is also what a turn is trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reinforge.dialects.chat_call import ChatCall
from reinforge.dialects.client_tools import ITEM_CALLS, ITEM_TOOLS, ResponseTools, read_call
from reinforge.dialects.fields import Fields, Notes, describe, join_texts, keep_given, read_texts
from reinforge.dialects.response_events import ResponseEvents, build_response
from reinforge.types.request import Message

_READ = {"model", "input", "instructions", "tools", "tool_choice", "text", "temperature", "top_p", "top_logprobs",
         "max_output_tokens", "parallel_tool_calls", "reasoning", "include", "stream", "truncation"}  # fmt: skip
_WHOLE = "send the whole conversation in input"
_REFUSED = {
    "previous_response_id": f"responses are not stored; {_WHOLE}",
    "conversation": f"conversations are not stored; {_WHOLE}",
    "background": "a response is answered at once; leave it out",
    "prompt": "there are no stored prompts; send instructions and input",
    "context_management": "the conversation is used unchanged; leave it out",
}
_WITH_LOGPROBS = "message.output_text.logprobs"
_ROLES = ("user", "system", "developer", "assistant")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal", "summary_text": "text",
          "reasoning_text": "text"}  # fmt: skip


def read_request(body: Mapping[str, Any], *, omits_content: bool = False) -> ChatCall:
    fields = Fields(body, notes=Notes(omits_content))
    fields.refuse(_REFUSED)
    fields.note_unread(_READ)
    fields.choice("truncation", ("auto", "disabled"))  # nothing is dropped: a prompt that does not fit is an error
    include = fields.items("include") or []
    instructions = fields.text("instructions")
    messages = [{"role": "system", "content": instructions}] if instructions else []
    messages += read_input(fields)
    if not messages:
        raise fields.bad("input", "expected a string or items, found neither")
    with_logprobs = _WITH_LOGPROBS in include
    tools = ResponseTools(fields.objects("tools"))
    reasoning, text = fields.nested("reasoning", {"effort"}), fields.nested("text", {"format", "verbosity"})
    arguments = keep_given(
        messages=messages,
        tools=tools.functions or None,
        tool_choice=_read_tool_choice(fields) if tools.functions else None,
        parallel_tool_calls=fields.flag("parallel_tool_calls") if tools.functions else None,
        response_format=None if text is None else _read_format(text),
        verbosity=None if text is None else text.text("verbosity"),
        temperature=fields.number("temperature"),
        top_p=fields.number("top_p"),
        max_completion_tokens=fields.integer("max_output_tokens", least=1),
        reasoning_effort=None if reasoning is None else reasoning.text("effort"),
        logprobs=with_logprobs or None,
        top_logprobs=(fields.integer("top_logprobs", least=0) or None) if with_logprobs else None,
    )
    options = {"body": dict(body), "logprobs": with_logprobs, "kinds": tools.kinds}
    model = fields.require("model", fields.text("model"))
    ignored, dropped = tuple(fields.notes.ignored), tuple(tools.dropped)
    return ChatCall(arguments, model, bool(fields.flag("stream")), options, ignored, dropped)


def _read_tool_choice(fields: Fields) -> str | dict[str, Any] | None:
    found = fields.value.get("tool_choice")
    if found is None or isinstance(found, str):
        return fields.choice("tool_choice", ("auto", "none", "required"))
    choice = Fields(found, fields.at("tool_choice"))
    if choice.value.get("type") == "allowed_tools":
        allowed = [name for tool in choice.objects("tools") if (name := _read_tool_name(tool)) is not None]
        return {**choice.value, "tools": [{"name": name} for name in allowed]}
    if (name := _read_tool_name(choice)) is None:
        message = '{"type": "function", "name": ...}, allowed_tools, "auto", "none" and "required"'
        raise choice.bad("type", f"only {message} are supported")
    return {"type": "function", "function": {"name": name}}


def _read_tool_name(choice: Fields) -> str | None:
    """Returns the name of the function that stands for a tool; None: its vendor would run it."""
    kind = choice.value.get("type")
    if kind in ITEM_TOOLS and kind != "custom":
        return str(kind)
    return choice.require("name", choice.text("name")) if kind in ("function", "custom") else None


def _read_format(text: Fields) -> dict[str, Any] | None:
    """Returns `text.format` as the `response_format` of chat completions, which has the schema one level deeper."""
    if (found := text.nested("format")) is None:
        return None
    kind = found.choice("type", ("text", "json_object", "json_schema"))
    if kind == "json_schema":
        schema = keep_given(
            name=found.require("name", found.text("name")),
            schema=found.require("schema", found.nested("schema")).value,
            strict=found.flag("strict"),
            description=found.text("description"),
        )
        return {"type": "json_schema", "json_schema": schema}
    return {"type": kind} if kind == "json_object" else None


def read_input(fields: Fields) -> list[Message]:
    found = fields.value.get("input")
    if found is None:
        return []
    if isinstance(found, str):
        return [{"role": "user", "content": found}]
    if not isinstance(found, list):
        raise fields.bad("input", f"expected a string or a list of items, found {describe(found)}")
    items = _Conversation()
    for item in fields.objects("input"):
        items.add(item)
    return items.finish()


class _Conversation:
    """Messages so far; reasoning, a message and function calls in a row are one assistant message."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._reply: Message | None = None

    def add(self, item: Fields) -> None:
        match item.text("type") or "message":
            case "message":
                self._add_message(item)
            case "reasoning":
                self._add_reasoning(item)
            case "item_reference":
                raise item.bad("type", "items are not stored; send the item itself")
            case "compaction":
                self._note(item, item.text("summary") or "[earlier conversation, compacted]")
            case kind if kind == "function_call" or kind in ITEM_CALLS:
                self._continue_reply().setdefault("tool_calls", []).append(read_call(item))
            case kind if kind.endswith("_output"):
                self._end_reply()
                call_id = item.require("call_id", item.text("call_id") or item.text("id"))
                self.messages.append({"role": "tool", "tool_call_id": call_id, "content": _read_result(item)})
            case kind:  # of a tool that ran on the vendor's servers
                item.note(kind)
                self._note(item, f"[{kind}]")

    def _note(self, item: Fields, text: str) -> None:
        """Adds a message of what has no message of its own."""
        self._end_reply()
        self.messages.append({"role": "user", "content": text})

    def finish(self) -> list[Message]:
        self._end_reply()
        return self.messages

    def _end_reply(self) -> None:
        if self._reply is not None:
            self.messages.append(self._reply)
        self._reply = None

    def _continue_reply(self) -> Message:
        if self._reply is None:
            self._reply = {"role": "assistant", "content": None}
        return self._reply

    def _add_message(self, item: Fields) -> None:
        role = item.require("role", item.choice("role", _ROLES))
        content = read_text(item, "content")
        if role != "assistant":
            self._end_reply()
            self.messages.append({"role": role, "content": content})
            return
        if self._reply is not None and (self._reply["content"] is not None or "tool_calls" in self._reply):
            self._end_reply()
        self._continue_reply()["content"] = content

    def _add_reasoning(self, item: Fields) -> None:
        self._end_reply()  # reasoning comes first in a reply
        content = read_text(item, "content" if item.value.get("content") else "summary")
        reply = self._continue_reply()
        if content:
            reply["reasoning_content"] = content


def _read_result(item: Fields) -> Any:
    """Returns the result of a tool as text: a string, parts, or what a shell or a patch says."""
    found = item.value.get("output")
    if isinstance(found, list) and all(isinstance(each, dict) and "type" not in each for each in found):
        return "".join(f"{each.get('stdout', '')}{each.get('stderr', '')}" for each in found)
    return read_text(item, "output") or item.text("status") or ""


def read_text(item: Fields, name: str) -> str | list[dict[str, Any]]:
    """Returns the text of a field that is a string or a list of parts; several parts stay parts, in the form of a chat.

    Example: `[{"type": "input_text", "text": "a"}]` -> "a".
    """
    texts = read_texts(item, name, _read_part, "parts")
    is_one = item.value.get("role") == "assistant" or item.value.get("type") == "reasoning"
    return "".join(texts) if is_one else join_texts(texts)


def _read_part(part: Fields) -> str:
    kind = part.text("type") or "input_text"
    if (field := _TEXTS.get(kind)) is None:
        return part.omit(kind.removeprefix("input_"))
    return part.require(field, part.text(field))


write_answer = build_response
open_events = ResponseEvents
