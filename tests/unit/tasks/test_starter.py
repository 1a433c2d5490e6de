"""The starter's tokenizer, and the starter itself in a few steps."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

from reinforge.tasks.tic_tac_toe.game import EMPTY_BOARD, legal_moves, prompt_for
from reinforge.tasks.tic_tac_toe.starter import Recipe, ensure_starter, home, make_tokenizer, random_moves

TINY = Recipe(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, num_steps=12, batch_size=8)


@pytest.fixture(autouse=True)
def _own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("REINFORGE_HOME", str(tmp_path))


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def test_home_is_the_variable_or_the_users_cache(tmp_path, monkeypatch):
    assert home() == tmp_path
    monkeypatch.delenv("REINFORGE_HOME")
    assert home().name == "reinforge"


def test_each_square_is_one_token(tokenizer):
    for sign in ("", "+", "-"):
        for number in range(1, 10):
            assert len(tokenizer.encode(f" {sign}{number}", add_special_tokens=False)) == 1
    prompt = tokenizer.encode(prompt_for(EMPTY_BOARD, "X"), add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(prompt)[:2] == ["Play", "Ġ+:"]
    assert len(prompt) == 11


@pytest.mark.parametrize("text", ["½ ünïcode\n\ttabs", "日本 5", "", "  two  spaces ", "Play +: +1", "\x00\x7f"])
def test_any_text_survives_the_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_the_template_marks_roles_and_asks_for_a_reply(tokenizer):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|system|>s<|end|><|user|>q<|end|><|assistant|>"
    assert tokenizer.eos_token == "<|end|>"


def test_it_is_shown_only_legal_moves_each_as_likely(tokenizer):
    first = list(itertools.islice(random_moves(Recipe(), tokenizer), 400))
    for trajectory in first:
        question, answer = trajectory.episode
        empty = [word for word in question.content.split(" ") if len(word) == 1]
        assert answer.content.strip() in empty
        assert tokenizer.decode(answer.tokens.token_ids) == f"{answer.content}<|end|>"
    opening = prompt_for(EMPTY_BOARD, "X")
    answers = [t.episode[1].content for t in first if t.episode[0].content == opening]
    assert len(set(answers)) == len(legal_moves(EMPTY_BOARD))


def test_it_is_made_once_and_loads_in_transformers(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    steps = []
    folder = ensure_starter(lambda done, total, loss: steps.append((done, total, loss)), TINY)
    assert folder.parent == tmp_path / "models"
    assert steps[-1][:2] == (12, 12)
    assert ensure_starter(lambda *_: pytest.fail("made twice"), TINY) == folder
    assert sorted(path.name for path in folder.parent.iterdir() if path.is_dir()) == [folder.name]
    assert not (folder / "training").exists()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.chat_template


def test_makers_at_the_same_time_make_one(tmp_path):
    made = []
    with ThreadPoolExecutor(3) as pool:
        folders = list(pool.map(lambda _: ensure_starter(lambda done, *_: made.append(done), TINY), range(3)))
    assert len(set(folders)) == 1
    assert made == [12]


def test_another_recipe_is_another_model():
    assert Recipe().sha256 == Recipe().sha256
    assert Recipe(num_steps=601).sha256 != Recipe().sha256


def test_the_same_recipe_gives_the_same_weights(tmp_path, monkeypatch):
    first = (ensure_starter(recipe=TINY) / "model.safetensors").read_bytes()
    monkeypatch.setenv("REINFORGE_HOME", str(tmp_path / "elsewhere"))
    assert (ensure_starter(recipe=TINY) / "model.safetensors").read_bytes() == first
