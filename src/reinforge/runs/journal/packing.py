"""Episodes as the rows of the journal hold them: messages and tokens once, numbers and texts as bytes, compressed.

    calls         prompt (1, 2), reply (3,) of messages [a]    prompt (1, 2, 3, 4), reply (5,) of messages [a, b, c]
    JSON          "messages": [a]                              "continues": [0, 2, 3], "messages": [c]
                  "prompt_token_ids": 2, "token_ids": 1        "prompt_token_ids": 1, "token_ids": 1
    numbers       1 2 3 4 5

`continues` says that a call begins with so many messages and tokens of an earlier call and its reply: a message is left
out where both calls hold the same object. What a call has in common with the call before it, such as the temperature,
is left out too. A message with a long text is a list: the message without it, and how many bytes it has.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, takewhile
from operator import is_, truth
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray
from pydantic_core import to_json as dump_plain

from reinforge.bounded import load_json
from reinforge.errors import RecordError
from reinforge.files import to_json
from reinforge.limits import get_limits
from reinforge.types.episode import EpisodeKey
from reinforge.types.request import TokenIds

LEVEL = 1  # of zstandard: a higher one makes a row a few percent smaller and takes twice the time
NUM_COMPARED = 8  # latest calls of an episode with which a call is compared
LONG_TEXT = 32  # characters; escaping a string for JSON takes ten times as long as encoding it
_HEADER = struct.Struct("<4I")
"""Bytes of the JSON, number of token ids and of log-probs, and bytes of a log-prob: 4 where that keeps all exactly."""
_LOGPROBS = ("logprobs", "processed_logprobs")
_REPEATED = (
    "llm", "model", "functions", "temperature", "top_p", "top_k", "min_p", "finish_reason", "policy_version",
    "restricted",
)  # fmt: skip


class EpisodePacker:
    """One episode that is about to be recorded, from what `dump_episode` returned.

    Raises:
        RecordError: It cannot be written, or is too large.
    """

    def __init__(self, data: Mapping[str, Any]):
        self._ids, self._logprobs, self._texts = array("i"), array("d"), list[bytes]()
        self._known: list[tuple[list[Any], array[int] | None]] = []
        self._previous: Mapping[str, Any] = {}
        packed = {**data, "calls": [self._pack_call(call) for call in data["calls"]]}
        if isinstance(output := self._pack_message({"content": data["output"]}), list):
            packed["output"], packed["output_bytes"] = None, output[1]
        self._text = to_json(packed)
        size = len(self._text) + len(self._ids) + len(self._logprobs) + sum(map(len, self._texts))
        if size > (most := get_limits().episode_chars):
            raise RecordError(f"it has {size:,} characters, and at most {most:,} can be recorded")

    def compress(self) -> bytes:
        text, logprobs = self._text.encode(), np.frombuffer(self._logprobs, "<f8")
        with np.errstate(over="ignore"):
            short = logprobs.astype("<f4")
        if np.array_equal(short.astype("<f8").view("<i8"), logprobs.view("<i8")):
            logprobs = short
        header = _HEADER.pack(len(text), len(self._ids), len(logprobs), logprobs.itemsize)
        numbers = _split_bytes(np.frombuffer(self._ids, "<i4")), _split_bytes(logprobs)
        return zstandard.ZstdCompressor(level=LEVEL).compress(b"".join((header, text, *numbers, *self._texts)))

    def _pack_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        messages, packed, previous = call["messages"], dict(call), self._previous
        for name in _REPEATED if previous else ():
            if call[name] == previous[name] and type(call[name]) is type(previous[name]):
                del packed[name]
        if call["tools"] is not None and call["tools"] is previous.get("tools"):
            del packed["tools"]
        earlier, count = self._find_earlier(messages)
        before = None if earlier is None else self._known[earlier][1]
        tokens, shared = self._pack_reply(packed, before)
        if earlier is not None:
            packed["continues"] = [earlier, count, shared]
        packed["messages"] = [self._pack_message(message) for message in messages[count:]]
        packed["reply"] = self._pack_message(call["reply"])
        if "others" in call:
            packed["others"] = [dict(other) for other in call["others"]]
            for other in packed["others"]:
                if is_same := tokens is not None and other["prompt_token_ids"] == call["prompt_token_ids"]:
                    other["prompt_token_ids"] = ()
                self._pack_reply(other, None)
                if is_same:
                    other["prompt_token_ids"] = True
        self._known.append(([*messages, call["reply"]], tokens))
        self._previous = call
        return packed

    def _pack_message(self, message: Mapping[str, Any]) -> Any:
        text = message.get("content")
        if type(text) is not str or len(text) < LONG_TEXT:
            return message
        self._texts.append(text.encode("utf-8", "surrogatepass"))
        return [{**message, "content": None}, len(self._texts[-1])]

    def _find_earlier(self, messages: Sequence[Any]) -> tuple[int | None, int]:
        """Returns the call that has the most messages at the beginning of another one, and how many."""
        best, most = None, 0
        for number in range(len(self._known) - 1, max(-1, len(self._known) - 1 - NUM_COMPARED), -1):
            known = self._known[number][0]
            count = sum(1 for _ in takewhile(truth, map(is_, known, messages)))
            if count > most:
                best, most = number, count
            if most and most >= len(known) - 1:
                break
        return best, most

    def _pack_reply(self, reply: dict[str, Any], before: array[int] | None) -> tuple[array[int] | None, int]:
        """Puts counts in place of a reply's numbers; returns all its tokens, and how many `before` has."""
        prompt, ids = _read_ids(reply["prompt_token_ids"]), _read_ids(reply["token_ids"])
        found = {name: _read_numbers(reply[name], "d") for name in _LOGPROBS if reply.get(name) is not None}
        if prompt is None or ids is None or None in found.values():
            return None, 0
        shared = 0 if before is None else _count_equal(before, prompt)
        self._ids += prompt[shared:] + ids
        reply["prompt_token_ids"], reply["token_ids"] = len(prompt) - shared, len(ids)
        for name, numbers in found.items():
            assert numbers is not None
            self._logprobs += numbers
            reply[name] = len(numbers)
        return prompt + ids, shared


