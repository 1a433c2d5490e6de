"""Splitting examples into train, select and confirm."""

import pytest

from reinforge.config.schema import SplitsConfig
from reinforge.errors import ConfigError
from reinforge.evaluation.splits import SPLITS, find_clusters, split_examples, split_with_validation
from reinforge.trainer.setup.fixed_splits import split_fixed
from reinforge.types.evaluation import EvalInputItem


def example(id_, question, answer=None, **columns):
    row = {"id": id_, "question": question, "answer": answer, **columns}
    return EvalInputItem(id=str(id_), input_obj=question, expected_output_obj=answer, full_dataset_entry=row)


def different(count):
    return [example(n, f"question {n}") for n in range(count)]


def sizes(splits):
    return [len(splits[name]) for name in SPLITS]


def ids(splits):
    return {name: {item.id for item in items} for name, items in splits.items()}


@pytest.mark.parametrize(
    ("count", "config", "expected"),
    [
        (100, {}, [60, 15, 25]),
        (10, {}, [6, 2, 2]),
        (3, {}, [1, 1, 1]),
        (10, {"train": 0.5, "select": 0.5, "confirm": 4}, [3, 3, 4]),
        (10, {"train": 5, "select": 2, "confirm": 3}, [5, 2, 3]),
        (20, {"train": 5, "select": 2, "confirm": 3}, [5, 2, 3]),
        (10, {"train": 0.5, "select": 0.1, "confirm": 0.2}, [5, 1, 2]),
    ],
)
def test_shares_and_counts(count, config, expected):
    splits = split_examples(different(count), SplitsConfig(**config), seed=0)
    assert sizes(splits) == expected
    assert len(set().union(*ids(splits).values())) == sum(expected)


def test_the_split_depends_on_the_seed_and_not_on_the_order_of_the_rows():
    items = different(40)
    once = ids(split_examples(items, SplitsConfig(), seed=1))
    assert ids(split_examples(items[::-1], SplitsConfig(), seed=1)) == once
    assert ids(split_examples(items, SplitsConfig(), seed=2)) != once
    assert ids(split_examples(items, SplitsConfig(seed=1), seed=2)) == once
    validation = [example(f"v{n}", f"asked {n}") for n in range(10)]
    first, second = (split_with_validation(items, validation, SplitsConfig(seed=1), n, id_key="id") for n in (1, 2))
    assert ids(first) == ids(second)


def talk(count, size=3, **columns):
    return [
        example(n, f"question {n}", conversation=f"c{n // size}", user=n % 2, **columns) for n in range(count * size)
    ]


PLAYS = [example(n, "play") for n in range(10)]
REPLIES = [example(n, "prompt", f"reply {n}", completion=f"reply {n}") for n in range(60)]
TORN = [example(id_, question, split=split) for id_, question, split in zip(
    "abcd", "xyxx", ("train", "select", "confirm", "train"), strict=True
)]  # fmt: skip


@pytest.mark.parametrize(
    ("items", "config", "message"),
    [
        (different(2), {}, "no examples are left for "),
        ([], {}, "no examples are left for train and select and confirm: the dataset has 0"),
        (different(10), {"train": 8, "select": 2}, "no examples are left for confirm"),
        (different(10), {"train": 8, "select": 3}, "train 8 \\+ select 3 is more than the dataset's 10 examples"),
        (different(10), {"train": 0.9, "select": 0.9}, "add up to more than 1"),
        (different(10), {"train": 2.5}, "2.5 is neither a share"),
        (PLAYS, {}, "left for select and confirm: the dataset has 10, 1 of them distinct"),
        (REPLIES, {}, r"has 60, 1 of them distinct \(replies to the same prompt count as one\)"),
        ([*different(5), example(1, "other")], {}, "these ids more than once: 1"),
        (TORN, {"key": "split"}, r"different splits: a \(train\), c \(confirm\), d \(train\)"),
        (talk(20), {"group_key": "user"}, "no examples are left for"),  # two users cannot fill three splits
        (talk(20), {"group_key": "usr"}, 'no row has .* in the column "usr", did you mean "user"'),
    ],
)
def test_impossible_splits_are_rejected(items, config, message):
    with pytest.raises(ConfigError, match=message):
        split_examples(items, SplitsConfig(**config), seed=0)


