"""Keeps the chats of served models, as far as the `record:` block of `learn.yml` allows.

POST /v1/chat/completions {"messages": .., "user": "u1", "metadata": {"session_id": "s1"}}
    =>  a chat of the conversation `s1` with the id of the answer, its texts, and the tokens that were sampled
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from aiohttp import web

from reinforge.bounded import encode_any, load_json
from reinforge.learning.store import LearningStore, make_alias
from reinforge.rollout.http.access import read_key
from reinforge.rollout.http.exchange import encode_body
from reinforge.runs.journal.episode_json import dump_tokens
from reinforge.serving.answers import TEXT, CutAnswerError
from reinforge.serving.chat import Keep, find_names
from reinforge.serving.recording import Change, RecordConfig, RecordedCall, Recorder, RecordWriter
from reinforge.types.request import ModelReply

logger = logging.getLogger(__name__)
USER_FIELDS = ("user", "safety_identifier", "metadata")
"""Fields of a request, repeated in some answers, that say whose it is: only their hash is kept."""


FindSplit = Callable[[str, str, str], tuple[int, int] | None]
"""Requested model, model that answered, conversation -> `split` of the chat and the version that it drew."""


class StoreWriter(RecordWriter):
    """Writes calls to a store. Runs in the recorder's thread."""

    def __init__(self, store: LearningStore, config: RecordConfig, find_split: FindSplit):
        super().__init__(store.database.parent, config)
        self._store, self._is_full, self._find_split = store, False, find_split
        self.max_bytes = config.max_mb * 1e6

    def write(self, call: RecordedCall, change: Change | None) -> str:
        """Returns what became of a call: recorded, not_whole, not_in_share, failed, cut, withheld, full."""
        request, reply = load_json(call.request), call.reply
        if call.call_type == TEXT and not isinstance(request.get("prompt"), str):
            return "not_whole"
        session, user = find_names(request)
        if session := call.conversation or session:
            conversation = make_alias(call.key, "session", session)
        else:  # two users may begin with the same words
            conversation = make_alias(call.key, "prompt", f"{user}\0{self._find_conversation(request)}")
        if not self._is_in_share(conversation):
            return "not_in_share"
        row: dict[str, Any] = {"key": call.key, "user": make_alias(call.key, "user", user) if user else None}
        row |= {"started_s": call.started_s, "version": None if reply is None else reply.version, "split": None}
        drawn: tuple[int, int] | None = None
        if user:  # the units of a comparison are users
            asked, answered = request.get("model"), load_json(b"".join(call.pieces)).get("model")
            drawn = self._find_split(str(asked or ""), str(answered), session or user)
        is_full = self._check_full()
        try:
            answer = self._read_answer(call)
        except CutAnswerError:
            answer = None
        if drawn is not None:
            row["split"], version = drawn
            cost = {"seconds": call.seconds, "tokens": reply.num_completion_tokens} if reply is not None else {}
            if not is_full:
                self._store.add("calls", {**row, **cost, "version": version, "is_error": answer is None})
        if answer is None or reply is None:
            return "failed" if reply is None else "cut"
        exchange = {"request": _drop(request, *USER_FIELDS), "response": _drop_tokens(_drop(answer, *USER_FIELDS))}
        if (found := self._clean(exchange, change)) is None:
            return "withheld"
        if is_full:
            return "full"
        record = {**self._describe(call, conversation), **self._measure(request, answer)}
        del record["trace_id"]  # each reply is rated by itself
        record |= {"request_id": answer["id"], "session_id": conversation}
        record |= {"proxy_server_request": {"body": found["request"]}, "response": found["response"]}
        if call.call_type == TEXT:
            record["messages"] = found["request"].get("prompt")
        row |= {"id": answer["id"], "conversation": conversation, "model": str(answer.get("model"))}
        tokens = reply.tokens if found == exchange else None
        self._store.add_chat(row, record, None if tokens is None else dump_tokens(tokens))
        return "recorded"

    def _check_full(self) -> bool:
        was_full, self._is_full = self._is_full, self._store.num_bytes >= self.max_bytes
        if self._is_full and not was_full:
            message = "%s has record.max_mb = %g MB: no further chats are kept until older ones are deleted"
            logger.warning(message, self._store.database.name, self._config.max_mb)
        return self._is_full

    def remove_old(self) -> bool:
        """Deletes the chats of days before the last `days` days, in UTC; returns whether there were any."""
        if self._config.days is None:
            return False
        today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        return self._store.remove_before((today - timedelta(days=self._config.days - 1)).timestamp())


def _drop(value: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: each for key, each in value.items() if key not in names}


def _drop_tokens(answer: dict[str, Any]) -> dict[str, Any]:
    """Returns an answer without its tokens, which repeat its text in pieces that no pattern of `remove` matches."""
    if "choices" in answer:
        choices = [_drop(choice, "logprobs", "token_ids", "prompt_token_ids") for choice in answer["choices"]]
        return {**_drop(answer, "prompt_token_ids"), "choices": choices}
    output = [
        {**item, "content": [_drop(part, "logprobs") for part in item["content"]]} if item.get("content") else item
        for item in answer.get("output", ())
    ]
    return {**answer, "output": output} if output else answer


class StoreKeeper:
    """A `ChatKeeper` that passes chats to a recorder.

    Args:
        token: The server's key; None: each client has the key that it sends.
    """

    def __init__(self, recorder: Recorder, token: str | None):
        self._recorder, self._token = recorder, token

    def hash_key(self, request: web.Request) -> str:
        """Returns what stands for the API key of a request; the chat page sends the server's in a cookie."""
        return hashlib.sha256(encode_any(self._token or read_key(request.headers))).hexdigest()

    @contextmanager
    def open(self, request: web.Request, body: bytes) -> Iterator[Keep | None]:
        call = self._recorder.begin(request.path.removeprefix("/v1/"), request.headers, body)
        if call is None:
            yield None
            return
        is_finished = False

        def keep(answer: Mapping[str, Any], replies: Sequence[ModelReply]) -> None:
            nonlocal is_finished
            if is_finished:
                return
            if len(replies) > 1:  # a rating would not say which
                self._recorder.counts["several_replies"] += 1
                return
            is_finished, call.reply = True, replies[0] if replies else None
            call.key, call.status, call.content_type = self.hash_key(request), 200, "application/json"
            self._recorder.add(call, encode_body(answer))
            self._recorder.finish(call, "" if replies else "the call failed")

        try:
            yield keep
        finally:
            if not is_finished:
                self._recorder.drop(call)
