"""Near-duplicate texts, and held-out examples that repeat training examples."""

import random

import pytest

from reinforge.config.schema import FinetuneConfig, GateConfig, SplitsConfig
from reinforge.evaluation import contamination
from reinforge.evaluation.contamination import (
    find_near_duplicates,
    find_repetitions,
    group_near_duplicates,
    measure_similarity,
    read_question,
    split_runs,
)
from reinforge.evaluation.splits import SPLITS, split_examples
from reinforge.types.evaluation import EvalInputItem

PASSWORD = "How do I reset the password of my account on the new website"


def example(id_, question, **columns):
    row = {"id": id_, "question": question, **columns}
    return EvalInputItem(id=id_, input_obj=question, expected_output_obj=None, full_dataset_entry=row)


@pytest.mark.parametrize(
    ("one", "other", "similarity"),
    [
        ("What is 3 + 4?", "what  is 3 + 4", 1.0),
        ("What is 3 + 4?", "What is 3 - 4?", 0.0),
        ("What is 3.5?", "What is 35?", 0.0),
        ("a b c d e f", "a b c d e g", 1 / 3),
        ("a b c d e f g h", "a b c d e f g h i", 4 / 5),
        ("今日は天気がいい", "今日は天気がいい。", 1.0),
        ("", "", 0.0),
    ],
)
def test_similarity_is_the_share_of_common_runs_of_five_words(one, other, similarity):
    assert measure_similarity(split_runs(one), split_runs(other)) == pytest.approx(similarity)


def test_pairs_come_with_their_similarity_in_the_order_of_the_texts():
    texts = ["a b c d e f g h", "x", "A B C D E F G H", "a b c d e f g h i", "X!", "", ""]
    assert find_near_duplicates(texts) == [(0, 2, 1.0), (0, 3, 0.8), (1, 4, 1.0)]
    assert find_near_duplicates(texts, threshold=0.81) == [(0, 2, 1.0), (1, 4, 1.0)]
    assert find_near_duplicates([]) == []


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.8, 1.0])
def test_the_index_finds_every_pair_that_comparing_all_texts_finds(threshold):
    rng = random.Random(0)
    texts = []
    for _ in range(60):
        words = rng.choices("abcdefgh", k=rng.randint(3, 14))
        texts += [" ".join(words), " ".join([*words, *rng.choices("xyz", k=rng.randint(0, 2))])]
    runs = [split_runs(text) for text in texts]
    first = {each: index for index, each in reversed(list(enumerate(runs)))}
    expected = [
        (i, j, measure_similarity(runs[i], runs[j]))
        for j in range(len(texts))
        for i in range(j)
        if (runs[i] == runs[j] and first[runs[j]] == i)
        or (first[runs[i]] == i and first[runs[j]] == j and measure_similarity(runs[i], runs[j]) >= threshold)
    ]
    assert find_near_duplicates(texts, threshold) == sorted(expected)
    assert len(expected) > 20


def test_a_dataset_that_repeats_one_long_text_takes_no_quadratic_time(monkeypatch):
    counted = []
    measure = contamination.measure_similarity
    monkeypatch.setattr(contamination, "measure_similarity", lambda a, b: counted.append(1) or measure(a, b))
    find_near_duplicates([f"{' '.join(map(str, range(100)))} number {i}" for i in range(200)])
    assert len(counted) <= 200 * contamination.MAX_CANDIDATES  # of 19,900 pairs


def test_held_out_questions_that_repeat_a_training_question_are_found_under_any_id():
    splits = {
        "train": [example("t1", PASSWORD), example("t2", "What is 3 + 4?", answer="7")],
        "select": [example("s1", f"{PASSWORD} please"), example("s2", "What is 4 + 4?")],
        "confirm": [example("c1", "what is 3 + 4", answer="seven")],
    }
    found = [(each.id, each.split, each.train_id, round(each.similarity, 2)) for each in find_repetitions(splits)]
    assert found == [("s1", "select", "t1", 0.9), ("c1", "confirm", "t2", 1.0)]
    assert [each.id for each in find_repetitions(splits, 0.95)] == ["c1"]


