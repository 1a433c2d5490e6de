"""Files of every format and Python rows as examples, and the errors for rows that cannot be used."""

import json
import sys
from pathlib import Path

import pytest

from reinforge.errors import ConfigError
from reinforge.evaluation.datasets import (
    CsvDatasetConfig,
    FileDataset,
    HuggingFaceDatasetConfig,
    JsonDatasetConfig,
    JsonlDatasetConfig,
    ParquetDatasetConfig,
    RowDataset,
)

ROWS = [{"id": 1, "question": "2+3?", "answer": "5"}, {"id": "b", "question": "1+1?", "answer": "2"}]


@pytest.fixture(autouse=True)
def _in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


async def read(config, project_root=None):
    return FileDataset(config, project_root or Path.cwd()).load()


async def find_problems(config):
    with pytest.raises(ConfigError) as caught:
        await read(config)
    return [str(problem) for problem in caught.value.problems]


async def problems(config):
    with pytest.raises(ConfigError) as caught:
        await read(config)
    return [f"{p.location}: {p.message}" for p in caught.value.problems]


def lines(*rows):
    Path("d.jsonl").write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return JsonlDatasetConfig(file_path=Path("d.jsonl"))


def document(text):
    Path("d.json").write_text(text)
    return JsonDatasetConfig(file_path=Path("d.json"))


@pytest.mark.parametrize("config", [lambda: lines(*ROWS), lambda: document(json.dumps(ROWS, indent=2))])
async def test_rows_become_examples(config):
    first, second = await read(config())
    assert (first.id, first.input_obj, first.expected_output_obj) == ("1", "2+3?", "5")
    assert first.full_dataset_entry == ROWS[0]
    assert second.id == "b"


async def test_columns_are_named_at_the_top_level_or_under_structure():
    path = lines({"key": "a", "q": "x", "label": 0}).file_path
    flat = JsonlDatasetConfig(file_path=path, id_key="key", question_key="q", answer_key="label")
    nested = JsonlDatasetConfig.model_validate(
        {"file_path": path, "id_key": "key", "structure": {"question_key": "q", "answer_key": "label"}}
    )
    assert flat == nested
    assert await read(flat) == await read(nested)
    with pytest.raises(ValueError, match='question_key is "q", but "z" under structure'):
        JsonlDatasetConfig.model_validate({"file_path": path, "question_key": "q", "structure": {"question_key": "z"}})


async def test_rows_without_ids_are_numbered_and_answers_are_optional():
    items = await read(lines({"question": "a"}, "", {"question": "b"}))
    assert [(item.id, item.expected_output_obj) for item in items] == [("1", None), ("2", None)]


async def test_the_error_for_a_missing_file_lists_the_paths_tried_and_the_closest_name(tmp_path):
    lines(*ROWS)
    with pytest.raises(ConfigError) as caught:
        await read(JsonlDatasetConfig(file_path=Path("b.jsonl")), tmp_path / "project")
    (problem,) = caught.value.problems
    tried = f"{tmp_path / 'b.jsonl'} and {tmp_path / 'project' / 'b.jsonl'}"
    assert problem.message == f'file not found: b.jsonl, did you mean "d.jsonl"? looked for {tried}'
    assert problem.fix == "correct the path or make it absolute"


async def test_a_relative_path_is_looked_up_in_the_working_directory_first(tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    (project / "d.jsonl").write_text('{"question": "there"}')
    config = JsonlDatasetConfig(file_path=Path("d.jsonl"))
    assert (await read(config, project))[0].input_obj == "there"
    lines({"question": "here"})
    assert (await read(config, project))[0].input_obj == "here"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "d.json: the dataset is empty"),
        ("", "d.json:1: expected a JSON list of objects"),
        ('{"question": 1}', "d.json:1: expected a JSON list of objects"),
        ('[\n {"question": "a"},\n {"question": }\n]', "d.json:3:15: invalid JSON: expecting value"),
        ('[\n {"question": "a"}\n {"question": "b"}\n]', "d.json:3: invalid JSON: expected , or ] after a list item"),
        ('[{"question": "a"}] x', "d.json:1: invalid JSON: unexpected text after the end of the list"),
        ('[\n{"question": "a"},\n5]', "d.json:3: expected an object, found int"),
    ],
)
async def test_a_json_file_that_is_not_a_list_of_objects_is_an_error(text, message):
    assert await problems(document(text)) == [message]


