"""A separate validation dataset whose rows differ from the training rows only in their id."""

from __future__ import annotations

import pytest

from reinforge.config.schema import SplitsConfig
from reinforge.errors import ConfigError
from reinforge.evaluation.validation_set import split_with_validation
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
