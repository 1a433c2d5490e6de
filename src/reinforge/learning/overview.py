"""What a store has of one served name, for a page: chats by day, scores by version. It reads no text of a chat.

support@1: ann thumb up, and down in another conversation; ben thumb up; a chat without feedback
=>  version 1: 4 chats, 3 of them rated, scores of its users: ann 0.5, ben 1
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from reinforge.learning.feedback import JUDGE, Opinion
from reinforge.learning.store import CHAT, MAX_REPLIES, SESSION, TRAINED, compute_score, open_store

DAY_S = 86400
_JOINS = {SESSION: "f.target = c.conversation AND f.until >= c.seq", CHAT: "f.target = c.id"}
"""Feedback of each level to its chats; that of the chat is read last, since it counts before that of the session."""


@dataclass(slots=True)
class ChatCounts:
    """Chats of a day or a version; a chat is rated if it has a thumb, a score or a correction now."""

    chats: int = 0
    rated: int = 0
    users: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # user -> conversation -> scores of replies

    def list_scores(self) -> list[float]:
        """Returns one score a user: the mean of their conversations, as the comparison of versions counts them."""
        return [fmean(fmean(replies[-MAX_REPLIES:]) for replies in each.values()) for each in self.users.values()]


@dataclass(slots=True)
class StoreOverview:
    days: dict[int, ChatCounts] = field(default_factory=lambda: defaultdict(ChatCounts))  # by days since 1970, in UTC
    versions: dict[str, ChatCounts] = field(default_factory=lambda: defaultdict(ChatCounts))  # by `NAME@NUMBER`
    num_new: int = 0  # rated chats that no version was trained on
    training: str = ""  # name of the newest training, of any served name


def read_overview(database: Path, name: str) -> StoreOverview:
    """Returns what a store has of a served name; a server may write to it at the same time."""
    found, rated = StoreOverview(), dict[int, tuple[Any, ...]]()
    chats = "chats AS c INDEXED BY chats_by_time"  # which has all that is read of them
    named, values = "WHERE substr(model, 1, ?) = ?", (len(name) + 1, f"{name}@")
    facts = f"CAST(started_s / {DAY_S} AS INTEGER) AS day, model"
    with open_store(database) as db:
        for day, model, count in db.execute(f"SELECT {facts}, count(*) FROM {chats} {named} GROUP BY 1, 2", values):
            found.days[day].chats += count
            found.versions[model].chats += count
        facts += f", coalesce(user, conversation), conversation, {TRAINED}"
        for level, joins in _JOINS.items():
            query = (
                f"SELECT c.seq, {facts}, source, f.data FROM {chats} CROSS JOIN feedback AS f ON f.key = c.key AND "
                f"level = '{level}' AND {joins} {named} ORDER BY started_s, c.seq, f.seq"
            )
            for seq, *chat in db.execute(query, values):
                rated[seq] = (*rated[seq], *chat[-2:]) if seq in rated else tuple(chat)
        for (newest,) in db.execute("SELECT version FROM trainings ORDER BY rowid DESC LIMIT 1"):
            found.training = newest
    judge = lru_cache(1000)(_judge)  # most say the same
    for _, (day, model, user, conversation, is_trained, *said) in sorted(rated.items()):
        is_rated, score = judge(*said)
        found.days[day].rated += is_rated
        found.versions[model].rated += is_rated
        found.num_new += is_rated and not is_trained
        if score is not None:
            found.versions[model].users.setdefault(user, {}).setdefault(conversation, []).append(score)
    return found


def _judge(*said: str) -> tuple[bool, float | None]:
    """Returns whether feedback rates a chat, and its score, from sources and what they say, the newest last."""
    opinions: dict[str, Opinion] = {}
    for source, text in zip(said[::2], said[1::2], strict=True):
        opinions[source] = opinions.get(source, {}) | json.loads(text)
    opinions.pop(JUDGE, None)  # no user; the comparison leaves it out as well, unless it is told otherwise
    now = [{name: value for name, value in each.items() if value is not None} for each in opinions.values()]
    return any(each.keys() - {"comment"} for each in now), compute_score(now)
