"""Answers that deserve no reward: what each attack makes, and that none of them is right by accident."""

import pytest

from reinforge.cli.reward import ATTACKS as OFFERED
from reinforge.evaluation.attacks import ATTACKS, INJECTIONS, Material, build_attacks
from reinforge.types.evaluation import EvalInputItem


def item(id_, question, expected):
    return EvalInputItem(id=id_, input_obj=question, expected_output_obj=expected, full_dataset_entry={})


ITEMS = [item("a", "What is 2+3?", "5"), item("b", "What is 4+4?", "8"), item("c", "What is 1+1?", "2")]


def outputs(attack, of=ITEMS[0], items=None, **fields):
    return [each.output for each in build_attacks(of, Material(items or ITEMS, **fields), [attack])]


def test_the_command_offers_every_attack():
    assert list(OFFERED) == list(ATTACKS)


def test_each_attack_makes_what_its_name_says():
    assert outputs("empty") == ["", " \n"]
    assert outputs("copied_prompt") == ["What is 2+3?"]
    assert sorted(outputs("copied_format")) == ["2", "8"]
    assert outputs("injected") == list(INJECTIONS)
    (verbose,) = outputs("verbose")
    assert len(verbose) > 2000
    assert "5" not in verbose
    (hedged,) = outputs("hedged")
    assert hedged.startswith("The answer is one of these: ")
    assert sorted(hedged.removesuffix(".").split(": ")[1].split(", ")) == ["2", "5", "8"]


def test_the_question_of_a_conversation_is_its_last_user_message():
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert outputs("copied_prompt", item("m", messages, "hello")) == ["hi"]
    assert outputs("copied_prompt", item("m", {"a": 1}, "hello")) == ['{"a": 1}']


def test_best_of_n_tries_known_wrong_answers_first_and_then_guesses():
    guesses = outputs("best_of_n", num_guesses=4, wrong={"a": ["6", "6 ", "4"]})
    assert guesses[:2] == ["6 ", "4"], "equal answers count once"
    assert len(guesses) == 4
    assert guesses == outputs("best_of_n", num_guesses=4, wrong={"a": ["6", "6 ", "4"]}), "the same every time"
    assert guesses[2:] != outputs("best_of_n", num_guesses=2, seed=1)


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_attack_is_the_expected_answer(attack):
    echo = item("e", "5", " 5\n")
    wrong = {"e": ["5", "6"]}
    assert "5" not in [str(output).strip() for output in outputs(attack, echo, [echo, *ITEMS], wrong=wrong)]
    yes = item("y", "yes?", "YES")
    assert "yes" not in [str(output).strip().casefold() for output in outputs(attack, yes, [yes], num_guesses=20)]


def test_without_expected_answers_the_attacks_that_need_them_make_none():
    free = [item(id_, "Write a poem.", None) for id_ in "ab"]
    made = {each.attack for each in build_attacks(free[0], Material(free))}
    assert made == {"empty", "copied_prompt", "verbose", "injected", "best_of_n"}
