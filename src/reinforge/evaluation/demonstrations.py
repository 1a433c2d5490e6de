"""Demonstrations: conversations from dataset rows, and which of their messages to train on.

    {"messages": [user, assistant, user, assistant]}       => one conversation; replies 1 and 3, reward 1
    {"messages": [user, assistant], "label": false}        => the same with reward 0 (a thumb down)
    {"prompt": P, "completion": C}                         => one conversation; P and C, reply C, reward 1
    {"prompt": P, "completion": C, "label": false}         => the same with reward 0
    {"prompt": P, "completion": C, "score": 0.3}           => the same with reward 0.3
    {"prompt": P, "chosen": C, "rejected": R}              => two siblings: C with reward 1, R with reward 0

Rows with rewards (a label, or a column `reward` or `score`) that answer the same prompt are siblings, one group.

A prompt that is a string becomes a user message. An assistant message with OpenAI's `weight: 0` is only context.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reinforge.evaluation.rows import Row
from reinforge.evaluation.shapes import (
    LABELED,
    MESSAGES,
    Columns,
    InvalidRowError,
    detect_shape,
    parse_messages,
    read_label,
)
from reinforge.types.evaluation import MAX_SCORE
from reinforge.types.request import Message

PREFERENCE_SHAPES = ("prompt/chosen/rejected", "openai preference")
DEMONSTRATION_SHAPES = (MESSAGES, "prompt/completion", LABELED, *PREFERENCE_SHAPES)
"""Shapes whose rows contain assistant messages to train on."""
REWARD_KEYS = ("reward", "score")
"""Columns that are read as rewards if their values are numbers and `reward_key` names no other one."""
LABEL = "label"  # column with a thumb: true for a good reply, false for a bad one


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One conversation to train on."""

    messages: list[Message]
    start: int = 0  # index of the first message after the prompt; assistant messages before it are context
    reward: float = 1.0  # that of the row; else 1 for a good answer, 0 for a bad one
    tools: list[dict[str, Any]] | None = None
    label: bool | None = None  # the row's thumb

    def replies(self, *, last_only: bool = False) -> list[int]:
        """Returns the indices of the messages to train on."""
        indices = [
            index
            for index, message in enumerate(self.messages)
            if index >= self.start and message["role"] == "assistant" and message.get("weight", 1) != 0
        ]
        return indices[-1:] if last_only else indices

    def describe_prompt(self, *, last_only: bool = False) -> str:
        first = next(iter(self.replies(last_only=last_only)), len(self.messages))
        return json.dumps([self.messages[:first], self.tools], sort_keys=True, default=repr)


