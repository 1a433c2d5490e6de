"""The shapes that rows come in, and rows as examples.

    question/answer             {"question": Q, "answer": A}                   => input Q, expected A
    messages                    {"messages": [M.., {"role": "assistant"..}]}   => input M.., expected the last text
    messages (to be answered)   {"messages": [M..], "label": 3}                => input M.., extra fields for the reward
    prompt/completion           {"prompt": P, "completion": C}                 => input P, expected C
    prompt/completion/label     {"prompt": P, "completion": C, "label": true}  => input P, expected C, or None if false
    prompt/chosen/rejected      {"prompt": P, "chosen": C, "rejected": R}      => input P, expected C
    openai preference           {"input": {"messages": [M..]}, "preferred_output": [C],
                                 "non_preferred_output": [R]}                  => input M.., expected C
    prompt                      {"prompt": P}                                  => input P

A dataset has one shape, found from its rows; a column that is named in the configuration is believed before any
shape. Whatever the shape, the whole row stays in `full_dataset_entry`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reinforge.errors import did_you_mean
from reinforge.evaluation.rows import Found, Row
from reinforge.types.evaluation import EvalInputItem

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
QUESTION_ANSWER = "question/answer"
MESSAGES, TO_BE_ANSWERED = "messages", "messages (to be answered)"
LABELLED = "prompt/completion/label"

SHAPES: dict[str, tuple[str, ...]] = {
    MESSAGES: ("messages",),
    "openai preference": ("input", "preferred_output", "non_preferred_output"),
    "prompt/chosen/rejected": ("prompt", "chosen", "rejected"),
    LABELLED: ("prompt", "completion", "label"),
    "prompt/completion": ("prompt", "completion"),
    "prompt": ("prompt",),
}
"""Shape -> the columns that a row must have, the most demanding first."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns hold what; a name that is not the default was asked for and must be there."""

    id_key: str = "id"
    question_key: str = "question"
    answer_key: str = "answer"

    def is_asked(self, name: str) -> bool:
        """Returns True if the user named this column: `id_key`, `question_key` or `answer_key`."""
        return bool(getattr(self, name) != getattr(Columns(), name))


@dataclass(frozen=True, slots=True)
class Examples:
    """Examples, the shape that their rows had, and the place of each row by the example's id."""

    items: list[EvalInputItem]
    shape: str
    places: dict[str, str]


class BadRow(Exception):
    """What is wrong with one row."""


def examples_from_rows(rows: Sequence[Row], columns: Columns, name: str, found: Found) -> Examples:
    """Returns one example a row.

    Raises:
        ConfigError: With every row that cannot be used, and those that `found` holds already.
    """
    if not rows and not found.problems:
        found.add(name, "the dataset is empty", "give it at least one row")
    usable = [row for row in rows if isinstance(row.value, dict)]
    for row in rows:
        if not isinstance(row.value, dict):
            found.add(row.place, f"expected an object, found {type(row.value).__name__}")
    shape = shape_of(usable, columns)
    if shape == QUESTION_ANSWER:
        pairs = _questions(usable, columns, found)
    else:
        pairs, shape = _shaped(usable, shape, columns, found)
    ids = _ids(usable, columns, found)
    order = {row.place: number for number, row in enumerate(rows)}
    found.problems.sort(key=lambda problem: order.get(problem.location, -1))
    found.raise_all()
    items = [
        EvalInputItem(id=id_, input_obj=asked, expected_output_obj=expected, full_dataset_entry=row.value)
        for row, id_, (asked, expected) in zip(usable, ids, pairs, strict=True)
    ]
    return Examples(items, shape, {id_: row.place for row, id_ in zip(usable, ids, strict=True)})


def shape_of(rows: Sequence[Row], columns: Columns) -> str:
    """Returns the shape that most rows have; question/answer where a column is named or none fits."""
    if columns.is_asked("question_key"):
        return QUESTION_ANSWER
    counts: Counter[str] = Counter()
    for row in rows:
        if columns.question_key in row.value:
            counts[QUESTION_ANSWER] += 1
            continue
        counts[next((shape for shape in SHAPES if _fits(row.value, shape)), "")] += 1
    del counts[""]
    return counts.most_common(1)[0][0] if counts else QUESTION_ANSWER


def _fits(row: Mapping[str, Any], shape: str) -> bool:
    if shape == LABELLED and not isinstance(row.get("label"), bool):
        return False  # a column of that name that means something else
    return all(row.get(key) is not None for key in SHAPES[shape])


def _questions(rows: Sequence[Row], columns: Columns, found: Found) -> list[tuple[Any, Any]]:
    has_answer = columns.is_asked("answer_key") or any(row.value.get(columns.answer_key) is not None for row in rows)
    needs_answer = "" if columns.is_asked("answer_key") else "; some rows have an answer, so every row needs one"
    pairs = []
    for row in rows:
        _require(row, columns.question_key, found)
        if has_answer:
            _require(row, columns.answer_key, found, needs_answer)
        pairs.append((row.value.get(columns.question_key), row.value.get(columns.answer_key)))
    return pairs