def test_equal_examples_stay_in_one_split():
    items = [example(f"{n}-{copy}", f"question {n}", n) for n in range(20) for copy in range(3)]
    for seed in range(5):
        splits = split_examples(items, SplitsConfig(), seed=seed)
        assert sizes(splits) == [36, 9, 15]
        questions = [{item.input_obj for item in splits[name]} for name in SPLITS]
        assert not questions[0] & questions[1]
        assert not (questions[0] | questions[1]) & questions[2]


def test_a_different_column_makes_examples_different():
    games = [example(n, "play", seed=n) for n in range(10)]
    assert sizes(split_examples(games, SplitsConfig(), seed=0)) == [6, 2, 2]


def test_examples_that_differ_only_in_their_id_are_examples_if_the_key_says_so():
    """A game: every row is "play", and the id seeds the opponent."""
    games = [example(n, "play") for n in range(10)]
    with pytest.raises(ConfigError, match=r"set finetuning\.splits\.key: id") as caught:
        split_examples(games, SplitsConfig(), seed=0)
    assert caught.value.problems[0].path == "finetuning.splits"
    splits = split_examples(games, SplitsConfig(key="id"), seed=0)
    assert sizes(splits) == [6, 2, 2]
    assert set().union(*ids(splits).values()) == {str(n) for n in range(10)}
    assert ids(split_examples(games[::-1], SplitsConfig(key="id"), seed=0)) == ids(splits), "in any order of rows"
    assert ids(split_examples(games, SplitsConfig(key="id"), seed=1)) != ids(splits)
    with pytest.raises(ConfigError) as caught:
        split_examples(different(2), SplitsConfig(), seed=0)
    assert "splits.key" not in caught.value.problems[0].fix, "no two rows are equal, so that would not help"


def test_the_column_with_the_id_may_have_another_name():
    games = [example(n, "play").copy_with_updates(full_dataset_entry={"game": n}) for n in range(10)]
    assert sizes(split_examples(games, SplitsConfig(key="game"), seed=0, id_key="game")) == [6, 2, 2]
    with pytest.raises(ConfigError, match=r"set finetuning\.splits\.key: game"):
        split_examples(games, SplitsConfig(), seed=0, id_key="game")


def test_a_column_names_the_split():
    items = [example(n, f"q{n}", split=name) for n, name in enumerate(["confirm", "train", "select", "train"])]
    assert ids(split_examples(items, SplitsConfig(key="split"), seed=0)) == {
        "train": {"1", "3"},
        "select": {"2"},
        "confirm": {"0"},
    }


def test_every_row_with_a_wrong_split_column_is_reported():
    items = [example(0, "a", split="trian"), example(1, "b", spilt="train"), example(2, "c", split="train")]
    with pytest.raises(ConfigError) as caught:
        split_examples(items, SplitsConfig(key="split"), seed=0)
    assert [problem.message for problem in caught.value.problems] == [
        'example "0" has split: \'trian\', did you mean "train"? allowed: train, select, confirm',
        'example "1" has no field "split", did you mean "spilt"?',
    ]


def test_replies_to_the_same_prompt_are_in_the_same_split():
    """Otherwise `confirm` would ask what training has seen."""
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    columns = [
        {"completion": "a", "score": 1},
        {"chosen": "a", "rejected": "b"},
        {"preferred_output": [said[1]]},
        {"messages": said},
    ]
    for column in columns:
        items = [example(n, f"prompt {n % 20}", f"reply {n}", **column) for n in range(60)]
        splits = split_examples(items, SplitsConfig(), seed=0)
        prompts = [{item.input_obj for item in splits[name]} for name in SPLITS]
        assert sum(map(len, prompts)) == len(set().union(*prompts)) == 20
        assert all(len(splits[name]) == 3 * len(found) for name, found in zip(SPLITS, prompts, strict=True))
    seeds = [example(n, f"prompt {n % 20}", f"reply {n}", world=n) for n in range(60)]
    assert sizes(split_examples(seeds, SplitsConfig(), seed=0)) == [36, 9, 15], "questions are told apart by the row"


def find_torn(splits):
    names = {}
    for name, items in splits.items():
        for item in items:
            names.setdefault(item.full_dataset_entry["conversation"], set()).add(name)
    return {value for value, found in names.items() if len(found) > 1}


