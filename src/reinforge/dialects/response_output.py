"""A chat completion as the `response` object of OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reinforge.dialects.chat_call import ChatCall
from reinforge.dialects.reply_tokens import read_tokens

_ECHOED: dict[str, Any] = {
    "instructions": None, "max_output_tokens": None, "temperature": None, "top_p": None, "metadata": {},
    "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "reasoning": None, "text": None,
    "truncation": "disabled", "user": None,
}  # fmt: skip
"""Fields of the request that a response repeats, with the value of an absent one."""


def build_response(completion: Mapping[str, Any], call: ChatCall) -> dict[str, Any]:
    choice, body = completion["choices"][0], call.options["body"]
    is_cut = choice["finish_reason"] == "length"
    usage, details = completion["usage"], completion["usage"].get("completion_tokens_details") or {}
    text = body.get("text") or {}
    return {
        "id": f"resp_{completion['id']}",
        "object": "response",
        "created_at": completion["created"],
        "status": "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "model": completion["model"],
        "output": _build_output(completion["id"], choice, with_logprobs=call.options["logprobs"]),
        "previous_response_id": None,
        "store": False,
        **{name: default if body.get(name) is None else body[name] for name, default in _ECHOED.items()},
        "text": {**text, "format": text.get("format") or {"type": "text"}},
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": details.get("reasoning_tokens") or 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def _build_output(call_id: str, choice: Mapping[str, Any], *, with_logprobs: bool) -> list[dict[str, Any]]:
    message, items = choice["message"], list[dict[str, Any]]()
    status = "incomplete" if choice["finish_reason"] == "length" else "completed"
    calls = message.get("tool_calls") or []
    if reasoning := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": reasoning}]
        items.append({"id": f"rs_{call_id}", "type": "reasoning", "summary": [], "content": content, "status": status})
    if message.get("refusal"):
        content = [{"type": "refusal", "refusal": message["refusal"]}]
        items.append(_build_message(call_id, content, status))
    elif message.get("content") or not (calls or reasoning):
        tokens = read_tokens(choice) if with_logprobs else None
        logprobs = tokens.build_content() if tokens is not None else []
        part = {"type": "output_text", "text": message.get("content") or "", "annotations": [], "logprobs": logprobs}
        items.append(_build_message(call_id, [part], status))
    return items + [_build_call(call, f"fc_{call_id}-{number}") for number, call in enumerate(calls)]


def _build_message(call_id: str, content: list[dict[str, Any]], status: str) -> dict[str, Any]:
    return {"id": f"msg_{call_id}", "type": "message", "role": "assistant", "status": status, "content": content}


def _build_call(call: Mapping[str, Any], item_id: str) -> dict[str, Any]:
    function = call["function"]
    return {
        "id": item_id,
        "type": "function_call",
        "call_id": call["id"],
        "name": function["name"],
        "arguments": function.get("arguments") or "",
        "status": "completed",
    }