def detect_row_shape(rows: Sequence[Any]) -> str:
    """Returns the shape of most rows, ignoring the columns named in the configuration."""
    return detect_shape([Row(row, "") for row in rows if isinstance(row, dict)], Columns())


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How the rows of a dataset are read."""

    shape: str
    reward_key: str | None = None  # the column with the reward; None: the shape alone says what is good
    has_disliked: bool = False  # some rows have a thumb down

    @property
    def is_paired(self) -> bool:
        """True if each row has a better and a worse reply."""
        return self.shape in PREFERENCE_SHAPES

    @property
    def is_rewardable(self) -> bool:
        """True if a column may say how good the only reply of a row is."""
        return self.shape in (MESSAGES, "prompt/completion")

    @property
    def marks_bad_replies(self) -> bool:
        return self.is_paired or (self.reward_key in (None, LABEL) and (self.has_disliked or self.shape == LABELED))

    @property
    def has_rewards(self) -> bool:
        """True if some replies can be better than others."""
        return self.reward_key is not None or self.is_paired or self.shape == LABELED

    def parse(self, row: Any) -> list[Demonstration]:
        return parse_demonstrations(row, self.shape, self.reward_key)

    def group(self, rows: Mapping[str, Any], *, last_only: bool = False) -> list[list[str]]:
        """Returns the ids of the rows in groups: with rewards those of equal prompts, else each row alone.

        With `last_only`, only the last reply of a row is trained on, so that all before it is the prompt.
        """
        groups: dict[str, list[str]] = {}
        for id_, row in rows.items():
            prompt = id_
            if self.has_rewards and not self.is_paired:
                prompt = self.parse(row)[0].describe_prompt(last_only=last_only)
            groups.setdefault(prompt, []).append(id_)
        return list(groups.values())


def detect_format(rows: Sequence[Any], reward_key: str | None = None) -> RowFormat:
    """Returns how to read these rows.

    Args:
        reward_key: The configured column with the reward; None: `reward` or `score`, if every row has a number there,
            or `label`, if every row has a thumb.
    """
    shape = detect_row_shape(rows)
    if reward_key is None and RowFormat(shape).is_rewardable and rows:
        reward_key = next((key for key in REWARD_KEYS if not find_unrewarded(rows, key)), None)
        if reward_key is None and not find_unlabeled(rows):
            reward_key = LABEL
    has_disliked = any(isinstance(row, Mapping) and read_label(row) is False for row in rows)
    return RowFormat(shape, reward_key, has_disliked and shape not in PREFERENCE_SHAPES)


def find_unrewarded(rows: Sequence[Any], key: str) -> list[int]:
    """Returns the indices of the rows without a number in this column."""
    return [index for index, row in enumerate(rows) if not isinstance(row, Mapping) or _to_reward(row.get(key)) is None]


def find_unlabeled(rows: Sequence[Any]) -> list[int]:
    """Returns the indices of the rows without true or false in the column `label`."""
    return [index for index, row in enumerate(rows) if not isinstance(row, Mapping) or read_label(row) is None]


def parse_demonstrations(row: Mapping[str, Any], shape: str, reward_key: str | None = None) -> list[Demonstration]:
    """Returns a row's conversation, or its chosen and its rejected one."""
    if not isinstance(row, Mapping):
        raise InvalidRowError(f"expected an object, found {type(row).__name__}")
    tools = row.get("tools") or None
    if tools is not None and not isinstance(tools, list):
        raise InvalidRowError("tools: expected a list of function definitions")
    label = read_label(row) if shape not in PREFERENCE_SHAPES else None
    if shape == MESSAGES:
        messages = parse_messages(row["messages"], "messages")
        _require_final_reply(messages, "messages")
        return [Demonstration(messages, reward=_read_reward(row, reward_key), tools=tools, label=label)]
    if shape == "openai preference":
        prompt: Any = row["input"]["messages"]
        tools = tools or row["input"].get("tools") or None
        answers = [("preferred_output", 1.0), ("non_preferred_output", 0.0)]
    else:
        prompt = row["prompt"]
        answers = [("chosen", 1.0), ("rejected", 0.0)] if shape in PREFERENCE_SHAPES else []
    if shape == "prompt/completion" or (shape == LABELED and reward_key is not None):
        answers = [("completion", _read_reward(row, reward_key))]
    elif shape == LABELED:
        if label is None:
            raise InvalidRowError(f"{LABEL}: expected true or false, found {str(row.get(LABEL))[:40]}")
        answers = [("completion", float(label))]
    context = _parse_text_or_messages(prompt, "user", "prompt")
    demonstrations = []
    for column, reward in answers:
        reply = _parse_text_or_messages(row[column], "assistant", column)
        _require_final_reply(reply, column)
        demonstrations.append(Demonstration([*context, *reply], len(context), reward, tools, label))
    return demonstrations


def _read_reward(row: Mapping[str, Any], key: str | None) -> float:
    if key is None:
        return 1.0
    label = read_label(row) if key == LABEL else None
    reward = _to_reward(row.get(key)) if label is None else float(label)
    if reward is None:
        found = f'"{row[key]}"'[:40] if row.get(key) is not None else "nothing"
        raise InvalidRowError(f"{key}: expected the row's reward, a number of at most {MAX_SCORE:g}, found {found}")
    return reward


def _to_reward(value: Any) -> float | None:
    """Returns a number, or the number that a cell of a CSV file holds; None for anything else."""
    try:
        reward = float(value) if isinstance(value, bool | int | float | str) else None
    except (ValueError, OverflowError):
        return None
    return reward if reward is not None and abs(reward) <= MAX_SCORE else None


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
