"""What a judge is shown of several answers to one example: the common part once, and each different answer once.

    three episodes:  [S, U1] -> A          =>  common: S, U1
                     [S, U1] -> A              answers: A, B      (the first two siblings gave the same answer)
                     [S, U1] -> B              places: 0, 0, 1

Answers are single texts, or whole episodes with their tool calls (`shows: episode`). An episode is written as one JSON
object per message, so that no message can pretend to be several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from reinforge.evaluation.answers import UnusableOutputError
from reinforge.evaluation.evaluators.judging import format_material, format_output
from reinforge.rollout.step_messages import parse_to_openai_messages
from reinforge.types.evaluation import EvalInputItem

Shows = Literal["episode", "output"]

SHOWN_KEYS = ("role", "content", "tool_calls", "function_call", "tool_call_id", "name")
"""What a judge sees of a message."""

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Contestants:
    """Several answers to one example.

    Attributes:
        common: What all of them answer: the messages that all episodes begin with, or the example's input.
        answers: The different answers, as texts.
        places: For each of the given answers, its index in `answers`.
    """

    common: str
    answers: list[str]
    places: list[int]


def build_contestants(items: Sequence[EvalInputItem], shows: Shows = "episode") -> Contestants:
    """Returns several answers to one example as a judge sees them.

    Args:
        items: The example with each of the answers.
        shows: `episode`: all messages after those that the episodes have in common, and the output if it is another
            text than the last message; `output`: the agent's output alone. Episodes without steps show the output.
    """
    episodes = [_read_messages(item) if shows == "episode" else [] for item in items]
    if not all(episodes):
        common, texts = format_material(items[0].input_obj), [_format_answer([], item) for item in items]
    else:
        num_common = _count_common(episodes)
        shared = episodes[0][:num_common]
        common = _format_messages(shared) if shared else format_material(items[0].input_obj)
        texts = [_format_answer(each[num_common:], item) for each, item in zip(episodes, items, strict=True)]
    answers = list(dict.fromkeys(texts))
    return Contestants(common, answers, [answers.index(text) for text in texts])


def _read_messages(item: EvalInputItem) -> list[Message]:
    """Returns the messages of an episode; none if its steps cannot be read as messages."""
    try:
        messages = parse_to_openai_messages(item.trajectory)
    except ValueError:
        return []
    return [{key: message[key] for key in SHOWN_KEYS if message.get(key)} for message in messages]


def _count_common(episodes: Sequence[Sequence[Message]]) -> int:
    """Returns how many messages all episodes begin with; what the model itself said is never common."""
    count = 0
    for messages in zip(*episodes, strict=False):
        if messages[0].get("role") == "assistant" or any(other != messages[0] for other in messages):
            break
        count += 1
    return count


def _format_answer(messages: Sequence[Message], item: EvalInputItem) -> str:
    """Returns the part of an episode that is its own, and its output if the last message does not say it already."""
    try:
        output = format_output(item.output_obj)
    except UnusableOutputError as error:
        output = f"[{error}]"
    if not messages:
        return output
    is_plain = len(messages) == 1 and messages[0].keys() <= {"role", "content"}
    if is_plain and messages[0].get("content", "") == item.output_obj:
        return output
    said = messages[-1].get("content") if messages[-1].get("role") == "assistant" else None
    return _format_messages(messages) + ("" if said == item.output_obj else f"\noutput: {output}")


def _format_messages(messages: Sequence[Message]) -> str:
    if len(messages) == 1 and messages[0].keys() <= {"role", "content"} and messages[0].get("role") == "user":
        return format_material(messages[0].get("content"))
    return "\n".join(format_material(message) for message in messages)
