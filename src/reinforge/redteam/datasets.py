"""The prompts that astra-rl brings along, read from its files: they are not part of this package.

    export REINFORGE_ASTRA_DATA=path/to/astra-rl/src/astra_rl/data

    from reinforge.redteam.datasets import CONVOKIT_REDDIT_TRAIN  # a sequence of strings

Without the variable, the files of an installed package `astra_rl` are read (`pip install --no-deps astra-rl`); it is
not imported. Prompts of your own need none of this: every sampler takes a list of strings.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reinforge.bounded import load_json
from reinforge.errors import ConfigError, Problem
from reinforge.files import read_regular_file

VARIABLE = "REINFORGE_ASTRA_DATA"


@dataclass(frozen=True, slots=True)
class AdvBenchPrompt:
    goal: str  # what the target is asked for
    target: str  # how a response begins that complies


def _find_folder() -> Path:
    if given := os.environ.get(VARIABLE):
        return Path(given)
    spec = importlib.util.find_spec("astra_rl")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (Path(place) / "data").is_dir():
            return Path(place) / "data"
    fix = (
        f"set {VARIABLE} to the folder src/astra_rl/data of a copy of astra-rl, run `pip install --no-deps astra-rl`, "
        "or give the sampler a list of prompts of your own"
    )
    raise ConfigError(Problem("reinforge.redteam.datasets", "astra-rl's prompts are not part of this package", fix))


def _read(path: Path) -> str:
    try:
        return read_regular_file(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(Problem(VARIABLE, f"cannot read {path}: {cause}", "name the folder that has it")) from cause


def _read_texts(path: Path) -> list[str]:
    try:
        rows = load_json(_read(path))
    except ValueError as cause:
        raise ConfigError(Problem(str(path), f"is not JSON: {cause}", "copy the file again")) from cause
    if not isinstance(rows, list) or not all(isinstance(row, str) and row for row in rows):
        raise ConfigError(Problem(str(path), "expected a list of strings, none of them empty", "copy the file again"))
    return rows


def _read_pairs(path: Path) -> list[AdvBenchPrompt]:
    rows = list(csv.DictReader(io.StringIO(_read(path), newline="")))
    if not all(row.get("goal") and row.get("target") for row in rows):
        raise ConfigError(Problem(str(path), "expected the columns goal and target in each row", "copy the file again"))
    return [AdvBenchPrompt(row["goal"], row["target"]) for row in rows]


class AstraPrompts(Sequence[Any]):
    """The rows of one of astra-rl's files, read when they are first used."""

    def __init__(self, file: str, read: Callable[[Path], list[Any]]):
        self.file, self._read = file, read
        self._path: Path | None = None
        self._rows: list[Any] = []

    def _get_rows(self) -> list[Any]:
        path = _find_folder() / self.file
        if path != self._path:
            self._rows, self._path = self._read(path), path
        return self._rows

    def __getitem__(self, index: Any) -> Any:
        return self._get_rows()[index]

    def __len__(self) -> int:
        return len(self._get_rows())

    def __repr__(self) -> str:
        return f"<the rows of {self.file}>"


ADV_BENCH_PROMPTS = AstraPrompts("adv_bench_prompts.csv", _read_pairs)  # harmful requests, as `AdvBenchPrompt`
ADV_BENCH_BASE_TASK_PROMPTS = AstraPrompts("task_prompts.json", _read_texts)
"""Beginnings of requests without their harmful part."""
CONVOKIT_REDDIT_TRAIN = AstraPrompts("convokit_reddit_prompts_train.json", _read_texts)
"""Openings of conversations, for training."""
CONVOKIT_REDDIT_DEV = AstraPrompts("convokit_reddit_prompts_dev.json", _read_texts)
"""Openings of conversations, for choosing a tester."""
CONVOKIT_REDDIT_TEST = AstraPrompts("convokit_reddit_prompts_test.json", _read_texts)
"""Openings of conversations, for the final evaluation."""

__all__ = [
    "ADV_BENCH_BASE_TASK_PROMPTS",
    "ADV_BENCH_PROMPTS",
    "CONVOKIT_REDDIT_DEV",
    "CONVOKIT_REDDIT_TEST",
    "CONVOKIT_REDDIT_TRAIN",
    "AdvBenchPrompt",
]
