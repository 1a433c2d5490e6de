"""Checks what an agent asks of the sampler, so that one impossible request fails alone and not with its whole batch."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from reinforge.bounded import find_surrogate
from reinforge.limits import get_limits
from reinforge.types.request import SamplingParams

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-4, 1e4
"""Logits divided by less are infinite in half of the floats, and their softmax is not a number."""
MIN_TOP_P = 1e-30  # a smaller one may be 0 as a 32-bit float, and keep no token


MAX_TOP_LOGPROBS = 20


def check_params(params: SamplingParams, vocab_size: int, num_top_logprobs: int = 0) -> None:
    """Refuses settings of a reply that the sampler cannot follow, by a `ValueError` that names the setting."""
    _check_number("temperature", params.temperature, 0, MAX_TEMPERATURE)
    if 0 < params.temperature < MIN_TEMPERATURE:
        allowed = f"0 (the most likely token), or a number from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
        raise ValueError(f"temperature is {params.temperature:g}, expected {allowed}")
    _check_number("top_p", params.top_p, 0, 1)
    if params.top_p < MIN_TOP_P:
        raise ValueError(
            f"top_p is {params.top_p:g}, which keeps no token; for the most likely token set temperature to 0"
        )
    _check_number("min_p", params.min_p, 0, 1)
    _check_number("num_top_logprobs", num_top_logprobs, 0, MAX_TOP_LOGPROBS)
    for name, least in (("top_k", 0), ("max_tokens", None), ("seed", None)):
        value = getattr(params, name)
        if value is None and name != "top_k":
            continue
        if isinstance(value, bool) or not isinstance(value, Integral) or (least is not None and value < least):
            raise ValueError(f"{name} is {_shorten(value)}, expected a whole number{' of at least 0' * (least == 0)}")
    _check_number("frequency_penalty", params.frequency_penalty, -2, 2)
    _check_number("presence_penalty", params.presence_penalty, -2, 2)
    limits = get_limits()
    _check_count("logit_bias", "entries", len(params.logit_bias), limits.logit_biases)
    _check_count("stop", "entries", len(params.stop) + len(params.stop_token_ids), limits.stop_strings)
    _check_logit_bias(params.logit_bias, vocab_size)
    for token in params.stop_token_ids:
        if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= token < vocab_size:
            raise ValueError(f"stop has token {_shorten(token)}, expected token ids from 0 to {vocab_size - 1}")
    for text in params.stop:
        if not isinstance(text, str):
            raise ValueError(f"stop has {_shorten(text)}, expected strings")
        if (half := find_surrogate(text)) is not None:
            raise ValueError(f"stop has an unpaired surrogate (U+{ord(text[half]):04X}), which no reply can contain")
    _check_count("stop", "bytes", sum(len(text.encode()) for text in params.stop), limits.stop_bytes)


def _check_count(name: str, what: str, count: int, most: int) -> None:
    if count > most:
        raise ValueError(f"{name} has {count:,} {what}, expected at most {most:,}")


def _check_logit_bias(pairs: tuple[tuple[int, float], ...], vocab_size: int) -> None:
    seen: set[int] = set()
    for token, bias in pairs:
        if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= token < vocab_size:
            raise ValueError(f"logit_bias has token {_shorten(token)}, expected a token id from 0 to {vocab_size - 1}")
        if token in seen:
            raise ValueError(f"logit_bias has token {token} twice")
        seen.add(token)
        _check_number(f"logit_bias of token {token}", bias, -100, 100)


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= float(value) <= high:
        raise ValueError(f"{name} is {_shorten(value)}, expected a number from {low:g} to {high:g}")


def _shorten(value: Any) -> str:
    return ascii(value)[:40] if not isinstance(value, int) or abs(value) < 10**30 else "a huge number"
