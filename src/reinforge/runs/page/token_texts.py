"""The text of each sampled token, from the tokenizer of the run's model; needs no torch."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

TOKENIZER = "tokenizer.json"
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer writes for a part of a character."""


class TokenTexts:
    """Splits the text of a reply into its tokens.

    Args:
        tokenizer: A `tokenizers.Tokenizer`; None: there is none, and nothing is split.
    """

    def __init__(self, tokenizer: Any = None):
        self._tokenizer = tokenizer

    @classmethod
    def find(cls, folder: Path, config: Mapping[str, Any]) -> TokenTexts:
        """Returns the texts of a run's tokens: of its model, of a checkpoint, or else of the model it began with."""
        if importlib.util.find_spec("tokenizers") is None:
            return cls()
        policy = (config.get("finetuning") or {}).get("policy") or {}
        given = [Path(name) for name in (policy.get("tokenizer"), policy.get("model")) if isinstance(name, str)]
        places = [folder / "model", *sorted((folder / "checkpoints").glob("*")), *given]
        for file in (place / TOKENIZER for place in places):
            if file.is_file():
                from tokenizers import Tokenizer

                try:
                    return cls(Tokenizer.from_file(str(file)))
                except Exception as error:  # noqa: BLE001  the library raises bare exceptions for a damaged file
                    logger.warning("%s cannot be read, so the page shows no tokens: %s", file, error)
        return cls()

    def split(self, token_ids: Sequence[int]) -> list[tuple[str, int]] | None:
        """Returns the text of each token and the number of tokens that it stands for; None: not known.

        Tokens that hold parts of one character are one piece. Special tokens are among them.

        Example: the ids of "a", the two halves of "é", and "<eos>" -> [("a", 1), ("é", 2), ("<eos>", 1)].
        """
        if self._tokenizer is None:
            return None
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        if any(not 0 <= token < size for token in token_ids):
            return None
        from tokenizers.decoders import DecodeStream

        stream, pieces, count = DecodeStream(skip_special_tokens=False), [], 0
        for token in token_ids:
            count += 1
            text = stream.step(self._tokenizer, token)
            if text is not None:
                pieces.append((text, count))
                count = 0
        return [*pieces, (UNFINISHED, count)] if count else pieces
