from dataclasses import dataclass

from ...factory import register_dataset

DATASET_NAME = "doubles"


@dataclass
class DoublesConfig:
    seed: int = 0
    size: int = 10


class Doubles:
    def __init__(self, config):
        self.config = config

    def __getitem__(self, index):
        return {"question": f"2 x {index}?", "answer": str(2 * index), "metadata": {}}

    def score_answer(self, answer, entry):
        return float(answer == entry["answer"])


register_dataset(DATASET_NAME, Doubles, DoublesConfig)
