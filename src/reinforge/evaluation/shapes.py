"""Detects the shape of a dataset's rows and turns them into examples.

    question/answer             {"question": Q, "answer": A}                   => input Q, expected A
    messages                    {"messages": [M.., {"role": "assistant"..}]}   => input M.., expected the last text
    messages, with a thumb      {"messages": [M.., {"role": "assistant"..}],
                                 "label": true}                                => the same; expected None if false
    messages (prompts only)     {"messages": [M..], "label": 3}                => input M.., extra fields for the reward
    prompt/completion           {"prompt": P, "completion": C}                 => input P, expected C
    prompt/completion/label     {"prompt": P, "completion": C, "label": true}  => input P, expected C, or None if false
    prompt/chosen/rejected      {"prompt": P, "chosen": C, "rejected": R}      => input P, expected C
    openai preference           {"input": {"messages": [M..]}, "preferred_output": [C],
                                 "non_preferred_output": [R]}                  => input M.., expected C
    prompt                      {"prompt": P}                                  => input P

A dataset has one shape, detected from its rows; columns named in the configuration take precedence. Whatever the shape,
`full_dataset_entry` keeps the whole row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reinforge.errors import did_you_mean
from reinforge.evaluation.rows import Row, RowProblems
from reinforge.types.evaluation import EvalInputItem

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
QUESTION_ANSWER = "question/answer"
MESSAGES, MESSAGES_PROMPTS_ONLY = "messages", "messages (prompts only)"
LABELED = "prompt/completion/label"

SHAPES: dict[str, tuple[str, ...]] = {
    MESSAGES: ("messages",),
    "openai preference": ("input", "preferred_output", "non_preferred_output"),
    "prompt/chosen/rejected": ("prompt", "chosen", "rejected"),
    LABELED: ("prompt", "completion", "label"),
    "prompt/completion": ("prompt", "completion"),
    "prompt": ("prompt",),
}
"""Shape -> the columns that it requires, the most specific shape first."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Names of the columns; one that differs from the default was configured, so every row must have it."""

    id_key: str = "id"
    question_key: str = "question"
    answer_key: str = "answer"

    def is_configured(self, name: str) -> bool:
        return bool(getattr(self, name) != getattr(Columns(), name))


@dataclass(frozen=True, slots=True)
class LoadedExamples:
    """Examples, the shape of their rows, and the location of each row by example id."""

    items: list[EvalInputItem]
    shape: str
    row_locations: dict[str, str]


class InvalidRowError(Exception):
    """A row that cannot be used."""


def build_examples(rows: Sequence[Row], columns: Columns, name: str, problems: RowProblems) -> LoadedExamples:
    """Returns one example per row; raises all problems, those found so far too."""
    if not rows and not problems.problems:
        problems.add(name, "the dataset is empty", "add at least one row")
    usable = [row for row in rows if isinstance(row.value, dict)]
    for row in rows:
        if not isinstance(row.value, dict):
            problems.add(row.location, f"expected an object, found {type(row.value).__name__}")
    shape = detect_shape(usable, columns)
    if shape == QUESTION_ANSWER:
        pairs = _read_question_answer_pairs(usable, columns, problems)
    else:
        pairs, shape = _read_shaped_pairs(usable, shape, columns, problems)
    ids = _read_ids(usable, columns, problems)
    order = {row.location: number for number, row in enumerate(rows)}
    problems.problems.sort(key=lambda problem: order.get(problem.location, -1))
    problems.raise_all()
    items = [
        EvalInputItem(id=id_, input_obj=prompt, expected_output_obj=expected, full_dataset_entry=row.value)
        for row, id_, (prompt, expected) in zip(usable, ids, pairs, strict=True)
    ]
    return LoadedExamples(items, shape, {id_: row.location for row, id_ in zip(usable, ids, strict=True)})


def detect_shape(rows: Sequence[Row], columns: Columns) -> str:
    """Returns the shape of most rows; question/answer if question_key is configured or no other shape matches."""
    if columns.is_configured("question_key"):
        return QUESTION_ANSWER
    counts: Counter[str] = Counter()
    for row in rows:
        if columns.question_key in row.value:
            counts[QUESTION_ANSWER] += 1
            continue
        counts[next((shape for shape in SHAPES if _matches_shape(row.value, shape)), "")] += 1
    del counts[""]
    return counts.most_common(1)[0][0] if counts else QUESTION_ANSWER


