"""Feedback on kept chats: what a client may send, and the rules for repeated, contradicting and late feedback.

the same key again, the same content     nothing changes, and the first answer is given again
the same key again, other content        409
one source says something else           field by field, the newest counts; null takes a field back
two sources contradict each other        both are kept; a chat with both thumbs has none when it is exported
after the chat was trained on            kept, and used by later trainings
after the chat was deleted               404
"""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Callable
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from reinforge.config.finetuning_blocks import Block
from reinforge.files import to_json
from reinforge.learning.store import CHAT, SESSION, Opinion, make_alias, read_opinions
from reinforge.serving.routes import ApiError
from reinforge.traces.ratings import read_value
from reinforge.types.evaluation import MAX_SCORE

MAX_PER_TARGET = 100
"""Most feedback on one chat or one session, so that a client cannot fill the disk."""
RESERVE = 1.1
"""Feedback is taken until the store is this times as large as the size at which no further chats are kept."""
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


def add_feedback(
    given: Feedback, opinion: Opinion, key: str, has_room: Callable[[], bool]
) -> Callable[[sqlite3.Connection], dict[str, Any]]:
    """Returns work that keeps feedback of the clients with an API key and returns the answer to them.

    Args:
        opinion: What of `given.opinion` may be kept.
        has_room: Asked just before it is written.
    """
    level = CHAT if given.session_id is None else SESSION
    target = str(given.id) if given.session_id is None else make_alias(key, "session", given.session_id)
    data = to_json(opinion)
    digest = hashlib.sha256(to_json([level, target, given.source, data]).encode()).hexdigest()

    def add(db: sqlite3.Connection) -> dict[str, Any]:
        if given.key is not None:
            query = "SELECT seq, digest FROM feedback WHERE key = ? AND request_key = ?"
            if (known := db.execute(query, (key, given.key)).fetchone()) is not None:
                if known[1] != digest:
                    message = f"other feedback was sent with the key {given.key!r}; send a new key"
                    raise ApiError(409, message, param="key", code="idempotency_key_reused")
                return _answer(known[0], is_new=False)
        column = "id" if level == CHAT else "conversation"
        query = f"SELECT max(seq) FROM chats WHERE key = ? AND {column} = ?"
        (until,) = db.execute(query, (key, target)).fetchone()
        if until is None:
            what = f"chat {given.id!r}" if level == CHAT else f"session {given.session_id!r}"
            message = f"no {what} is kept for this API key: it is unknown, was not recorded, or was deleted"
            raise ApiError(404, message, param="id" if level == CHAT else "session_id", code="chat_not_found")
        query = "SELECT count(*), max(seq) FROM feedback WHERE key = ? AND level = ? AND target = ?"
        count, newest = db.execute(query, (key, level, target)).fetchone()
        now = read_opinions(db, key, level, target, until).get(given.source)
        if given.key is None and now is not None and now | opinion == now:
            return _answer(newest, is_new=False)
        if count >= MAX_PER_TARGET:
            raise ApiError(409, f"it has {count} times feedback, which is the limit", code="too_much_feedback")
        if not has_room():
            raise ApiError(507, "the store is full; nothing was kept", code="store_full")
        row = (key, level, target, until, given.source, data, given.key, digest, time.time())
        names = "key, level, target, until, source, data, request_key, digest, at_s"
        added = db.execute(f"INSERT INTO feedback ({names}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        return _answer(added.lastrowid, is_new=True)

    return add


def _answer(seq: int | None, *, is_new: bool) -> dict[str, Any]:
    return {"id": f"feedback-{seq}", "object": "feedback", "is_new": is_new}
