from dataclasses import dataclass

from ..factory import register_dataset


@dataclass
class AnagramsConfig:
    seed: int = 0
    size: int = 10


class Anagrams:
    """Has several right answers, and names one in the metadata, as propositional_logic does."""

    def __init__(self, config):
        self.config = config

    def __getitem__(self, index):
        return {"question": f"ab{index}", "answer": None, "metadata": {"example_answer": f"{index}ba"}}

    def score_answer(self, answer, entry):
        return float(answer != entry["question"] and sorted(answer) == sorted(entry["question"]))


register_dataset("anagrams", Anagrams, AnagramsConfig)
