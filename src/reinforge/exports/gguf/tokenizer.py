"""The tokenizer of a GGUF file, as the library `tokenizers` has it: byte-level BPE and SentencePiece's BPE.

A file has tokens, merges and the *name* of a way to split text before merging (`tokenizer.ggml.pre`). A wrong split
gives other tokens than the model was trained with and shows in no error, so a name that is not in `SPLITS` is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reinforge.exports.gguf.header import GGUFError, GGUFHeader

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TEMPLATE = "tokenizer.chat_template"
BYTE_LEVEL, SENTENCE_PIECE = "gpt2", "llama"  # values of `tokenizer.ggml.model`
CONTROL, USER_DEFINED = 3, 4
"""Kinds of tokens that text is searched for before anything else; control tokens are left out of replies."""
END_NAMES = {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<end_of_turn>", "<|end_of_text|>"}
"""Control tokens that end a reply, in whichever family; llama.cpp stops at them, too."""
END_SETTINGS = ("eos", "eot", "eom")
PROBES = (
    "It's 1234567 o'clock,  WE'LL see: x=3.14;\n\n\tif (a != b) {return -1;}   // done\r\n",
    "na\u00efve cafe\u0301 \u65e5\u672c\u8a9e \u041f\u0440\u0438\u0432\u0435\u0442 \u0661\u0662",
    "CamelCase snake_case \U0001f600!? ",
)
"""Texts that ways to split text treat differently: digits, short forms, spaces, line ends, accents, scripts."""
LOW_LINE = "\u2581"
OTHER_TOKENIZER = "set finetuning.policy.tokenizer to the folder or hub id of the original model"

_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT_FORMS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BY_CASE = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
)


@dataclass(frozen=True, slots=True)
class Split:
    pattern: str | None = None  # expression for the pieces; None: that of GPT-2
    by_digit: bool = False  # each digit is a piece of its own, before the expression
    ignores_merges: bool = False  # a piece that is a token is not merged
    composes: bool = False  # text is first brought into the composed form (NFC)


_LLAMA3 = Split(rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_TAIL}", ignores_merges=True)
_QWEN2 = Split(rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_TAIL}", composes=True)
SPLITS = {
    "gpt-2": Split(),
    "smollm": Split(by_digit=True),
    "starcoder": Split(by_digit=True),
    "refact": Split(by_digit=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": Split(
        rf"{_BY_CASE}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+", ignores_merges=True
    ),
}
"""By `tokenizer.ggml.pre`."""


def check_tokenizer(header: GGUFHeader) -> None:
    """Checks that `make_tokenizer` can make a file's tokenizer, without making it."""
    kind = header.get("tokenizer.ggml.model", str)
    if kind not in (BYTE_LEVEL, SENTENCE_PIECE):
        found = "has no tokenizer" if kind is None else f"has a tokenizer of the kind {kind[:40]!r}"
        raise GGUFError(f"{found}; {BYTE_LEVEL} and {SENTENCE_PIECE} can be read", OTHER_TOKENIZER)
    if kind == BYTE_LEVEL:
        find_split(header)
    tokens, _ = _list_tokens(header)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is not None and len(tokens) > embedding.shape[0]:
        raise GGUFError(f"has {len(tokens)} tokens, but {embedding.shape[0]} rows in its embedding", OTHER_TOKENIZER)
    if kind == SENTENCE_PIECE:
        _list_of(header, "scores", float, len(tokens))
    elif not _list_of(header, "merges", str):
        raise GGUFError("has a tokenizer without merges (tokenizer.ggml.merges)", OTHER_TOKENIZER)


def find_split(header: GGUFHeader) -> Split:
    name = header.get("tokenizer.ggml.pre", str)
    if name not in SPLITS:
        found = "does not say how its tokenizer splits text" if name is None else f"splits text as {name[:40]!r}"
        raise GGUFError(f"{found} (tokenizer.ggml.pre); known are {', '.join(SPLITS)}", OTHER_TOKENIZER)
    return SPLITS[name]


def find_ends(header: GGUFHeader) -> list[int]:
    tokens, kinds = _list_tokens(header)
    ends = {number for number, token in enumerate(tokens) if kinds[number] == CONTROL and token in END_NAMES}
    named = {header.find_token(name, len(tokens)) for name in END_SETTINGS}
    return sorted(ends | {number for number in named if number is not None})


