"""The text of a reply while its tokens arrive: no character is shown before all of its tokens are there.

tokens "Hel", "lo", first half of an emoji, second half    ->    "Hel", "lo", "", the emoji
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from reinforge.types.text_markers import count_held, find_marker

INCOMPLETE = "\ufffd"  # what tokenizers write for a part of a character


class TextStream:
    """Decodes one reply.

    Args:
        special: Text of each special token; an empty text if the reply's text leaves it out.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], special: Mapping[int, str], stop: Sequence[str] = ()):
        self._decode, self._special, self._stop = decode, special, tuple(stop)
        self._ids: list[int] = []
        self._prefix, self._read = 0, 0
        self._held = ""
        self._has_ended = False

    def add(self, token_ids: Sequence[int]) -> str:
        """Returns the text that is certain with some more tokens.

        What is held back (half a character, the beginning of a stop string) is part of a later text, or of none.
        """
        if self._has_ended:
            return ""
        text = self._held
        for token in token_ids:
            if (written := self._special.get(token)) is None:
                self._ids.append(token)
            elif written:
                text += self._take() + written
        text += self._take()
        if self._stop and (end := find_marker(text, self._stop)) >= 0:
            self._has_ended = True
            return text[:end]
        held = count_held(text, self._stop)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def _take(self) -> str:
        """Returns the text of the newest tokens; they are decoded behind earlier ones, on which their spaces depend."""
        if self._read == len(self._ids):
            return ""
        known, whole = self._decode(self._ids[self._prefix : self._read]), self._decode(self._ids[self._prefix :])
        if len(whole) <= len(known) or whole.endswith(INCOMPLETE):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return whole[len(known) :]
