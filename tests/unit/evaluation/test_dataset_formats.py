"""CSV, Parquet and Hugging Face datasets give the same examples; problems name the line."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reinforge.errors import ConfigError
from reinforge.evaluation.datasets import (
    CsvDatasetConfig,
    HuggingFaceDatasetConfig,
    ParquetDatasetConfig,
    file_dataset,
)
from reinforge.types.evaluation import EvalInputItem

ROWS = [{"id": "a", "question": "2+3?", "answer": "5"}, {"id": "b", "question": "1+1?", "answer": "2"}]


async def read(config: Any) -> list[EvalInputItem]:
    async for loader in file_dataset(config, SimpleNamespace(project_root=Path.cwd())):
        return loader.load()
    raise AssertionError("the factory yields a loader")


async def find_problems(config: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        await read(config)
    return [str(problem) for problem in caught.value.problems]


def triples(items: list[EvalInputItem]) -> list[tuple[Any, Any, Any]]:
    return [(item.id, item.input_obj, item.expected_output_obj) for item in items]


EXPECTED = [("a", "2+3?", "5"), ("b", "1+1?", "2")]


def csv_file(folder: Path, text: str, **settings: Any) -> CsvDatasetConfig:
    (folder / "d.csv").write_bytes(text.encode())
    return CsvDatasetConfig(file_path=folder / "d.csv", **settings)


async def test_csv(tmp_path: Path) -> None:
    text = "\ufeffid,question,answer\r\na,2+3?,5\r\n\r\nb,1+1?,2\r\n"
    assert triples(await read(csv_file(tmp_path, text))) == EXPECTED
    text = 'key;q;label\n1;"two\nlines; ""quoted""";x\n'
    config = csv_file(tmp_path, text, delimiter=";", id_key="key", question_key="q", answer_key="label")
    assert triples(await read(config)) == [("1", 'two\nlines; "quoted"', "x")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "d.csv: the dataset is empty"),
        ("question,answer\n", "d.csv: the dataset is empty"),
        ("question,question\nx,y\n", "d.csv:1: the header names question more than once"),
        ("question,\nx,y\n", "d.csv:1: the header has a column without a name"),
        ('question,answer\n"a\nb",c\nx\n', "d.csv:4: 1 cells, but the header has 2 columns"),
        ("question,answer\nx,1\ny,\n", 'd.csv:3: the field "answer" is null; some rows have an answer'),
        ('question,answer\n"a"b,c\n', "d.csv:2: invalid CSV: ',' expected after '\"'"),
        ('question\n"a\n', "d.csv:2: invalid CSV: unexpected end of data"),
        ("text\nx\n", 'd.csv:2: no field "question"; the row has text'),
    ],
)
async def test_problems_with_a_csv_file_name_the_line(tmp_path: Path, text: str, message: str) -> None:
    (found,) = await find_problems(csv_file(tmp_path, text))
    assert message in found


async def test_parquet(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "d.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    assert triples(await read(ParquetDatasetConfig(file_path=path))) == EXPECTED
    messages = [{"role": "user", "content": "hi", "name": None}, {"role": "assistant", "content": "ho", "name": "x"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": messages}]), path)
    (item,) = await read(ParquetDatasetConfig(file_path=path))
    assert (item.input_obj, item.expected_output_obj) == ([{"role": "user", "content": "hi"}], "ho")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROWS[0], {"id": "c", "question": None}]), path)
    found = await find_problems(ParquetDatasetConfig(file_path=path))
    assert f'{path}: row 2: the field "question" is null' in found[0]
    path.write_bytes(b"not a table")
    (found,) = await find_problems(ParquetDatasetConfig(file_path=path))
    assert f"{path}: not a Parquet file: " in found


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(str(tmp_path / "whole"))
    datasets.DatasetDict({"train": whole, "test": whole.select([1])}).save_to_disk(str(tmp_path / "split"))
    return tmp_path


async def test_a_saved_hugging_face_dataset(saved: Path) -> None:
    def of(name: str, **settings: Any) -> HuggingFaceDatasetConfig:
        return HuggingFaceDatasetConfig(file_path=saved / name, **settings)

    assert triples(await read(of("whole"))) == EXPECTED
    assert triples(await read(of("split", split="test"))) == EXPECTED[1:]
    (found,) = await find_problems(of("split"))
    assert "has several splits; available: train, test" in found
    assert "fix: set split: train" in found
    (found,) = await find_problems(of("split", split="tst"))
    assert 'has no split "tst", did you mean "test"?' in found
    (found,) = await find_problems(of("whole", split="train"))
    assert f'split is "train", but {saved / "whole"} has no splits' in found
    (found,) = await find_problems(of("whol"))
    assert f'folder not found: {saved / "whol"}, did you mean "whole"?' in found
    (saved / "other").mkdir()
    (found,) = await find_problems(of("other"))
    assert f"cannot load {saved / 'other'}: " in found
    assert "fix: give a folder written by `save_to_disk`, or the id of a dataset on the Hugging Face Hub" in found


@pytest.mark.parametrize(
    ("config", "module"), [(ParquetDatasetConfig, "pyarrow"), (HuggingFaceDatasetConfig, "datasets")]
)
async def test_without_the_extra_the_error_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Any, module: str
) -> None:
    path = tmp_path / "there"
    path.write_text("x") if module == "pyarrow" else path.mkdir()
    monkeypatch.setitem(sys.modules, module, None)  # what `import` sees where a package is not installed
    (found,) = await find_problems(config(file_path=path))
    assert f"eval.general.dataset._type: `_type: {config.static_type}` needs {module}, which is not installed" in found
    assert "fix: pip install 'reinforge[data]'" in found
