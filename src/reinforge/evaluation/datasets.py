"""Datasets: files of rows, or rows from Python, as examples.

    {"id": "q1", "question": "2+3?", "answer": "5"}
        => EvalInputItem(id="q1", input_obj="2+3?", expected_output_obj="5", full_dataset_entry=<the row>)

Ids are text; where no row has one, rows are numbered from 1. Everything that is wrong with the rows is told at once.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from reinforge.config.schema import Block, DatasetConfig
from reinforge.errors import ConfigError, Problem, did_you_mean
from reinforge.interfaces import DatasetLoader
from reinforge.registry import register_dataset
from reinforge.types.evaluation import EvalInputItem

MAX_PROBLEMS = 20
SPACE = " \t\r\n"


class DatasetStructure(Block):
    """The reference's place for the names of the columns."""

    question_key: str | None = Field(default=None, description="Column with the agent's input.")
    answer_key: str | None = Field(default=None, description="Column with the expected output.")


class FileDatasetConfig(DatasetConfig):
    """A file of rows; each row is an object."""

    file_path: Path = Field(description="The file; relative to the working directory, or else to the configuration.")
    id_key: str = Field(default="id", description="Column with the example's id; rows are numbered where none has it.")
    question_key: str = Field(default="question", description="Column with the agent's input.")
    answer_key: str = Field(default="answer", description="Column with the expected output; all rows have it or none.")
    structure: DatasetStructure | None = Field(default=None, description="question_key and answer_key, nested.")

    @model_validator(mode="after")
    def _flatten(self) -> FileDatasetConfig:
        structure, self.structure = self.structure, None
        for name in ("question_key", "answer_key"):
            nested = getattr(structure, name, None)
            if nested is None:
                continue
            if name in self.model_fields_set and getattr(self, name) != nested:
                raise ValueError(f'{name} is "{getattr(self, name)}" here and "{nested}" under structure; give it once')
            setattr(self, name, nested)
        return self


class JsonDatasetConfig(FileDatasetConfig, name="json"):
    """A JSON file that holds one list of objects."""


class JsonlDatasetConfig(FileDatasetConfig, name="jsonl"):
    """A file with one JSON object on each line; empty lines are skipped."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row and where it stands, for example `train.jsonl:7`."""

    value: Any
    place: str


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns hold what; a name that is not the default was asked for and must be there."""

    id_key: str = "id"
    question_key: str = "question"
    answer_key: str = "answer"

    def is_asked(self, name: str) -> bool:
        """Returns True if the user named this column: `id_key` or `answer_key`."""
        return bool(getattr(self, name) != getattr(Columns(), name))


@dataclass
class _Found:
    """Problems by place; prints the first twenty and says how many more there are."""

    problems: list[Problem] = field(default_factory=list)

    def add(self, place: str, message: str, fix: str = "") -> None:
        self.problems.append(Problem("", message, fix, place))

    def raise_all(self) -> None:
        if len(self.problems) > MAX_PROBLEMS:
            rest = Problem("", f"and {len(self.problems) - MAX_PROBLEMS} more problems like these")
            raise ConfigError([*self.problems[:MAX_PROBLEMS], rest])
        if self.problems:
            raise ConfigError(self.problems)


class FileDataset(DatasetLoader):
    """Examples of one JSON or JSONL file.

    Args:
        config: Its settings.
        project_root: The configuration's folder.
    """

    def __init__(self, config: FileDatasetConfig, project_root: Path):
        self.config, self.project_root = config, project_root

    def load(self) -> list[EvalInputItem]:
        """Returns every example, in the file's order."""
        path = self._find()
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ConfigError(Problem("", "the file is not UTF-8", "save it as UTF-8", str(path))) from error
        except OSError as error:
            raise ConfigError(Problem("", f"the dataset cannot be read: {error.strerror}", "", str(path))) from error
        found = _Found()
        parse = json_rows if isinstance(self.config, JsonDatasetConfig) else jsonl_rows
        rows = list(parse(text, str(path), found))
        columns = Columns(self.config.id_key, self.config.question_key, self.config.answer_key)
        return examples_from_rows(rows, columns, str(path), found)

    def _find(self) -> Path:
        written = self.config.file_path
        if written.is_file():
            return written
        if (self.project_root / written).is_file():
            return self.project_root / written
        tried = list(dict.fromkeys([written.absolute(), self.project_root.absolute() / written]))
        beside = [entry.name for path in tried if path.parent.is_dir() for entry in path.parent.iterdir()]
        message = f"there is no file {written}{did_you_mean(written.name, beside)}"
        fix = f"looked for {' and '.join(map(str, tried))}"
        raise ConfigError(Problem("eval.general.dataset.file_path", message, fix))


