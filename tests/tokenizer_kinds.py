"""Five kinds of tokenizers, trained on a few sentences: most of them do not give a text back as it was."""

import json

from tests.models import SENTENCES, SPECIAL_TOKENS, make_tokenizer

TOOL_TEMPLATE = (
    "{% if tools %}<|tools|>{% for t in tools %}{{ t.function.name }} {% endfor %}as <tool_call>{% endif %}"
    "{% for m in messages %}<|{{ m.role if m.role in ('system', 'assistant') else 'user' }}|>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
    "<tool_call>{{ {'name': f.name, 'arguments': f.arguments} | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXTS = [*SENTENCES, '<tool_call>{"name": "left", "arguments": {"text": "yes"}}</tool_call>']
UNKNOWN = "<|unknown|>"


def _fast(tokenizer, **options):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>", **options)


def _trained(model, trainer, *, normalizer=None, pre_tokenizer=None, decoder=None):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer(model)
    for name, part in {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "decoder": decoder}.items():
        if part is not None:
            setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def unigram():
    """Pieces by likelihood, words marked by a low line; what it has not seen is unknown."""
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=[*SPECIAL_TOKENS, UNKNOWN], unk_token=UNKNOWN, show_progress=False
    )
    pieces = {"pre_tokenizer": pre_tokenizers.Metaspace(), "decoder": decoders.Metaspace()}
    return _fast(_trained(models.Unigram(), trainer, normalizer=normalizers.NFKC(), **pieces), unk_token=UNKNOWN)


def word_pieces():
    """Lower case without accents, words in pieces; punctuation stands apart."""
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=[*SPECIAL_TOKENS, UNKNOWN], show_progress=False)
    parts = {"normalizer": normalizers.BertNormalizer(), "pre_tokenizer": pre_tokenizers.BertPreTokenizer()}
    model = models.WordPiece(unk_token=UNKNOWN)
    return _fast(_trained(model, trainer, decoder=decoders.WordPiece(), **parts), unk_token=UNKNOWN)


def characters():
    """One token a character, each by itself."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

    trainer = trainers.WordLevelTrainer(vocab_size=300, special_tokens=[*SPECIAL_TOKENS, UNKNOWN], show_progress=False)
    split = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    model = models.WordLevel(unk_token=UNKNOWN)
    return _fast(_trained(model, trainer, pre_tokenizer=split, decoder=decoders.Fuse()), unk_token=UNKNOWN)


def pairs_with_bytes():
    """Merged pairs of characters, as Llama 2 and Gemma have them: a space before each text, bytes for the unknown."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, trainers

    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL_TOKENS, show_progress=False)
    spaces = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    learnt = _trained(models.BPE(), trainer, normalizer=spaces)
    model = json.loads(learnt.to_str())["model"]
    vocab = {f"<0x{byte:02X}>": 0 for byte in range(256)} | model["vocab"]
    vocab = {piece: number for number, piece in enumerate(vocab)}
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True))
    tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return _fast(tokenizer)


TOKENIZERS = {
    "byte-level pairs": make_tokenizer,
    "unigram": unigram,
    "word pieces": word_pieces,
    "pairs with bytes": pairs_with_bytes,
    "characters": characters,
}


def make_tool_tokenizer(kind):
    """Returns one of the five, with a template that writes tool calls."""
    tokenizer = TOKENIZERS[kind]()
    tokenizer.chat_template = TOOL_TEMPLATE
    return tokenizer