def _shaped(rows: Sequence[Row], shape: str, columns: Columns, found: Found) -> tuple[list[tuple[Any, Any]], str]:
    """Returns input and expected output of each row, and the shape, told apart by whether messages are answered."""
    pairs: list[tuple[Any, Any]] = []
    for row in rows:
        lacking = [key for key in SHAPES[shape] if row.value.get(key) is None]
        if lacking:
            has = ", ".join(row.value) or "no fields"
            fix = f"the dataset's shape is {shape}; give the row {', '.join(lacking)}"
            found.add(row.place, f"no {' and no '.join(lacking)} (the row has {has})", fix)
            pairs.append((None, None))
            continue
        try:
            asked, expected = _READERS[shape](row.value)
        except BadRow as error:
            found.add(row.place, str(error), f"the dataset's shape is {shape}")
            asked, expected = None, None
        if shape in (MESSAGES, "prompt") and (columns.is_asked("answer_key") or expected is None):
            expected = row.value.get(columns.answer_key)
        pairs.append((asked, expected))
    answered = [expected is not None for asked, expected in pairs if asked is not None]
    if shape == LABELLED or (not any(answered) and not columns.is_asked("answer_key")):
        return pairs, TO_BE_ANSWERED if shape == MESSAGES else shape
    for row, (asked, expected) in zip(rows, pairs, strict=True):
        if asked is not None and expected is None:
            what = f'no final assistant message and no field "{columns.answer_key}"'
            what = what if shape == MESSAGES else f'no field "{columns.answer_key}"'
            found.add(row.place, f"{what}; other rows have an answer, so every row needs one")
    return pairs, shape


def _ids(rows: Sequence[Row], columns: Columns, found: Found) -> list[str]:
    """Returns the ids as text; rows are numbered where none has one."""
    has_id = columns.is_asked("id_key") or any(row.value.get(columns.id_key) is not None for row in rows)
    needs_id = "" if columns.is_asked("id_key") else "; some rows have an id, so every row needs one"
    seen: dict[str, str] = {}
    ids = []
    for number, row in enumerate(rows, start=1):
        id_ = row.value.get(columns.id_key)
        if has_id and id_ is None:
            _require(row, columns.id_key, found, needs_id)
        text = str(id_) if has_id else str(number)
        if text in seen and id_ is not None:
            found.add(row.place, f'the id "{text}" is taken by {seen[text]}', "give every example an id of its own")
        seen.setdefault(text, row.place)
        ids.append(text)
    return ids


def _require(row: Row, key: str, found: Found, why: str = "") -> None:
    if row.value.get(key) is not None:
        return
    if key in row.value:
        found.add(row.place, f'the field "{key}" is null{why}')
        return
    hint = did_you_mean(key, row.value)
    message = f'no field "{key}"{hint or ";"} the row has {", ".join(row.value) or "no fields"}{why}'
    fix = "name the column with question_key, answer_key or id_key, or use messages or prompt/completion"
    found.add(row.place, message, "" if why else fix)


def messages_of(value: Any, where: str) -> list[dict[str, Any]]:
    """Returns chat messages without the empty fields that columnar formats add.

    Raises:
        BadRow: It is no list of messages in OpenAI's shape.
    """
    if not isinstance(value, list) or not value:
        raise BadRow(f"{where}: expected a list of messages, found {_shown(value)}")
    messages = []
    for number, message in enumerate(value):
        place = f"{where}[{number}]"
        if not isinstance(message, Mapping):
            raise BadRow(f"{place}: expected a message, found {_shown(message)}")
        role = message.get("role")
        if role not in ROLES:
            raise BadRow(f"{place}: role {role!r}{did_you_mean(str(role), ROLES) or ';'} roles: {', '.join(ROLES)}")
        content = message.get("content")
        if content is None and not message.get("tool_calls") and not message.get("function_call"):
            raise BadRow(f"{place}: no content and no tool_calls")
        if not isinstance(content, str | list | None):
            raise BadRow(f"{place}: content is {_shown(content)}, expected text or a list of blocks")
        messages.append({key: item for key, item in message.items() if item is not None or key == "content"})
    return messages


def _conversation(row: dict[str, Any]) -> tuple[Any, Any]:
    messages = messages_of(row["messages"], "messages")
    if messages[-1]["role"] != "assistant":
        return messages, None
    if len(messages) == 1:
        raise BadRow("messages: only an assistant message, so there is nothing to answer")
    return messages[:-1], _answer(messages[-1:], "messages")


def _prompt(value: Any, where: str = "prompt") -> Any:
    return value if isinstance(value, str) else messages_of(value, where)


def _answer(value: Any, where: str) -> Any:
    """Returns an answer as text where it is one; else the messages (tool calls, several turns)."""
    if isinstance(value, str):
        return value
    messages = messages_of(value, where)
    content = messages[0].get("content")
    return content if len(messages) == 1 and isinstance(content, str) and content else messages


def _preference(row: dict[str, Any]) -> tuple[Any, Any]:
    _answer(row["rejected"], "rejected")
    return _prompt(row["prompt"]), _answer(row["chosen"], "chosen")


def _openai_preference(row: dict[str, Any]) -> tuple[Any, Any]:
    if not isinstance(row["input"], Mapping):
        raise BadRow(f"input: expected an object with messages, found {_shown(row['input'])}")
    asked = messages_of(row["input"].get("messages"), "input.messages")
    _answer(row["non_preferred_output"], "non_preferred_output")
    return asked, _answer(row["preferred_output"], "preferred_output")


def _labelled(row: dict[str, Any]) -> tuple[Any, Any]:
    if not isinstance(row["label"], bool):
        raise BadRow(f"label: expected true or false, found {_shown(row['label'])}")
    answer = _answer(row["completion"], "completion")
    return _prompt(row["prompt"]), answer if row["label"] else None


_READERS: dict[str, Callable[[dict[str, Any]], tuple[Any, Any]]] = {
    MESSAGES: _conversation,
    "openai preference": _openai_preference,
    "prompt/chosen/rejected": _preference,
    LABELLED: _labelled,
    "prompt/completion": lambda row: (_prompt(row["prompt"]), _answer(row["completion"], "completion")),
    "prompt": lambda row: (_prompt(row["prompt"]), None),
}


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float):
        return str(value)
    return f'"{value[:40]}"' if isinstance(value, str) and value else "nothing" if not value else type(value).__name__
