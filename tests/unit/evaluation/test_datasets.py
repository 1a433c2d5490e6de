"""JSON and JSONL files and Python rows as examples, and the errors for rows that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reinforge.errors import ConfigError
from reinforge.evaluation.datasets import (
    JsonDatasetConfig,
    JsonlDatasetConfig,
    RowDataset,
    file_dataset,
)
from reinforge.types.evaluation import EvalInputItem

ROWS = [{"id": 1, "question": "2+3?", "answer": "5"}, {"id": "b", "question": "1+1?", "answer": "2"}]


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


async def read(config: Any, project_root: Path | None = None) -> list[EvalInputItem]:
    async for loader in file_dataset(config, SimpleNamespace(project_root=project_root or Path.cwd())):
        return loader.load()
    raise AssertionError("the factory yields a loader")


async def problems(config: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        await read(config)
    return [f"{p.location}: {p.message}" for p in caught.value.problems]


def lines(*rows: Any) -> JsonlDatasetConfig:
    Path("d.jsonl").write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return JsonlDatasetConfig(file_path=Path("d.jsonl"))


def document(text: str) -> JsonDatasetConfig:
    Path("d.json").write_text(text)
    return JsonDatasetConfig(file_path=Path("d.json"))


@pytest.mark.parametrize("config", [lambda: lines(*ROWS), lambda: document(json.dumps(ROWS, indent=2))])
async def test_rows_become_examples(config: Any) -> None:
    first, second = await read(config())
    assert (first.id, first.input_obj, first.expected_output_obj) == ("1", "2+3?", "5")
    assert first.full_dataset_entry == ROWS[0]
    assert second.id == "b"


async def test_columns_are_named_at_the_top_level_or_under_structure() -> None:
    path = lines({"key": "a", "q": "x", "label": 0}).file_path
    flat = JsonlDatasetConfig(file_path=path, id_key="key", question_key="q", answer_key="label")
    nested = JsonlDatasetConfig.model_validate(
        {"file_path": path, "id_key": "key", "structure": {"question_key": "q", "answer_key": "label"}}
    )
    assert flat == nested
    assert await read(flat) == await read(nested)
    with pytest.raises(ValueError, match='question_key is "q", but "z" under structure'):
        JsonlDatasetConfig.model_validate({"file_path": path, "question_key": "q", "structure": {"question_key": "z"}})


async def test_rows_without_ids_are_numbered_and_answers_are_optional() -> None:
    items = await read(lines({"question": "a"}, "", {"question": "b"}))
    assert [(item.id, item.expected_output_obj) for item in items] == [("1", None), ("2", None)]


async def test_the_error_for_a_missing_file_lists_the_paths_tried_and_the_closest_name(tmp_path: Path) -> None:
    lines(*ROWS)
    with pytest.raises(ConfigError) as caught:
        await read(JsonlDatasetConfig(file_path=Path("b.jsonl")), tmp_path / "project")
    (problem,) = caught.value.problems
    tried = f"{tmp_path / 'b.jsonl'} and {tmp_path / 'project' / 'b.jsonl'}"
    assert problem.message == f'file not found: b.jsonl, did you mean "d.jsonl"? looked for {tried}'
    assert problem.fix == "correct the path or make it absolute"


async def test_a_relative_path_is_looked_up_in_the_working_directory_first(tmp_path: Path) -> None:
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
        (
            '[\n {"question": "a"}\n {"question": "b"}\n]',
            "d.json:3: invalid JSON: expected , or ] after a list item",
        ),
        ('[{"question": "a"}] x', "d.json:1: invalid JSON: unexpected text after the end of the list"),
        ('[\n{"question": "a"},\n5]', "d.json:3: expected an object, found int"),
    ],
)
async def test_a_json_file_that_is_not_a_list_of_objects_is_an_error(text: str, message: str) -> None:
    assert await problems(document(text)) == [message]


async def test_all_bad_lines_of_a_jsonl_file_are_reported_together() -> None:
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
        'd.jsonl:4: no field "question", did you mean "qestion"? the row has qestion, id',
        'd.jsonl:5: no field "id"; the row has question; some rows have an id, so every row needs one',
        'd.jsonl:6: the field "question" is null',
    ]
    assert await problems(lines("")) == ["d.jsonl: the dataset is empty"]
    assert await problems(lines('[{"question": 1}]')) == ["d.jsonl:1: expected one JSON object per line, found a list"]


async def test_duplicate_ids_name_both_lines() -> None:
    assert await problems(lines(ROWS[0], ROWS[1], {"id": "1", "question": "x", "answer": "y"})) == [
        'd.jsonl:3: id "1" is already used at d.jsonl:1'
    ]


async def test_either_all_rows_have_an_answer_or_none_has() -> None:
    assert await problems(lines(ROWS[0], {"id": 2, "question": "x"})) == [
        'd.jsonl:2: no field "answer"; the row has id, question; some rows have an answer, so every row needs one'
    ]


async def test_a_configured_column_must_exist() -> None:
    path = lines(*ROWS).file_path
    found = await problems(JsonlDatasetConfig(file_path=path, answer_key="anwser"))
    assert found[0] == 'd.jsonl:1: no field "anwser", did you mean "answer"? the row has id, question, answer'
    found = await problems(JsonlDatasetConfig(file_path=path, id_key="key"))
    assert found[0] == 'd.jsonl:1: no field "key"; the row has id, question, answer'


async def test_the_list_of_problems_is_cut_at_twenty() -> None:
    found = await problems(lines(*["{"] * 25))
    assert len(found) == 21
    assert found[-1] == ": and 5 more problems like these"


def test_rows_from_python() -> None:
    items = RowDataset([{"q": "a"}, {"q": "b"}], question_key="q").load()
    assert [(item.id, item.input_obj) for item in items] == [("1", "a"), ("2", "b")]
    assert RowDataset(items).load() == items
    with pytest.raises(ConfigError, match='row 2: id "1" is already used at row 1'):
        RowDataset([{"id": 1, "question": "a"}, {"id": "1", "question": "b"}]).load()
    with pytest.raises(ConfigError, match="the dataset is empty"):
        RowDataset([]).load()
