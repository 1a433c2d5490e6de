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

from reinforge.dialects.chat_call import find_rest, split_text
from reinforge.dialects.reply_tokens import ReplyTokens, read_tokens

_TEXTS = ("reasoning_content", "content", "refusal")
"""The texts of a message, in the order in which a model writes them."""

Chunk = dict[str, Any]


@dataclass(slots=True)
class SentChoice:
    texts: dict[str, str] = field(default_factory=dict)
    num_tokens: int = 0


def build_head(completion: Mapping[str, Any], *, include_usage: bool) -> Chunk:
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
    """
    head, sent = build_head(completion, include_usage=include_usage), sent or {}
    first = {"prompt_token_ids": list(ids)} if (ids := completion.get("prompt_token_ids")) and not sent else {}
    for number, choice in enumerate(completion["choices"]):
        for part in _split_choice(choice, () if number else token_texts, sent.get(choice["index"])):
            yield {**head, **first, "choices": [part]}
            first = {}
    if include_usage:
        yield {**head, "choices": [], "usage": dict(completion["usage"])}


def _split_choice(
    choice: Mapping[str, Any], token_texts: Sequence[str], sent: SentChoice | None
) -> Iterator[dict[str, Any]]:
    message = choice["message"]
    tokens = _ChunkTokens(choice, token_texts, 0 if sent is None else sent.num_tokens)
    base = {"index": choice["index"], "finish_reason": None, "logprobs": None}
    if sent is None:
        yield {**base, "delta": {"role": message["role"], "content": ""}}
    for name in _TEXTS:
        text = message.get(name) or ""
        if sent is not None:
            if rest := find_rest(text, sent.texts.get(name, "")):
                yield {**base, "delta": {name: rest}}
        elif text:
            for piece, end in tokens.split(text):
                yield {**base, "delta": {name: piece}, **tokens.take(end)}
    for index, call in enumerate(message.get("tool_calls") or ()):
        for delta in _split_call(index, call):
            yield {**base, "delta": {"tool_calls": [delta]}}
    # of a served model also the version of its weights
    ending = {name: choice[name] for name in ("finish_reason", "model_version") if name in choice}
    yield {**base, "delta": {}, **tokens.take(None), **ending}


def _split_call(index: int, call: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
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
