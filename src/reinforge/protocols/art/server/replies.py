"""The replies that the server has sampled lately, so that a trajectory that comes back is trained as it was sampled."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from reinforge.types.episode import ModelCall
from reinforge.types.request import TokenLogprobs

MAX_TOKENS = 8_000_000
"""Most tokens, of prompts and replies together, that are kept; the oldest replies go first."""
ReplyKey = tuple[str, tuple[float, ...]]
"""The base model and the log-probs of a reply."""
TokenIds = tuple[tuple[int, ...], tuple[int, ...]]
"""The tokens of a prompt and of its reply."""


class SampledReplies:
    """Finds replies by their log-probs, which every client sends back and few replies share.

    A reply of which the model is certain, such as one token of log-prob 0.0, may have the log-probs of another one; it
    is found by its tokens alone.

    Args:
        max_tokens: How much is kept.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS):
        self._max_tokens, self._num_tokens = max_tokens, 0
        self._replies: OrderedDict[tuple[ReplyKey, TokenIds], TokenLogprobs] = OrderedDict()
        self._alike: dict[ReplyKey, dict[TokenIds, None]] = {}

    def record(self, call: ModelCall, base_model: str) -> None:
        """Remembers every choice of a call.

        Args:
            call: The call.
            base_model: What the model that answered was trained from: models of one base share their tokens.
        """
        for reply in call.choices:
            if reply.tokens is not None and reply.tokens.token_ids:
                self._add(base_model, replace(reply.tokens, texts=(), top_logprobs=()))

    def _add(self, base_model: str, tokens: TokenLogprobs) -> None:
        key, ids = (base_model, tokens.logprobs), (tokens.prompt_token_ids, tokens.token_ids)
        if (earlier := self._replies.pop((key, ids), None)) is not None:
            self._num_tokens -= _count(earlier)
        self._replies[key, ids] = tokens
        self._alike.setdefault(key, {})[ids] = None
        self._num_tokens += _count(tokens)
        while self._num_tokens > self._max_tokens and len(self._replies) > 1:
            (old_key, old_ids), oldest = self._replies.popitem(last=False)
            self._num_tokens -= _count(oldest)
            del self._alike[old_key][old_ids]
            if not self._alike[old_key]:
                del self._alike[old_key]

    def find(
        self,
        base_model: str,
        logprobs: Sequence[float],
        token_ids: Sequence[int] | None = None,
        prompt_token_ids: Sequence[int] | None = None,
    ) -> TokenLogprobs | None:
        """Returns a reply as it was sampled.

        None: it was not sampled here, or too long ago, or several replies have these log-probs.

        Args:
            base_model: What the model that is trained was trained from.
            logprobs: The log-prob of each of its tokens.
            token_ids: Its tokens, if the client sent them; other tokens are another reply.
            prompt_token_ids: The tokens of its prompt, likewise.
        """
        key, given = (base_model, tuple(logprobs)), (prompt_token_ids, token_ids)
        wanted = [None if ids is None else tuple(ids) for ids in given]
        fits = [
            ids
            for ids in self._alike.get(key, ())
            if all(mine is None or mine == own for mine, own in zip(wanted, ids, strict=True))
        ]
        return self._replies[key, fits[0]] if len(fits) == 1 else None


def _count(tokens: TokenLogprobs) -> int:
    """Returns what a reply takes of the memory, in tokens; kept tokens of sampling filters count as well."""
    kept = (
        0 if tokens.supports is None else len(tokens.supports.packed_token_ids) + sum(map(len, tokens.supports.masks))
    )
    return len(tokens.prompt_token_ids) + len(tokens.token_ids) + kept // 32
