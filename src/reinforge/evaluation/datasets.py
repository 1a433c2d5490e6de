"""Datasets: files of rows, or rows from Python, as examples.

    {"id": "q1", "question": "2+3?", "answer": "5"}
        => EvalInputItem(id="q1", input_obj="2+3?", expected_output_obj="5", full_dataset_entry=<the row>)

Other shapes that people have (`messages`, `prompt`/`completion`, preferences) are recognised, see `shapes.py`. Ids are
text; where no row has one, rows are numbered from 1. Everything that is wrong with the rows is told at once.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from reinforge.config.schema import Block, DatasetConfig
from reinforge.errors import ConfigError, Problem, did_you_mean
from reinforge.evaluation.rows import (
    HUB_ID,
    Found,
    Row,
    csv_rows,
    hugging_face_rows,
    json_rows,
    jsonl_rows,
    parquet_rows,
)
from reinforge.evaluation.shapes import Columns, examples_from_rows
from reinforge.interfaces import DatasetLoader
from reinforge.registry import register_dataset
from reinforge.types.evaluation import EvalInputItem

logger = logging.getLogger(__name__)


class DatasetStructure(Block):
    """The reference's place for the names of the columns."""

    question_key: str | None = Field(default=None, description="Column with the agent's input.")
    answer_key: str | None = Field(default=None, description="Column with the expected output.")


class FileDatasetConfig(DatasetConfig):
    """A file of rows; each row is an object."""

    file_path: Path = Field(description="The file; relative to the working directory, or else to the configuration.")
    id_key: str = Field(default="id", description="Column with the example's id; rows are numbered where none has it.")
    question_key: str = Field(
        default="question", description="Column with the agent's input; the default also recognises other shapes."
    )
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


class CsvDatasetConfig(FileDatasetConfig, name="csv"):
    """A CSV file whose first line names the columns; every value is text, an empty cell is no value."""

    delimiter: str = Field(default=",", min_length=1, max_length=1, description="What stands between two cells.")


class ParquetDatasetConfig(FileDatasetConfig, name="parquet"):
    """A Parquet file; needs the extra `data`."""


class HuggingFaceDatasetConfig(FileDatasetConfig, name="hf_dataset"):
    """A folder that `Dataset.save_to_disk` wrote, or the id of a dataset on the hub; needs the extra `data`."""

    file_path: Path = Field(description="The folder, or the hub id (fetched and cached by the datasets library).")
    split: str | None = Field(default=None, description="Split to read; null: the only one.")
    subset: str | None = Field(default=None, description="Configuration of a dataset on the hub.")
    revision: str | None = Field(default=None, description="Version of a dataset on the hub.")


class FileDataset(DatasetLoader):
    """Examples of one file.

    Args:
        config: Its settings.
        project_root: The configuration's folder.

    Attributes:
        shape: What the rows looked like, once they are loaded.
        places: Where the row of each example stands, by its id.
    """

    def __init__(self, config: FileDatasetConfig, project_root: Path):
        self.config, self.project_root = config, project_root
        self.shape: str | None = None
        self.places: dict[str, str] = {}

    def load(self) -> list[EvalInputItem]:
        """Returns every example, in the file's order."""
        found = Found()
        rows, name = self._rows(found)
        columns = Columns(self.config.id_key, self.config.question_key, self.config.answer_key)
        examples = examples_from_rows(rows, columns, name, found)
        self.shape, self.places = examples.shape, examples.places
        logger.info("%s: %d rows of the shape %s", name, len(rows), self.shape)
        return examples.items

    def _rows(self, found: Found) -> tuple[list[Row], str]:
        """Returns the rows and the name that places in them begin with."""
        config, source = self.config, str(self.config.file_path)
        if isinstance(config, HuggingFaceDatasetConfig):
            folder = self._find(optional=HUB_ID.fullmatch(source) is not None)
            return hugging_face_rows(source, folder, config.model_dump(include={"split", "subset", "revision"})), source
        path = self._find()
        assert path is not None
        if isinstance(config, ParquetDatasetConfig):
            return parquet_rows(path), str(path)
        if isinstance(config, CsvDatasetConfig):
            return list(csv_rows(_text(path, newline=""), str(path), found, config.delimiter)), str(path)
        parse = json_rows if isinstance(config, JsonDatasetConfig) else jsonl_rows
        return list(parse(_text(path), str(path), found)), str(path)

    def _find(self, optional: bool = False) -> Path | None:
        """Returns where the file or folder lies; None where it lies nowhere and is `optional`."""
        written = self.config.file_path
        is_there = Path.is_dir if isinstance(self.config, HuggingFaceDatasetConfig) else Path.is_file
        for path in (written, self.project_root / written):
            if is_there(path):
                return path
        if optional:
            return None
        tried = list(dict.fromkeys([written.absolute(), self.project_root.absolute() / written]))
        beside = [entry.name for path in tried if path.parent.is_dir() for entry in path.parent.iterdir()]
        what = "folder" if is_there is Path.is_dir else "file"
        message = f"there is no {what} {written}{did_you_mean(written.name, beside)}"
        fix = f"looked for {' and '.join(map(str, tried))}"
        raise ConfigError(Problem("eval.general.dataset.file_path", message, fix))


