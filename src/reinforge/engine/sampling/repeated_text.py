"""Guesses the next tokens of a reply from earlier text of its conversation, which a step then computes together.

Agents repeat their context: code that they edit, results of tools, keys of JSON. Where the last tokens occurred before,
those that followed them there are likely to follow again (prompt lookup, as in arXiv:2304.04487). A step for several
tokens of one reply takes little longer than a step for one, because it reads the weights once. Every position is
sampled as always, and guesses after the first wrong one are dropped, so the reply is the one without guesses, rounding
apart.
"""

from __future__ import annotations

from collections.abc import Sequence

NUM_KEY = 3  # tokens that must have occurred before
FEW, MANY = 3, 7  # guesses of a step: many after one whose guesses were all right
MAX_PAUSE = 32


def count_right(sampled: Sequence[int], guesses: Sequence[int]) -> int:
    """Returns how many guesses were sampled before the first that was not.

    Example: sampled 4 5 7 2, guesses 4 5 6 -> 2
    """
    return next((n for n, guess in enumerate(guesses) if sampled[n] != guess), len(guesses))


class RepeatedText:
    """The prompt and reply of one conversation so far.

    Example: 1 2 3 4 5 1 2 3 -> guesses 4 5 1
    """

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._following: dict[tuple[int, ...], int] = {}  # where the text goes on after tokens that occurred in it
        self._most, self._pause, self._left = FEW, 0, 0

    def __len__(self) -> int:
        return len(self._token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            place = len(self._token_ids)
            if place >= NUM_KEY:
                self._following[tuple(self._token_ids[-NUM_KEY:])] = place
            self._token_ids.append(token)

    def guess(self) -> list[int]:
        """Returns the tokens that may come next; none if there is no guess, or guesses have been wrong of late."""
        if self._left:
            self._left -= 1
            return []
        place = self._following.get(tuple(self._token_ids[-NUM_KEY:]))
        return [] if place is None else self._token_ids[place : place + self._most]

    def learn(self, num_guesses: int, num_right: int) -> None:
        """Adapts the next guesses: where none is right, it waits 1, 2, 4, ... steps before the next."""
        self._most = MANY if num_right == num_guesses else FEW
        self._pause = 0 if num_right else min(MAX_PAUSE, max(1, 2 * self._pause))
        self._left = self._pause
