"""Answers of a model's API as one JSON body each, whether they came whole or as a stream of events.

data: {"choices": [{"index": 0, "delta": {"content": "Hel"}}]}
data: {"choices": [{"index": 0, "delta": {"content": "lo"}, "finish_reason": "stop"}]}
data: [DONE]                    =>   {"choices": [{"index": 0, "message": {"content": "Hello"}, ...}]}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reinforge.bounded import load_json
from reinforge.rollout.http.exchange import Dialect
from reinforge.types.request import Message

Event = dict[str, Any]
DONE = b"[DONE]"
CHAT, TEXT, RESPONSES, ANTHROPIC = "completion", "text_completion", "responses", "anthropic_messages"
CALL_TYPES = {"chat/completions": CHAT, "completions": TEXT, "responses": RESPONSES, "messages": ANTHROPIC}
"""Path below `/v1/` -> what LiteLLM's logs call the API."""
CUT = frozenset({"length", "max_tokens", "content_filter", "refusal", "pause_turn", "model_context_window_exceeded"})
"""Why a reply ended before the model was done, in the words of both APIs."""
_SET = frozenset({"index", "type", "id", "role", "finish_reason"})
"""Fields of a piece that replace earlier ones; other strings are appended."""


class CutAnswerError(ValueError):
    """An answer that holds no whole reply; the message says why."""


def read_answer(call_type: str, body: bytes, content_type: str) -> Event:
    """Returns the body of an answer; that of a stream is put together from its events.

    Raises:
        CutAnswerError: It is not JSON, an error, incomplete, or a reply that ended at a limit.
    """
    try:
        if content_type.startswith("text/event-stream"):
            answer = _JOINS[call_type](*_read_events(body))
        else:
            answer = load_json(body)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise error if isinstance(error, CutAnswerError) else CutAnswerError("not the JSON of this API") from None
    if not isinstance(answer, dict) or answer.get("error"):
        raise CutAnswerError("an error in place of a reply")
    if (reason := _find_ending(call_type, answer)) in CUT or (call_type == RESPONSES and reason != "completed"):
        raise CutAnswerError(f"the reply ended early: {str(reason)[:40]}")
    return answer


def read_reply(answer: Event, dialect: Dialect) -> list[Message]:
    """Returns the first reply of an answer as one message of chat completions; raises an error if there is none."""
    if "choices" in answer:
        choice = answer["choices"][0]
        return [choice.get("message") or {"role": "assistant", "content": choice["text"]}]
    said = {"messages": [{"role": "assistant", "content": answer.get("content")}], "input": answer.get("output")}
    call = dialect.read_request({"model": "", "max_tokens": 1, **said}, omits_content=True)  # as of the next turn
    return [call.arguments["messages"][-1]]


def read_usage(answer: Mapping[str, Any]) -> tuple[int, int] | None:
    """Returns the tokens of the prompt and of the reply; None: the answer does not say."""
    usage = answer.get("usage")
    usage = usage if isinstance(usage, Mapping) else {}
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    completion = usage.get("completion_tokens", usage.get("output_tokens"))
    if not isinstance(prompt, int) or not isinstance(completion, int):
        return None
    cached = (usage.get(name) for name in ("cache_read_input_tokens", "cache_creation_input_tokens"))
    return prompt + sum(each for each in cached if isinstance(each, int)), completion  # Anthropic counts them apart


def _read_events(body: bytes) -> tuple[list[Event], bool]:
    """Returns the JSON of the events of a stream, and whether it says that it is complete."""
    events, is_done = list[Event](), False
    for block in re.split(rb"\r?\n\r?\n", body):
        data = b"\n".join(line[5:].strip() for line in block.splitlines() if line.startswith(b"data:"))
        if data == DONE:
            is_done = True
        elif data:
            events.append(load_json(data))
    if any(event.get("error") for event in events):
        raise CutAnswerError("an error in the stream")
    return events, is_done


def _find_ending(call_type: str, answer: Event) -> Any:
    if call_type == RESPONSES:
        return answer.get("status")
    if call_type == ANTHROPIC:
        return answer.get("stop_reason")
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise CutAnswerError("no reply")
    return choices[0].get("finish_reason")


def _accumulate(total: Event, piece: Event) -> None:
    """Adds a piece of a streamed object; items of lists belong together by their `index`."""
    for key, value in piece.items():
        old = total.get(key)
        if value is None or (key in _SET and value == ""):
            continue
        if isinstance(value, list):
            listed = total[key] = [] if old is None else old
            for item in value:
                index = item.get("index") if isinstance(item, dict) else None
                same = next((each for each in listed if index is not None and each.get("index") == index), None)
                if same is None:
                    listed.append(same := {} if isinstance(item, dict) else item)
                if isinstance(item, dict):
                    _accumulate(same, item)
        elif isinstance(value, dict):
            _accumulate(total.setdefault(key, {}), value)
        elif isinstance(value, str) and isinstance(old, str) and key not in _SET:
            total[key] = old + value
        else:
            total[key] = value


def _join_chunks(events: Sequence[Event], is_done: bool) -> Event:
    """Chat and text completions."""
    answer: Event = {}
    for event in events:
        head = {key: value for key, value in event.items() if key != "choices" and value is not None}
        _accumulate(answer, {"choices": event.get("choices") or []})
        answer.update(head)
    choices = answer.get("choices") or []
    if not is_done and not all(choice.get("finish_reason") for choice in choices):
        raise CutAnswerError("the stream is cut")
    for choice in choices:
        if (message := choice.pop("delta", None)) is not None:
            choice["message"] = {"role": "assistant", "content": None, **message}
            for call in message.get("tool_calls", ()):
                call.pop("index", None)
    return answer


def _take_response(events: Sequence[Event], is_done: bool) -> Event:
    """OpenAI's responses: the last event has the whole."""
    ends = ("response.completed", "response.incomplete", "response.failed")
    found = next((event["response"] for event in reversed(events) if event.get("type") in ends), None)
    if not isinstance(found, dict):
        raise CutAnswerError("the stream is cut")
    return found


def _join_blocks(events: Sequence[Event], is_done: bool) -> Event:
    """Anthropic's messages."""
    message, blocks, inputs = Event(), dict[int, Event](), dict[int, str]()
    for event in events:
        kind, delta = event.get("type"), event.get("delta") or {}
        if kind == "message_start":
            message = dict(event["message"])
        elif kind == "content_block_start":
            blocks[event["index"]] = dict(event["content_block"])
        elif kind == "content_block_delta" and delta.get("type") == "input_json_delta":
            inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
        elif kind == "content_block_delta":
            _accumulate(blocks[event["index"]], {key: value for key, value in delta.items() if key != "type"})
        elif kind == "message_delta":
            message |= delta
            message["usage"] = {**message.get("usage", {}), **event.get("usage", {})}
        is_done = is_done or kind == "message_stop"
    if not message or not is_done:
        raise CutAnswerError("the stream is cut")
    for index, text in inputs.items():
        blocks[index]["input"] = load_json(text or "{}")
    return {**message, "content": [blocks[index] for index in sorted(blocks)]}


_JOINS: dict[str, Callable[[Sequence[Event], bool], Event]] = {
    CHAT: _join_chunks,
    TEXT: _join_chunks,
    RESPONSES: _take_response,
    ANTHROPIC: _join_blocks,
}
