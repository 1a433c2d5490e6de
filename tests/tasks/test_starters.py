"""What all starters share: tokenizer, supervised episodes and cache, with a toy task and few steps."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from reinforge.runs.progress import SilentProgress
from reinforge.tasks.starters import Recipe, ensure_built, find_folder, home, make_bpe_tokenizer, supervised_episode

TINY = Recipe(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, num_steps=12, batch_size=8)
SAID = [{"role": "user", "content": "say five"}, {"role": "assistant", "content": "five"}]


def toy_tokenizer():
    return make_bpe_tokenizer(["say five"] * 2, words=r" ?\S+|\s+")


def build_toy(recipe=TINY, progress=None):
    episodes = itertools.repeat
    return ensure_built("toy", recipe, toy_tokenizer, lambda _, t: episodes(supervised_episode(t, SAID)), progress)


class Shares(SilentProgress):
    def __init__(self):
        self.shown = []

    def stage(self, epoch, stage, total):
        self.shown.append(stage)

    def advance(self, share):
        self.shown.append(round(share, 3))


def test_the_display_shows_how_far_a_starter_is():
    shares = Shares()
    build_toy(replace(TINY, num_steps=30), shares)
    assert shares.shown == ["MAKE MODEL", round(25 / 30, 3), 1.0]
    build_toy(replace(TINY, num_steps=30), shares)
    assert len(shares.shown) == 3, "it exists by now"


@pytest.fixture
def num_built(caplog):
    """Returns how many starters have been announced so far."""
    announced = "creating the bundled model toy (once; it takes about a minute)"
    return lambda: [record.getMessage() for record in caplog.records if record.levelname == "WARNING"].count(announced)


@pytest.fixture(autouse=True)
def _own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("REINFORGE_HOME", str(tmp_path))


@pytest.fixture(scope="module")
def tokenizer():
    return toy_tokenizer()


def test_home_is_the_variable_or_the_users_cache(tmp_path, monkeypatch):
    assert home() == tmp_path
    monkeypatch.delenv("REINFORGE_HOME")
    assert home().name == "reinforge"


@pytest.mark.parametrize("text", ["½ ünïcode\n\ttabs", "日本 5", "", "  two  spaces ", "say five", "\x00\x7f"])
def test_any_text_survives_the_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_the_template_marks_roles_and_asks_for_a_reply(tokenizer):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|system|>s<|end|><|user|>q<|end|><|assistant|>"
    assert tokenizer.eos_token == "<|end|>"


def test_every_assistant_turn_is_supervised_with_the_prompt_before_it(tokenizer):
    again = [{"role": "user", "content": " five"}, {"role": "assistant", "content": "say"}]
    turns = supervised_episode(tokenizer, [*SAID, *again]).episode
    assert [turn.tokens is not None for turn in turns] == [False, True, False, True]
    assert tokenizer.decode(turns[1].tokens.prompt_token_ids) == "<|user|>say five<|end|><|assistant|>"
    assert tokenizer.decode(turns[1].tokens.token_ids) == "five<|end|>"
    assert tokenizer.decode(turns[3].tokens.prompt_token_ids) == (
        "<|user|>say five<|end|><|assistant|>five<|end|><|user|> five<|end|><|assistant|>"
    )


def test_a_starter_is_built_once_and_loads_in_transformers(tmp_path, num_built):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = build_toy()
    assert folder.parent == tmp_path / "models"
    assert build_toy() == folder
    assert num_built() == 1
    assert sorted(path.name for path in folder.parent.iterdir() if path.is_dir()) == [folder.name]
    assert not (folder / "training").exists()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.chat_template


def test_concurrent_builds_make_one_starter(num_built):
    with ThreadPoolExecutor(3) as pool:
        folders = list(pool.map(lambda _: build_toy(), range(3)))
    assert len(set(folders)) == 1
    assert num_built() == 1


def test_another_recipe_is_another_model():
    assert find_folder("toy", Recipe()) == find_folder("toy", Recipe())
    assert find_folder("toy", Recipe(num_steps=601)) != find_folder("toy", Recipe())


@pytest.mark.slow
def test_the_same_recipe_gives_the_same_weights(tmp_path, monkeypatch):
    first = (build_toy() / "model.safetensors").read_bytes()
    monkeypatch.setenv("REINFORGE_HOME", str(tmp_path / "elsewhere"))
    assert (build_toy() / "model.safetensors").read_bytes() == first
