"""Reads rows from files, each with its location.

    train.jsonl, line 7    =>  Row({"question": ...}, "train.jsonl:7")
    train.parquet, row 7   =>  Row({"question": ...}, "train.parquet: row 7")

Rows that cannot be read are collected in a `RowProblems` and reported together. CSV, JSON and JSONL need only the
standard library; Parquet and Hugging Face datasets need the extra `data`, which is imported on first use.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from reinforge.errors import BackendUnavailable, ConfigError, Problem, did_you_mean

MAX_PROBLEMS = 20
WHITESPACE = " \t\r\n"
INSTALL_COMMAND = "pip install 'reinforge[data]'"
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Row:
    """One row and its location, for example `train.jsonl:7`."""

    value: Any
    location: str


@dataclass
class RowProblems:
    """Problems with the rows of a dataset; reports the first twenty and the number of the others."""

    problems: list[Problem] = field(default_factory=list)

    def add(self, location: str, message: str, fix: str = "") -> None:
        """Adds a problem."""
        self.problems.append(Problem("", message, fix, location))

    def raise_all(self) -> None:
        """Raises a `ConfigError` with all problems, if there are any."""
        if len(self.problems) > MAX_PROBLEMS:
            rest = Problem("", f"and {len(self.problems) - MAX_PROBLEMS} more problems like these")
            raise ConfigError([*self.problems[:MAX_PROBLEMS], rest])
        if self.problems:
            raise ConfigError(self.problems)


def import_extra(module: str, type_name: str) -> ModuleType:
    """Imports a module of the extra `data`.

    Raises:
        ConfigError: The module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        message = f"`_type: {type_name}` needs {package}, which is not installed ({error})"
        raise ConfigError(Problem("eval.general.dataset._type", message, INSTALL_COMMAND)) from error


def read_json_rows(text: str, name: str, problems: RowProblems) -> Iterator[Row]:
    """Yields the items of a JSON list, each with the line on which it starts."""
    decoder = json.JSONDecoder()
    position = line = 0

    def skip(characters: str) -> None:
        nonlocal position, line
        start = position
        while position < len(text) and text[position] in characters:
            position += 1
        line += text.count("\n", start, position)

    skip(WHITESPACE)
    if text[position : position + 1] != "[":
        fix = "use `_type: jsonl` for one object per line" if text[position : position + 1] == "{" else ""
        problems.add(f"{name}:{line + 1}", "expected a JSON list of objects", fix)
        return
    position += 1
    skip(WHITESPACE)
    while text[position : position + 1] != "]":
        start = position
        try:
            value, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            message = f"invalid JSON: {error.msg[:1].lower()}{error.msg[1:]}"
            problems.add(f"{name}:{error.lineno}:{error.colno}", message)
            return
        yield Row(value, f"{name}:{line + 1}")
        line += text.count("\n", start, position)
        skip(WHITESPACE)
        if text[position : position + 1] == ",":
            position += 1
            skip(WHITESPACE)
        elif text[position : position + 1] != "]":
            problems.add(f"{name}:{line + 1}", "invalid JSON: expected , or ] after a list item")
            return
    position += 1
    skip(WHITESPACE)
    if position < len(text):
        problems.add(f"{name}:{line + 1}", "invalid JSON: unexpected text after the end of the list")


def read_jsonl_rows(text: str, name: str, problems: RowProblems) -> Iterator[Row]:
    """Yields the object on each line; empty lines are skipped."""
    if text.lstrip().startswith("["):
        problems.add(f"{name}:1", "expected one JSON object per line, found a list", "use `_type: json`")
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield Row(json.loads(line), f"{name}:{number}")
        except json.JSONDecodeError as error:
            message = f"invalid JSON: {error.msg[:1].lower()}{error.msg[1:]}"
            problems.add(f"{name}:{number}:{error.colno}", message)