def read_label(row: Mapping[str, Any]) -> bool | None:
    """Returns a row's thumb: true or false in the column `label`, also as text in a cell of a CSV file; else None."""
    label = row.get("label")
    if isinstance(label, str):
        return {"true": True, "false": False}.get(label.strip().lower())
    return label if isinstance(label, bool) else None


def _matches_shape(row: Mapping[str, Any], shape: str) -> bool:
    if shape == LABELED and read_label(row) is None:
        return False  # some other column that happens to be called label
    return all(row.get(key) is not None for key in SHAPES[shape])


def _read_question_answer_pairs(rows: Sequence[Row], columns: Columns, problems: RowProblems) -> list[tuple[Any, Any]]:
    is_configured = columns.is_configured("answer_key")
    has_answer = is_configured or any(row.value.get(columns.answer_key) is not None for row in rows)
    reason = "" if is_configured else "; some rows have an answer, so every row needs one"
    has_question = any(row.value.get(columns.question_key) is not None for row in rows)
    pairs = []
    for row in rows:
        _require_field(row, columns.question_key, problems, "; other rows have one" if has_question else "")
        if has_answer:
            _require_field(row, columns.answer_key, problems, reason)
        pairs.append((row.value.get(columns.question_key), row.value.get(columns.answer_key)))
    return pairs


def _read_shaped_pairs(
    rows: Sequence[Row], shape: str, columns: Columns, problems: RowProblems
) -> tuple[list[tuple[Any, Any]], str]:
    """Returns the input and the expected output of each row, and the shape (`messages` with or without answers)."""
    pairs: list[tuple[Any, Any]] = []
    for row in rows:
        absent = [key for key in SHAPES[shape] if row.value.get(key) is None]
        if absent:
            has = ", ".join(row.value) or "no fields"
            fix = f"add {', '.join(absent)} to the row, since the dataset has the shape {shape}"
            problems.add(row.location, f"no {' and no '.join(absent)} (the row has {has})", fix)
            pairs.append((None, None))
            continue
        try:
            prompt, expected = _READERS[shape](row.value)
        except InvalidRowError as error:
            problems.add(row.location, str(error), f"write the row in the shape of the dataset: {shape}")
            prompt, expected = None, None
        if shape in (MESSAGES, "prompt") and (columns.is_configured("answer_key") or expected is None):
            expected = row.value.get(columns.answer_key)
        pairs.append((prompt, expected))
    answered = [expected is not None for prompt, expected in pairs if prompt is not None]
    if shape == LABELED or (not any(answered) and not columns.is_configured("answer_key")):
        return pairs, MESSAGES_PROMPTS_ONLY if shape == MESSAGES else shape
    for row, (prompt, expected) in zip(rows, pairs, strict=True):
        if prompt is not None and expected is None and not _is_disliked(row.value):
            what = f'no final assistant message and no field "{columns.answer_key}"'
            what = what if shape == MESSAGES else f'no field "{columns.answer_key}"'
            problems.add(row.location, f"{what}; other rows have an answer, so every row needs one")
    return pairs, shape


def _read_ids(rows: Sequence[Row], columns: Columns, problems: RowProblems) -> list[str]:
    """Returns the ids as strings; if no row has one, rows are numbered from 1."""
    has_id = columns.is_configured("id_key") or any(row.value.get(columns.id_key) is not None for row in rows)
    reason = "" if columns.is_configured("id_key") else "; some rows have an id, so every row needs one"
    seen: dict[str, str] = {}
    ids = []
    for number, row in enumerate(rows, start=1):
        id_ = row.value.get(columns.id_key)
        if has_id and id_ is None:
            _require_field(row, columns.id_key, problems, reason)
        text = str(id_) if has_id else str(number)
        if text in seen and id_ is not None:
            problems.add(row.location, f'id "{text}" is already used at {seen[text]}', "give every example its own id")
        seen.setdefault(text, row.location)
        ids.append(text)
    return ids


def _require_field(row: Row, key: str, problems: RowProblems, reason: str = "") -> None:
    if row.value.get(key) is not None:
        return
    if key in row.value:
        problems.add(row.location, f'the field "{key}" is null{reason}')
        return
    hint = did_you_mean(key, row.value)
    message = f'no field "{key}"{hint or ";"} the row has {", ".join(row.value) or "no fields"}{reason}'
    fix = "rename the column, or name it in the run's dataset: question_key, answer_key or id_key"
    problems.add(row.location, message, "" if reason else fix)


