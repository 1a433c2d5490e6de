"""OpenAI's validation of training files: the first error of a file, or None if the service accepts it."""

from __future__ import annotations

import json
from typing import Any

MIN_EXAMPLES = 10
ROLES = {"system", "developer", "user", "assistant", "tool", "function"}
KEYS = {
    "assistant": {"role", "content", "name", "weight", "tool_calls", "refusal", "function_call"},
    "tool": {"role", "content", "tool_call_id"},
}
OTHERS = {"role", "content", "name"}


def find_file_error(content: bytes, method: str) -> str | None:
    """Returns the message of the first error in a file, or None."""
    try:
        rows = [json.loads(line) for line in content.decode().splitlines()]
    except ValueError:
        return "The file is not formatted as JSONL."
    if len(rows) < MIN_EXAMPLES:
        return f"Training file has {len(rows)} example(s), but must have at least {MIN_EXAMPLES} examples"
    check = _find_supervised_error if method == "supervised" else _find_preference_error
    for number, row in enumerate(rows, 1):
        if (error := check(row)) is not None:
            return f"line {number}: {error}"
    return None


def _find_supervised_error(row: Any) -> str | None:
    if not isinstance(row, dict) or set(row) - {"messages", "tools", "parallel_tool_calls", "functions"}:
        return "unexpected keys"
    messages = row.get("messages")
    error = _find_messages_error(messages)
    if error is None and not any(m["role"] == "assistant" and m.get("weight", 1) for m in messages):
        error = "no assistant message has a weight other than 0"
    return error


def _find_preference_error(row: Any) -> str | None:
    if not isinstance(row, dict) or set(row) != {"input", "preferred_output", "non_preferred_output"}:
        return "expected input, preferred_output and non_preferred_output"
    if not isinstance(row["input"], dict) or set(row["input"]) - {"messages", "tools", "parallel_tool_calls"}:
        return "input: unexpected keys"
    for name in ("preferred_output", "non_preferred_output"):
        output = row[name]
        if not isinstance(output, list) or [m.get("role") for m in output] != ["assistant"]:
            return f"{name} must be one assistant message"
    outputs = [*row["preferred_output"], *row["non_preferred_output"]]
    return _find_messages_error(row["input"].get("messages")) or _find_messages_error(outputs)


def _find_messages_error(messages: Any) -> str | None:
    if not isinstance(messages, list) or not messages:
        return "messages must be a list of messages"
    for place, message in enumerate(messages):
        role = message.get("role")
        if role not in ROLES:
            return f"messages[{place}]: unknown role {role!r}"
        if further := set(message) - KEYS.get(role, OTHERS):
            return f"messages[{place}]: unexpected keys {sorted(further)}"
        if message.get("weight", 1) not in (0, 1):
            return f"messages[{place}]: weight must be 0 or 1"
        if message.get("content") is None and not message.get("tool_calls"):
            return f"messages[{place}]: content is missing"
        if role == "tool" and not message.get("tool_call_id"):
            return f"messages[{place}]: tool_call_id is missing"
    return None


def list_trained_texts(content: bytes) -> list[str]:
    """Returns the texts that a file trains on, in order."""
    texts = []
    for row in map(json.loads, content.decode().splitlines()):
        messages = row.get("preferred_output") or [m for m in row["messages"] if m["role"] == "assistant"]
        texts += [m["content"] for m in messages if m.get("weight", 1) and m.get("content")]
    return texts
