"""The word problems: their data, the agent, the reward and what the demo shows of a run."""

import random
import re
from pathlib import Path

import pytest

from reinforge.config.loader import load_config
from reinforge.dialects.families.detection import find_family
from reinforge.dialects.families.family import ToolFormat
from reinforge.errors import PolicyFailure
from reinforge.rollout.workflows.tools import format_result
from reinforge.tasks.word_problems import WORD_PROBLEMS
from reinforge.tasks.word_problems.agent import CALCULATOR as CALCULATOR_TOOL
from reinforge.tasks.word_problems.agent import answer, calculate, calculate_and_answer
from reinforge.tasks.word_problems.dataset import WordProblemsDataset, WordProblemsDatasetConfig
from reinforge.tasks.word_problems.display import choose_problems, format_replies
from reinforge.tasks.word_problems.problems import (
    CONFIRM_WORDINGS,
    WORDINGS,
    Calculation,
    list_calculations,
    write_problem,
)
from reinforge.tasks.word_problems.scoring import score_calculation, score_tool_use
from reinforge.types.evaluation import EvalInputItem
from tests.doubles import ScriptedChat
from tests.episodes import make_context

EVERYTHING = WordProblemsDatasetConfig(num_train=1500, num_select=120, num_confirm=600)
ITEM = EvalInputItem(id="t", input_obj="2 and 3?", expected_output_obj="5", full_dataset_entry={})
CALL = {"name": "calculate", "arguments": '{"expression": "2 + 3"}'}
APPLES = ITEM.copy_with_updates(input_obj="Ana has 12 apples and buys 5 more.", expected_output_obj="17")


def operands(row):
    """The numbers that a problem names, without their order, and the answer: what has to be calculated."""
    return (*sorted(map(int, re.findall(r"\d+", row["question"]))), row["answer"])


@pytest.mark.parametrize(
    ("calculation", "result"),
    [
        (Calculation(12, "+", 5), 17),
        (Calculation(12, "-", 5), 7),
        (Calculation(12, "*", 5), 60),
        (Calculation(60, "/", 5), 12),
    ],
)
def test_a_calculation_has_its_result(calculation, result):
    assert calculation.result == result


def test_results_are_whole_numbers_above_zero_and_no_calculation_occurs_twice():
    every = list(list_calculations())
    assert len(set(every)) == len(every) > 900
    assert all(each.result > 0 for each in every)
    assert all(each.result * each.right == each.left for each in every if each.operator == "/")
    assert {each.operator for each in every} == set(WORDINGS) == set(CONFIRM_WORDINGS)


def test_a_problem_names_both_numbers_and_never_the_result():
    for wordings in (WORDINGS, CONFIRM_WORDINGS):
        for operator, texts in wordings.items():
            for text in texts:
                found = write_problem(random.Random(0), Calculation(84, operator, 7), {operator: (text,)})
                assert re.findall(r"\d+", found) in (["84", "7"], ["7", "84"]), text
                assert "{" not in found


def test_confirm_shares_no_calculation_and_no_wording_with_the_other_splits():
    rows = WordProblemsDataset(EVERYTHING).rows()
    assert len({row["question"] for row in rows}) == len(rows) == 2220
    splits = {name: [row for row in rows if row["split"] == name] for name in ("train", "select", "confirm")}
    calculations = {name: {operands(row) for row in found} for name, found in splits.items()}
    for name, others in (("confirm", ("train", "select")), ("train", ("select",))):
        for other in others:
            assert calculations[name].isdisjoint(calculations[other]), (name, other)
    assert not {text for texts in WORDINGS.values() for text in texts} & {
        text for texts in CONFIRM_WORDINGS.values() for text in texts
    }
    patterns = [re.compile(_to_pattern(text)) for texts in WORDINGS.values() for text in texts]
    assert all(any(pattern.fullmatch(row["question"]) for pattern in patterns) for row in splits["train"])
    assert not any(pattern.fullmatch(row["question"]) for pattern in patterns for row in splits["confirm"])


def _to_pattern(text):
    return re.sub(r"\\{\w+\\}", r"\\w+", re.escape(text))


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("12 + 5", "17"),
        ("5 - 12", "-7"),
        ("12 * 5", "60"),
        ("60 / 5", "12"),
        ("7 / 2", "3.5"),
        ("7 / 0", "not a number"),
        ("2 ** 9", "not a calculation"),
        ("__import__('os')", "not a calculation"),
    ],
)
def test_the_calculator_calculates_with_two_numbers_only(expression, result):
    assert calculate(expression) == result
    assert format_result(result) == result
    allowed = CALCULATOR_TOOL["function"]["parameters"]["properties"]["expression"]["pattern"]
    assert (re.search(allowed, expression) is None) == (result == "not a calculation")


async def test_the_agent_returns_the_reply():
    llm = ScriptedChat("5")
    assert await answer(ITEM, llm, make_context()) == "5"
    [request] = llm.requests
    assert request["messages"][-1]["content"].startswith("2 and 3?")
    assert "tools" not in request


