"""Rows to train on, from a store: its chats and what is said of them, as records that `reinforge data import` reads.

all   every chat, with its thumbs and scores
sft   replies with a thumb up, and corrections in place of the replies that they correct
kto   replies with a thumb up or down, and corrections as good replies, against those that they correct
dpo   corrections against the replies that they correct
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reinforge.errors import ConfigError
from reinforge.files import open_private, storage_boundary
from reinforge.learning.store import LearningStore, StoredChat, read_chats
from reinforge.traces.entries import Exchange
from reinforge.traces.importer import ImportOptions, import_traces
from reinforge.traces.litellm import LiteLLM
from reinforge.traces.report import ImportReport
from reinforge.types.seeding import stable_seed


def read_exchange(chat: StoredChat) -> tuple[list[Any], list[Any], Any]:
    """Returns the messages of a chat before the reply, those of the reply, and the tools."""
    exchange = next(iter(LiteLLM().read(chat.record)))
    assert isinstance(exchange, Exchange)
    return exchange.messages[: exchange.num_context], exchange.messages[exchange.num_context :], exchange.tools


def build_records(chat: StoredChat, use: str) -> Iterator[dict[str, Any]]:
    """Yields the records of one chat; none if it has nothing for this use."""
    correction = chat.correction
    if use == "dpo" or (use in ("sft", "kto") and correction is not None):
        prompt, reply, tools = read_exchange(chat)
        head = {"id": chat.id, "conversation_id": chat.record["session_id"], "prompt": prompt, "tools": tools}
        said, is_other = {"role": "assistant", "content": correction}, correction != reply[-1].get("content")
        if use != "dpo":
            yield {**head, "completion": said, "thumbs": True}
        elif correction is not None and is_other:
            yield {**head, "chosen": [said], "rejected": reply}
        if use == "kto" and is_other:
            yield {**head, "id": f"{chat.id}-corrected", "completion": reply, "thumbs": False}
        return
    if (use == "sft" and chat.labels != {True}) or (use == "kto" and len(chat.labels) != 1):
        return
    yield chat.record
    for opinion in chat.opinions.values():
        found = {name: opinion[field] for field, name in (("label", "thumbs"), ("score", "score")) if field in opinion}
        if found:
            yield {"id": chat.id, **found}


def count_new(database: Path, use: str, *, judged: bool = True, since_s: float = 0.0) -> int:
    """Returns how many rated chats have something for a use, and were trained on by no version.

    Args:
        judged: Those that only the judge has rated count too.
        since_s: Those that began earlier do not.
    """
    chats = read_chats(database, only_new=True, judged=judged, since_s=since_s)
    return sum(any(True for _ in build_records(chat, use)) for chat in chats)


@dataclass(frozen=True, slots=True)
class ChatSelection:
    """Which chats a training by `reinforge learn run` takes; a user's chats then count as one conversation."""

    replay: float  # share of the users whose chats are rows again if a version was trained on them
    without: Collection[tuple[str, str]] = ()  # keys and conversations that are left out
    base: str = ""  # the version that it begins with
    judged: bool = True  # also what only the judge has rated
    since_s: float = 0.0  # none that began earlier


def export_rows(
    database: Path, output: Path, use: str, version: str | None = None, choice: ChatSelection | None = None
) -> ImportReport:
    """Writes the rows of a store, and returns what was written.

    Args:
        use: all, sft, kto or dpo.
        version: Name of the model version that is trained on them, kept in the store; None: not known yet.
        choice: For a training; None: every chat, as it is.
    """
    used, picked = list[tuple[str, str]](), ChatSelection(1.0) if choice is None else choice
    with (
        storage_boundary(output),
        tempfile.TemporaryDirectory(prefix=".export-", dir=output.absolute().parent) as folder,
    ):
        records = Path(folder) / "chats.jsonl"
        with open(records, "w", encoding="utf-8", opener=open_private) as file:
            for chat in read_chats(database, judged=picked.judged, since_s=picked.since_s):
                if choice is not None:
                    chat.record["session_id"] = chat.owner
                    if (chat.key, chat.conversation) in choice.without:
                        continue
                    if chat.is_trained and stable_seed(0, str(version), chat.owner) >= choice.replay * 2**63:
                        continue
                for number, record in enumerate(build_records(chat, use)):
                    file.write(json.dumps(record) + "\n")
                    if not number:
                        used.append((chat.key, chat.id))
        if not used:
            raise ConfigError(f"no chat in {database} can be used for {use}; `--use all` takes every chat")
        report = import_traces([records], output, ImportOptions())
    if version is not None:
        store = LearningStore(database)
        try:
            store.record_training(version, used, None if choice is None else choice.base)
        finally:
            store.close()
    return report