def test_only_what_the_agent_is_asked_counts():
    messages = [
        {"role": "system", "content": "You are helpful."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": "Yes?"},
    ]
    assert read_question(messages) == "Hello Yes?"
    assert read_question({"topic": "tea", "n": 3, "none": None}) == "3 tea"


def test_the_template_of_a_prompt_makes_no_duplicates():
    rule = "Read the following question with care, think step by step and give the answer in one word at the end of it:"
    asked = "Who wrote Faust?|Where is Oslo?|What is H2O?|When was 1066?|Why is grass green?|Who am I?"
    items = [example(str(n), f"{rule} {question}") for n, question in enumerate(asked.split("|"))]
    splits = {"train": items[:3], "select": items[3:4], "confirm": [*items[4:], example("copy", items[0].input_obj)]}
    assert [each.id for each in find_repetitions(splits)] == ["copy"]


def test_a_question_that_many_examples_share_is_not_what_makes_them_examples():
    games = [example(f"g{n}", "Play noughts and crosses.", seed=n) for n in range(12)]
    assert find_repetitions({"train": games[:6], "select": games[6:8], "confirm": games[8:]}) == []
    few = {"train": games[:1], "select": games[1:2], "confirm": games[2:3]}
    assert [each.id for each in find_repetitions(few)] == ["g1", "g2"]


def test_near_duplicates_are_grouped_also_through_others():
    words = "abcdefghijklmnopqrst"
    items = [example("x", " ".join(words)), example("y", " ".join(words[1:])), example("z", " ".join(words[2:]))]
    assert measure_similarity(split_runs(items[0].input_obj), split_runs(items[2].input_obj)) == 14 / 16
    assert group_near_duplicates([*items, example("w", "alone")], 0.9) == [["x", "y", "z"]]


def many_with_copies():
    rng = random.Random(1)
    texts = [" ".join(rng.choices([f"w{n}" for n in range(200)], k=20)) for _ in range(30)]
    return [example(f"{n}{copy}", f"{text} {copy}") for n, text in enumerate(texts) for copy in "ab"]


def test_near_duplicates_go_into_one_split_if_they_are_to_be_grouped():
    items = many_with_copies()
    splits = split_examples(items, SplitsConfig(near_duplicates="group"), seed=0)
    assert find_repetitions(splits) == []
    assert [len(splits[name]) for name in SPLITS] == [36, 10, 14]  # shares of 60: 36, 9 and 15
    # without that, the copies are spread
    assert len(find_repetitions(split_examples(items, SplitsConfig(), seed=0))) > 5


def test_a_run_warns_or_refuses_as_configured():
    from reinforge.trainer.guards import find_warnings, refuse_repetitions

    splits = {
        "train": [example("t1", PASSWORD)],
        "select": [example("s1", f"{PASSWORD} please")],
        "confirm": [example("c1", "Something else")],
    }

    def warn(**settings):
        config = FinetuneConfig(splits=SplitsConfig(**settings), gate=GateConfig(metric="judge"))
        events = find_warnings(config, splits, "reward", ["reward", "judge"])
        return [event.guard for event in events if event.guard != "contamination_by_meaning"]  # its package is there

    assert warn() == ["contamination"]
    assert warn(near_duplicate_similarity=0.95) == warn(near_duplicates="allow") == warn(key="id") == []
    assert refuse_repetitions(splits, SplitsConfig()) == []
    [problem] = refuse_repetitions(splits, SplitsConfig(near_duplicates="refuse"))
    assert problem.path == "finetuning.splits.near_duplicates"
    assert problem.message == (
        "a held-out example repeats a training example under another id: s1 (select) repeats t1, 90% similar"
    )
    [problem] = refuse_repetitions(splits, SplitsConfig(near_duplicates="group"))
    assert "cannot be put into one split, since the dataset itself says which examples are held out" in problem.fix


def test_a_verdict_without_a_metric_apart_from_the_reward_is_warned_about():
    from reinforge.trainer.guards import find_warnings, list_held_out_metrics

    def texts(**gate):
        events = find_warnings(FinetuneConfig(gate=GateConfig(**gate)), {}, "reward", ["reward", "exact"])
        return [event.text for event in events]

    [text] = texts()
    assert "no metric apart from the reward reward is held out" in text
    assert "such as exact" in text
    assert texts(metric="reward") == [text]
    rows_are_trained_on = find_warnings(FinetuneConfig(), {}, "reward", ["reward"], trains_on_reward=False)
    assert rows_are_trained_on == [], "nothing raised this reward"
    assert texts(metric="exact") == texts(guard_metrics={"exact": 0.1}) == []
    assert list_held_out_metrics(GateConfig(metric="a", guard_metrics={"b": 0.1, "a": 0.2, "reward": 0}), "reward") == [
        "a",
        "b",
    ]