def read_csv_rows(text: str, name: str, problems: RowProblems, delimiter: str = ",") -> Iterator[Row]:
    """Yields a dict from column names to cells for each row; every value is a string, an empty cell is None.

    A row's location is the line on which it starts, since quoted cells may contain line breaks.
    """
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    line = 0
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            fix = 'put cells with quotes or line breaks into "...", and write a quote inside them as ""'
            problems.add(f"{name}:{line}", f"invalid CSV: {error}", fix)
            return
        if not any(cells):
            continue
        if header is None:
            header = [cell.strip() for cell in cells]
            repeated = sorted({cell for cell in header if header.count(cell) > 1})
            if repeated or "" in header:
                what = f"names {', '.join(repeated)} more than once" if any(repeated) else "has a column without a name"
                problems.add(f"{name}:{line}", f"the header {what}", "give every column its own name")
                return
        elif len(cells) != len(header):
            fix = f"the header has {', '.join(header)}; set `delimiter` if the file uses another separator"
            problems.add(f"{name}:{line}", f"{len(cells)} cells, but the header has {len(header)} columns", fix)
        else:
            yield Row({key: cell or None for key, cell in zip(header, cells, strict=True)}, f"{name}:{line}")


def read_parquet_rows(path: Path) -> list[Row]:
    """Returns the rows of a Parquet file.

    Raises:
        ConfigError: pyarrow is not installed, or the file is not Parquet.
    """
    pyarrow, parquet = import_extra("pyarrow", "parquet"), import_extra("pyarrow.parquet", "parquet")
    try:
        table = parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(Problem("", f"not a Parquet file: {_get_first_line(error)}", "", str(path))) from error
    return number_rows(table.to_pylist(), str(path))


def read_hugging_face_rows(source: str, folder: Path | None, choice: Mapping[str, str | None]) -> list[Row]:
    """Returns the rows of a saved dataset, or of a dataset on the Hugging Face Hub.

    Args:
        source: The folder or hub id from the configuration.
        folder: The folder of a saved dataset; None: `source` is a hub id.
        choice: `split`, `subset` and `revision`; None for those that are not set.

    Raises:
        ConfigError: datasets is not installed, or the dataset or its split does not exist.
        BackendUnavailable: The hub does not respond.
    """
    datasets = import_extra("datasets", "hf_dataset")
    try:
        if folder is not None:
            loaded = datasets.load_from_disk(str(folder))
        else:
            loaded = datasets.load_dataset(source, name=choice.get("subset"), revision=choice.get("revision"))
    except ConnectionError as error:
        raise BackendUnavailable(f"cannot download the dataset {source}: {_get_first_line(error)}") from error
    except Exception as error:
        message = f"cannot load {source}: {type(error).__name__}: {_get_first_line(error)}"
        fix = "give a folder written by `save_to_disk`, or the id of a dataset on the Hugging Face Hub"
        raise ConfigError(Problem("eval.general.dataset.file_path", message, fix)) from error
    return number_rows(_select_split(loaded, source, choice.get("split")), source)


def _select_split(loaded: Any, source: str, split: str | None) -> Any:
    """Returns one split of a `DatasetDict`, or the dataset itself if it has no splits."""
    if not isinstance(loaded, Mapping):
        if split is None:
            return loaded
        message = f'split is "{split}", but {source} has no splits'
        raise ConfigError(Problem("eval.general.dataset.split", message, "remove split"))
    names = list(loaded)
    if split is None and len(names) == 1:
        return loaded[names[0]]
    if split in loaded:
        return loaded[split]
    what = "has several splits" if split is None else f'has no split "{split}"{did_you_mean(split, names)}'
    message = f"{source} {what}; available: {', '.join(map(str, names)) or 'none'}"
    raise ConfigError(Problem("eval.general.dataset.split", message, f"set split: {names[0]}" if names else ""))


def number_rows(values: Any, name: str) -> list[Row]:
    """Returns values as rows, numbered from 1."""
    return [Row(value, f"{name}: row {number}") for number, value in enumerate(values, start=1)]


def _get_first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
