"""Checks the rows of a file before a job runs, as `reinforge data validate` does, and by OpenAI's rules of each method.

    line 3: messages[1]: unknown role 'bot'; allowed: system, developer, user, ...
    line 7: item has no city; it has messages, answer                     (a grader asks for {{item.city}})

Every bad row is named by its line, the first twenty of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from reinforge.errors import ConfigError
from reinforge.evaluation.demonstrations import parse_demonstrations
from reinforge.evaluation.row_limits import RowLimits, TextRows
from reinforge.evaluation.rows import Row, RowProblems, read_jsonl_rows
from reinforge.evaluation.shapes import MESSAGES, InvalidRowError, parse_messages
from reinforge.files import replace_file
from reinforge.protocols.openai.graders.schema import Grader, list_graders, list_templates
from reinforge.protocols.openai.graders.templates import TemplateError, check_fields

ROW_ID, PROMPT, ROW = "id", "prompt", "row"
"""Columns of the file that a reinforcement job is given: the prompt, and the whole row for the grader."""
MAX_SHOWN_ROWS = 16  # training rows by which a job without a validation file shows its progress
TOOL_KEYS = ("tools", "parallel_tool_calls", "functions")
MESSAGE_KEYS = (
    "role", "content", "name", "weight", "refusal", "tool_calls", "tool_call_id", "reasoning_content", "reasoning",
    "thinking",
)  # fmt: skip
Check = Callable[[Any], None]


def prepare_rows(
    source: Path, target: Path, method: str, grader: Grader | None = None, training: Path | None = None
) -> tuple[int, int]:
    """Checks the rows of a file, those to hold out also against `training`, and writes them as a job reads them.

    Pairs of equal replies are left out: their gradients cancel, and clients that pair sampled replies write some.

    Returns:
        The number of rows that are written, and of those left out.
    """
    try:
        rows, num_equal = _read_checked_rows(source, CHECKS[method], grader, training)
    except ConfigError as error:
        lines = [(each, each.location.removeprefix(str(source)).lstrip(":")) for each in error.problems]
        named = [replace(each, location=f"line {line}" if line else "") for each, line in lines]
        raise ConfigError(named) from None
    values = [row.value for row in rows]
    if method == "reinforcement":
        values = [
            {ROW_ID: str(number), PROMPT: value["messages"], ROW: value} for number, value in enumerate(values, 1)
        ]
    replace_file(target, "".join(json.dumps(value) + "\n" for value in values))
    return len(values), num_equal


def _read_checked_rows(
    source: Path, check: Check, grader: Grader | None, training: Path | None
) -> tuple[list[Row], int]:
    """Returns the rows, without pairs of equal replies, and the number of these."""
    problems, rows, num_equal = RowProblems(), list[Row](), 0
    trained, held_out = set() if training is None else _read_contents(training), set[str]()
    for row in read_jsonl_rows(TextRows(source, RowLimits()), problems):
        try:
            check(row.value)
            if grader is not None:
                check_references(grader, row.value)
        except (InvalidRowError, TemplateError) as error:
            problems.add(row.location, str(error))
        else:
            if check is _check_preference and row.value["preferred_output"] == row.value["non_preferred_output"]:
                num_equal += 1
                continue
        rows.append(row)
        if training is not None:
            held_out.add(content := _format_content(row.value))
            if content in trained:
                problems.add(row.location, "the row is also in the training file; remove it from one of the two")
    if not rows and not problems.problems:
        equal = "preferred_output and non_preferred_output are the same in every row"
        problems.add("", equal if num_equal else "the file has no rows")
    elif len(held_out) == 1:
        problems.add("", "a validation file needs at least two rows that differ; add some, or leave the file out")
    problems.raise_all()
    return rows, num_equal


def _read_contents(path: Path) -> set[str]:
    with path.open(encoding="utf-8") as lines:
        values = map(json.loads, lines)
        return {_format_content(value.get(ROW, value)) for value in values}


def _format_content(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def check_references(grader: Grader, row: Mapping[str, Any]) -> None:
    for _, each in list_graders(grader):
        for _, template in list_templates(each):
            check_fields(template, row)


def _check_supervised(row: Any) -> None:
    _check_keys(row, "messages", *TOOL_KEYS)
    if "functions" in row:
        raise InvalidRowError("functions: use tools instead, a list of {type: function, function: {...}}")
    _check_messages(row.get("messages"), "messages")
    [demonstration] = parse_demonstrations(row, MESSAGES)
    if len(row["messages"]) < 2:
        raise InvalidRowError("messages: expected a message before the assistant's")
    if not demonstration.replies():
        raise InvalidRowError("messages: no assistant message has a weight other than 0, so there is nothing to train")


def _check_preference(row: Any) -> None:
    _check_keys(row, "input", "preferred_output", "non_preferred_output")
    missing = [name for name in ("input", "preferred_output", "non_preferred_output") if name not in row]
    if missing:
        raise InvalidRowError(
            f"no {' and no '.join(missing)}; expected input, preferred_output and non_preferred_output"
        )
    _check_keys(row["input"], "messages", "tools", "parallel_tool_calls", where="input: ")
    _check_messages(row["input"].get("messages"), "input.messages")
    for name in ("preferred_output", "non_preferred_output"):
        messages = _check_messages(row[name], name)
        if [message["role"] for message in messages] != ["assistant"]:
            raise InvalidRowError(f"{name}: expected one assistant message")
    parse_demonstrations(row, "openai preference")


def _check_prompt(row: Any) -> None:
    if not isinstance(row, Mapping):
        raise InvalidRowError(f"expected an object, found {type(row).__name__}")
    if row.get("tools"):
        raise InvalidRowError("tools: a job with a grader trains answers without tools")
    messages = _check_messages(row.get("messages"), "messages")
    if messages[-1]["role"] == "assistant":
        raise InvalidRowError("messages: the last message is the assistant's, but the model is to write that")


CHECKS: dict[str, Check] = {"supervised": _check_supervised, "dpo": _check_preference, "reinforcement": _check_prompt}


def _check_keys(value: Any, *allowed: str, where: str = "") -> None:
    if not isinstance(value, Mapping):
        raise InvalidRowError(f"{where}expected an object, found {type(value).__name__}")
    if further := sorted(str(key) for key in set(value) - set(allowed)):
        raise InvalidRowError(f"{where}unexpected keys {', '.join(further)[:200]}; allowed: {', '.join(allowed)}")


def _check_messages(value: Any, field: str) -> list[dict[str, Any]]:
    messages = parse_messages(value, field)
    for number, message in enumerate(messages):
        if message.get("weight", 1) not in (0, 1):
            raise InvalidRowError(f"{field}[{number}]: weight must be 0 or 1, found {str(message['weight'])[:20]}")
        if further := sorted(set(message) - set(MESSAGE_KEYS)):
            found, allowed = ", ".join(further)[:200], ", ".join(MESSAGE_KEYS)
            raise InvalidRowError(f"{field}[{number}]: unexpected keys {found}; allowed: {allowed}")
        _check_content(message.get("content"), f"{field}[{number}].content")
        if message["role"] == "tool" and not message.get("tool_call_id"):
            raise InvalidRowError(f"{field}[{number}]: tool_call_id is missing")
    return messages


def _check_content(content: Any, field: str) -> None:
    """Checks that a message has no content that would not be trained on, such as an image."""
    for number, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidRowError(f"{field}[{number}]: only parts of the type text are supported, found {kind!s:.40}")


def show_rows(source: Path, target: Path) -> None:
    """Writes a few rows of a job's file, spread over it, by which a job without held-out rows shows its progress."""
    lines = source.read_text(encoding="utf-8").splitlines(keepends=True)
    step = max(1, len(lines) // MAX_SHOWN_ROWS)
    shown = lines[::step][:MAX_SHOWN_ROWS]
    if len(shown) == 1:  # a run splits them in two
        again = json.loads(shown[0])
        shown.append(json.dumps({**again, **({ROW_ID: "again"} if ROW_ID in again else {})}) + "\n")
    replace_file(target, "".join(shown))