def parse_messages(value: Any, field: str) -> list[dict[str, Any]]:
    """Returns chat messages in OpenAI's format, without the null fields that columnar formats add."""
    if not isinstance(value, list) or not value:
        raise InvalidRowError(f"{field}: expected a list of messages, found {_describe(value)}")
    messages = []
    for number, message in enumerate(value):
        path = f"{field}[{number}]"
        if not isinstance(message, Mapping):
            raise InvalidRowError(f"{path}: expected a message, found {_describe(message)}")
        role = message.get("role")
        if role not in ROLES:
            hint = did_you_mean(str(role), ROLES)
            raise InvalidRowError(f"{path}: unknown role {role!r}{hint or ';'} allowed: {', '.join(ROLES)}")
        content = message.get("content")
        if content is None and not message.get("tool_calls") and not message.get("function_call"):
            raise InvalidRowError(f"{path}: no content and no tool_calls")
        if not isinstance(content, str | list | None):
            raise InvalidRowError(f"{path}: content is {_describe(content)}, expected a string or a list of blocks")
        messages.append({key: item for key, item in message.items() if item is not None or key == "content"})
    return messages


def _is_disliked(row: Mapping[str, Any]) -> bool:
    """Returns True if the last message of a row is a reply with a thumb down, which is not an answer to expect."""
    messages = row.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    return read_label(row) is False and isinstance(last, Mapping) and last.get("role") == "assistant"


def _read_conversation(row: dict[str, Any]) -> tuple[Any, Any]:
    messages = parse_messages(row["messages"], "messages")
    if messages[-1]["role"] != "assistant":
        return messages, None
    if len(messages) == 1:
        raise InvalidRowError("messages: expected a message before the assistant's")
    # `weight` is about training; a model that is asked need not know it
    prompt = [{key: value for key, value in each.items() if key != "weight"} for each in messages[:-1]]
    return prompt, None if _is_disliked(row) else _parse_answer(messages[-1:], "messages")


def _parse_prompt(value: Any) -> Any:
    return value if isinstance(value, str) else parse_messages(value, "prompt")


def _parse_answer(value: Any, field: str) -> Any:
    """Returns an answer as a string if it is plain text; otherwise its messages (tool calls, several turns)."""
    if isinstance(value, str):
        return value
    messages = parse_messages(value, field)
    content = messages[0].get("content")
    return content if len(messages) == 1 and isinstance(content, str) and content else messages


def _read_preference(row: dict[str, Any]) -> tuple[Any, Any]:
    _parse_answer(row["rejected"], "rejected")
    return _parse_prompt(row["prompt"]), _parse_answer(row["chosen"], "chosen")


def _read_openai_preference(row: dict[str, Any]) -> tuple[Any, Any]:
    if not isinstance(row["input"], Mapping):
        raise InvalidRowError(f"input: expected an object with messages, found {_describe(row['input'])}")
    prompt = parse_messages(row["input"].get("messages"), "input.messages")
    _parse_answer(row["non_preferred_output"], "non_preferred_output")
    return prompt, _parse_answer(row["preferred_output"], "preferred_output")


def _read_labeled(row: dict[str, Any]) -> tuple[Any, Any]:
    if (label := read_label(row)) is None:
        raise InvalidRowError(f"label: expected true or false, found {_describe(row['label'])}")
    answer = _parse_answer(row["completion"], "completion")
    return _parse_prompt(row["prompt"]), answer if label else None


_READERS: dict[str, Callable[[dict[str, Any]], tuple[Any, Any]]] = {
    MESSAGES: _read_conversation,
    "openai preference": _read_openai_preference,
    "prompt/chosen/rejected": _read_preference,
    LABELED: _read_labeled,
    "prompt/completion": lambda row: (_parse_prompt(row["prompt"]), _parse_answer(row["completion"], "completion")),
    "prompt": lambda row: (_parse_prompt(row["prompt"]), None),
}


def _describe(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float):
        return str(value)
    return f'"{value[:40]}"' if isinstance(value, str) and value else "nothing" if not value else type(value).__name__
