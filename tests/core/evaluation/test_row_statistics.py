"""Loading, describing and cleaning the rows of a file."""

import json

import pytest

from reinforge.errors import ConfigError
from reinforge.evaluation.row_statistics import compute_row_statistics, find_repeated_rows, load_rows
from reinforge.trainer.builders.offline import list_offline_choices


@pytest.fixture
def load(tmp_path):
    def load_given(*rows, name="rows.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_rows(tmp_path / name)

    return load_given


def chat(question, *answers, **columns):
    messages = []
    for answer in answers:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **columns}


def test_figures_of_conversations(load):
    rows = [
        chat("four", "ab", label=True, conversation="x", tools=[{"type": "function"}]),
        chat("four", "abcd", label=False, conversation="x"),
        chat("seven..", "a", "abc", label=True, conversation="y"),
        chat("four", "ab", label=True, conversation="z", id=None),
    ]
    found = compute_row_statistics(load(*rows))
    counts = (found.num_rows, found.num_conversations, found.num_prompts, found.num_pairs)
    assert counts == (4, 3, 3, 1), "tools are part of the prompt"
    assert (found.num_repeated, found.num_tools) == (0, 1), "equal but for its tools"
    assert (found.labels, found.reward_key, found.rewards) == ({True: 3, False: 1}, "label", [1.0, 0.0, 1.0, 1.0])
    assert (found.num_replies, found.reply_chars) == ([1, 1, 2, 1], [2, 4, 1, 3, 2])
    assert found.prompt_chars == [4, 4, len("seven.. a seven.."), 4]
    text = dict(found.format_rows())
    assert text["rows"] == "4 of 3 conversations"
    assert text["label"] == "3 true, 1 false, 0 without"
    assert json.loads(json.dumps(found.as_dict()))["reply_chars"] == {"min": 1, "median": 2, "mean": 2.4, "max": 4}


def test_rows_without_replies_have_figures_too(load):
    found = compute_row_statistics(load({"question": "abc", "answer": "d"}, {"question": "abc", "answer": "e"}))
    assert (found.num_rows, found.num_conversations, found.num_prompts, found.num_repeated) == (2, 2, 1, 0)
    assert "reply" not in dict(found.format_rows())


def test_repeated_rows_are_found_whatever_their_ids_and_scores(load):
    long = "please tell me how long the way from the station to the harbour takes on foot"
    rows = [
        chat(long, "ten minutes", id="a", label=True),
        chat(long, "ten minutes", id="b", label=False),
        chat(long, "ten minutes, I think", id="c", label=True),
        chat("unrelated words that nobody repeats in any other row", "yes", id="d", label=True),
    ]
    loaded = load(*rows)
    assert find_repeated_rows(loaded, 1.0) == {1: (0, 1.0)}
    near = find_repeated_rows(loaded, 0.5)
    assert sorted(near) == [1, 2]
    assert near[2][0] == 0
    assert 0.5 <= near[2][1] < 1


def test_every_problem_of_a_file_is_named_with_its_line(load, tmp_path):
    with pytest.raises(ConfigError) as caught:
        load(chat("q", "a"), {"messages": [{"role": "user", "content": "q"}, {"role": "alien", "content": "a"}]})
    assert [problem.location for problem in caught.value.problems] == [f"{tmp_path}/rows.jsonl:2"]
    with pytest.raises(ConfigError) as caught:
        load(chat("q", "a"), {**chat("q", "a"), "tools": "none"})
    assert str(caught.value) == f"{tmp_path}/rows.jsonl:2: tools: expected a list of function definitions"
    with pytest.raises(ConfigError, match=r"the name ends with .txt; allowed: .json, .jsonl"):
        load(chat("q", "a"), name="rows.txt")


def choose(loaded):
    return {each.algorithm: "no" if each.problem else each.settings for each in list_offline_choices(loaded)}


def test_the_algorithms_that_can_train_on_rows(load):
    plain, good, bad = chat("q", "a"), chat("q", "b", label=True), chat("q", "c", label=False)
    with_floor = "yes, with min_reward: 0.5"
    no = dict.fromkeys(("rejection_sampling", "kto", "dpo"), "no")
    assert choose(load(plain)) == {"sft": "yes", **no}
    assert choose(load(good, bad)) == {"sft": with_floor, "rejection_sampling": with_floor, "kto": "yes", "dpo": "yes"}
    assert choose(load(good, chat("r", "c", label=False)))["dpo"] == "no"
    assert choose(load(plain, bad)) == {"sft": "no", **no}
    sampled = "yes: the agent samples replies (`_type: group`)"
    assert choose(load({"question": "q", "answer": "a"})) == {"grpo": sampled, "sft": "no", **no}
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    assert choose(load(pair))["dpo"] == "yes"


def test_tools_that_all_rows_share_make_no_near_duplicates(load):
    tools = [{"type": "function", "function": {"name": "f", "description": " ".join(map(str, range(300)))}}]
    questions = ("how long does the way to the harbour take", "which bread is baked on a sunday in may")
    rows = load(*(chat(question, "a short answer", tools=tools) for question in questions))
    assert find_repeated_rows(rows, 0.8) == {}
    same = load(*(chat(questions[0], "a short answer", tools=tools, id=f"row {n}", scores={"x": n}) for n in range(2)))
    assert find_repeated_rows(same, 0.8) == {1: (0, 1.0)}
