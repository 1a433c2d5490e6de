"""Thumbs and scores in the forms in which tools record them.

read_value("thumbs_up") => True     read_value("👎") => False     read_value("0.5") => 0.5     read_value("meh") => None
"""

from __future__ import annotations

import math
import re
from typing import Any

from reinforge.types.evaluation import MAX_SCORE

UP = {
    *("up", "thumbsup", "thumbs_up", "thumb_up", "👍", "positive", "pos", "good", "like", "liked"),
    *("upvote", "yes", "true"),
}
DOWN = {
    *("down", "thumbsdown", "thumbs_down", "thumb_down", "👎", "negative", "neg", "bad", "dislike", "disliked"),
    *("downvote", "no", "false"),
}
THUMB_NAMES = frozenset(
    [
        *("thumb", "thumbs", "thumbs_up", "thumb_up", "like", "liked", "vote", "upvote", "reaction"),
        *("feedback", "user_feedback", "user_rating", "user_score", "rating", "label", "helpful", "is_helpful"),
    ]
)
"""Names of scores, in lower case with underscores, whose two values are thumbs; another is named with `--label`."""
REWARD_NAMES = frozenset({"reward", "score"})


def normalize_name(name: str) -> str:
    """Returns a score's name in lower case with underscores: `userFeedback`, `User Feedback` -> `user_feedback`."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return re.sub(r"[^\w]+", "_", words).strip("_").lower()


def read_first_value(*values: Any) -> float | bool | None:
    return next((found for value in values if (found := read_value(value)) is not None), None)


def read_value(value: Any) -> float | bool | None:
    """Returns a number, or whether a thumb is up; None for anything else."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        word = re.sub(r"[\s-]+", "_", value.strip().lower())
        if word in UP or word in DOWN:
            return word in UP
    try:
        number = float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        return None
    return number if abs(number) <= MAX_SCORE else None
