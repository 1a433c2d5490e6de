"""What one reply may sample next, and what is added to its logits: grammar, banned tokens, biases and penalties."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reinforge.engine.sampling.grammar import CompiledGrammar, read_bitmask
from reinforge.types.request import SamplingParams
from reinforge.types.supports import Support, unpack_mask

BAN = -100  # a `logit_bias` that bans its token, so that the others' distribution is only restricted, not changed

MAX_MASK_BYTES = 8 * 2**20
"""Maximum memory for the different masks of one reply: 1,300 of them at 49,152 tokens, while a JSON text needs about
ten. Further positions are not trained."""

GRACE_S, SECONDS_PER_TOKEN = 1.0, 0.005
"""Time that a grammar may take of the sampler's thread: at the start, and more with each token. A JSON schema takes
20 to 300 us a token."""

NOT_RECORDED = np.zeros(0, np.int32)


class TokenConstraint:
    """The constraint of one reply; used by the sampler's thread once it is made.

    Args:
        params: `logit_bias`, `frequency_penalty` and `presence_penalty` of the reply.
        grammar: What the reply must match; None: it is free.

    Attributes:
        allowed: What may be sampled next, one bit per token, `[V / 8]`; no bit: the reply ends.
        changes_logits: True if biases or penalties change the distribution, so that its tokens are not trained.
    """

    def __init__(self, params: SamplingParams, vocab_size: int, grammar: CompiledGrammar | None = None):
        self.vocab_size = vocab_size
        self._frequency, self._presence = params.frequency_penalty, params.presence_penalty
        self._has_penalty = bool(self._frequency or self._presence)
        self._biases = {token: bias for token, bias in params.logit_bias if bias and bias > BAN}
        self.changes_logits = bool(self._biases) or self._has_penalty
        self._unbanned = np.packbits(np.ones(vocab_size, np.bool_), bitorder="little")
        for token in (token for token, bias in params.logit_bias if bias <= BAN):
            self._unbanned[token // 8] &= 255 ^ (1 << token % 8)
        self._matcher: Any = None if grammar is None else grammar.start()
        self.allowed = self._unbanned if grammar is None else grammar.first & self._unbanned
        self._counts: dict[int, int] = {}
        self._masks: dict[bytes, bytes] = {}
        self._num_tokens, self._spent_s = 0, 0.0

    @property
    def can_continue(self) -> bool:
        return self.allowed.any().item()

    @property
    def is_complete(self) -> bool:
        """True if the reply may end here."""
        return self._matcher is None or self._matcher.is_accepting()

    def advance(self, token: int) -> None:
        """Takes the token that was sampled; sets `allowed` to what may come next."""
        if self._has_penalty:
            self._counts[token] = self._counts.get(token, 0) + 1
        if self._matcher is None:
            return
        started = time.thread_time()
        bits = self._matcher.compute_bitmask() if self._matcher.consume_token(token) else b""
        if reason := self._matcher.get_error():
            raise ValueError(f"the reply's grammar is too complex: {reason.split('<')[0].strip()}")
        self._num_tokens += 1
        self._spent_s += time.thread_time() - started
        if self._spent_s > GRACE_S + SECONDS_PER_TOKEN * self._num_tokens:
            raise ValueError(
                f"the reply's grammar is too slow: {self._spent_s:.1f} s for {self._num_tokens} tokens, "
                "while all other replies wait"
            )
        self.allowed = read_bitmask(bits, self.vocab_size) & self._unbanned

    def replay(self, token_ids: Sequence[int]) -> list[Support]:
        """Returns the allowed tokens of each position of a reply that another program sampled.

        That program may allow a token that is not allowed here: what was allowed is then unknown from there on.
        """
        supports: list[Support] = []
        for place, token in enumerate(token_ids):
            if not self.is_allowed(np.array([token], np.int32)).all():
                return [*supports, *[NOT_RECORDED] * (len(token_ids) - place)]
            supports.append(self.read_support())
            if place + 1 < len(token_ids):
                self.advance(token)
        return supports

    def compute_offsets(self) -> dict[int, float]:
        """Returns what is added to the logits of the next step, by token."""
        offsets = dict(self._biases)
        for token, count in self._counts.items():
            offsets[token] = offsets.get(token, 0.0) - self._presence - self._frequency * count
        return offsets

    def is_allowed(self, tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        allowed: NDArray[np.bool_] = (self.allowed[tokens // 8] >> (tokens % 8).astype(np.uint8) & 1).astype(np.bool_)
        return allowed

    def count_allowed(self) -> int:
        return int(np.bitwise_count(self.allowed).sum())

    def read_support(self) -> Support:
        """Returns the allowed tokens as they are recorded: the smaller of ids and bits."""
        if self.count_allowed() * 32 <= self.vocab_size:
            return unpack_mask(self.allowed.tobytes())
        mask = self.allowed.tobytes()
        if mask in self._masks or (len(self._masks) + 1) * len(mask) <= MAX_MASK_BYTES:
            return self._masks.setdefault(mask, mask)
        return NOT_RECORDED


def build_constraint(
    params: SamplingParams, vocab_size: int, grammar: CompiledGrammar | None
) -> TokenConstraint | None:
    """Returns the constraint of a reply; None if every token may be sampled as the model says."""
    biases = any(bias for _, bias in params.logit_bias)
    if grammar is None and not biases and not params.frequency_penalty and not params.presence_penalty:
        return None
    constraint = TokenConstraint(params, vocab_size, grammar)
    if not constraint.can_continue:
        raise ValueError("logit_bias bans every token that the reply could begin with")
    return constraint
