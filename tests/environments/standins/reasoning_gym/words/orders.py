from dataclasses import dataclass

from ..factory import register_dataset

DATASET_NAME = "orders"


@dataclass
class OrdersConfig:
    seed: int = 0
    size: int = 10


class Orders:
    """Asks for the first of some words, which are in the order of a set, as ransom_note's letters are."""

    def __init__(self, config):
        self.config = config

    def __getitem__(self, index):
        words = list({f"{letter}{index}" for letter in "abcdefghij"})
        return {"question": " ".join(words), "answer": words[0], "metadata": {}}

    def score_answer(self, answer, entry):
        return float(answer == entry["answer"])


register_dataset(DATASET_NAME, Orders, OrdersConfig)
