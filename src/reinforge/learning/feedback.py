"""Feedback on kept chats: what a client may send, and the rules for repeated, contradicting and late feedback.

the same key again, the same content     nothing changes, and the first answer is given again
the same key again, other content        409
one source says something else           field by field, the newest counts; null takes a field back
two sources contradict each other        both are kept; a chat with both thumbs has none when it is exported
after the chat was trained on            kept, and used by later trainings
after the chat was deleted               404
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from reinforge.config.finetuning_blocks import Block
from reinforge.traces.ratings import read_value
from reinforge.types.evaluation import MAX_SCORE

JUDGE = "judge"
"""The source of what `judge:` of learn.yml says; clients cannot send it."""
Opinion = dict[str, Any]
"""What a source says: `label` (bool), `score`, `correction`, `comment`, as far as given; None: taken back."""
Name = Annotated[str, Field(min_length=1, max_length=200)]


class Feedback(Block):
    """The body of `POST /v1/feedback`."""

    id: Name | None = Field(default=None, description="Id of the answer: chatcmpl-..., resp_..., msg_...")
    session_id: Name | None = Field(default=None, description="Session whose chats so far are rated.")
    score: float | None = Field(default=None, strict=True, allow_inf_nan=False, ge=-MAX_SCORE, le=MAX_SCORE)
    thumb: bool | int | str | None = Field(default=None, description='"up" or "down", or another usual form.')
    label: bool | None = Field(default=None, strict=True, description="True: a thumb up; False: a thumb down.")
    correction: str | None = Field(default=None, min_length=1, max_length=100_000, description="What was right.")
    comment: str | None = Field(default=None, max_length=10_000)
    source: Name = Field(default="user", description="Who says it: a person or a program.")
    key: Name | None = Field(default=None, description="Makes a request safe to repeat, as `Idempotency-Key` does.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.id is None) == (self.session_id is None):
            raise ValueError("expected either id, of an answer, or session_id")
        if not self.opinion:
            raise ValueError("expected a score, a thumb, a label, a correction or a comment")
        if {"thumb", "label"} <= self.model_fields_set:
            raise ValueError("thumb and label are the same; send one of them")
        if self.thumb is not None and read_value(self.thumb) not in (1, 0, -1):
            raise ValueError(f"thumb: expected up or down, found {str(self.thumb)[:40]!r}")
        if self.correction is not None and self.id is None:
            raise ValueError("a correction replaces one reply: send its id in place of session_id")
        return self

    @property
    def opinion(self) -> Opinion:
        """What is said, with null for what is taken back."""
        given: Opinion = {
            name: getattr(self, name)
            for name in ("label", "score", "correction", "comment")
            if name in self.model_fields_set
        }
        if "thumb" in self.model_fields_set:
            given["label"] = None if self.thumb is None else (read_value(self.thumb) or 0) > 0
        return given