async def test_all_bad_lines_of_a_jsonl_file_are_reported_together():
    config = lines(
        {"question": "a", "id": 1},
        "{",
        "[1]",
        {"qestion": "b", "id": 2},
        {"question": "c"},
        {"question": None, "id": 3},
    )
    assert await problems(config) == [
        "d.jsonl:2:2: invalid JSON: expecting property name enclosed in double quotes",
        "d.jsonl:3: expected an object, found list",
        'd.jsonl:4: no field "question", did you mean "qestion"? the row has qestion, id; other rows have one',
        'd.jsonl:5: no field "id"; the row has question; some rows have an id, so every row needs one',
        'd.jsonl:6: the field "question" is null; other rows have one',
    ]
    assert await problems(lines("")) == ["d.jsonl: the dataset is empty"]
    assert await problems(lines('[{"question": 1}]')) == ["d.jsonl:1: expected one JSON object per line, found a list"]


async def test_duplicate_ids_name_both_lines():
    assert await problems(lines(ROWS[0], ROWS[1], {"id": "1", "question": "x", "answer": "y"})) == [
        'd.jsonl:3: id "1" is already used at d.jsonl:1'
    ]


async def test_either_all_rows_have_an_answer_or_none_has():
    assert await problems(lines(ROWS[0], {"id": 2, "question": "x"})) == [
        'd.jsonl:2: no field "answer"; the row has id, question; some rows have an answer, so every row needs one'
    ]


async def test_a_configured_column_must_exist():
    path = lines(*ROWS).file_path
    found = await problems(JsonlDatasetConfig(file_path=path, answer_key="anwser"))
    has = "the row has id, question, answer (also at d.jsonl:2)"
    assert found == [f'd.jsonl:1: 2 × no field "anwser", did you mean "answer"? {has}'], "one line for all rows"
    found = await problems(JsonlDatasetConfig(file_path=path, id_key="key"))
    assert found == [f'd.jsonl:1: 2 × no field "key"; {has}']


async def test_the_list_of_problems_is_cut_at_twenty():
    found = await problems(lines(*({**ROWS[0], "id": number % 25} for number in range(50))))
    assert len(found) == 21
    assert found[-1] == ": and 5 more problems like these"


def test_rows_from_python():
    items = RowDataset([{"q": "a"}, {"q": "b"}], question_key="q").load()
    assert [(item.id, item.input_obj) for item in items] == [("1", "a"), ("2", "b")]
    assert RowDataset(items).load() == items
    with pytest.raises(ConfigError, match='row 2: id "1" is already used at row 1'):
        RowDataset([{"id": 1, "question": "a"}, {"id": "1", "question": "b"}]).load()
    with pytest.raises(ConfigError, match="the dataset is empty"):
        RowDataset([]).load()


SAVED = [{"id": "a", "question": "2+3?", "answer": "5"}, {"id": "b", "question": "1+1?", "answer": "2"}]


def triples(items):
    return [(item.id, item.input_obj, item.expected_output_obj) for item in items]


EXPECTED = [("a", "2+3?", "5"), ("b", "1+1?", "2")]


def csv_file(folder, text, **settings):
    (folder / "d.csv").write_bytes(text.encode())
    return CsvDatasetConfig(file_path=folder / "d.csv", **settings)


async def test_csv(tmp_path):
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
async def test_problems_with_a_csv_file_name_the_line(tmp_path, text, message):
    (found,) = await find_problems(csv_file(tmp_path, text))
    assert message in found


async def test_parquet(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "d.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(SAVED), path)
    assert triples(await read(ParquetDatasetConfig(file_path=path))) == EXPECTED
    messages = [{"role": "user", "content": "hi", "name": None}, {"role": "assistant", "content": "ho", "name": "x"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": messages}]), path)
    (item,) = await read(ParquetDatasetConfig(file_path=path))
    assert (item.input_obj, item.expected_output_obj) == ([{"role": "user", "content": "hi"}], "ho")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([SAVED[0], {"id": "c", "question": None}]), path)
    found = await find_problems(ParquetDatasetConfig(file_path=path))
    assert f'{path}: row 2: the field "question" is null' in found[0]
    path.write_bytes(b"not a table")
    (found,) = await find_problems(ParquetDatasetConfig(file_path=path))
    assert f"{path}: not a Parquet file: " in found


@pytest.fixture
def saved(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    whole = datasets.Dataset.from_list(SAVED)
    whole.save_to_disk(str(tmp_path / "whole"))
    datasets.DatasetDict({"train": whole, "test": whole.select([1])}).save_to_disk(str(tmp_path / "split"))
    return tmp_path


async def test_a_saved_hugging_face_dataset(saved):
    def of(name, **settings):
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
async def test_without_the_extra_the_error_names_it(tmp_path, monkeypatch, config, module):
    path = tmp_path / "there"
    path.write_text("x") if module == "pyarrow" else path.mkdir()
    monkeypatch.setitem(sys.modules, module, None)  # what `import` sees where a package is not installed
    (found,) = await find_problems(config(file_path=path))
    assert f"eval.general.dataset._type: `_type: {config.static_type}` needs {module}, which is not installed" in found
    assert "fix: pip install 'reinforge[data]'" in found
