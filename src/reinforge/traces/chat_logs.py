"""Plain chat logs: OpenAI messages, ShareGPT, exchanges and single messages in columns, preferences, and thumbs.

{"messages": [..], "thumbs": "up"}                      a conversation
{"conversations": [{"from": "human", "value": ..}]}     a conversation (ShareGPT)
{"prompt": .., "completion": .., "label": true}         an exchange; columns of CSV files have many names
{"conversation_id": .., "role": .., "content": ..}      one message of a conversation
{"prompt": .., "chosen": .., "rejected": ..}            a better and a worse reply
{"id": .., "rating": 1}                                 a thumb alone; `id` is that of a conversation or a call
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from reinforge.traces import entries
from reinforge.traces.messages import add_system, parse_json, read_message, read_messages, read_reply, read_tools
from reinforge.traces.ratings import REWARD_NAMES, THUMB_NAMES, normalize_name, read_value

COLUMNS: dict[str, tuple[str, ...]] = {
    "messages": ("messages", "conversations", "conversation", "dialog", "dialogue", "turns", "items", "chat"),
    "prompt": ("prompt", "question", "input", "instruction", "query", "user_message", "user", "request", "message"),
    "completion": (
        *("completion", "answer", "output", "response", "reply", "assistant"),
        *("assistant_message", "bot", "generation"),
    ),
    "role": ("role", "from", "sender", "author", "speaker"),
    "content": ("content", "text", "message", "value", "body", "utterance"),
    "conversation": (
        *("conversation_id", "session_id", "thread_id", "chat_id", "dialogue_id", "dialog_id", "conversation"),
        *("session", "thread", "ticket_id", "ticket"),
    ),
    "id": ("id", "uuid", "message_id", "request_id", "trace_id", "run_id", "row_id"),
    "time": ("timestamp", "created_at", "time", "date", "datetime", "turn", "index", "position"),
    "system": ("system", "system_prompt", "instructions"),
    "tools": ("tools", "functions"),
}
"""What a column holds, and the names under which it is found, in lower case with underscores, the likeliest first."""
_NAMED_BY_ROLE = ("assistant", "assistant_message", "bot")
"""Completions beside which a column `user` is what the user wrote; beside others it is who the user is."""


class ChatLogs(entries.ExportFormat):
    """Reads plain chat logs.

    Args:
        columns: What a column holds -> its name, for names that are not found by themselves.
        ratings: Further columns with a thumb or a score.
    """

    name = "chat"

    def __init__(self, columns: Mapping[str, str] | None = None, ratings: tuple[str, ...] = ()):
        self._columns, self._ratings = dict(columns or {}), {normalize_name(name) for name in ratings}
        self._fields: dict[tuple[str, ...], dict[str, str]] = {}

    def matches(self, record: entries.Record) -> bool:
        """Returns True if some columns hold messages, a prompt and a reply or a rating, or a rating and its target."""
        fields = self._find_fields(record, with_empty=True)
        is_message = "role" in fields and "content" in fields
        is_rated = any(map(self._is_rating_name, record))
        is_pair = "prompt" in fields and ("completion" in fields or {"chosen", "rejected"} <= set(record) or is_rated)
        return "messages" in fields or is_message or is_pair or "chosen" in record or self._is_rating(record, fields)

    def read(self, part: entries.Record) -> Iterator[entries.Entry]:
        fields = self._find_fields(part)
        if self._is_rating(part, fields):
            yield from self._read_ratings(part, fields)
            return
        if {"chosen", "rejected"} <= set(part):
            yield self._read_compared(part, fields)
            return
        ratings = tuple(self._list_ratings(part))
        if "role" in fields and "messages" not in fields and "content" in self._find_fields(part, with_empty=True):
            yield from self._read_message(part, fields, ratings)
            return
        exchange = self._read_exchange(part, fields)
        if loose := list(self._list_rated_messages(part, fields, exchange)):
            yield from loose
            if ratings:
                names = ", ".join(rating.name for rating in ratings)
                raise entries.UnreadableRecordError(
                    f"{names} of the whole record is left out, since single messages are rated"
                )
            return
        yield exchange
        yield from ratings

    def _find_fields(self, record: entries.Record, *, with_empty: bool = False) -> dict[str, str]:
        names = tuple(name for name in record if with_empty or record[name] not in (None, "", []))
        if (found := self._fields.get(names)) is None:
            by_name = {normalize_name(str(name)): name for name in reversed(names)}
            found = {}
            for kind, likely in COLUMNS.items():
                if (given := self._columns.get(kind)) is not None:
                    column = given if given in names else None
                else:
                    column = next((by_name[name] for name in likely if name in by_name), None)
                if column is not None:
                    found[kind] = column
            self._correct_prompt(found, by_name)
            if len(self._fields) < 1000:
                self._fields[names] = found
        found = dict(found)
        if "messages" in found and not isinstance(parse_json(record[found["messages"]]), list | Mapping):
            del found["messages"]
        return found

    def _correct_prompt(self, found: dict[str, str], by_name: Mapping[str, str]) -> None:
        """Replaces a column `user` that names the user by the next likely one."""
        is_name = normalize_name(str(found.get("prompt", ""))) == "user" and "prompt" not in self._columns
        if is_name and normalize_name(str(found.get("completion", ""))) not in _NAMED_BY_ROLE:
            del found["prompt"]
            later = COLUMNS["prompt"][COLUMNS["prompt"].index("user") + 1 :]
            if (column := next((by_name[name] for name in later if name in by_name), None)) is not None:
                found["prompt"] = column

    def _is_rating(self, record: entries.Record, fields: Mapping[str, str]) -> bool:
        has_text = any(kind in fields for kind in ("messages", "content", "prompt", "completion")) or "chosen" in record
        return not has_text and ("id" in fields or "conversation" in fields) and any(map(self._is_rating_name, record))

    def _is_rating_name(self, column: object) -> bool:
        name = normalize_name(str(column))
        return name in THUMB_NAMES or name in REWARD_NAMES or name in self._ratings

    def _list_ratings(self, record: entries.Record) -> Iterator[entries.Rating]:
        for column, cell in record.items():
            if self._is_rating_name(column) and cell not in (None, ""):
                yield entries.Rating(str(column), read_value(cell))

    def _read_ratings(self, record: entries.Record, fields: Mapping[str, str]) -> Iterator[entries.Rating]:
        level: entries.Level = "any" if "id" in fields else "conversation"
        target = str(record[fields["id" if "id" in fields else "conversation"]])
        yield from (replace(rating, level=level, target=target) for rating in self._list_ratings(record))

    def _list_rated_messages(
        self, record: entries.Record, fields: Mapping[str, str], exchange: entries.Exchange
    ) -> Iterator[entries.LooseMessage]:
        raw = parse_json(record[fields["messages"]]) if "messages" in fields else None
        raw = raw.get("messages") if isinstance(raw, Mapping) else raw
        raw = raw if isinstance(raw, list) else []
        rated = [tuple(self._list_ratings(each)) if isinstance(each, Mapping) else () for each in raw]
        if not any(rating.value is not None for found in rated for rating in found):
            return
        # a message with the results of several tools becomes several
        ratings = [each for found, given in zip(rated, raw, strict=True) for each in [found] * len(read_message(given))]
        first = int(exchange.messages[0] != read_message(raw[0])[0])  # 1 after a system prompt of its own column
        ratings = [()] * first + ratings + [()] * (len(exchange.messages) - first - len(ratings))
        for number, (message, found) in enumerate(zip(exchange.messages, ratings, strict=True)):
            start, group = f"{number:06}", exchange.conversation or exchange.id
            yield entries.LooseMessage(
                group, message, start, conversation=group, tools=exchange.tools, ratings=found, is_whole=True
            )

    def _read_exchange(self, record: entries.Record, fields: Mapping[str, str]) -> entries.Exchange:
        names = {"id": "id", "conversation": "conversation", "start": "time"}
        place: dict[str, Any] = {name: str(_get_cell(record, fields, kind, "")) for name, kind in names.items()}
        if fields.get("conversation") == fields.get("messages"):
            place["conversation"] = ""
        place |= {"conversation": place["conversation"] or place["id"]}
        place["tools"] = read_tools(_get_cell(record, fields, "tools"))
        is_chat = "messages" in fields
        if not is_chat and (missing := [kind for kind in ("prompt", "completion") if kind not in fields]):
            rated = " or ".join(str(name) for name in record if self._is_rating_name(name))
            what = f"no {missing[0]}" + (f", so there is no exchange for {rated} to rate" if rated else "")
            fix = f"name its column with --column {missing[0]}"
            if rated and missing == ["completion"]:
                fix += ", or, if no replies were kept, train on this file itself: its prompts, with a reward or a judge"
            raise entries.UnreadableRecordError(f"{what} (the record has {', '.join(map(str, record))}); {fix}")
        messages = read_messages(record[fields["messages" if is_chat else "prompt"]])
        messages = add_system(messages, _get_cell(record, fields, "system"))
        if is_chat and ("completion" not in fields or not messages or messages[-1]["role"] == "assistant"):
            return entries.Exchange(messages=messages, **place)
        instruction = next((record[name] for name in record if normalize_name(str(name)) == "instruction"), None)
        is_alpaca = not is_chat and normalize_name(fields["prompt"]) == "input"
        if is_alpaca and isinstance(instruction, str) and instruction:
            asked = f"{instruction}\n\n{messages[-1]['content']}"
            messages = [*messages[:-1], {"role": "user", "content": asked}]
        return entries.Exchange.of_call(messages, read_reply(record[fields["completion"]]), **place)

    def _read_message(
        self, record: entries.Record, fields: Mapping[str, str], ratings: tuple[entries.Rating, ...]
    ) -> Iterator[entries.LooseMessage]:
        """Yields the message of a record; one that cannot be read leaves a hole, at which its conversation ends."""
        if "conversation" not in fields:
            raise entries.UnreadableRecordError("a message without the id of its conversation")
        group = str(record[fields["conversation"]])
        start = str(_get_cell(record, fields, "time", ""))
        start = start if entries.is_sortable(start) else ""  # such as 1/2/2026 9:05; the order of the file counts
        content = _get_cell(record, fields, "content")
        try:
            messages = read_message({**record, "role": record[fields["role"]], "content": content})
        except entries.UnreadableRecordError as error:
            yield entries.LooseMessage(group, {"role": entries.UNREADABLE}, start, conversation=group)
            raise entries.UnreadableRecordError(f"{error}; its conversation ends before this message") from None
        for message in messages:
            yield entries.LooseMessage(group, message, start, conversation=group, ratings=ratings)

    def _read_compared(self, record: entries.Record, fields: Mapping[str, str]) -> entries.ComparedReplies:
        given = (record[fields[kind]] for kind in ("prompt", "messages") if kind in fields)
        prompt = next((found for each in given if (found := read_messages(each))), [])
        both = [self._read_side(record[name], prompt) for name in ("chosen", "rejected")]
        if not prompt:  # whole conversations that share their beginning
            shared = next((n for n, (a, b) in enumerate(zip(*both, strict=False)) if a != b), min(map(len, both)))
            prompt, both = both[0][:shared], [each[shared:] for each in both]
        if not prompt or not all(both):
            raise entries.UnreadableRecordError("chosen and rejected do not answer the same prompt")
        id_, conversation = (str(_get_cell(record, fields, kind, "")) for kind in ("id", "conversation"))
        tools = read_tools(_get_cell(record, fields, "tools"))
        return entries.ComparedReplies(id_, prompt, both[0], both[1], conversation or id_, tools)

    def _read_side(self, value: Any, prompt: list[Any]) -> list[Any]:
        value = parse_json(value)
        if isinstance(value, str):
            return [{"role": "assistant", "content": value}]
        messages = read_messages(value)
        return messages[len(prompt) :] if prompt and messages[: len(prompt)] == prompt else messages


def _get_cell(record: entries.Record, fields: Mapping[str, str], kind: str, default: Any = None) -> Any:
    return record[fields[kind]] if kind in fields else default