def _read_ids(ids: Any) -> array[int] | None:
    """Returns token ids as an array; None: there are none, or a model of the user reports something else."""
    return ids.to_array() if isinstance(ids, TokenIds) else _read_numbers(ids, "i")


def _read_numbers(numbers: Any, kind: str) -> array[Any] | None:
    try:
        return None if numbers is None else array(kind, struct.pack(f"{len(numbers)}{kind}", *numbers))
    except (TypeError, struct.error):
        return None


def _count_equal(before: array[int], prompt: array[int]) -> int:
    count = min(len(before), len(prompt))
    if before[:count] == prompt[:count]:
        return count
    differ = np.frombuffer(before, np.int32)[:count] != np.frombuffer(prompt, np.int32)[:count]
    return int(differ.argmax())


def _split_bytes(numbers: NDArray[Any]) -> bytes:
    """Returns the first bytes of all numbers, then the second ones: the high bytes of most are equal."""
    return numbers.view(np.uint8).reshape(-1, numbers.itemsize).T.tobytes()


def _join_bytes(data: memoryview, dtype: str) -> NDArray[Any]:
    size = np.dtype(dtype).itemsize
    return np.frombuffer(np.frombuffer(data, np.uint8).reshape(size, -1).T.tobytes(), dtype)


def build_episode_row(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns of an episode that can be read without unpacking it."""
    key = EpisodeKey(data["phase"], data["epoch"], data["example_id"], data["generation"], data["round"])
    output, scores = data["output"], {name: _read_number(each["score"]) for name, each in data["scores"].items()}
    is_dialogue = isinstance(output, dict) and isinstance(output.get("branches"), list)
    protocol = output.get("protocol") if is_dialogue else None
    names = ("phase", "epoch", "round", "example_id", "generation", "attempt", "outcome", "reward", "reason")
    row = {name: data[name] for name in names}
    return {
        **row,
        "key": str(key),
        "scores": to_json(scores),
        "protocol": protocol if isinstance(protocol, str) else None,
    }


def _read_number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def read_packed(blob: bytes) -> dict[str, Any]:
    """Returns an episode whose calls lack the messages and tokens that they continue; other numbers are counts."""
    return _read(blob)[0]


def _read(blob: bytes) -> tuple[dict[str, Any], NDArray[Any], NDArray[Any]]:
    """Returns an episode with its texts, its token ids and its log-probs; a `ValueError` for a damaged one."""
    try:
        if zstandard.frame_content_size(blob) > 8 * get_limits().episode_chars:
            raise ValueError("the episode is larger than any that can be recorded")
        content = memoryview(zstandard.ZstdDecompressor().decompress(blob))
        num_bytes, num_ids, num_logprobs, size = _HEADER.unpack_from(content)
    except (zstandard.ZstdError, struct.error) as error:
        raise ValueError(f"the episode cannot be decompressed: {error}") from error
    if size not in (4, 8):
        raise ValueError(f"a log-prob has {size} bytes")
    places = [_HEADER.size, num_bytes, 4 * num_ids, size * num_logprobs]
    text, ids, logprobs = (content[sum(places[:part]) : sum(places[: part + 1])] for part in (1, 2, 3))
    data, texts, previous = load_json(bytes(text)), content[sum(places) :], dict[str, Any]()

    def restore(message: Any) -> Any:
        nonlocal texts
        if not isinstance(message, list):
            return message
        message, count = message
        message["content"], texts = str(texts[:count], "utf-8", "surrogatepass"), texts[count:]
        return message

    for call in data["calls"]:
        call |= {name: previous[name] for name in (*_REPEATED, "tools") if name not in call}
        call["messages"] = [restore(message) for message in call["messages"]]
        call["reply"], previous = restore(call["reply"]), call
    if "output_bytes" in data:
        data["output"] = restore([{}, data.pop("output_bytes")])["content"]
    return data, _join_bytes(ids, "<i4"), _join_bytes(logprobs, f"<f{size}")


def unpack_episode(blob: bytes) -> dict[str, Any]:
    """Returns an episode as `dump_episode` returned it; what calls have in common is the same object in each."""
    data, ids, logprobs = _read(blob)
    listed: list[float | None] = logprobs.tolist()
    if not np.isfinite(logprobs).all():  # null in JSON
        listed = [value if abs(value) < np.inf else None for value in logprobs.tolist()]
    streams, budget = (iter(ids.tolist()), iter(listed)), get_limits().episode_chars
    known: list[tuple[list[Any], list[int]]] = []
    for call in data["calls"]:
        before: list[int] = []
        if "continues" in call:
            number, count, shared = call.pop("continues")
            call["messages"] = known[number][0][:count] + call["messages"]
            before = known[number][1][:shared]
        budget -= len(call["messages"]) + len(before)
        if budget < 0:
            raise ValueError("the episode is larger than any that can be recorded")
        _unpack_reply(call, before, *streams)
        for other in call.get("others", ()):
            _unpack_reply(other, call["prompt_token_ids"] if other["prompt_token_ids"] is True else [], *streams)
        known.append(([*call["messages"], call["reply"]], (call["prompt_token_ids"] or []) + (call["token_ids"] or [])))
    return data


def write_line(blob: bytes) -> bytes:
    data = unpack_episode(blob)
    try:
        return dump_plain(data) + b"\n"  # all of it is plain JSON, which this writes ten times as fast as `json`
    except ValueError:  # half of a surrogate pair
        return f"{to_json(data)}\n".encode()


def _unpack_reply(
    reply: dict[str, Any], before: list[int], ids: Iterator[int], logprobs: Iterator[float | None]
) -> None:
    if not isinstance(reply["token_ids"], int):
        return
    count = 0 if reply["prompt_token_ids"] is True else reply["prompt_token_ids"]
    reply["prompt_token_ids"] = before + list(islice(ids, count))
    reply["token_ids"] = list(islice(ids, reply["token_ids"]))
    for name in _LOGPROBS:
        if isinstance(reply.get(name), int):
            reply[name] = list(islice(logprobs, reply[name]))
