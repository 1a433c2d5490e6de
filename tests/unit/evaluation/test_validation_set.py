"""A separate validation dataset whose rows differ from the training rows only in their id."""

from __future__ import annotations

import pytest

from reinforge.config.schema import SplitsConfig
from reinforge.errors import ConfigError
from reinforge.evaluation.splits import split_with_validation
from reinforge.types.evaluation import EvalInputItem


def games(*ids: str) -> list[EvalInputItem]:
    rows = [{"id": id_, "question": "play"} for id_ in ids]
    return [EvalInputItem(id=r["id"], input_obj="play", expected_output_obj="win", full_dataset_entry=r) for r in rows]


def test_rows_that_differ_only_in_their_id_are_examples_if_the_key_says_so() -> None:
    train, validation = games("a", "b", "c"), games("v", "w", "x", "y", "z")
    with pytest.raises(ConfigError, match="also in the training dataset under another id") as caught:
        split_with_validation(train, validation, SplitsConfig(), 0, id_key="id")
    assert "set finetuning.splits.key: id" in caught.value.problems[0].fix
    splits = split_with_validation(train, validation, SplitsConfig(key="id"), 0, id_key="id")
    assert {name: len(items) for name, items in splits.items()} == {"train": 3, "select": 2, "confirm": 3}
    held_out = {item.id for name in ("select", "confirm") for item in splits[name]}
    assert held_out == {"v", "w", "x", "y", "z"}


def test_a_column_that_names_the_splits_is_refused_beside_a_validation_dataset() -> None:
    with pytest.raises(ConfigError, match="both define which examples are held out"):
        split_with_validation(games("a"), games("v"), SplitsConfig(key="split"), 0, id_key="id")


def talk(*ids: str) -> list[EvalInputItem]:
    """Examples whose conversation is the first character of their id."""
    rows = [{"id": id_, "question": f"about {id_}", "conversation": id_[0]} for id_ in ids]
    return [
        EvalInputItem(id=r["id"], input_obj=r["question"], expected_output_obj="a", full_dataset_entry=r) for r in rows
    ]


def test_conversations_stay_in_one_split_and_in_one_dataset() -> None:
    validation = talk("v1", "v2", "v3", "w1", "w2", "w3")
    splits = split_with_validation(talk("a1", "b1"), validation, SplitsConfig(), 0, id_key="id")
    assert sorted("".join(sorted(item.id[0] for item in splits[name])) for name in ("select", "confirm")) == [
        "vvv",
        "www",
    ]
    with pytest.raises(ConfigError, match="1 values of conversation are also in the training dataset: w") as caught:
        split_with_validation(talk("a1", "w9"), validation, SplitsConfig(), 0, id_key="id")
    assert "finetuning.splits.group_key: null" in caught.value.problems[0].fix
    split_with_validation(talk("a1", "w9"), validation, SplitsConfig(group_key=None), 0, id_key="id")


def test_replies_to_one_prompt_stay_in_one_split() -> None:
    rows = [{"id": f"{prompt}{n}", "prompt": prompt, "completion": f"{n}"} for prompt in "vwxyz" for n in range(2)]
    held_out = [
        EvalInputItem(id=r["id"], input_obj=r["prompt"], expected_output_obj="", full_dataset_entry=r) for r in rows
    ]
    splits = split_with_validation(talk("a1"), held_out, SplitsConfig(select=0.5, confirm=0.5), 0, id_key="id")
    select, confirm = ({item.input_obj for item in splits[name]} for name in ("select", "confirm"))
    assert not select & confirm
    assert select | confirm == set("vwxyz")
