"""Reads rows from files, each with its location.

    train.jsonl, line 7    =>  Row({"question": ...}, "train.jsonl:7")
    train.parquet, row 7   =>  Row({"question": ...}, "train.parquet: row 7")

Rows that cannot be read are collected in a `RowProblems` and reported together. CSV, JSON and JSONL need only the
standard library; Parquet and Hugging Face datasets need the extra `data`, which is imported on first use.
"""

from __future__ import annotations

import csv
import importlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from reinforge.bounded import TooDeepError, check_depth
from reinforge.errors import BackendUnavailable, ConfigError, Problem, did_you_mean
from reinforge.evaluation.row_limits import (
    JsonSyntaxError,
    JsonText,
    JsonTooLongError,
    RowLimits,
    TextRows,
    check_regular_file,
    describe_depth,
    find_unusable,
    is_suspect,
    reject_constant,
)
from reinforge.limits import get_limits

MAX_PROBLEMS, MAX_PLACES = 20, 4
INSTALL_COMMAND = "pip install 'reinforge[data]'"
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Row:
    """One row and its location, for example `train.jsonl:7`."""

    value: Any
    location: str


@dataclass
class RowProblems:
    """Problems with the rows of a dataset; reports equal ones once, the first twenty, and the number of the others."""

    problems: list[Problem] = field(default_factory=list)

    @property
    def first(self) -> list[Problem]:
        """The first twenty, and one more that counts the others."""
        equal: dict[tuple[str, str], list[Problem]] = {}
        for problem in self.problems:
            equal.setdefault((problem.message, problem.fix), []).append(problem)
        found = [_merge(problems) for problems in equal.values()]
        more = len(found) - MAX_PROBLEMS
        rest = [Problem("", f"and {more} more problems like these")] if more > 0 else []
        return [*found[:MAX_PROBLEMS], *rest]

    def add(self, location: str, message: str, fix: str = "") -> None:
        self.problems.append(Problem("", message, fix, location))

    def raise_all(self) -> None:
        if self.problems:
            raise ConfigError(self.first)


def _merge(equal: list[Problem]) -> Problem:
    first, *others = equal
    if not others:
        return first
    places = ", ".join(each.location for each in others[:MAX_PLACES]) + (", ..." if len(others) > MAX_PLACES else "")
    return replace(first, message=f"{len(equal)} × {first.message} (also at {places})")


