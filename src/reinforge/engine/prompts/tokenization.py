"""Text to tokens by the parts between special tokens, each of which is tokenized once.

    "<user>2+3?<end><assistant>5<end><user>why?<end>"   =>   <user>2+3?  <end>  <assistant>5  <end>  <user>why?  <end>

A special token is never part of another one or of other text, so that what stands before it and what stands behind it
are tokenized separately. A conversation that continues costs only what is new in it.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

from reinforge.bounded import find_surrogate

LONG_TEXT, CACHED_ENTRIES = 1 << 14, 4096  # characters; texts
CACHED_CHARS = 1 << 23  # of the cached texts; a token takes as much memory as ten of them


class TokenCache:
    """Tokens by what they were made of; the ones that were not used for longest go first."""

    def __init__(self) -> None:
        self._entries, self._num_chars = OrderedDict[Hashable, tuple[tuple[int, ...], int]](), 0
        self._lock = threading.Lock()

    def find(self, key: Hashable) -> tuple[int, ...] | None:
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def add(self, key: Hashable, token_ids: tuple[int, ...], num_chars: int) -> None:
        with self._lock:
            if key not in self._entries:  # another thread may have added it meanwhile
                self._entries[key] = token_ids, num_chars
                self._num_chars += num_chars
            while len(self._entries) > CACHED_ENTRIES or self._num_chars > CACHED_CHARS:
                self._num_chars -= self._entries.popitem(last=False)[1][1]


class TextTokenizer:
    """Tokenizes what a chat template has written, special tokens included."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        bounds = list[str]()
        if self._backend is not None:
            self._backend.no_truncation()  # as it was last used before it was saved, which cuts off a prompt
            self._backend.no_padding()
            bounds = find_bounds(tokenizer)
        self._bounds = re.compile("|".join(map(re.escape, bounds))) if bounds else None
        self._parts = TokenCache()

    def tokenize(self, text: str) -> list[int]:
        check_surrogates(text)
        if self._backend is None:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        starts = [0, *(found.start() for found in self._bounds.finditer(text))] if self._bounds is not None else [0]
        token_ids = list[int]()
        for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
            token_ids += self._tokenize_part(text[start:end])
        return token_ids

    def _tokenize_part(self, part: str) -> tuple[int, ...]:
        if (found := self._parts.find(part)) is not None:
            return found
        # The template has written the special tokens; calling the backend saves three times what the work itself takes.
        if len(part) > LONG_TEXT:  # only a batch lets other threads of Python run meanwhile
            found = tuple(self._backend.encode_batch_fast([part], add_special_tokens=False)[0].ids)
        else:
            found = tuple(self._backend.encode(part, add_special_tokens=False).ids)
        self._parts.add(part, found, len(part))
        return found


def check_surrogates(text: str) -> None:
    if (found := find_surrogate(text)) is not None:
        raise ValueError(
            f"the prompt has an unpaired surrogate (U+{ord(text[found]):04X}) at character {found}, which no "
            'tokenizer can encode; remove it in the agent: text.encode("utf-8", "replace").decode()'
        )


def find_bounds(tokenizer: Any) -> list[str]:
    """Returns special tokens of the chat template at which every text can be divided.

    They do not overlap with another added token that is matched in the text as it is, take no space before them, and do
    not change what stands beside them.
    """
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    as_written = [token for token in added if not token.normalized]
    joined = "\0".join(token.content for token in as_written)
    ends = {token.content[start:] for token in as_written for start in range(1, len(token.content))}
    template = f"{tokenizer.chat_template} {tokenizer.special_tokens_map}"
    return [
        text
        for token in as_written
        if token.special
        and (text := token.content) in template
        and not (token.lstrip or token.single_word or text[0].isalnum() or text[0] == "_")
        and joined.count(text) == 1
        and not any(text[:count] in ends for count in range(1, len(text)))
    ]
