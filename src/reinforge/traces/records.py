"""The records of export files, one at a time: a file of any size needs only the memory of its largest record.

A JSON file may be a list, one object per line, one object, or an object around a list, such as `{"data": [...]}`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

from reinforge.bounded import load_json
from reinforge.errors import ConfigError, Problem
from reinforge.evaluation.row_limits import JsonSyntaxError, JsonText, RowLimits, TextRows, check_regular_file
from reinforge.evaluation.rows import Row, RowProblems, import_extra, read_csv_rows, read_jsonl_rows, read_list_items

LIMITS = RowLimits(max_rows=1_000_000_000, max_row_chars=50_000_000, max_file_mb=1 << 20)
LIST_KEYS = ("data", "runs", "traces", "rows", "records", "logs", "results", "sessions")
"""Fields of an object that are only there to wrap the list of records."""
CONTENT_KEYS = frozenset(
    ("id", "messages", "conversations", "prompt", "input", "inputs", "attributes", "observations", "scores", "run_type")
)
"""Fields of an object that is a record itself, whatever lists it has."""
BATCH_KEYS = ("resourceSpans", "resourceLogs")  # fields whose items stay wrapped, since they say what the items are
REST = "the rest of the file is not read; repair it here and import it again"
FIRST_LINE_CHARS = 500_000
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".log", ".txt")
VOTED, ANSWERS = ".voted.jsonl", ".answers.jsonl"  # files of `reinforge replace` beside its rows


def list_files(sources: list[Path], output: Path) -> list[Path]:
    """Returns the files to read: those given, and those of a folder whose suffix is known, in order, each once.

    Hidden files and the output of an earlier import are not part of a folder.

    Raises:
        ConfigError: A path does not exist, is the output, or is a folder without such a file.
    """
    files: list[Path] = []
    for source in sources:
        if not source.is_dir():
            check_regular_file(source, LIMITS)
            if output.exists() and source.samefile(output):
                raise ConfigError(Problem("", "the file to read is also the file to write", "give another --output"))
            files.append(source)
            continue
        found = sorted(path for path in source.rglob("*") if _is_export(path, source, output))
        if not found:
            message = f"no files in the folder end with {', '.join(SUFFIXES)}"
            raise ConfigError(Problem("", message, "name the files", str(source)))
        files += found
    return list({path.resolve(): path for path in reversed(files)}.values())[::-1]


def _is_export(path: Path, folder: Path, output: Path) -> bool:
    is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    is_known = not is_hidden and path.suffix.lower() in SUFFIXES and path.is_file()
    outputs = (output, *map(output.with_suffix, (VOTED, ANSWERS)))
    return is_known and path.resolve() not in [each.resolve() for each in outputs]


def read_records(path: Path, problems: RowProblems) -> Iterator[Row]:
    """Yields the records of a file; CSV, TSV and Parquet are known by their suffix."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        yield from _read_parquet(path, problems)
    elif suffix in (".csv", ".tsv"):
        file = TextRows(path, LIMITS, newline="")
        yield from read_csv_rows(file, problems, _find_delimiter(path, file))
    elif _has_object_per_line(TextRows(path, LIMITS)):
        for row in read_jsonl_rows(TextRows(path, LIMITS), problems):
            yield from _unwrap(row)
    else:
        yield from _read_documents(TextRows(path, LIMITS), problems)


def _find_delimiter(path: Path, file: TextRows) -> str:
    if path.suffix.lower() == ".tsv":
        return "\t"
    header = next(file.read_lines(), "")
    return max(",;\t", key=header.count)


def _has_object_per_line(file: TextRows) -> bool:
    """Returns True if the first line that is not empty is a whole object, of at most a million characters."""
    line, end, _ = next(file.read_parts(), "").lstrip().partition("\n")
    if not line.startswith("{") or (not end and len(line) > FIRST_LINE_CHARS):
        return False
    try:
        load_json(line)
    except ValueError:
        return not line.rstrip().endswith(("{", "[", ","))  # the first line of a pretty-printed object, or a broken row
    return True


def _unwrap(row: Row) -> Iterator[Row]:
    value = row.value
    for key in LIST_KEYS:
        items = value.get(key) if isinstance(value, Mapping) else None
        if not isinstance(items, list) or not items or CONTENT_KEYS & value.keys():
            continue
        if all(isinstance(item, Mapping) for item in items):
            yield from (Row(item, row.location) for item in items)
            return
    yield row


def _read_documents(file: TextRows, problems: RowProblems) -> Iterator[Row]:
    """Yields the items of a list, or of the list inside an object; or objects one after another."""
    name, text, is_empty = str(file.path), JsonText(file.read_parts(), LIMITS.max_row_chars), True
    while (character := text.peek()) in ("[", "{"):
        line, is_empty = text.line, False
        try:
            if character == "[":
                text.take("[")
                rows = read_list_items(text, file, problems)
            else:
                rows = _read_object(text, file, problems, f"{name}:{line}")
            for row in rows:
                yield from _unwrap(row)
        except ConfigError:  # the file cannot be read any further
            raise
        except ValueError as error:
            at = f"{name}:{error.line}:{error.column}" if isinstance(error, JsonSyntaxError) else f"{name}:{text.line}"
            what = error.message if isinstance(error, JsonSyntaxError) else str(error)
            problems.add(at, f"invalid JSON: {what[:1].lower()}{what[1:]}")
            problems.add(at, REST)
            return
        if text.has_dropped:
            problems.add(f"{name}:{text.line}", REST)
            return
    if character or is_empty:
        what = f"expected JSON, found {character!r}" if character else "the file is empty"
        problems.add(f"{name}:{text.line}", what, "give a .json, .jsonl, .csv, .tsv or .parquet file")


def _read_object(text: JsonText, file: TextRows, problems: RowProblems, location: str) -> Iterator[Row]:
    """Yields the items of the lists that an object is there to wrap; the whole object if it has none."""
    document: dict[str, Any] = {}
    num_lists = 0
    text.take("{")
    while text.peek() not in ("}", ""):
        key, _ = text.decode()
        if not isinstance(key, str) or not text.take(":"):
            raise JsonSyntaxError("expected a name and a colon", text.line, 1)
        if key in (*LIST_KEYS, *BATCH_KEYS) and text.peek() == "[":
            num_lists += 1
            text.take("[")
            for row in read_list_items(text, file, problems):
                yield Row({key: [row.value]}, row.location) if key in BATCH_KEYS else row
        else:
            document[key], _ = text.decode()
        if not text.take(",") and text.peek() != "}":
            raise JsonSyntaxError("expected , or } after a field", text.line, 1)
    text.take("}")
    if not num_lists or CONTENT_KEYS & document.keys():
        yield Row(document, location)


def _read_parquet(path: Path, problems: RowProblems) -> Iterator[Row]:
    pyarrow, parquet = import_extra("pyarrow", "parquet"), import_extra("pyarrow.parquet", "parquet")
    check_regular_file(path, LIMITS)
    try:
        batches = parquet.ParquetFile(path).iter_batches(batch_size=1000)
        rows = chain.from_iterable(batch.to_pylist() for batch in batches)
        for number, value in enumerate(islice(rows, LIMITS.max_rows), start=1):
            yield Row({key: each for key, each in value.items() if each is not None}, f"{path}: row {number}")
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        problems.add(str(path), f"not a Parquet file: {str(error)[:200]}")
