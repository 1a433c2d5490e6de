"""Loads examples from files or from Python rows.

    {"id": "q1", "question": "2+3?", "answer": "5"}
        => EvalInputItem(id="q1", input_obj="2+3?", expected_output_obj="5", full_dataset_entry=<the row>)

Other common row shapes (`messages`, `prompt`/`completion`, preferences) are detected, see `shapes.py`. Ids are strings;
if no row has one, rows are numbered from 1. All problems with the rows are reported together.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from reinforge.config.schema import Block, DatasetConfig
from reinforge.errors import ConfigError, Problem, did_you_mean
from reinforge.evaluation.row_limits import RowLimits, TextRows, find_unusable
from reinforge.evaluation.rows import (
    HUB_ID,
    Row,
    RowProblems,
    read_csv_rows,
    read_hugging_face_rows,
    read_json_rows,
    read_jsonl_rows,
    read_parquet_rows,
)
from reinforge.evaluation.shapes import Columns, build_examples
from reinforge.interfaces import Builder, DatasetLoader
from reinforge.registry import register_dataset
from reinforge.types.evaluation import EvalInputItem

logger = logging.getLogger(__name__)


class DatasetStructure(Block):
    """Column names in NeMo Agent Toolkit's layout."""

    question_key: str | None = Field(default=None, description="Column with the agent's input.")
    answer_key: str | None = Field(default=None, description="Column with the expected output.")


class FileDatasetConfig(DatasetConfig):
    """A file of rows; each row is an object."""

    file_path: Path = Field(
        description="The file; a relative path is looked up in the working directory, then beside the configuration."
    )
    id_key: str = Field(
        default="id", description="Column with the example's id. If no row has one, rows are numbered from 1."
    )
    question_key: str = Field(
        default="question", description="Column with the agent's input; the default also detects other row shapes."
    )
    answer_key: str = Field(
        default="answer", description="Column with the expected output; either every row has one or no row has."
    )
    structure: DatasetStructure | None = Field(
        default=None, description="Alternative place for question_key and answer_key."
    )

    max_rows: int = Field(default=RowLimits.max_rows, ge=1, description="Rows that the dataset may have.")
    max_row_chars: int = Field(
        default=RowLimits.max_row_chars, ge=1, description="Characters that a row of a text file may have."
    )
    max_file_mb: int = Field(default=RowLimits.max_file_mb, ge=1, description="Size that the file may have, in MiB.")

    @model_validator(mode="after")
    def _flatten_structure(self) -> FileDatasetConfig:
        structure, self.structure = self.structure, None
        for name in ("question_key", "answer_key"):
            nested = getattr(structure, name, None)
            if nested is None:
                continue
            if name in self.model_fields_set and getattr(self, name) != nested:
                raise ValueError(f'{name} is "{getattr(self, name)}", but "{nested}" under structure; set it only once')
            setattr(self, name, nested)
        return self

    @property
    def limits(self) -> RowLimits:
        return RowLimits(self.max_rows, self.max_row_chars, self.max_file_mb)


class JsonDatasetConfig(FileDatasetConfig, name="json"):
    """A JSON file with one list of objects."""


class JsonlDatasetConfig(FileDatasetConfig, name="jsonl"):
    """A file with one JSON object per line; empty lines are skipped."""


class CsvDatasetConfig(FileDatasetConfig, name="csv"):
    """A CSV file whose first line names the columns; every value is a string, and an empty cell is null."""

    delimiter: str = Field(default=",", min_length=1, max_length=1, description="Separator between cells.")


class ParquetDatasetConfig(FileDatasetConfig, name="parquet"):
    """A Parquet file; needs the extra `data`."""


SUFFIXES: dict[str, type[FileDatasetConfig]] = {
    ".json": JsonDatasetConfig,
    ".jsonl": JsonlDatasetConfig,
    ".ndjson": JsonlDatasetConfig,
    ".csv": CsvDatasetConfig,
    ".parquet": ParquetDatasetConfig,
}


class HuggingFaceDatasetConfig(FileDatasetConfig, name="hf_dataset"):
    """A folder written by `Dataset.save_to_disk`, or a dataset on the Hugging Face Hub; needs the extra `data`."""

    file_path: Path = Field(description="The folder, or the hub id (downloaded and cached by the datasets library).")
    split: str | None = Field(default=None, description="Split to read; null: the dataset's only split.")
    subset: str | None = Field(default=None, description="Configuration name of a dataset on the hub.")
    revision: str | None = Field(default=None, description="Revision of a dataset on the hub.")


def choose_format(path: Path) -> type[FileDatasetConfig]:
    """Returns the configuration for a file whose `_type` is not named."""
    if (found := SUFFIXES.get(path.suffix.lower())) is None:
        message = f"the name ends with {path.suffix or 'nothing'}; allowed: {', '.join(SUFFIXES)}"
        raise ConfigError(Problem("", message, "", str(path)))
    return found


