"""A finished chat completion in the chunks in which OpenAI's API streams it.

    {"role": "assistant", "content": "Hi you"}, tokens "Hi", " you", end
        => delta {"role": "assistant", "content": ""}
           delta {"content": "Hi"}
           delta {"content": " you"}
           delta {}, finish_reason "stop"

Joined, the deltas are the message; the chunks' log-probs and token ids are those of the whole reply, special tokens
included: what belongs to no text is part of the chunk after it. A reply that is sent while it is sampled has the same
chunks, with the pieces of text that the sampler delivered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from reinforge.dialects.events import split_text
from reinforge.dialects.reply_deltas import find_rest
from reinforge.dialects.reply_tokens import ReplyTokens, read_tokens

_TEXTS = ("reasoning_content", "content", "refusal")
"""The texts of a message, in the order in which a model writes them."""

Chunk = dict[str, Any]


@dataclass(slots=True)
class SentChoice:
    """What the client has of one choice."""

    texts: dict[str, str] = field(default_factory=dict)
    num_tokens: int = 0


def build_head(completion: Mapping[str, Any], *, include_usage: bool) -> Chunk:
    """Returns the fields that all chunks of a completion share."""
    names = ("id", "created", "model", "model_version")
    head = {name: completion[name] for name in names if name in completion} | {"object": "chat.completion.chunk"}
    return {**head, "usage": None} if include_usage else head


def split_completion(
    completion: Mapping[str, Any],
    *,
    token_texts: Sequence[str] = (),
    include_usage: bool = False,
    sent: Mapping[int, SentChoice] | None = None,
) -> Iterator[Chunk]:
    """Yields the chunks of a completion, one choice after the other.

    Args:
        completion: The completion. A choice's `logprobs` and `token_ids`, and the `prompt_token_ids`, go into the
            chunks where they are set.
        token_texts: Texts of the first choice's tokens, at which its text is split; without them, and without
            log-probs, a text is split at its words.
        include_usage: Whether the last chunk holds the token counts, as `stream_options` says.
    """
    head, sent = build_head(completion, include_usage=include_usage), sent or {}
    first = {"prompt_token_ids": list(ids)} if (ids := completion.get("prompt_token_ids")) and not sent else {}
    for number, choice in enumerate(completion["choices"]):
        if (known := sent.get(choice["index"])) is not None:
            parts = _split_rest(choice, known)
        else:
            parts = _split_choice(choice, token_texts if number == 0 else ())
        for part in parts:
            yield {**head, **first, "choices": [part]}
            first = {}
    if include_usage:
        yield {**head, "choices": [], "usage": dict(completion["usage"])}


def _split_choice(choice: Mapping[str, Any], token_texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    message, tokens = choice["message"], _ChunkTokens(choice, token_texts)
    base = {"index": choice["index"], "finish_reason": None, "logprobs": None}
    yield {**base, "delta": {"role": message["role"], "content": ""}}
    for name in _TEXTS:
        if text := message.get(name):
            for piece, end in tokens.split(text):
                yield {**base, "delta": {name: piece}, **tokens.take(end)}
    for index, call in enumerate(message.get("tool_calls") or ()):
        for delta in _split_call(index, call):
            yield {**base, "delta": {"tool_calls": [delta]}}
    yield {**base, "delta": {}, **tokens.take(None), **_end(choice)}


def _end(choice: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the last chunk of a choice says; of a served model also the version of its weights."""
    return {name: choice[name] for name in ("finish_reason", "model_version") if name in choice}


def _split_rest(choice: Mapping[str, Any], sent: SentChoice) -> Iterator[dict[str, Any]]:
    message, tokens = choice["message"], _ChunkTokens(choice, (), sent.num_tokens)
    base = {"index": choice["index"], "finish_reason": None, "logprobs": None}
    for name in _TEXTS:
        if rest := find_rest(message.get(name), sent.texts.get(name, "")):
            yield {**base, "delta": {name: rest}}
    for index, call in enumerate(message.get("tool_calls") or ()):
        for delta in _split_call(index, call):
            yield {**base, "delta": {"tool_calls": [delta]}}
    yield {**base, "delta": {}, **tokens.take(None), **_end(choice)}


def _split_call(index: int, call: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the deltas of one tool call: its id and name, then its arguments."""
    function = call.get("function")
    if not isinstance(function, Mapping):  # another service's kind of call
        yield {**call, "index": index}
        return
    arguments = function.get("arguments") or ""
    named = {**function, "arguments": ""}
    yield {**call, "index": index, "type": call.get("type", "function"), "function": named}
    for piece in split_text(arguments):
        yield {"index": index, "function": {"arguments": piece}}


class _ChunkTokens:
    """The tokens of one choice, which its chunks share out in order.

    Args:
        texts: Texts of its tokens; none: those of its log-probs.
        num_taken: How many of them were sent already.
    """

    def __init__(self, choice: Mapping[str, Any], texts: Sequence[str], num_taken: int = 0):
        tokens = read_tokens(choice) or ReplyTokens()
        self._entries = tokens.build_content() if choice.get("logprobs") is not None else None
        self._ids = choice.get("token_ids")
        texts = texts or tokens.texts
        self._text, self._ends = "".join(texts), list(accumulate(map(len, texts)))
        self._place, self._taken = 0, num_taken

    def split(self, text: str) -> Iterator[tuple[str, int]]:
        """Yields the pieces of a text, each with the number of tokens up to its end; 0 if they are not known."""
        start = self._text.find(text, self._place)
        if start < 0:  # a character that spans tokens, or a text that the tokens do not spell
            yield from ((piece, 0) for piece in split_text(text))
            return
        end, cut = start + len(text), start
        for number, token_end in enumerate(self._ends, 1):
            if token_end <= cut:
                continue
            place = min(token_end, end)
            yield self._text[cut:place], number if token_end <= end else number - 1
            cut = place
            if cut == end:
                break
        self._place = end

    def take(self, end: int | None) -> dict[str, Any]:
        """Returns the log-probs and ids of the tokens that no chunk had yet."""
        last = len(self._ids or self._entries or ()) if end is None else end
        start, self._taken = self._taken, max(last, self._taken)
        taken: dict[str, Any] = {}
        if self._entries is not None and (entries := self._entries[start : self._taken]):
            taken["logprobs"] = {"content": entries, "refusal": None}
        if self._ids is not None:
            taken["token_ids"] = list(self._ids[start : self._taken])
        return taken
