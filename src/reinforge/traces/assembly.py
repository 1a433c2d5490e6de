"""Rows from the model calls of a trace.

Calls whose prompt continues an earlier call are one row, and each reply is trained once:

    call 1:  user                             -> assistant (calls a tool)
    call 2:  user, assistant, tool            -> assistant (answers)
        =>  {"messages": [user, assistant, tool, assistant]}

A reply that a prompt brought along was given in an earlier request, which has a row of its own: here it is context
(`weight: 0`). So is a greeting before the first message of the user.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from reinforge.traces.entries import Exchange, UnreadableRecordError
from reinforge.types.request import Message


@dataclass
class Draft:
    """A row that later calls may still continue.

    Attributes:
        messages: All messages.
        trained: Indices of the replies to train on.
        keys: What is compared of each message.
        tools: Function definitions.
        calls: Ids of the calls.
        records: What the store calls their records.
        trace: Their trace.
    """

    messages: list[Message]
    trained: set[int]
    keys: list[str]
    tools: list[dict[str, Any]] | None
    calls: list[str] = field(default_factory=list)
    records: list[str] = field(default_factory=list)
    trace: str = ""

    def build_messages(self) -> list[Message]:
        """Returns the messages up to the last reply, context with `weight: 0`.

        Raises:
            UnreadableRecordError: No reply answers a message of the user.
        """
        first = next((i for i, message in enumerate(self.messages) if message["role"] in ("user", "tool")), None)
        trained = {i for i in self.trained if first is not None and i > first and _is_trainable(self.messages[i])}
        if not trained:
            if first is not None and any(i > first and not _has_content(self.messages[i]) for i in self.trained):
                raise UnreadableRecordError("the reply is empty")
            roles = ", ".join(message["role"] for message in self.messages[:6]) or "none"
            raise UnreadableRecordError(f"no reply to a message of the user (roles: {roles})")
        kept = self.messages[: max(trained) + 1]
        return [
            {**message, "weight": 0} if message["role"] == "assistant" and i not in trained else message
            for i, message in enumerate(kept)
        ]


def _is_trainable(message: Message) -> bool:
    """Returns False for a reply that is only context, or that is empty, such as a refusal recorded elsewhere."""
    return message.get("weight", 1) != 0 and _has_content(message)


def _has_content(message: Message) -> bool:
    return bool(message.get("content") or message.get("tool_calls"))


def merge_calls(exchanges: Sequence[Exchange]) -> list[Draft]:
    """Returns the rows of a trace.

    Args:
        exchanges: Its exchanges, in their order; the summary of the trace counts only if it has no calls.
    """
    calls = [each for each in exchanges if not each.is_summary] or list(exchanges[:1])
    drafts: list[Draft] = []
    for call in calls:
        keys = [_make_key(message) for message in call.messages]
        continued = next((draft for draft in reversed(drafts) if _continues(call, keys, draft)), None)
        first = call.num_context
        trained = {i for i, each in enumerate(call.messages) if i >= first and each["role"] == "assistant"}
        if continued is None:
            drafts.append(Draft(list(call.messages), trained, keys, call.tools, [call.id], [call.record], call.trace))
            continue
        continued.messages += call.messages[len(continued.keys) :]
        continued.trained |= trained
        continued.keys = keys
        continued.calls.append(call.id)
        continued.records.append(call.record)
    return drafts


def _continues(call: Exchange, keys: list[str], draft: Draft) -> bool:
    length = len(draft.keys)
    return length <= call.num_context and draft.tools == call.tools and keys[:length] == draft.keys


def _make_key(message: Message) -> str:
    """Returns what is equal for a reply and for the same reply in a later prompt: no ids, no reasoning."""
    calls = [_normalize_call(call) for call in message.get("tool_calls") or ()]
    return json.dumps([message["role"], message.get("content") or "", calls])


def _normalize_call(call: dict[str, Any]) -> list[str]:
    arguments = call["function"]["arguments"]
    with contextlib.suppress(ValueError, RecursionError):
        arguments = json.dumps(json.loads(arguments), sort_keys=True)
    return [call["function"]["name"], arguments]