class FileDataset(DatasetLoader):
    """Loads the examples of one file; `row_locations` has the location of each row by example id."""

    def __init__(self, config: FileDatasetConfig, project_root: Path):
        self.config, self.project_root = config, project_root
        self.shape: str | None = None
        self.row_locations: dict[str, str] = {}

    def load(self) -> list[EvalInputItem]:
        problems = RowProblems()
        rows, name = self._read_rows(problems)
        columns = Columns(self.config.id_key, self.config.question_key, self.config.answer_key)
        examples = build_examples(rows, columns, name, problems)
        self.shape, self.row_locations = examples.shape, examples.row_locations
        logger.info("%s: %d rows of shape %s", name, len(rows), self.shape)
        return examples.items

    def _read_rows(self, problems: RowProblems) -> tuple[list[Row], str]:
        """Returns the rows and the name with which their locations start."""
        config, source = self.config, str(self.config.file_path)
        if isinstance(config, HuggingFaceDatasetConfig):
            folder = self._find_path(optional=HUB_ID.fullmatch(source) is not None)
            choice = config.model_dump(include={"split", "subset", "revision"})
            return _keep_usable(read_hugging_face_rows(source, folder, choice, config.limits), problems), source
        path = self._find_path()
        assert path is not None
        if isinstance(config, ParquetDatasetConfig):
            return _keep_usable(read_parquet_rows(path, config.limits), problems), str(path)
        if isinstance(config, CsvDatasetConfig):
            file = TextRows(path, config.limits, newline="")
            return list(read_csv_rows(file, problems, config.delimiter)), str(path)
        read = read_json_rows if isinstance(config, JsonDatasetConfig) else read_jsonl_rows
        return list(read(TextRows(path, config.limits), problems)), str(path)

    def _find_path(self, optional: bool = False) -> Path | None:
        """Returns the path of the file or folder; None if it does not exist and is `optional`."""
        given, wants_folder = self.config.file_path, isinstance(self.config, HuggingFaceDatasetConfig)
        tried = list(dict.fromkeys([given.absolute(), self.project_root.absolute() / given]))
        path = next((path for path in (given, self.project_root / given) if _exists(path)), None)
        if path is not None and path.is_dir() == wants_folder:
            return path
        if optional:
            return None
        what = "folder" if wants_folder else "file"
        if path is not None:
            message = f"{given} is a {'file' if wants_folder else 'folder'}, expected a {what}"
            raise ConfigError(Problem("eval.general.dataset.file_path", message, f"name the {what}"))
        hint = did_you_mean(given.name, _list_nearby(tried))
        message = f"{what} not found: {given}{hint or ';'} looked for {' and '.join(map(str, tried))}"
        raise ConfigError(Problem("eval.general.dataset.file_path", message, "correct the path or make it absolute"))


def _keep_usable(rows: Sequence[Row], problems: RowProblems) -> list[Row]:
    """Returns the rows within the limits and adds the problems of the others."""
    kept = []
    for row in rows:
        if (found := find_unusable(row.value, finite=False)) is None:
            kept.append(row)
        else:
            problems.add(row.location, *found)
    return kept


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long, a folder that may not be entered
        return False


def _list_nearby(tried: Sequence[Path]) -> list[str]:
    with contextlib.suppress(OSError):
        return [entry.name for path in tried if path.parent.is_dir() for entry in path.parent.iterdir()]
    return []


class RowDataset(DatasetLoader):
    """Loads examples from Python rows: mappings in one of the supported shapes, or `EvalInputItem`s."""

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any] | EvalInputItem],
        *,
        id_key: str = "id",
        question_key: str = "question",
        answer_key: str = "answer",
    ):
        self.rows, self.columns = list(rows), Columns(id_key, question_key, answer_key)
        self.shape: str | None = None
        self.row_locations: dict[str, str] = {}

    def load(self) -> list[EvalInputItem]:
        if self.rows and all(isinstance(row, EvalInputItem) for row in self.rows):
            return [row.model_copy() for row in self.rows if isinstance(row, EvalInputItem)]
        rows = [
            Row(dict(row) if isinstance(row, Mapping) else row, f"row {n}") for n, row in enumerate(self.rows, start=1)
        ]
        problems = RowProblems()
        examples = build_examples(_keep_usable(rows, problems), self.columns, "the dataset", problems)
        self.shape, self.row_locations = examples.shape, examples.row_locations
        return examples.items


async def file_dataset(config: FileDatasetConfig, builder: Builder) -> AsyncIterator[DatasetLoader]:
    yield FileDataset(config, builder.project_root)


for _config_type in (
    JsonDatasetConfig,
    JsonlDatasetConfig,
    CsvDatasetConfig,
    ParquetDatasetConfig,
    HuggingFaceDatasetConfig,
):
    register_dataset(config_type=_config_type)(file_dataset)


class RowsDatasetConfig(DatasetConfig, name="rows"):
    """Rows in the configuration itself, or from Python."""

    rows: list[Any] = Field(description="Mappings with the columns named below, or EvalInputItems.")
    id_key: str = Field(default="id", description="Column with the example's id.")
    question_key: str = Field(
        default="question", description="Column with the agent's input; the default also detects other row shapes."
    )
    answer_key: str = Field(default="answer", description="Column with the expected output.")


@register_dataset(config_type=RowsDatasetConfig)
async def rows_dataset(config: RowsDatasetConfig, builder: Builder) -> AsyncIterator[DatasetLoader]:
    yield RowDataset(config.rows, id_key=config.id_key, question_key=config.question_key, answer_key=config.answer_key)