def import_extra(module: str, type_name: str) -> ModuleType:
    """Imports a module of the extra `data`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        message = f"`_type: {type_name}` needs {package}, which is not installed ({error})"
        raise ConfigError(Problem("eval.general.dataset._type", message, INSTALL_COMMAND)) from error


def read_json_rows(file: TextRows, problems: RowProblems) -> Iterator[Row]:
    """Yields the items of a JSON list, each with the line on which it starts; only one is in memory at a time."""
    name, text = str(file.path), JsonText(file.read_parts(), file.limits.max_row_chars)
    if not text.take("["):
        fix = "use `_type: jsonl` for one object per line" if text.peek() == "{" else ""
        problems.add(f"{name}:{text.line}", "expected a JSON list of objects", fix)
        return
    yield from read_list_items(text, file, problems)
    if text.peek():
        problems.add(f"{name}:{text.line}", "invalid JSON: unexpected text after the end of the list")


def read_list_items(text: JsonText, file: TextRows, problems: RowProblems) -> Iterator[Row]:
    """Yields the items of a JSON list up to its end; after invalid JSON the rest of the file is skipped."""
    name, count = str(file.path), 0
    while text.peek() != "]":
        count, location = count + 1, f"{name}:{text.line}"
        if _is_too_many(count, file.limits, location, problems):
            text.drop_rest()
            return
        try:
            value, item = text.decode()
        except ConfigError:  # the file cannot be read any further
            raise
        except JsonTooLongError:
            _fits(None, file.limits, location, problems)
            text.drop_rest()
            return
        except ValueError as error:
            location = f"{name}:{error.line}:{error.column}" if isinstance(error, JsonSyntaxError) else location
            problems.add(location, *_describe_json_error(error))
            text.drop_rest()
            return
        if _fits(item, file.limits, location, problems) and _is_usable(value, item, location, problems):
            yield Row(value, location)
        if not text.take(",") and text.peek() != "]":
            problems.add(f"{name}:{text.line}", "invalid JSON: expected , or ] after a list item")
            text.drop_rest()
            return
    text.take("]")


def read_jsonl_rows(file: TextRows, problems: RowProblems) -> Iterator[Row]:
    """Yields the object on each line; empty lines are skipped."""
    name, count = str(file.path), 0
    for number, line in enumerate(file.read_lines(), start=1):
        location = f"{name}:{number}"
        if not _fits(line, file.limits, location, problems):
            return  # the rest of the line would count as another one
        if not line.strip():
            continue
        if count == 0 and line.lstrip().startswith("["):
            problems.add(f"{name}:1", "expected one JSON object per line, found a list", "use `_type: json`")
            return
        count += 1
        if _is_too_many(count, file.limits, location, problems):
            return
        try:
            check_depth(line, 0, get_limits().json_depth)
            value = json.loads(line.rstrip("\n"), parse_constant=reject_constant)
        except ValueError as error:
            column = f":{error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            problems.add(f"{location}{column}", *_describe_json_error(error))
            continue
        if _is_usable(value, line, location, problems):
            yield Row(value, location)


def _describe_json_error(error: ValueError) -> tuple[str, str]:
    if isinstance(error, json.JSONDecodeError | JsonSyntaxError):
        message = error.msg if isinstance(error, json.JSONDecodeError) else error.message
        return f"invalid JSON: {message[:1].lower()}{message[1:]}", ""
    if isinstance(error, TooDeepError):
        return describe_depth()
    if "digits" in str(error):
        return f"an integer has more than {sys.get_int_max_str_digits():,} digits", "write it as a string"
    return f"invalid JSON: {error}", "write null, or leave the field out"


def _is_too_many(count: int, limits: RowLimits, location: str, problems: RowProblems) -> bool:
    if count <= limits.max_rows:
        return False
    problems.add(location, f"more than {limits.max_rows:,} rows (max_rows)", "raise max_rows, or use fewer rows")
    return True


def _fits(text: str | None, limits: RowLimits, location: str, problems: RowProblems) -> bool:
    """Returns True if the text of a row is short enough; else, and for one that was not read, adds the problem."""
    if text is not None and len(text) <= limits.max_row_chars:
        return True
    message = f"the row has more than {limits.max_row_chars:,} characters (max_row_chars)"
    problems.add(location, message, "raise max_row_chars, or shorten the row")
    return False


def _is_usable(value: Any, text: str, location: str, problems: RowProblems) -> bool:
    found = find_unusable(value) if is_suspect(text) else None
    if found is not None:
        problems.add(location, *found)
    return found is None


def read_csv_rows(file: TextRows, problems: RowProblems, delimiter: str = ",") -> Iterator[Row]:
    """Yields a dict from column names to cells for each row; every value is a string, an empty cell is None.

    A row's location is the line on which it starts, since quoted cells may contain line breaks.
    """
    previous = csv.field_size_limit(file.limits.max_row_chars)
    try:
        yield from _read_csv_rows(file, problems, delimiter)
    finally:
        csv.field_size_limit(previous)


def _read_csv_rows(file: TextRows, problems: RowProblems, delimiter: str) -> Iterator[Row]:
    name, count = str(file.path), 0
    reader = csv.reader(file.read_lines(), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        location = f"{name}:{reader.line_num + 1}"
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            message, fix = _describe_csv_error(error, file.limits)
            problems.add(location, f"{message}; the rows after it are not read", fix)
            return
        if not any(cells):
            continue
        if (found := find_unusable(cells)) is not None:
            problems.add(location, *found)
        elif header is None:
            header = _read_header(cells, location, problems)
            if header is None:
                return
        elif _is_too_many(count := count + 1, file.limits, location, problems):
            return
        elif len(cells) != len(header):
            fix = f"the header has {', '.join(header)}; set `delimiter` if the file uses another separator"
            problems.add(location, f"{len(cells)} cells, but the header has {len(header)} columns", fix)
        else:
            yield Row({key: cell or None for key, cell in zip(header, cells, strict=True)}, location)


def _describe_csv_error(error: csv.Error, limits: RowLimits) -> tuple[str, str]:
    if "field limit" in str(error):
        message = f"a cell has more than {limits.max_row_chars:,} characters (max_row_chars)"
        return message, 'close every quote with ", or raise max_row_chars'
    fix = 'put cells with quotes or line breaks into "...", and write a quote inside them as ""'
    return f"invalid CSV: {error}", fix


def _read_header(cells: list[str], location: str, problems: RowProblems) -> list[str] | None:
    """Returns the names of the columns; None if two are equal or one is empty."""
    header = [cell.strip() for cell in cells]
    repeated = sorted({cell for cell in header if header.count(cell) > 1}) if len(set(header)) < len(header) else []
    if not repeated and "" not in header:
        return header
    what = f"names {', '.join(repeated)} more than once" if any(repeated) else "has a column without a name"
    problems.add(location, f"the header {what}", "give every column its own name")
    return None


def read_parquet_rows(path: Path, limits: RowLimits) -> list[Row]:
    check_regular_file(path, limits)
    pyarrow, parquet = import_extra("pyarrow", "parquet"), import_extra("pyarrow.parquet", "parquet")
    try:
        count = parquet.read_metadata(path).num_rows
        values = parquet.read_table(path).to_pylist() if count <= limits.max_rows else []
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise ConfigError(Problem("", f"not a Parquet file: {_get_first_line(error)}", "", str(path))) from error
    check_count(count, limits, str(path))
    return number_rows(values, str(path))


def read_hugging_face_rows(
    source: str, folder: Path | None, choice: Mapping[str, str | None], limits: RowLimits
) -> list[Row]:
    """Returns the rows of a saved dataset, or of a dataset on the Hugging Face Hub.

    Args:
        folder: The folder of a saved dataset; None: `source` is a hub id.
        choice: `split`, `subset` and `revision`; None for those that are not set.
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
    rows = _select_split(loaded, source, choice.get("split"))
    check_count(len(rows), limits, source)
    return number_rows(rows, source)


def _select_split(loaded: Any, source: str, split: str | None) -> Any:
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


def check_count(count: int, limits: RowLimits, name: str) -> None:
    if count > limits.max_rows:
        message = f"{count:,} rows, more than max_rows ({limits.max_rows:,})"
        raise ConfigError(Problem("", message, "raise max_rows, or use fewer rows", name))


def number_rows(values: Any, name: str) -> list[Row]:
    return [Row(value, f"{name}: row {number}") for number, value in enumerate(values, start=1)]


def _get_first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
