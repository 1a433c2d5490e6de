"""The rows of a file, each with its place, whatever the file's format.

    train.jsonl, line 7    =>  Row({"question": ...}, "train.jsonl:7")
    train.parquet, row 7   =>  Row({"question": ...}, "train.parquet: row 7")

What cannot be read is noted in a `Found` and told all at once. CSV, JSON and JSONL are read by the standard library;
Parquet and saved Hugging Face datasets need the extra `data`, which is imported where it is used.
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
SPACE = " \t\r\n"
INSTALL = "pip install 'reinforge[data]'"
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Row:
    """One row and where it stands, for example `train.jsonl:7`."""

    value: Any
    place: str


@dataclass
class Found:
    """Problems by place; prints the first twenty and says how many more there are."""

    problems: list[Problem] = field(default_factory=list)

    def add(self, place: str, message: str, fix: str = "") -> None:
        """Notes one problem."""
        self.problems.append(Problem("", message, fix, place))

    def raise_all(self) -> None:
        """Raises a `ConfigError` if anything was noted."""
        if len(self.problems) > MAX_PROBLEMS:
            rest = Problem("", f"and {len(self.problems) - MAX_PROBLEMS} more problems like these")
            raise ConfigError([*self.problems[:MAX_PROBLEMS], rest])
        if self.problems:
            raise ConfigError(self.problems)


def extra(module: str, type_name: str) -> ModuleType:
    """Returns a module of the extra `data`.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        message = f"`_type: {type_name}` needs {package}, which is not installed ({error})"
        raise ConfigError(Problem("eval.general.dataset._type", message, INSTALL)) from error


def json_rows(text: str, name: str, found: Found) -> Iterator[Row]:
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


def jsonl_rows(text: str, name: str, found: Found) -> Iterator[Row]:
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


def csv_rows(text: str, name: str, found: Found, delimiter: str = ",") -> Iterator[Row]:
    """Yields a mapping from the header's names for each line; every value is text, an empty cell is None.

    A row is named by the line that it begins on, since quoted cells may hold line breaks.
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
            found.add(
                f"{name}:{line}", f"not CSV: {error}", 'put text with quotes or line breaks in "…", "" for a quote'
            )
            return
        if not any(cells):
            continue
        if header is None:
            header = [cell.strip() for cell in cells]
            repeated = sorted({cell for cell in header if header.count(cell) > 1})
            if repeated or "" in header:
                what = f"names {', '.join(repeated)} twice" if any(repeated) else "has a column without a name"
                found.add(f"{name}:{line}", f"the header {what}", "give every column a name of its own")
                return
        elif len(cells) != len(header):
            fix = f"the header has {', '.join(header)}; another separator is set by `delimiter`"
            found.add(f"{name}:{line}", f"{len(cells)} cells where the header has {len(header)}", fix)
        else:
            yield Row({key: cell or None for key, cell in zip(header, cells, strict=True)}, f"{name}:{line}")


def parquet_rows(path: Path) -> list[Row]:
    """Returns the rows of a Parquet file.

    Raises:
        ConfigError: pyarrow is not installed, or the file is not Parquet.
    """
    pyarrow, parquet = extra("pyarrow", "parquet"), extra("pyarrow.parquet", "parquet")
    try:
        table = parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(Problem("", f"not Parquet: {_first_line(error)}", "", str(path))) from error
    return numbered(table.to_pylist(), str(path))


def hugging_face_rows(source: str, folder: Path | None, choice: Mapping[str, str | None]) -> list[Row]:
    """Returns the rows of a saved dataset, or of one on the hub.

    Args:
        source: As the configuration names it.
        folder: Where it lies; None: `source` is a hub id.
        choice: `split`, `subset` and `revision`, each None where not asked for.

    Raises:
        ConfigError: datasets is not installed, or the dataset or its split is not there.
        BackendUnavailable: The hub does not answer.
    """
    datasets = extra("datasets", "hf_dataset")
    try:
        if folder is not None:
            loaded = datasets.load_from_disk(str(folder))
        else:
            loaded = datasets.load_dataset(source, name=choice.get("subset"), revision=choice.get("revision"))
    except ConnectionError as error:
        raise BackendUnavailable(f"the dataset {source} cannot be fetched: {_first_line(error)}") from error
    except Exception as error:
        message = f"{source} cannot be loaded: {type(error).__name__}: {_first_line(error)}"
        fix = "give a folder that `save_to_disk` wrote, or the id of a dataset on the hub"
        raise ConfigError(Problem("eval.general.dataset.file_path", message, fix)) from error
    return numbered(_one_split(loaded, source, choice.get("split")), source)


def _one_split(loaded: Any, source: str, split: str | None) -> Any:
    """Returns one split of a `DatasetDict`, or the dataset itself."""
    if not isinstance(loaded, Mapping):
        if split is None:
            return loaded
        message = f'{source} has no splits, so there is no "{split}"'
        raise ConfigError(Problem("eval.general.dataset.split", message, "leave split out"))
    names = list(loaded)
    if split is None and len(names) == 1:
        return loaded[names[0]]
    if split in loaded:
        return loaded[split]
    asked = "needs a split" if split is None else f'has no split "{split}"{did_you_mean(split, names)}'
    message = f"{source} {asked}; it has {', '.join(map(str, names)) or 'none'}"
    raise ConfigError(Problem("eval.general.dataset.split", message, f"set split: {names[0]}" if names else ""))


def numbered(values: Any, name: str) -> list[Row]:
    """Returns values as rows, numbered from 1."""
    return [Row(value, f"{name}: row {number}") for number, value in enumerate(values, start=1)]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
