"""The questions of customers, and the dialogues in which a clerk answers them with the tools.

What do 3 lamps cost?     lookup(item="lamp") -> 24      calculate(expression="3*24") -> 72     72
What is 17 plus 8?        calculate(expression="17+8") -> 25                                    25
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from reinforge.config.schema import DatasetConfig
from reinforge.registry import register_dataset
from reinforge.tasks.datasets import SplitDataset, read_words
from reinforge.types.request import Message
from reinforge.types.seeding import stable_random

_WORDS = read_words(__file__)
PRICES: dict[str, int] = _WORDS["prices"]  # what `lookup` returns; no prompt shows it
PRICE_WORDINGS = _WORDS["price_wordings"]
SUM_WORDINGS = _WORDS["sum_wordings"]

OPERATORS = {"plus": "+", "minus": "-", "times": "*"}

SYSTEM = "You are a clerk. Look prices up, calculate, then answer with the number only."
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]},
        },
    }
    for name, parameter, description in (
        ("lookup", "item", "Returns the price of one article."),
        ("calculate", "expression", "Returns the value of an expression of two whole numbers, such as 3*24."),
    )
]


@dataclass(frozen=True, slots=True)
class Question:
    """A customer's question: `count` `operator` the price of `item`, or `other` if it names both numbers."""

    text: str
    count: int
    operator: str
    item: str | None = None
    other: int = 0

    @property
    def second(self) -> int:
        return PRICES[self.item] if self.item is not None else self.other

    @property
    def answer(self) -> int:
        return calculate(self.count, self.operator, self.second)


def calculate(left: int, operator: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


def write_question(rng: random.Random) -> Question:
    """Returns a random question; three in four are about a price."""
    if rng.random() < 0.75:
        count, item = rng.randint(2, 9), rng.choice(list(PRICES))
        return Question(rng.choice(PRICE_WORDINGS).format(count=count, item=item), count, "*", item)
    word = rng.choice(list(OPERATORS))
    right, left = sorted((rng.randint(2, 60), rng.randint(2, 60)))
    if word == "times":
        left = rng.randint(2, 9)
    text = rng.choice(SUM_WORDINGS).format(left=left, word=word, right=right)
    return Question(text, left, OPERATORS[word], None, right)


@dataclass(frozen=True, slots=True)
class Habits:
    """How often a careless clerk does what, at each step; one that skips a tool guesses its result."""

    skips_lookup: float = 0.3
    wrong_operator: float = 0.25
    skips_calculation: float = 0.2
    answers_price: float = 0.15


def write_dialogue(rng: random.Random, question: Question, habits: Habits) -> list[Message]:
    """Returns the messages in which a clerk with these habits answers a question."""
    messages: list[Message] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question.text}]
    second = question.second
    if question.item is not None:
        if rng.random() < habits.skips_lookup:
            second = rng.choice(list(PRICES.values()))
        else:
            messages += write_tool_use("lookup", {"item": question.item}, str(second))
            if rng.random() < habits.answers_price:
                return [*messages, {"role": "assistant", "content": str(second)}]
    operator = question.operator
    if rng.random() < habits.wrong_operator:
        operator = rng.choice([other for other in "+-*" if other != operator])
    value = calculate(question.count, operator, second)
    if rng.random() < habits.skips_calculation:
        return [*messages, {"role": "assistant", "content": str(rng.randint(2, 500))}]
    messages += write_tool_use("calculate", {"expression": f"{question.count}{operator}{second}"}, str(value))
    return [*messages, {"role": "assistant", "content": str(value)}]


def write_tool_use(name: str, arguments: dict[str, str], result: str) -> list[Message]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": f"call-{name}", "type": "function", "function": function}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": result},
    ]


class ShopDatasetConfig(DatasetConfig, name="shop"):
    """Number of questions per split; set `splits.key: split`, since every row names its split."""

    num_train: int = Field(default=512, ge=1, le=2000, description="Questions to train on.")
    num_select: int = Field(default=60, ge=1, le=200, description="Questions to select the best checkpoint on.")
    num_confirm: int = Field(default=200, ge=1, le=500, description="Questions for the verdict.")
    seed: int = Field(default=0, ge=0, description="Seed of the questions.")


@register_dataset(config_type=ShopDatasetConfig)
class ShopDataset(SplitDataset):
    """Rows such as `{"id": "train-00017", "split": "train", "question": "What do 3 ...", "answer": "72"}`."""

    def rows(self) -> list[dict[str, Any]]:
        rng = stable_random(self.config.seed, "shop")

        def write(split: str, index: int) -> dict[str, Any]:
            question = write_question(rng)
            return {"question": question.text, "answer": str(question.answer)}

        return self.write_rows(write)
