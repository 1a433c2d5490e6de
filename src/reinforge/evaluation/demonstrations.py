"""Demonstrations: conversations from dataset rows, and which of their messages to train on.

    {"messages": [user, assistant, user, assistant]}       => one conversation; replies 1 and 3, reward 1
    {"prompt": P, "completion": C}                         => one conversation; P and C, reply C, reward 1
    {"prompt": P, "completion": C, "label": false}         => the same with reward 0
    {"prompt": P, "chosen": C, "rejected": R}              => two siblings: C with reward 1, R with reward 0

A prompt that is a string becomes a user message. An assistant message with OpenAI's `weight: 0` is only context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reinforge.evaluation.rows import Row
from reinforge.evaluation.shapes import LABELLED, MESSAGES, Columns, InvalidRowError, detect_shape, parse_messages
from reinforge.types.request import Message

PREFERENCE_SHAPES = ("prompt/chosen/rejected", "openai preference")
DEMONSTRATION_SHAPES = (MESSAGES, "prompt/completion", LABELLED, *PREFERENCE_SHAPES)
"""Shapes whose rows contain assistant messages to train on."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One conversation to train on.

    Attributes:
        messages: The whole conversation, in OpenAI's format.
        start: Index of the first message after the prompt; assistant messages before it are context.
        reward: 1 for a good answer, 0 for a bad one.
        tools: Function definitions in OpenAI's format, or None.
    """

    messages: list[Message]
    start: int = 0
    reward: float = 1.0
    tools: list[dict[str, Any]] | None = None

    def replies(self, *, last_only: bool = False) -> list[int]:
        """Returns the indices of the messages to train on."""
        indices = [
            index
            for index, message in enumerate(self.messages)
            if index >= self.start and message["role"] == "assistant" and message.get("weight", 1) != 0
        ]
        return indices[-1:] if last_only else indices


def detect_row_shape(rows: Sequence[Any]) -> str:
    """Returns the shape of most rows, ignoring the columns named in the configuration."""
    return detect_shape([Row(row, "") for row in rows if isinstance(row, dict)], Columns())


def parse_demonstrations(row: Mapping[str, Any], shape: str) -> list[Demonstration]:
    """Returns a row's conversation, or its chosen and its rejected one.

    Args:
        row: A row of the dataset.
        shape: One of `DEMONSTRATION_SHAPES`.

    Raises:
        InvalidRowError: The row has no assistant message to train on, or is malformed.
    """
    if not isinstance(row, Mapping):
        raise InvalidRowError(f"expected an object, found {type(row).__name__}")
    tools = row.get("tools") or None
    if tools is not None and not isinstance(tools, list):
        raise InvalidRowError("tools: expected a list of function definitions")
    if shape == MESSAGES:
        messages = parse_messages(row["messages"], "messages")
        _require_final_reply(messages, "messages")
        return [Demonstration(messages, tools=tools)]
    if shape == "openai preference":
        prompt: Any = row["input"]["messages"]
        tools = tools or row["input"].get("tools") or None
        answers = [("preferred_output", 1.0), ("non_preferred_output", 0.0)]
    else:
        prompt = row["prompt"]
        answers = [("chosen", 1.0), ("rejected", 0.0)] if shape in PREFERENCE_SHAPES else [("completion", 1.0)]
    if shape == LABELLED:
        answers = [("completion", float(row["label"]))]
    context = _parse_text_or_messages(prompt, "user", "prompt")
    demonstrations = []
    for column, reward in answers:
        reply = _parse_text_or_messages(row[column], "assistant", column)
        _require_final_reply(reply, column)
        demonstrations.append(Demonstration([*context, *reply], len(context), reward, tools))
    return demonstrations


def _require_final_reply(messages: Sequence[Message], field: str) -> None:
    role = messages[-1]["role"]
    if role != "assistant":
        raise InvalidRowError(f"{field}: the last message has role {role}, expected assistant")


def _parse_text_or_messages(value: Any, role: str, field: str) -> list[Message]:
    if not isinstance(value, str):
        return parse_messages(value, field)
    if not value:
        raise InvalidRowError(f"{field}: the text is empty")
    return [{"role": role, "content": value}]
