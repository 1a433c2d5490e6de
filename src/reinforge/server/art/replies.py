"""The replies that the server has sampled lately, so that a trajectory that comes back is trained as it was sampled."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from reinforge.server.models import ServedModel
from reinforge.types.episode import ModelCall
from reinforge.types.request import TokenLogprobs

MAX_TOKENS = 8_000_000
"""Most tokens, of prompts and replies together, that are kept; the oldest replies go first."""


class SampledReplies:
    """Finds replies by their log-probs, which every client sends back and hardly any two replies share.

    Args:
        max_tokens: How much is kept.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS):
        self._max_tokens, self._num_tokens = max_tokens, 0
        self._by_logprobs: OrderedDict[tuple[float, ...], TokenLogprobs] = OrderedDict()

    def record(self, call: ModelCall, model: ServedModel) -> None:
        """Remembers every choice of a call."""
        for reply in call.choices:
            if reply.tokens is not None and reply.tokens.token_ids:
                self._add(reply.tokens)

    def _add(self, tokens: TokenLogprobs) -> None:
        earlier = self._by_logprobs.pop(tokens.logprobs, None)
        self._by_logprobs[tokens.logprobs] = tokens
        self._num_tokens += _count(tokens) - (0 if earlier is None else _count(earlier))
        while self._num_tokens > self._max_tokens and len(self._by_logprobs) > 1:
            _, oldest = self._by_logprobs.popitem(last=False)
            self._num_tokens -= _count(oldest)

    def find(
        self,
        logprobs: Sequence[float],
        token_ids: Sequence[int] | None = None,
        prompt_token_ids: Sequence[int] | None = None,
    ) -> TokenLogprobs | None:
        """Returns a reply as it was sampled; None: it was not sampled here, or too long ago.

        Args:
            logprobs: The log-prob of each of its tokens.
            token_ids: Its tokens, if the client sent them; other tokens are another reply.
            prompt_token_ids: The tokens of its prompt, likewise.
        """
        found = self._by_logprobs.get(tuple(logprobs))
        if found is None:
            return None
        for given, own in ((token_ids, found.token_ids), (prompt_token_ids, found.prompt_token_ids)):
            if given is not None and tuple(given) != own:
                return None
        return found


def _count(tokens: TokenLogprobs) -> int:
    return len(tokens.prompt_token_ids) + len(tokens.token_ids)
