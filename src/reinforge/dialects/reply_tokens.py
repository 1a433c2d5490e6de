"""The tokens of one choice of a completion, from wherever the model's kind keeps them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reinforge.types.request import TokenLogprob, TokenLogprobs

LOWEST_LOGPROB = -9999.0  # what OpenAI writes for a log-prob that is not known or too low to say; JSON has no infinity


@dataclass(frozen=True, slots=True)
class ReplyTokens:
    """The tokens of one choice."""

    texts: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()
    token_ids: tuple[int, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[list[dict[str, Any]], ...] = ()

    def build_content(self, *, as_ids: bool = False) -> list[dict[str, Any]]:
        """Returns the tokens in the format of OpenAI's `logprobs.content`.

        Args:
            as_ids: Write a token as `token_id:ID`, as vLLM does, where its id is known.
        """
        tops = self.top_logprobs or ([],) * len(self.texts)
        names = [f"token_id:{each}" for each in self.token_ids] if as_ids and self.token_ids else self.texts
        return [
            {"token": name, "bytes": list(text.encode()), "logprob": logprob, "top_logprobs": top}
            for name, text, logprob, top in zip(names, self.texts, self.logprobs, tops, strict=True)
        ]


def read_tokens(choice: Mapping[str, Any]) -> ReplyTokens | None:
    """Returns the tokens of one of a completion's `choices`; None: the model reports none.

    Args:
        choice: Its `logprobs` are a `TokenLogprobs`, a dict in OpenAI's format, or None.
    """
    found = choice.get("logprobs")
    if isinstance(found, TokenLogprobs):
        texts = found.texts or ("",) * len(found.token_ids)
        tops = tuple([_build_top(each) for each in top] for top in found.top_logprobs)
        return ReplyTokens(texts, _clean(found.logprobs), found.token_ids, tuple(found.prompt_token_ids), tops)
    if not isinstance(found, Mapping):
        return None
    content = found.get("content") or ()
    return ReplyTokens(
        tuple(str(each["token"]) for each in content),
        _clean(tuple(each["logprob"] for each in content)),
        tuple(found.get("token_ids") or ()),
        tuple(found.get("prompt_token_ids") or ()),
        tuple(list(each.get("top_logprobs") or ()) for each in content),
    )


def _build_top(entry: TokenLogprob) -> dict[str, Any]:
    (logprob,) = _clean((entry.logprob,))
    return {"token": entry.token, "bytes": list(entry.token.encode()), "logprob": logprob}


def _clean(logprobs: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(each if math.isfinite(each) else LOWEST_LOGPROB for each in logprobs)