def test_rows_of_one_conversation_stay_together():
    splits = split_examples(talk(20), SplitsConfig(), seed=0)
    assert find_torn(splits) == set()
    assert sizes(splits) == [36, 9, 15]
    assert find_torn(split_examples(talk(20), SplitsConfig(group_key=None), seed=0)), "without it they are torn apart"


@pytest.mark.parametrize("value", [None, "", True, ["a"], {"a": 1}, 1.5])
def test_what_names_no_conversation_groups_nothing(value):
    items = [example(n, f"question {n}", conversation=value) for n in range(10)]
    assert sizes(split_examples(items, SplitsConfig(), seed=0)) == [6, 2, 2]


def test_equal_rows_of_different_conversations_join_them():
    items = talk(20)
    same = [example(f"x{c}", "thanks", conversation=f"c{c}") for c in range(0, 20, 2)]
    for item in same:
        item.full_dataset_entry["messages"] = [{"role": "assistant", "content": item.id}]  # a reply: the prompt counts
    splits = split_examples(items + same, SplitsConfig(), seed=0)
    assert len({name for name, found in ids(splits).items() for item in same if item.id in found}) == 1
    assert find_torn(splits) == set()


def test_a_column_of_splits_that_tears_a_conversation_is_refused():
    items = [example(n, f"question {n}", conversation=f"c{n // 2}", part=SPLITS[n % 3]) for n in range(6)]
    with pytest.raises(ConfigError, match="rows with conversation 'c0' are in different splits: train, select"):
        split_examples(items, SplitsConfig(key="part"), seed=0)
    assert sizes(split_examples(items, SplitsConfig(key="part", group_key=None), seed=0)) == [2, 2, 2]


