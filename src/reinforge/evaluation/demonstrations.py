"""Rows that show what to say: conversations, and which of their messages are replies to learn.

    {"messages": [user, assistant, user, assistant]}       => one; replies 1 and 3, reward 1
    {"prompt": P, "completion": C}                         => one; P and C, reply C, reward 1
    {"prompt": P, "completion": C, "label": false}         => the same with reward 0
    {"prompt": P, "chosen": C, "rejected": R}              => two siblings: C with reward 1, R with reward 0

A text in place of a prompt is what the user says. An assistant message with OpenAI's `weight: 0` is context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reinforge.evaluation.rows import Row
from reinforge.evaluation.shapes import LABELLED, MESSAGES, BadRow, Columns, messages_of, shape_of
from reinforge.types.request import Message

PAIRS = ("prompt/chosen/rejected", "openai preference")
SHOWN = (MESSAGES, "prompt/completion", LABELLED, *PAIRS)
"""Shapes whose rows show what to say."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One conversation to learn from.

    Attributes:
        messages: All of it, in OpenAI's shape.
        start: Assistant messages before this one are context: they belong to the prompt.
        reward: 1 for what is right, 0 for what is wrong.
        tools: Function definitions in OpenAI's shape, or None.
    """

    messages: list[Message]
    start: int = 0
    reward: float = 1.0
    tools: list[dict[str, Any]] | None = None

    def replies(self, *, last_only: bool = False) -> list[int]:
        """Returns the places of the messages that are learnt."""
        places = [
            place
            for place, message in enumerate(self.messages)
            if place >= self.start and message["role"] == "assistant" and message.get("weight", 1) != 0
        ]
        return places[-1:] if last_only else places


def shape_of_rows(rows: Sequence[Any]) -> str:
    """Returns the shape that most rows have, whatever columns the configuration names."""
    return shape_of([Row(row, "") for row in rows if isinstance(row, dict)], Columns())


def demonstrations_of(row: Mapping[str, Any], shape: str) -> list[Demonstration]:
    """Returns what a row shows: one conversation, or the chosen and the rejected one.

    Args:
        row: The dataset's row.
        shape: One of `SHOWN`.

    Raises:
        BadRow: It shows nothing that could be learnt.
    """
    if not isinstance(row, Mapping):
        raise BadRow(f"expected an object, found {type(row).__name__}")
    tools = row.get("tools") or None
    if tools is not None and not isinstance(tools, list):
        raise BadRow("tools: expected a list of function definitions")
    if shape == MESSAGES:
        messages = messages_of(row["messages"], "messages")
        if messages[-1]["role"] != "assistant":
            raise BadRow("messages: the last one is not the assistant's, so nothing is said that could be learnt")
        return [Demonstration(messages, tools=tools)]
    if shape == "openai preference":
        asked: Any = row["input"]["messages"]
        tools = tools or row["input"].get("tools") or None
        answers = [("preferred_output", 1.0), ("non_preferred_output", 0.0)]
    else:
        asked = row["prompt"]
        answers = [("chosen", 1.0), ("rejected", 0.0)] if shape in PAIRS else [("completion", 1.0)]
    if shape == LABELLED:
        answers = [("completion", float(row["label"]))]
    prompt = _said(asked, "user", "prompt")
    shown = []
    for column, reward in answers:
        reply = _said(row[column], "assistant", column)
        if reply[-1]["role"] != "assistant":
            raise BadRow(f"{column}: the last message is not the assistant's, so nothing is said that could be learnt")
        shown.append(Demonstration([*prompt, *reply], len(prompt), reward, tools))
    return shown


def _said(value: Any, role: str, where: str) -> list[Message]:
    if not isinstance(value, str):
        return messages_of(value, where)
    if not value:
        raise BadRow(f"{where}: the text is empty")
    return [{"role": role, "content": value}]
