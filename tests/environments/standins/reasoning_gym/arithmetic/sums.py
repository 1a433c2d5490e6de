from dataclasses import dataclass
from types import SimpleNamespace

from ..factory import register_dataset

DATASET_NAME = "sums"


@dataclass
class SumsConfig:
    seed: int = 0
    size: int = 10
    largest: int = 9


class Sums:
    """Questions repeat: there are only `largest` different ones."""

    def __init__(self, config):
        self.config = config
        self.task_indices = [index % 3 for index in range(config.size)]

    def __getitem__(self, index):
        left = index % self.config.largest
        return {"question": f"{left} + 1?", "answer": str(left + 1), "metadata": {"pair": (left, 1)}}

    def score_answer(self, answer, entry):
        if answer == "hang":
            while True:
                pass
        if answer == "unreadable" or entry["answer"] == "5":
            raise ValueError("not a number")
        return 1.0 if answer == entry["answer"] else 0.01


class SumsCurriculum:
    attributes = {"largest": SimpleNamespace(levels=[20, 40, 60])}

    def set_global_level(self, level):
        self.largest = self.attributes["largest"].levels[level]

    def generate_configuration(self, defaults):
        return SumsConfig(**{**defaults, "largest": self.largest})


register_dataset(DATASET_NAME, Sums, SumsConfig, SumsCurriculum)
