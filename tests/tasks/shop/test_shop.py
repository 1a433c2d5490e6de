import json
import random
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from reinforge.tasks.shop import questions
from reinforge.tasks.shop.questions import (
    Habits,
    Question,
    ShopDataset,
    ShopDatasetConfig,
    write_dialogue,
    write_question,
)
from reinforge.tasks.shop.starter import ClerkRecipe, generate_careless_clerks, make_tokenizer

ROOT = Path(__file__).parents[3]
CAREFUL = Habits(0.0, 0.0, 0.0, 0.0)
LAMPS = Question("What do 3 pieces of the lamp cost?", 3, "*", "lamp")
SUM = Question("17 plus 8?", 17, "+", None, 8)


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(ROOT / "examples" / "tool_agent" / "agent.py"))


def steps(question, habits, seed=0):
    messages = write_dialogue(random.Random(seed), question, habits)[2:]
    calls = [message["tool_calls"][0]["function"]["arguments"] for message in messages if message.get("tool_calls")]
    return [json.loads(call) for call in calls], [m["content"] for m in messages if m["content"] is not None]


def test_a_careful_clerk_looks_up_calculates_and_answers():
    assert LAMPS.answer == 72
    assert steps(LAMPS, CAREFUL) == ([{"item": "lamp"}, {"expression": "3*24"}], ["24", "72", "72"])
    assert steps(SUM, CAREFUL) == ([{"expression": "17+8"}], ["25", "25"])


def test_each_habit_costs_its_step():
    assert steps(LAMPS, replace(CAREFUL, answers_price=1.0)) == ([{"item": "lamp"}], ["24", "24"])
    assert steps(LAMPS, replace(CAREFUL, skips_calculation=1.0))[0] == [{"item": "lamp"}]
    calls, _ = steps(LAMPS, replace(CAREFUL, wrong_operator=1.0))
    assert calls[1]["expression"] in ("3+24", "3-24")
    calls, _ = steps(LAMPS, replace(CAREFUL, skips_lookup=1.0))
    assert [list(call) for call in calls] == [["expression"]]


def test_answers_are_right():
    rows = ShopDataset(ShopDatasetConfig(num_train=300, num_select=50, num_confirm=50)).rows()
    assert all(row["question"].find("  ") < 0 and row["answer"].lstrip("-").isdigit() for row in rows)


def test_the_examples_tools_are_those_of_the_task(example):
    assert example["PRICES"] == questions.PRICES
    assert example["SYSTEM"] == questions.SYSTEM
    assert (example["lookup"]("lamp"), example["calculate"]("3*24")) == ("24", "72")
    assert example["calculate"]("4 - 9") == "-5"
    assert example["calculate"]("9**9**9") == "not an expression"
    rng = random.Random(1)
    for _ in range(50):
        question = write_question(rng)
        expression = f"{question.count}{question.operator}{question.second}"
        assert example["calculate"](expression) == str(question.answer)


def test_the_starter_imitates_calls_as_its_template_writes_them():
    tokenizer = make_tokenizer()
    episodes = generate_careless_clerks(ClerkRecipe(habits=CAREFUL), tokenizer)
    episode = next(each for each in episodes if len(each.episode) == 7).episode
    texts = [tokenizer.decode(turn.logprobs.token_ids) for turn in episode if turn.logprobs is not None]
    assert texts[0].startswith('<tool_call>{"name": "lookup", "arguments": {"item": "')
    assert texts[1].startswith('<tool_call>{"name": "calculate", "arguments": {"expression": "')
    assert texts[2].removesuffix("<|end|>") == episode[-2].content
    assert all(text.endswith("<|end|>") for text in texts)
    last = episode[-1].logprobs
    assert len(last.prompt_token_ids) + len(last.token_ids) <= ClerkRecipe().max_model_len
