from dataclasses import dataclass

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
        return 1.0 if answer == entry["answer"] else 0.01


register_dataset(DATASET_NAME, Sums, SumsConfig)
