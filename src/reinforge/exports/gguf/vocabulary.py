"""A byte-level BPE tokenizer as GGUF holds it: tokens, their types, merges, and the name of the pre-tokenizer.

llama.cpp has the regular expressions of pre-tokenizers in its source, by name (`tokenizer.ggml.pre`). The name is found
by what the tokenizer does, not by the model's name:

    Digits, ByteLevel with its regex                             -> smollm
    Split by Qwen2's regex, ByteLevel without a regex            -> qwen2
    Split by Llama 3's regex, merges ignored for known pieces    -> llama-bpe
    anything else                                                -> refused: text would become other tokens
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reinforge.engine.model.chat_template import PromptRenderer
from reinforge.errors import ConfigError, Problem
from reinforge.exports.gguf.tokenizer import SPLITS, Split
from reinforge.types.request import ModelRequest

FORMAT = "--format gguf"
CONVERTER = (
    "export with --format merged, and convert that folder with llama.cpp's own converter: "
    "python convert_hf_to_gguf.py FOLDER --outfile model.gguf"
)

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""GGUF's types of tokens."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    tokens: tuple[str, ...]
    """One for each row of the embeddings, in the spelling of byte-level BPE."""
    types: tuple[int, ...]
    """GGUF's type of each token."""
    merges: tuple[str, ...]
    """Pairs of tokens, separated by a space, the first to merge first."""
    pre: str
    """llama.cpp's name of the pre-tokenizer."""
    ends: tuple[int, ...]
    """Tokens that end a reply, the tokenizer's own first."""
    bos: int | None
    pad: int | None
    unknown: int | None
    adds_bos: bool
    """llama.cpp begins every prompt with `bos`."""
    chat_template: str


def build_vocabulary(tokenizer: Any, num_rows: int, ends: Sequence[int]) -> Vocabulary:
    """Returns the vocabulary of a Hugging Face tokenizer.

    Args:
        tokenizer: A fast tokenizer with a chat template.
        num_rows: Rows of the embeddings; those without a token are unused ones.
        ends: Tokens that end a reply.
    """
    definition = _read_definition(tokenizer)
    pre = name_pre_tokenizer(definition)
    names = {index: name for name, index in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    # transformers adds tokens of the family that a model may have no embedding for; text that has one cannot be run
    if missing := [index for index in names if index >= num_rows and index not in added]:
        raise _refuse(f"the token {names[missing[0]]!r} has no embedding: the model has {num_rows} rows")
    special = {index for index, token in added.items() if token.special}
    types = [
        UNUSED if i not in names else CONTROL if i in special else USER_DEFINED if i in added else NORMAL
        for i in range(num_rows)
    ]

    def keep(token: int | None) -> int | None:
        return token if token is not None and token < num_rows else None

    template = tokenizer.chat_template
    template = template.get("default", next(iter(template.values()))) if isinstance(template, dict) else template
    return Vocabulary(
        tokens=tuple(names.get(index, f"[PAD{index}]") for index in range(num_rows)),
        types=tuple(types),
        merges=tuple(each if isinstance(each, str) else " ".join(each) for each in definition["model"]["merges"]),
        pre=pre,
        ends=tuple(dict.fromkeys(end for end in map(keep, (tokenizer.eos_token_id, *ends)) if end is not None)),
        bos=keep(tokenizer.bos_token_id),
        pad=keep(tokenizer.pad_token_id),
        unknown=keep(tokenizer.unk_token_id),
        adds_bos=_adds_bos(tokenizer),
        chat_template=template,
    )


def name_pre_tokenizer(definition: dict[str, Any]) -> str:
    """Returns llama.cpp's name of the pre-tokenizer in the content of a `tokenizer.json`; others are refused."""
    model, normalizer = definition["model"], definition.get("normalizer")
    if model.get("type") != "BPE" or model.get("byte_fallback") or model.get("continuing_subword_prefix"):
        kind = "BPE with byte fallback (SentencePiece)" if model.get("type") == "BPE" else model.get("type")
        raise _refuse(f"its tokenizer is {kind}; this writer knows byte-level BPE")
    if normalizer is not None and normalizer.get("type") != "NFC":  # llama.cpp leaves out NFC for these models, too
        raise _refuse(f"its tokenizer normalizes text by {normalizer.get('type')}, which llama.cpp does not")
    steps = list(_read_steps(definition.get("pre_tokenizer")))
    split = _describe_steps(steps, ignores_merges=bool(model.get("ignore_merges")))
    name = next((name for name, known in SPLITS.items() if split == replace(known, composes=False)), None)
    if name is None:
        text = json.dumps(definition.get("pre_tokenizer"))[:300]
        fix = (
            f"llama.cpp has no name for its pre-tokenizer, or none that this writer knows ({', '.join(SPLITS)}): {text}"
        )
        raise _refuse(fix)
    return name


def _describe_steps(steps: list[dict[str, Any]], *, ignores_merges: bool) -> Split | None:
    """Returns how text is split before merging; None: in another way than any that GGUF has a name for."""
    digits = [step for step in steps if step["type"] == "Digits"]
    others = steps[1:] if steps and steps[0] in digits else steps
    if any(not step.get("individual_digits") for step in digits) or any(step in digits for step in others):
        return None
    *splits, last = others or [{"type": "none"}]
    if last["type"] != "ByteLevel" or last.get("add_prefix_space") or len(splits) > 1:
        return None
    if splits and not (last.get("use_regex") is False and _keeps_all_pieces(splits[0])):
        return None
    if not splits and last.get("use_regex") is False:
        return None
    pattern = splits[0]["pattern"].get("Regex") if splits else None
    return Split(pattern, by_digit=bool(digits), ignores_merges=ignores_merges)


def _keeps_all_pieces(step: dict[str, Any]) -> bool:
    how = (step.get("behavior"), step.get("invert", False))
    return step["type"] == "Split" and how in (("Isolated", False), ("Removed", True))


def _read_steps(node: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if node is None:
        return
    if node["type"] == "Sequence":
        for each in node["pretokenizers"]:
            yield from _read_steps(each)
    else:
        yield node


def _read_definition(tokenizer: Any) -> dict[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _refuse("its tokenizer is not one of the tokenizers library, so its definition cannot be read")
    definition: dict[str, Any] = json.loads(backend.to_str())
    return definition


def _adds_bos(tokenizer: Any) -> bool:
    """Returns True if llama.cpp puts the BOS token before every prompt, as the tokenizer does before every text.

    With it, llama.cpp begins chat prompts with one, too, and removes that of the template. So where the tokenizer adds
    one but the template does not, what training saw comes first: chat prompts have none.
    """
    bos = tokenizer.bos_token_id
    prompt = PromptRenderer(tokenizer).render(ModelRequest([{"role": "user", "content": "a"}]))
    return bos is not None and prompt[:1] == (bos,) and bool(tokenizer.encode("a")[0] == bos)


def _refuse(message: str) -> ConfigError:
    return ConfigError(Problem(FORMAT, f"cannot write this model as GGUF: {message}", CONVERTER))