def write_tokenizer(folder: Path, header: GGUFHeader) -> None:
    """Writes a file's tokenizer and its chat template into a folder, in transformers' layout."""
    check_tokenizer(header)
    make_tokenizer(header).save(str(folder / "tokenizer.json"))
    tokens, _ = _list_tokens(header)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}.items():
        if (number := header.find_token(key, len(tokens))) is not None:
            settings[name] = tokens[number]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    if template := header.get(TEMPLATE, str):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def make_tokenizer(header: GGUFHeader) -> Tokenizer:
    from tokenizers import AddedToken

    tokens, kinds = _list_tokens(header)
    vocab = {token: number for number, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        raise GGUFError("has duplicate tokens", OTHER_TOKENIZER)
    is_byte_level = header.get("tokenizer.ggml.model", str) == BYTE_LEVEL
    tokenizer = _make_byte_level(header, vocab) if is_byte_level else _make_sentence_piece(header, vocab)
    for number, token in enumerate(tokens):  # in the order of their numbers, which the library gives them
        if kinds[number] in (CONTROL, USER_DEFINED):
            special = kinds[number] == CONTROL
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=special)])
    _add_first_token(tokenizer, header, tokens)
    return tokenizer


def check_same_tokens(loaded: Any, header: GGUFHeader) -> None:
    """Checks that what transformers loaded is the file's tokenizer: for some families it uses a class of its own."""
    own = make_tokenizer(header)
    for text in PROBES:
        if loaded.encode(text, add_special_tokens=False) != own.encode(text, add_special_tokens=False).ids:
            split = header.settings.get("tokenizer.ggml.pre", SENTENCE_PIECE)
            message = f"transformers loads {type(loaded).__name__} for it, which gives other tokens than {split}"
            raise GGUFError(f"has a tokenizer that cannot be used: {message}", OTHER_TOKENIZER)


def _make_byte_level(header: GGUFHeader, vocab: Mapping[str, int]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    split = find_split(header)
    merges = [tuple(merge.split(" ", 1)) for merge in _list_of(header, "merges", str)]
    try:
        model = models.BPE(dict(vocab), merges, ignore_merges=split.ignores_merges)
    except Exception as error:
        raise GGUFError(f"has an unusable tokenizer: {str(error)[:200]}", OTHER_TOKENIZER) from error
    tokenizer = Tokenizer(model)
    if split.composes:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.by_digit else []
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _make_sentence_piece(header: GGUFHeader, vocab: Mapping[str, int]) -> Tokenizer:
    """Returns BPE over pieces with a low line for a space, whose merges follow from the scores of the pieces."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens = list(vocab)
    scores = _list_of(header, "scores", float, len(tokens))
    unknown = header.get("tokenizer.ggml.unknown_token_id", int, 0)
    pairs = _derive_merges(vocab, scores)
    model = models.BPE(dict(vocab), pairs, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    leads = header.get("tokenizer.ggml.add_space_prefix", bool, True)
    prepended = [normalizers.Prepend(LOW_LINE)] if leads else []
    tokenizer.normalizer = normalizers.Sequence([*prepended, normalizers.Replace(" ", LOW_LINE)])
    stripped = [decoders.Strip(" ", 1, 0)] if leads else []
    parts = [decoders.Replace(LOW_LINE, " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def _derive_merges(vocab: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Returns every pair of pieces that make a piece, the pair with the highest score of its whole first."""
    ranked = []
    for piece, number in vocab.items():
        parts = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        held = [(left, right) for left, right in parts if left in vocab and right in vocab]
        ranked += [(-scores[number], vocab[left], vocab[right], left, right) for left, right in held]
    return [(left, right) for *_, left, right in sorted(ranked)]


def _add_first_token(tokenizer: Tokenizer, header: GGUFHeader, tokens: list[str]) -> None:
    from tokenizers import processors

    is_piece = header.get("tokenizer.ggml.model", str) == SENTENCE_PIECE
    number = header.find_token("bos", len(tokens))
    if number is not None and header.get("tokenizer.ggml.add_bos_token", bool, is_piece):
        first = tokens[number]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[first, "$A"], pair=[first, "$A", f"{first}:1", "$B:1"], special_tokens=[(first, number)]
        )


def _list_tokens(header: GGUFHeader) -> tuple[list[str], list[int]]:
    tokens = _list_of(header, "tokens", str)
    if not tokens:
        raise GGUFError("has a tokenizer without tokens (tokenizer.ggml.tokens)", OTHER_TOKENIZER)
    return tokens, _list_of(header, "token_type", int, len(tokens)) or [0] * len(tokens)


def _list_of(header: GGUFHeader, name: str, kind: type, length: int | None = None) -> list[Any]:
    values = header.get(f"tokenizer.ggml.{name}", list, [])
    if (values and not isinstance(values[0], kind)) or (length is not None and values and len(values) != length):
        raise GGUFError(f"has an unusable list tokenizer.ggml.{name} of {len(values)} values", OTHER_TOKENIZER)
    return list(values)
