"""Scores given tokens at an OpenAI-compatible endpoint: the completions API with `echo` and `logprobs`.

    request   POST /completions  {"prompt": [11, 12, 13], "max_tokens": 1, "temperature": 0, "echo": true, ...}
    answer    choices[0].logprobs = {"tokens": ["a", "b", "c", "d"], "token_logprobs": [null, -0.5, -1.5, -0.1]}
    or        choices[0].prompt_logprobs = [null, {"12": {"logprob": -0.5, "decoded_token": "b"}}, {"13": ...}]
    =>        log p of tokens 12 and 13: -0.5 and -1.5; the fourth token is the server's own

The second form is vLLM's, for `extra_body: {prompt_logprobs: 0}`. Both are at temperature 1 over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reinforge.bounded import load_json
from reinforge.engine.model.source import FAMILY
from reinforge.errors import ConfigError, Problem
from reinforge.rollout.models.openai_http import OpenAIEndpoint, UnexpectedAnswer
from reinforge.types.sample import FloatArray, TrainingSample

PATH = "/completions"
PROBE = "The quick brown fox: 3.14 * 2 = 6.28\n\tdef f(x): return [x, {}] # yes, no; na\u00efve, Z\u00fcrich"
"""Text whose tokens are compared with those of the endpoint."""
MIN_COMPARED = 5  # tokens of the probe that must be comparable; bytes of a split character are not
IDS = "token_id:"


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """The log-probs of given tokens."""

    logprobs: list[float | None]  # one for each token; None: the endpoint gives none, as for the first
    texts: list[str | None]  # each token as the endpoint writes it; None: not given


async def score_prompt(endpoint: OpenAIEndpoint, body: dict[str, Any], token_ids: Sequence[int]) -> ScoredPrompt:
    asked = {"prompt": list(token_ids), "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
    text = await endpoint.call("POST", PATH, body={**asked, **body})
    where = f"{endpoint.url}{PATH}"
    try:
        raw = load_json(text)
        choice = raw["choices"][0]
    except (ValueError, LookupError, TypeError):
        raise UnexpectedAnswer(f"{where}: the response is not a completion") from None
    scored = parse_prompt_logprobs(choice, token_ids) or parse_echo(choice, len(token_ids))
    if scored is None:
        message = f"{where}: the completion has no log-probs of the given prompt, so this model cannot be a teacher"
        fix = "serve it with vLLM (echo with logprobs, or extra_body: {prompt_logprobs: 0}), or use `_type: local`"
        raise UnexpectedAnswer(f"{message}; {fix}")
    return scored


def parse_echo(choice: Any, count: int) -> ScoredPrompt | None:
    """Returns what `echo` with `logprobs` gives for the first `count` tokens; None: another answer."""
    found = choice.get("logprobs") if isinstance(choice, dict) else None
    logprobs, texts = (found.get(key) if isinstance(found, dict) else None for key in ("token_logprobs", "tokens"))
    if not isinstance(logprobs, list) or len(logprobs) <= count:  # without `echo` there is only the server's own token
        return None
    named = texts if isinstance(texts, list) and len(texts) >= count else [None] * count
    return ScoredPrompt(
        [_parse_number(each) for each in logprobs[:count]], [_parse_text(each) for each in named[:count]]
    )


def parse_prompt_logprobs(choice: Any, token_ids: Sequence[int]) -> ScoredPrompt | None:
    """Returns what vLLM's `prompt_logprobs` gives for the tokens; None: another answer."""
    rows = choice.get("prompt_logprobs") if isinstance(choice, dict) else None
    if not isinstance(rows, list) or len(rows) != len(token_ids):
        return None
    found = [row.get(str(token)) if isinstance(row, dict) else None for row, token in zip(rows, token_ids, strict=True)]
    entries = [each if isinstance(each, dict) else {} for each in found]
    return ScoredPrompt(
        [_parse_number(each.get("logprob")) for each in entries],
        [_parse_text(each.get("decoded_token")) for each in entries],
    )


def fill_in_logprobs(sample: TrainingSample, scored: ScoredPrompt, model_name: str) -> FloatArray:
    """Returns log p of a sample's trained tokens, `[T]`, 0 elsewhere.

    A token that was sampled from a part of the vocabulary only, as under a grammar, gets the sampler's own log-prob:
    the endpoint does not know that part, so the token counts as one on which the two agree.
    """
    logprobs = np.zeros(len(sample), np.float32)
    counts = None if sample.supports is None else sample.supports.counts
    for place in np.flatnonzero(sample.loss_mask).tolist():
        if counts is not None and counts[place] != 0:
            logprobs[place] = sample.sampling_logprobs[place]
            continue
        value = scored.logprobs[place]
        if value is None:
            raise UnexpectedAnswer(f"{model_name} gives no log-prob of token {place} of {len(sample)}")
        logprobs[place] = value
    return logprobs


def refuse_other_texts(model_name: str, tokenizer: Any, token_ids: Sequence[int], scored: ScoredPrompt) -> None:
    """Compares how the endpoint and the policy's tokenizer write the same tokens."""
    compared = 0
    for token, text in zip(token_ids, scored.texts, strict=True):
        own = tokenizer.decode([token], skip_special_tokens=False)
        if text is not None and text.startswith(IDS):
            compared += 1
            if text != f"{IDS}{token}":
                raise _build_refusal(model_name, f"token {token} is {text.removeprefix(IDS)} there")
        elif text is None or "\ufffd" in own + text or text.startswith("bytes:") or not (text.strip() and own.strip()):
            continue
        elif text.strip() != own.strip():
            raise _build_refusal(model_name, f"token {token} is {own!a} in the policy and {text!a} there")
        else:
            compared += 1
    if compared < MIN_COMPARED:
        message = f"the endpoint names {compared} of {len(token_ids)} tokens, too few to verify that they are the same"
        raise _build_refusal(model_name, message)


def _build_refusal(model_name: str, reason: str) -> ConfigError:
    message = f"the teacher {model_name} has a different tokenizer than the policy: {reason}"
    return ConfigError(Problem("finetuning.algorithm.teacher", message, FAMILY))


def _parse_number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _parse_text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