class ListDataset(DatasetLoader):
    """Examples from Python.

    Args:
        rows: Mappings with the columns below, or finished `EvalInputItem`s.
        id_key: Column with the id.
        question_key: Column with the agent's input.
        answer_key: Column with the expected output.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any] | EvalInputItem],
        *,
        id_key: str = "id",
        question_key: str = "question",
        answer_key: str = "answer",
    ):
        self.rows, self.columns = list(rows), Columns(id_key, question_key, answer_key)

    def load(self) -> list[EvalInputItem]:
        """Returns every example, in order."""
        if self.rows and all(isinstance(row, EvalInputItem) for row in self.rows):
            return [row.model_copy() for row in self.rows if isinstance(row, EvalInputItem)]
        rows = [
            Row(dict(row) if isinstance(row, Mapping) else row, f"row {n}") for n, row in enumerate(self.rows, start=1)
        ]
        return examples_from_rows(rows, self.columns, "the dataset", _Found())


def json_rows(text: str, name: str, found: _Found) -> Iterator[Row]:
    """Yields the items of a JSON list, each with the line that it begins on."""
    decoder = json.JSONDecoder()
    position = line = 0

    def skip(characters: str) -> None:
        nonlocal position, line
        start = position
        while position < len(text) and text[position] in characters:
            position += 1
        line += text.count("\n", start, position)

    skip(SPACE)
    if text[position : position + 1] != "[":
        fix = "use `_type: jsonl` for one object a line" if text[position : position + 1] == "{" else ""
        found.add(f"{name}:{line + 1}", "expected a JSON list of objects", fix)
        return
    position += 1
    skip(SPACE)
    while text[position : position + 1] != "]":
        start = position
        try:
            value, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            found.add(f"{name}:{error.lineno}:{error.colno}", f"not JSON: {error.msg[:1].lower()}{error.msg[1:]}")
            return
        yield Row(value, f"{name}:{line + 1}")
        line += text.count("\n", start, position)
        skip(SPACE)
        if text[position : position + 1] == ",":
            position += 1
            skip(SPACE)
        elif text[position : position + 1] != "]":
            found.add(f"{name}:{line + 1}", "not JSON: expected , or ] after an item of the list")
            return
    position += 1
    skip(SPACE)
    if position < len(text):
        found.add(f"{name}:{line + 1}", "not JSON: something follows the end of the list")


def jsonl_rows(text: str, name: str, found: _Found) -> Iterator[Row]:
    """Yields the object of each line that is not empty."""
    if text.lstrip().startswith("["):
        found.add(f"{name}:1", "expected one JSON object on each line, found a list", "use `_type: json`")
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield Row(json.loads(line), f"{name}:{number}")
        except json.JSONDecodeError as error:
            found.add(f"{name}:{number}:{error.colno}", f"not JSON: {error.msg[:1].lower()}{error.msg[1:]}")


def examples_from_rows(rows: Sequence[Row], columns: Columns, name: str, found: _Found) -> list[EvalInputItem]:
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
    has_id = columns.is_asked("id_key") or any(row.value.get(columns.id_key) is not None for row in usable)
    has_answer = columns.is_asked("answer_key") or any(row.value.get(columns.answer_key) is not None for row in usable)
    seen: dict[str, str] = {}
    items: list[EvalInputItem] = []
    for number, row in enumerate(usable, start=1):
        _require(row, columns.question_key, found)
        if has_answer:
            _require(row, columns.answer_key, found, "; some rows have an answer, so every row needs one")
        id_ = row.value.get(columns.id_key)
        if has_id and id_ is None:
            _require(row, columns.id_key, found, "; some rows have an id, so every row needs one")
            continue
        text = str(id_) if has_id else str(number)
        if text in seen:
            found.add(row.place, f'the id "{text}" is taken by {seen[text]}', "give every example an id of its own")
        seen.setdefault(text, row.place)
        items.append(
            EvalInputItem(
                id=text,
                input_obj=row.value.get(columns.question_key),
                expected_output_obj=row.value.get(columns.answer_key),
                full_dataset_entry=row.value,
            )
        )
    found.raise_all()
    return items


def _require(row: Row, key: str, found: _Found, why: str = "") -> None:
    if row.value.get(key) is not None:
        return
    if key in row.value:
        found.add(row.place, f'the field "{key}" is null{why}')
        return
    hint = did_you_mean(key, row.value)
    message = f'no field "{key}"{hint or ";"} the row has {", ".join(row.value) or "no fields"}{why}'
    found.add(row.place, message, "" if why else "name the column with question_key, answer_key or id_key")


@register_dataset(config_type=JsonDatasetConfig)
async def json_dataset(config: JsonDatasetConfig, builder: Any) -> AsyncIterator[DatasetLoader]:
    """Yields the examples of a JSON file."""
    yield FileDataset(config, builder.project_root)


@register_dataset(config_type=JsonlDatasetConfig)
async def jsonl_dataset(config: JsonlDatasetConfig, builder: Any) -> AsyncIterator[DatasetLoader]:
    """Yields the examples of a JSONL file."""
    yield FileDataset(config, builder.project_root)


class RowsDatasetConfig(DatasetConfig, name="rows"):
    """Rows that stand in the configuration itself, or come from Python."""

    rows: list[Any] = Field(description="Mappings with the columns below, or finished EvalInputItems.")
    id_key: str = Field(default="id", description="Column with the id.")
    question_key: str = Field(default="question", description="Column with the agent's input.")
    answer_key: str = Field(default="answer", description="Column with the expected output.")


@register_dataset(config_type=RowsDatasetConfig)
async def rows_dataset(config: RowsDatasetConfig, builder: Any) -> AsyncIterator[DatasetLoader]:
    """Yields the rows."""
    yield ListDataset(config.rows, id_key=config.id_key, question_key=config.question_key, answer_key=config.answer_key)