def test_whole_numbers_that_were_read_as_decimal_numbers_group_rows():
    items = [example(n, f"question {n}", customer=None if n == 59 else float(n // 3)) for n in range(60)]
    splits = split_examples(items, SplitsConfig(group_key="customer"), seed=0)
    customers = [{item.full_dataset_entry["customer"] for item in splits[name]} - {None} for name in SPLITS]
    assert sum(map(len, customers)) == len(set.union(*customers)) == 20


def test_one_conversation_for_all_rows_is_told_with_its_column():
    items = [example(n, f"question {n}", conversation="web") for n in range(30)]
    with pytest.raises(ConfigError) as caught:
        split_examples(items, SplitsConfig(), seed=0)
    [problem] = caught.value.problems
    assert "the dataset has 30, 30 of them distinct" in problem.message
    assert problem.message.endswith("in 1 groups with equal conversation")
    assert "set finetuning.splits.group_key: null" in problem.fix


def test_examples_of_one_conversation_or_prompt_are_one_cluster():
    items = [
        example("a", "one", completion="x", conversation="c"),
        example("b", "two", completion="x", conversation="c"),
        example("d", "one", completion="y"),
        example("e", "three", completion="y"),
        example("f", "Three!"),
    ]
    assert find_clusters(items, SplitsConfig()) == {"a": "a", "b": "a", "d": "a", "e": "e", "f": "e"}
    assert find_clusters(items, SplitsConfig(group_key=None)) == {"a": "a", "d": "a", "e": "e", "f": "e"}
    assert find_clusters(items, SplitsConfig(key="id", group_key=None)) == {}, "the id makes the example"


def test_the_rule_of_a_game_is_not_a_prompt_unless_the_rows_are_equal() -> None:
    games = [example(n, "play", seed=n // 2) for n in range(8)]
    assert find_clusters(games, SplitsConfig()) == {str(n): str(n // 2 * 2) for n in range(8)}
    questions = [example(n, f"question {n % 10}", seed=n) for n in range(30)]
    assert find_clusters(questions, SplitsConfig()) == {str(n): str(n % 10) for n in range(30)}


def games(*ids):
    return [example(id_, "play", "win") for id_ in ids]


def test_rows_that_differ_only_in_their_id_are_examples_if_the_key_says_so():
    train, validation = games("a", "b", "c"), games("v", "w", "x", "y", "z")
    with pytest.raises(ConfigError, match="also in the training dataset under another id") as caught:
        split_with_validation(train, validation, SplitsConfig(), 0, id_key="id")
    assert "set finetuning.splits.key: id" in caught.value.problems[0].fix
    splits = split_with_validation(train, validation, SplitsConfig(key="id"), 0, id_key="id")
    assert {name: len(items) for name, items in splits.items()} == {"train": 3, "select": 2, "confirm": 3}
    held_out = {item.id for name in ("select", "confirm") for item in splits[name]}
    assert held_out == {"v", "w", "x", "y", "z"}


def test_a_column_that_names_the_splits_is_refused_beside_a_validation_dataset():
    with pytest.raises(ConfigError, match="both define which examples are held out"):
        split_with_validation(games("a"), games("v"), SplitsConfig(key="split"), 0, id_key="id")


def talk_of(*ids):
    """Examples whose conversation is the first character of their id."""
    return [example(id_, f"about {id_}", "a", conversation=id_[0]) for id_ in ids]


def test_conversations_stay_in_one_split_and_in_one_dataset():
    validation = talk_of("v1", "v2", "v3", "w1", "w2", "w3")
    splits = split_with_validation(talk_of("a1", "b1"), validation, SplitsConfig(), 0, id_key="id")
    assert sorted("".join(sorted(item.id[0] for item in splits[name])) for name in ("select", "confirm")) == [
        "vvv",
        "www",
    ]
    with pytest.raises(ConfigError, match="1 values of conversation are also in the training dataset: w") as caught:
        split_with_validation(talk_of("a1", "w9"), validation, SplitsConfig(), 0, id_key="id")
    assert "finetuning.splits.group_key: null" in caught.value.problems[0].fix
    split_with_validation(talk_of("a1", "w9"), validation, SplitsConfig(group_key=None), 0, id_key="id")


def test_fixed_splits_stay_as_a_dataset_grows():
    """Ten chats of each of 100 users; later there are 100 more users, and twenty chats of each."""

    def chats(num_users, size):
        return [
            example(f"{user}-{n}", f"{user} {n}", user=f"u{user}") for user in range(num_users) for n in range(size)
        ]

    def users(splits):
        return {name: {item.full_dataset_entry["user"] for item in items} for name, items in splits.items()}

    config = SplitsConfig(fixed=True, group_key="user")
    first, later = (users(split_fixed(chats(*size), config, seed=0)) for size in ((100, 10), (200, 20)))
    for name in SPLITS:
        assert first[name] == {each for each in later[name] if int(each[1:]) < 100}
    assert [len(later[name]) for name in SPLITS] == pytest.approx([120, 30, 50], abs=20)
    assert users(split_fixed(chats(100, 10), config, seed=1)) != first
    assert users(split_examples(chats(100, 10), SplitsConfig(group_key="user"), seed=0)) != first


def test_rows_to_train_on_that_repeat_a_held_out_question_are_left_out_of_fixed_splits():
    """All users ask one question, and another that nearly repeats that of one other user."""
    items = [example(f"a{n}", "the same", user=f"u{n}", completion=f"reply {n}") for n in range(40)]
    near = [" ".join(f"w{n // 2}-{word}" for word in range(60)) + f" {n}" for n in range(40)]
    items += [example(f"b{n}", near[n], user=f"u{n}") for n in range(40)]

    def train(**more):
        splits = split_fixed(items, SplitsConfig(fixed=True, group_key="user", **more), seed=0)
        assert len(splits["confirm"]) == 2 * len({item.full_dataset_entry["user"] for item in splits["confirm"]})
        return {item.id for item in splits["train"]}

    users = {int(id_[1:]) for id_ in train(near_duplicates="allow")}
    assert train(near_duplicates="allow") == {f"{kind}{n}" for kind in "ab" for n in users}
    assert train() == {f"b{n}" for n in users}
    both = {n for n in users if n ^ 1 in users}
    assert 0 < len(both) < len(users)
    assert train(near_duplicates="group") == {f"b{n}" for n in both}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"confirm": 40}, "finetuning.splits.confirm: 40 is a count\n.*write a share from 0 to 1"),
        ({"key": "split"}, "finetuning.splits.key: set together with fixed"),
        ({"train": 0.9}, "the shares add up to 1.3, more than 1"),
    ],
)
def test_fixed_splits_need_shares(config, message):
    with pytest.raises(ConfigError, match=message):
        split_fixed(different(100), SplitsConfig(fixed=True, **config), seed=0)
