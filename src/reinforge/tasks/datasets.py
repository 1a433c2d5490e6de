"""What the bundled tasks share: words that a seeded grammar chooses from, and rows, each in one of three splits."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reinforge.interfaces import DatasetLoader
from reinforge.types.evaluation import EvalInputItem

SPLITS = ("train", "select", "confirm")


def read_words(module_file: str) -> dict[str, Any]:
    """Returns the words that a module's grammar chooses from: `words.json` beside it."""
    return dict(json.loads(Path(module_file).with_name("words.json").read_text(encoding="utf-8")))


class SplitDataset(DatasetLoader):
    """Rows with the columns `id`, `split`, `question` and, if there is one, `answer`; the config has `num_SPLIT`."""

    def __init__(self, config: Any):
        self.config = config

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """Returns all rows, in the order train, select, confirm."""

    def load(self) -> list[EvalInputItem]:
        return list(map(EvalInputItem.from_row, self.rows()))

    def write_rows(self, write: Callable[[str, int], dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the rows of all splits; no question occurs twice: `write` is called again for one that is known."""
        rows, seen = [], set[str]()
        for split in SPLITS:
            for index in range(getattr(self.config, f"num_{split}")):
                row = write(split, index)
                while row["question"] in seen:
                    row = write(split, index)
                seen.add(row["question"])
                rows.append({"id": f"{split}-{index:05}", "split": split, **row})
        return rows
