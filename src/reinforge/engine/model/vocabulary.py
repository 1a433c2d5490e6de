"""Whether two models have the same tokens, so that one can score what the other sampled. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reinforge.config.policy import PolicyConfig
from reinforge.engine.model.model_files import read_json
from reinforge.engine.model.source import find_tokenizer_source
from reinforge.errors import ConfigError

FAMILY = "use a teacher of the policy's own family, whose tokenizer is the same, such as a larger model of the series"


def read_vocabulary(config: PolicyConfig) -> dict[str, int] | None:
    """Returns the ids of a model's tokens by their text; None: they are only known once the tokenizer is loaded."""
    try:
        folder = Path(find_tokenizer_source(config).location)
    except ConfigError:  # validation reports it
        return None
    content = read_json(folder / "tokenizer.json") if folder.is_dir() else None
    model = content.get("model") if content is not None else None
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if content is None or not isinstance(vocabulary, dict):
        return None
    added = content.get("added_tokens")
    listed = [each for each in added if isinstance(each, dict)] if isinstance(added, list) else []
    return {**vocabulary, **{str(each.get("content")): each.get("id") for each in listed}}


def find_token_difference(policy: Mapping[str, Any], teacher: Mapping[str, Any]) -> str | None:
    """Returns the first token of the policy that a teacher does not have by the same id; None: it has all of them.

    Example: {"a": 0, "b": 1}, {"a": 0, "b": 2} -> 'the token "b" is 1 in the policy and 2 in the teacher'.
    """
    for text, number in sorted(policy.items(), key=lambda pair: pair[1]):
        if teacher.get(text) != number:
            other = f"{teacher[text]} in the teacher" if text in teacher else "missing in the teacher"
            return f"the token {ascii(text)[:40]} is {number} in the policy and {other}"
    return None
