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
    """The part of a GGUF file that llama.cpp tokenizes with.

    Attributes:
        tokens: One for each row of the embeddings, in the spelling of byte-level BPE.
        types: GGUF's type of each token.
        merges: Pairs of tokens, separated by a space, the first to merge first.
        pre: llama.cpp's name of the pre-tokenizer.
        ends: Tokens that end a reply, the tokenizer's own first.
        bos, pad, unknown: Special tokens; None: the tokenizer has none.
        adds_bos: llama.cpp begins every prompt with `bos`.
        chat_template: Jinja text.
    """

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...]
    pre: str
    ends: tuple[int, ...]
    bos: int | None
    pad: int | None
    unknown: int | None
    adds_bos: bool
    chat_template: str


def build_vocabulary(tokenizer: Any, num_rows: int, ends: Sequence[int]) -> Vocabulary:
    """Returns the vocabulary of a Hugging Face tokenizer.

    Args:
        tokenizer: A fast tokenizer with a chat template.
        num_rows: Rows of the embeddings; those without a token are unused ones.
        ends: Tokens that end a reply.

    Raises:
        ConfigError: It is no byte-level BPE, or llama.cpp does not know its pre-tokenizer.
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
        merges=tuple(_list_merges(definition)),
        pre=pre,
        ends=tuple(dict.fromkeys(end for end in map(keep, (tokenizer.eos_token_id, *ends)) if end is not None)),
        bos=keep(tokenizer.bos_token_id),
        pad=keep(tokenizer.pad_token_id),
        unknown=keep(tokenizer.unk_token_id),
        adds_bos=_adds_bos(tokenizer, _render_any_prompt(tokenizer)),
        chat_template=template,
    )


def name_pre_tokenizer(definition: dict[str, Any]) -> str:
    """Returns llama.cpp's name of a tokenizer's pre-tokenizer.

    Args:
        definition: The content of a `tokenizer.json`.

    Raises:
        ConfigError: llama.cpp has none that splits text in the same way, or it is not known here.
    """
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
    """Yields the steps of a pre-tokenizer."""
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


def _list_merges(definition: dict[str, Any]) -> Iterator[str]:
    for merge in definition["model"]["merges"]:
        yield merge if isinstance(merge, str) else " ".join(merge)


def _adds_bos(tokenizer: Any, template_prompt: Sequence[int]) -> bool:
    """Returns True if llama.cpp puts the BOS token before every prompt, as the tokenizer does before every text.

    With it, llama.cpp begins chat prompts with one, too, and removes that of the template. So where the tokenizer adds
    one but the template does not, what training saw comes first: chat prompts have none.
    """
    bos = tokenizer.bos_token_id
    if bos is None or template_prompt[:1] != (bos,):
        return False
    return bool(tokenizer.encode("a")[0] == bos)


def _render_any_prompt(tokenizer: Any) -> tuple[int, ...]:
    return PromptRenderer(tokenizer).render(ModelRequest([{"role": "user", "content": "a"}]))


def _refuse(message: str) -> ConfigError:
    return ConfigError(Problem(FORMAT, f"cannot write this model as GGUF: {message}", CONVERTER))