@pytest.mark.parametrize("agent", [answer, calculate_and_answer])
async def test_a_prompt_replaces_the_system_text(agent):
    llm = ScriptedChat(CALL, "5")
    await agent(ITEM, llm, make_context(system="Count."))
    assert llm.requests[0]["messages"][0] == {"role": "system", "content": "Count."}


async def test_the_agent_with_a_calculator_answers_after_its_result():
    llm = ScriptedChat(CALL, "5")
    assert await calculate_and_answer(ITEM, llm, make_context()) == "2 + 3 = 5\n5"
    first, second = llm.requests
    assert first["tool_choice"] == "required"
    assert "tool_choice" not in second
    assert second["messages"][-1] == {"role": "tool", "tool_call_id": "c1", "content": "5"}


async def test_a_call_that_was_cut_off_is_a_failure_of_the_policy():
    with pytest.raises(PolicyFailure, match="incomplete"):
        await calculate_and_answer(ITEM, ScriptedChat('[calculate(expression="2'), make_context())


async def test_an_answer_without_a_number_is_a_failure_and_not_the_calculators_number():
    llm = ScriptedChat(CALL, "Awesome!")
    with pytest.raises(PolicyFailure, match="the answer has no number"):
        await calculate_and_answer(ITEM, llm, make_context())


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("12 + 5 = 17", 1.0),
        ("5 + 12 = 17\n", 1.0),
        ("12 - 5 = 7", 0.3),
        ("12 + 5 = 17 apples", 0.7 + 0.3 * 5 / 6),
        ("12 + 5 is 17", 0.7 + 0.3 * 3 / 6),
        ("There are 17.", 0.7),
        ("12 apples", 0.3 * 1 / 6),
        ("3 + 4 = 7", 0.0),
        ("120 + 5 = 125", 0.0),
        ("Seventeen", 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_is_the_right_number_and_a_calculation_with_the_numbers_of_the_problem(reply, score):
    assert score_calculation(APPLES.copy_with_updates(output_obj=reply)) == pytest.approx(score)


@pytest.mark.parametrize(
    ("output", "score"),
    [
        ("12 + 5 = 17\n17", 1.0),
        ("5 + 12 = 17\n17 apples", 0.7 + 0.3 * 3 / 4),
        ("12 - 5 = 7\n7", 0.3),
        ("12 - 5 = 7\nThe answer is 7", 0.15),
        ("12 - 5 = 7\n70", 0.15),
        ("12 - 5 = 7\n7.5", 0.15),
        ("12 + 12 = 24\n1", 0.075),
        ("2 + 3 = 5\n4", 0.0),
        ("2 + 3 = 5\n17", 0.7),
    ],
)
def test_with_a_calculator_the_form_is_the_problems_numbers_and_the_result_alone(output, score):
    """Of a number alone every short one would do: the model then answers 1 or 10 and forgets the calculator."""
    assert score_tool_use(APPLES.copy_with_updates(output_obj=output)) == pytest.approx(score)


def test_the_template_gives_smollm2s_own_text_and_shows_a_known_format_of_tool_calls():
    template = load_config(WORD_PROBLEMS).config.finetuning.policy.chat_template
    family = find_family(template)
    assert family is not None
    assert family.tool_format is ToolFormat.PYTHONIC
    jinja2 = pytest.importorskip("jinja2")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 3?"}]
    render = jinja2.Template(template).render
    assert render(messages=messages, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    )
    call = {"function": {"name": "calculate", "arguments": {"expression": "2 + 3"}}}
    messages += [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "5"}]
    assert render(messages=messages, tools=[CALCULATOR_TOOL]) == (
        '<|im_start|>system\nBe brief.\nTools, called as [name(argument="value")]:\n'
        "calculate(expression): Returns the result of a calculation with two numbers.<|im_end|>\n"
        "<|im_start|>user\n2 + 3?<|im_end|>\n"
        '<|im_start|>assistant\n[calculate(expression="2 + 3")]<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n'
    )


def episode(score):
    return {"scores": {"correct": {"score": score}}}


def test_the_demo_shows_newly_solved_problems_and_one_that_is_still_wrong():
    before = {name: episode(0.0) for name in "abcdefg"} | {"h": episode(1.0)}
    after = {name: episode(1.0) for name in "abcde"} | {"f": episode(0.0), "g": episode(0.0), "h": episode(1.0)}
    assert choose_problems(before, after) == ["a", "b", "c", "d", "f"]
    assert choose_problems(before, {}) == []


def test_a_call_is_shown_with_its_result():
    function = {"name": "calculate", "arguments": '{"expression": "12 + 5"}'}
    asked = {"messages": [], "reply": {"content": None, "tool_calls": [{"function": function}]}}
    answered = {"messages": [{"role": "tool", "content": "17"}], "reply": {"content": "It is\n17"}}
    assert format_replies([asked, answered]) == "12 + 5 -> 17; It is 17"


def test_the_files_of_the_task_are_listed_in_its_docstring():
    import reinforge.tasks.word_problems as task

    names = {path.name for path in Path(task.__file__).parent.iterdir() if path.is_file()} - {"__init__.py"}
    assert names == set(re.findall(r"^(\w+\.\w+) ", task.__doc__, re.MULTILINE))
