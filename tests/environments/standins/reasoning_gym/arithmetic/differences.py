from ..factory import register_dataset
from .sums import Sums, SumsConfig


class Differences(Sums):
    def __getitem__(self, index):
        entry = super().__getitem__(index)
        return {**entry, "question": f"{entry['answer']} - 1?", "answer": str(int(entry["answer"]) - 1)}


register_dataset("differences", Differences, SumsConfig)
