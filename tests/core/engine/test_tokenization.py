"""Text that is tokenized by the parts between special tokens has the tokens that it has as a whole."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from reinforge.engine.prompts import tokenization
from reinforge.engine.prompts.tokenization import TextTokenizer, find_bounds

TEXTS = ["the cat sat on the mat, and the dog too", " a  b\n\nc ", "Größe 2 + 3 = 5", "<|end of it", "it ends|>", "x_y"]
PLAIN = [AddedToken("<|user|>", special=True), AddedToken("<|end|>", special=True)]
NOT_BOUNDS = [
    AddedToken("<mask>", special=True, lstrip=True),
    AddedToken("word", special=True, single_word=True),
    AddedToken("A:", special=True),  # a word before it may need to know what follows
    AddedToken("<t>", special=True),
    AddedToken("<t><t>", special=True),  # has the one before it inside
    AddedToken("[x", special=True),
    AddedToken("x]", special=True),  # may begin inside the one before it
    AddedToken("<tool>", special=False, normalized=False),
    AddedToken("\n\n", special=False, normalized=False),
    AddedToken("<lower>", special=True, normalized=True),
    AddedToken("<unseen>", special=True),
]
TEMPLATE = "".join(
    token.content for token in [*PLAIN, *NOT_BOUNDS, AddedToken("<|trim|>")] if token.content != "<unseen>"
)


def make_byte_level():
    built = Tokenizer(models.BPE())
    built.pre_tokenizer, built.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return built, trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def make_metaspace(scheme):
    built = Tokenizer(models.BPE(unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return built, trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>"])


def make_unigram():
    built = Tokenizer(models.Unigram())
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return built, trainers.UnigramTrainer(vocab_size=60, special_tokens=["<unk>"], unk_token="<unk>")


def make_wordpiece():
    built = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    built.normalizer, built.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    return built, trainers.WordPieceTrainer(vocab_size=100, special_tokens=["[UNK]"])


KINDS = {
    "byte level": make_byte_level,
    "metaspace first": lambda: make_metaspace("first"),
    "metaspace always": lambda: make_metaspace("always"),
    "unigram": make_unigram,
    "wordpiece": make_wordpiece,
}


def build(kind, added):
    built, trainer = KINDS[kind]()
    built.train_from_iterator(TEXTS * 3, trainer)
    built.add_tokens(added)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=built)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write_texts(tokenizer, count):
    rng = random.Random(0)
    pieces = [*TEXTS, *(token.content for token in tokenizer.added_tokens_decoder.values()), " ", "words", "a", "\n"]
    return ["".join(rng.choices(pieces, k=rng.randint(0, 12))) for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_parts_have_the_tokens_of_the_whole(kind):
    tokenizer = build(kind, [*PLAIN, AddedToken("<|trim|>", special=True, rstrip=True), *NOT_BOUNDS])
    assert find_bounds(tokenizer) == ["<|user|>", "<|end|>", "<|trim|>", "[x"]
    parts = TextTokenizer(tokenizer)
    for text in write_texts(tokenizer, 400):
        assert parts.tokenize(text) == tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize("wrong", ["<mask>", "<t>", "x]"])
def test_division_at_other_tokens_would_change_tokens(wrong, monkeypatch):
    """The mutation check of what a bound must be."""
    tokenizer = build("byte level", [*PLAIN, *NOT_BOUNDS])
    monkeypatch.setattr(tokenization, "find_bounds", lambda tokenizer: [wrong])
    parts = TextTokenizer(tokenizer)
    assert any(
        parts.tokenize(text) != tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        for text in write_texts(tokenizer, 400)
    )


def test_a_tokenizer_that_was_saved_while_it_cut_and_padded_does_neither(tmp_path):
    tokenizer = build("byte level", PLAIN)
    whole = tokenizer.backend_tokenizer.encode("<|user|>the cat sat on the mat<|end|>", add_special_tokens=False).ids
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    tokenizer.save_pretrained(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    saved.chat_template = TEMPLATE
    assert TextTokenizer(saved).tokenize("<|user|>the cat sat on the mat<|end|>") == whole


def test_a_conversation_that_continues_costs_what_is_new(monkeypatch):
    tokenizer = build("byte level", PLAIN)
    parts, seen = TextTokenizer(tokenizer), []
    real = parts._backend

    class Counting:
        def encode(self, text, **settings):
            seen.append(text)
            return real.encode(text, **settings)

    parts._backend = Counting()
    parts.tokenize("<|user|>the cat<|end|>\n<|user|>")
    seen.clear()
    parts.tokenize("<|user|>the cat<|end|>\n<|user|>sat<|end|>\n")
    assert seen == ["<|user|>sat"]