def _text(path: Path, newline: str | None = None) -> str:
    try:
        with path.open(encoding="utf-8-sig", newline=newline) as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ConfigError(Problem("", "the file is not UTF-8", "save it as UTF-8", str(path))) from error
    except OSError as error:
        raise ConfigError(Problem("", f"the dataset cannot be read: {error.strerror}", "", str(path))) from error


class ListDataset(DatasetLoader):
    """Examples from Python.

    Args:
        rows: Mappings in one of the shapes, or finished `EvalInputItem`s.
        id_key: Column with the id.
        question_key: Column with the agent's input; the default also recognises other shapes.
        answer_key: Column with the expected output.

    Attributes:
        shape: What the rows looked like, once they are loaded.
        places: Where the row of each example stands, by its id.
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
        self.shape: str | None = None
        self.places: dict[str, str] = {}

    def load(self) -> list[EvalInputItem]:
        """Returns every example, in order."""
        if self.rows and all(isinstance(row, EvalInputItem) for row in self.rows):
            return [row.model_copy() for row in self.rows if isinstance(row, EvalInputItem)]
        rows = [
            Row(dict(row) if isinstance(row, Mapping) else row, f"row {n}") for n, row in enumerate(self.rows, start=1)
        ]
        examples = examples_from_rows(rows, self.columns, "the dataset", Found())
        self.shape, self.places = examples.shape, examples.places
        return examples.items


@register_dataset(config_type=JsonDatasetConfig)
async def json_dataset(config: JsonDatasetConfig, builder: Any) -> AsyncIterator[DatasetLoader]:
    """Yields the examples of a JSON file."""
    yield FileDataset(config, builder.project_root)


@register_dataset(config_type=JsonlDatasetConfig)
async def jsonl_dataset(config: JsonlDatasetConfig, builder: Any) -> AsyncIterator[DatasetLoader]:
    """Yields the examples of a JSONL file."""
    yield FileDataset(config, builder.project_root)


@register_dataset(config_type=CsvDatasetConfig)
async def csv_dataset(config: CsvDatasetConfig, builder: Any) -> AsyncIterator[DatasetLoader]:
    """Yields the examples of a CSV file."""
    yield FileDataset(config, builder.project_root)


@register_dataset(config_type=ParquetDatasetConfig)
async def parquet_dataset(config: ParquetDatasetConfig, builder: Any) -> AsyncIterator[DatasetLoader]:
    """Yields the examples of a Parquet file."""
    yield FileDataset(config, builder.project_root)


@register_dataset(config_type=HuggingFaceDatasetConfig)
async def hf_dataset(config: HuggingFaceDatasetConfig, builder: Any) -> AsyncIterator[DatasetLoader]:
    """Yields the examples of a Hugging Face dataset."""
    yield FileDataset(config, builder.project_root)


class RowsDatasetConfig(DatasetConfig, name="rows"):
    """Rows that stand in the configuration itself, or come from Python."""

    rows: list[Any] = Field(description="Mappings with the columns below, or finished EvalInputItems.")
    id_key: str = Field(default="id", description="Column with the id.")
    question_key: str = Field(
        default="question", description="Column with the agent's input; the default also recognises other shapes."
    )
    answer_key: str = Field(default="answer", description="Column with the expected output.")


@register_dataset(config_type=RowsDatasetConfig)
async def rows_dataset(config: RowsDatasetConfig, builder: Any) -> AsyncIterator[DatasetLoader]:
    """Yields the rows."""
    yield ListDataset(config.rows, id_key=config.id_key, question_key=config.question_key, answer_key=config.answer_key)
