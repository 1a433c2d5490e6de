"""Records the calls of a large model in the form of LiteLLM's logs, which `reinforge data import` reads.

    logs/requests-2026-01-31.jsonl
    {"request_id": .., "trace_id": CONVERSATION, "call_type": "completion", "status": "success", "startTime": ..,
     "response_time": 0.31, "prompt_tokens": 80, "completion_tokens": 12, "response_cost": 0.0003,
     "proxy_server_request": {"body": REQUEST}, "response": REPLY}

A call that failed, was cut or ended at a limit has `status: failure` and neither request nor reply. A thread writes, so
that no request waits for it; what goes wrong there is logged once and counted, and requests still pass.
"""

from __future__ import annotations

import hashlib
import json
import logging
import queue
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, field_validator

from reinforge.bounded import load_json
from reinforge.config.document import parse_yaml
from reinforge.config.finetuning_blocks import Block
from reinforge.config.imports import import_object
from reinforge.config.problems import Validator
from reinforge.errors import ConfigError, describe_error
from reinforge.evaluation.patterns import compile_pattern
from reinforge.files import append_line, make_private_folder, read_regular_file, storage_boundary
from reinforge.limits import get_limits
from reinforge.registry import REGISTRY
from reinforge.rollout.http.access import read_key
from reinforge.safe_text import redact_known_forms
from reinforge.serving.answers import CALL_TYPES, RESPONSES, TEXT, CutAnswerError, read_answer, read_usage
from reinforge.serving.routes import read_session
from reinforge.types.request import ModelReply

logger = logging.getLogger(__name__)
QUEUE_CALLS, QUEUE_BYTES = 1024, 1 << 26
"""Most finished calls that wait to be written, and most bytes of calls that wait or are being answered."""
KNOWN_PROMPTS = 100_000
"""Newest prompts whose conversation is known when the next request continues them."""
CLOSE_S = 5.0
PATTERN_S = 0.1
ELSEWHERE = ("previous_response_id", "conversation", "prompt")
"""Fields of a request whose conversation is kept by the upstream: what the model saw is not in the request."""
REMOVED = "[removed]"
_SECRET_FIELDS = frozenset({"authorization", "headers", "api_key", "authorization_token"})
"""Fields of a tool, such as an MCP server's, that hold its key."""
_FILE = re.compile(r"requests-(\d{4}-\d\d-\d\d)\.jsonl")
_CACHE_MARK = re.compile(r',?"cache_control":\{[^{}]*\}')
Change = Callable[[dict[str, Any]], Any]


class ConsentConfig(Block):
    """Users who agreed; only their requests are recorded."""

    header: str | None = Field(default=None, description="Name of a header that the application sends for them.")
    value: str = Field(default="yes", description="Value of that header.")
    keys: list[str] = Field(default=[], description="SHA-256, in hexadecimal digits, of API keys whose users agreed.")

    @field_validator("keys")
    @classmethod
    def _check_keys(cls, keys: list[str]) -> list[str]:
        if any(re.fullmatch("[0-9a-fA-F]{64}", key) is None for key in keys):
            raise ValueError("expected SHA-256 hashes of 64 hexadecimal digits: printf %s KEY | sha256sum")
        return [key.lower() for key in keys]

    def covers(self, headers: Mapping[str, str]) -> bool:
        if self.header is not None and headers.get(self.header, "").strip() == self.value:
            return True
        return bool(self.keys) and hashlib.sha256(read_key(headers).encode()).hexdigest() in self.keys


class PriceConfig(Block):
    prompt: float = Field(ge=0, description="US dollars per million tokens of prompts.")
    completion: float = Field(ge=0, description="US dollars per million tokens of replies.")


class RecordConfig(Block):
    """What `reinforge serve` keeps with `--record` and `--learn`."""

    share: float = Field(default=1.0, ge=0, le=1, description="Share of the conversations; a hash decides on each.")
    consent: ConsentConfig | None = Field(default=None, description="Null: the requests of all users are recorded.")
    remove: list[str] = Field(default=[], description="Regular expressions whose matches are replaced by [removed].")
    change: str | None = Field(
        default=None,
        description="`module:function` that gets {request, response} and returns what is kept of it; None: nothing.",
    )
    days: int | None = Field(default=None, ge=1, description="Files of days before the last DAYS days are deleted.")
    max_mb: float = Field(default=1024.0, gt=0, description="Nothing is recorded while the files have more megabytes.")
    prices: dict[str, PriceConfig] = Field(default={}, description="Name of a model -> its prices.")

    @field_validator("remove")
    @classmethod
    def _check_patterns(cls, patterns: list[str]) -> list[str]:
        for pattern in patterns:
            compile_pattern(pattern)
        return patterns


def read_record_config(path: Path | None) -> RecordConfig:
    """Returns the `record:` block of a YAML file; a `ConfigError` lists its problems."""
    if path is None:
        return RecordConfig()
    config: RecordConfig = read_blocks(path, record=RecordConfig)["record"]
    return config


def read_blocks(path: Path, **types: type[BaseModel]) -> dict[str, Any]:
    """Returns the blocks of a YAML file by name, without those that it lacks; `record:` has defaults."""
    document = parse_yaml(read_regular_file(path, get_limits().config_bytes + 1), str(path))
    document.data = document.data if isinstance(document.data, dict) else {}
    allowed = " or ".join(f"`{name}:`" for name in types)
    for name in document.data.keys() - types.keys():
        document.report((name,), "unknown section", f"write everything below {allowed}")
    named = {name: type_ for name, type_ in types.items() if name in document.data or name == "record"}
    found = {name: Validator(document, REGISTRY).validate(type_, (name,)) for name, type_ in named.items()}
    if document.problems or None in found.values():
        raise ConfigError(document.problems)
    return found


@dataclass(slots=True)
class RecordedCall:
    """One request, while it is answered and until it is written."""

    call_type: str
    request: bytes
    conversation: str  # as the client names it; empty: it does not
    started_s: float = field(default_factory=time.time)
    begun: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    status: int = 0
    content_type: str = ""
    pieces: list[bytes] = field(default_factory=list)
    num_bytes: int = 0
    problem: str = ""  # why it has no reply
    is_dropped: bool = False
    reply: ModelReply | None = None  # what a model of this server sampled, with its tokens
    key: str = ""  # SHA-256 of the API key


class Recorder:
    """Writes calls to a folder. All methods but `flush` and those with a leading underscore run in the event loop.

    Args:
        writer: Writes each call; None: to the files of the folder.
    """

    def __init__(
        self,
        folder: Path,
        config: RecordConfig,
        *,
        project_root: Path | None = None,
        writer: RecordWriter | None = None,
    ):
        self.folder, self.config = folder, config
        self.counts: Counter[str] = Counter()
        self._change: Change | None = None
        if config.change is not None:
            self._change = import_object(config.change, project_root or Path.cwd(), path="record.change")
        self._queue: queue.Queue[RecordedCall | threading.Event | None] = queue.Queue(QUEUE_CALLS)
        self._taken = self._freed = 0  # bytes; each is written by one thread only
        self._thread: threading.Thread | None = None
        self._has_warned = False
        self._writer = writer or RecordWriter(folder, config)
        self.measured = self._writer.measured

    def start(self) -> None:
        with storage_boundary(self.folder):
            make_private_folder(self.folder)
        self._thread = threading.Thread(target=self._run, name="record", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Writes what waits; gives up after some seconds, such as those of a disk that does not answer."""
        if self._thread is not None and self._thread.is_alive():
            try:
                self._queue.put(None, timeout=CLOSE_S)
                self._thread.join(CLOSE_S)
            except queue.Full:
                pass

    def flush(self) -> None:
        """Waits until every call that has finished so far is written."""
        done = threading.Event()
        self._queue.put(done)
        while not done.wait(0.2) and self._thread is not None and self._thread.is_alive():
            pass

    def begin(self, path: str, headers: Mapping[str, str], body: bytes) -> RecordedCall | None:
        """Returns the call of a request, to be passed to `add` and `finish`; None: it is not recorded."""
        if (call_type := CALL_TYPES.get(path.rstrip("/"))) is None:
            return None
        if self.config.consent is not None and not self.config.consent.covers(headers):
            self.counts["no_consent"] += 1
            return None
        if not self._take(len(body)):
            return None
        return RecordedCall(call_type, body, read_session(headers), num_bytes=len(body))

    def add(self, call: RecordedCall, piece: bytes) -> None:
        if call.is_dropped:
            return
        if self._take(len(piece)):
            call.num_bytes += len(piece)
            call.pieces.append(piece)
        else:
            call.is_dropped = True
            call.pieces.clear()

    def drop(self, call: RecordedCall) -> None:
        """Forgets a call that is not to be written."""
        self._taken -= call.num_bytes

    def finish(self, call: RecordedCall, problem: str = "") -> None:
        call.seconds, call.problem = time.perf_counter() - call.begun, problem
        try:
            if not call.is_dropped:
                self._queue.put_nowait(call)
                return
        except queue.Full:
            self.counts["dropped"] += 1
        self.drop(call)

    def _take(self, num_bytes: int) -> bool:
        if self._taken - self._freed + num_bytes > QUEUE_BYTES:
            self.counts["dropped"] += 1
            return False
        self._taken += num_bytes
        return True

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            if isinstance(call, threading.Event):
                call.set()
                continue
            try:
                outcome = self._writer.write(call, self._change)
            except Exception as error:  # noqa: BLE001  a user's function may raise anything, and requests must pass
                outcome = "error"
                if not self._has_warned:
                    self._has_warned = True
                    logger.warning(
                        "recording failed: %s; requests still pass, and later failures are only counted in /metrics",
                        describe_error(error),
                    )
            self.counts[outcome] += 1
            self._freed += call.num_bytes


class RecordWriter:
    def __init__(self, folder: Path, config: RecordConfig):
        self._folder, self._config = folder, config
        self._conversations: OrderedDict[bytes, str] = OrderedDict()
        self._day: date | None = None
        self._size = 0
        self.measured = dict.fromkeys(("calls", "tokens", "priced", "dollars"), 0.0)  # sums, over what is known

    def write(self, call: RecordedCall, change: Change | None) -> str:
        """Returns what became of a call: recorded, failed, not_in_share, not_whole, withheld, full."""
        try:
            request = load_json(call.request)
        except ValueError:
            request = None
        if not isinstance(request, dict):
            return "not_whole"
        conversation = call.conversation or self._find_conversation(request)
        if not self._is_in_share(conversation):
            return "not_in_share"
        record = self._describe(call, conversation)
        if call.call_type == RESPONSES and any(request.get(name) for name in ELSEWHERE):
            return "not_whole"
        if call.call_type == TEXT and not isinstance(request.get("prompt"), str):
            return "not_whole"
        try:
            answer = self._read_answer(call)
        except CutAnswerError as error:
            failed = {"status": "failure", "error_code": call.status, "error_str": str(error)}
            return "failed" if self._append({**record, **failed}) else "full"
        found = self._clean({"request": request, "response": answer}, change)
        if found is None:
            return "withheld"
        record |= self._measure(request, answer)
        if call.call_type == TEXT:
            record["messages"] = found["request"].get("prompt")
        whole = {**record, "proxy_server_request": {"body": found["request"]}, "response": found["response"]}
        return "recorded" if self._append(whole) else "full"

    def _is_in_share(self, conversation: str) -> bool:
        number = int.from_bytes(hashlib.sha256(conversation.encode()).digest()[:8])
        return number < self._config.share * 2**64

    def _read_answer(self, call: RecordedCall) -> dict[str, Any]:
        if call.problem or not 200 <= call.status < 300:
            raise CutAnswerError(call.problem or f"status {call.status}")
        return read_answer(call.call_type, b"".join(call.pieces), call.content_type)

    def _describe(self, call: RecordedCall, conversation: str) -> dict[str, Any]:
        def show(seconds: float) -> str:
            return datetime.fromtimestamp(call.started_s + seconds, UTC).isoformat(timespec="milliseconds")

        return {
            "request_id": hashlib.sha256(f"{call.started_s} {call.begun} {conversation}".encode()).hexdigest()[:24],
            "trace_id": conversation,
            "call_type": call.call_type,
            "status": "success",
            "startTime": show(0.0),
            "endTime": show(call.seconds),
            "response_time": round(call.seconds, 4),
        }

    def _measure(self, request: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the model, its tokens and their price, as far as they are known."""
        names = [str(each) for each in (answer.get("model"), request.get("model")) if each]
        found: dict[str, Any] = {"model": names[0]} if names else {}
        if (usage := read_usage(answer)) is None:
            return found
        found |= {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
        self._sum(calls=1, tokens=sum(usage))
        price = next((self._config.prices[name] for name in names if name in self._config.prices), None)
        if price is not None:
            found["response_cost"] = (usage[0] * price.prompt + usage[1] * price.completion) / 1e6
            self._sum(priced=1, dollars=found["response_cost"])
        return found

    def _sum(self, **values: float) -> None:
        for name, value in values.items():
            self.measured[name] += value

    def _clean(self, exchange: dict[str, Any], change: Change | None) -> dict[str, Any] | None:
        found: Any = self.mask(exchange)
        if change is None or found is None:
            return dict(found)
        found = change(found)
        if found is not None and not (isinstance(found, dict) and {"request", "response"} <= found.keys()):
            raise TypeError("record.change must return an object with request and response, or None")
        return found

    def mask(self, value: Any) -> Any:
        """Returns plain data without known forms of keys, and with what the patterns find replaced."""
        if isinstance(value, str):
            value = redact_known_forms(value)
            for pattern in self._config.remove:
                value = compile_pattern(pattern).sub(REMOVED, value, timeout=PATTERN_S)
            return value
        if isinstance(value, dict):
            is_tool = value.get("type") == "mcp" or "server_url" in value or "authorization_token" in value
            return {key: self.mask(each) for key, each in value.items() if not (is_tool and key in _SECRET_FIELDS)}
        return [self.mask(each) for each in value] if isinstance(value, list) else value

    def _find_conversation(self, request: Mapping[str, Any]) -> str:
        """Returns the conversation of a request.

        The prompt of an earlier request, then replies  =>  its conversation. Any other prompt begins one.
        """
        messages = next((request[name] for name in ("messages", "input", "prompt") if request.get(name)), "")
        digest, earlier = hashlib.sha256(), list[bytes]()
        digest.update(_dump([request.get(name) for name in ("system", "instructions")]))
        for message in messages if isinstance(messages, list) else [messages]:
            kind = (message.get("role"), message.get("type")) if isinstance(message, Mapping) else ()
            if "assistant" in kind or "function_call" in kind or "reasoning" in kind:
                earlier.append(digest.digest())
            digest.update(_dump(message))
        whole = digest.digest()
        found = next((self._conversations[each] for each in reversed(earlier) if each in self._conversations), None)
        self._conversations[whole] = found or whole.hex()[:24]
        self._conversations.move_to_end(whole)
        if len(self._conversations) > KNOWN_PROMPTS:
            self._conversations.popitem(last=False)
        return self._conversations[whole]

    def _append(self, record: dict[str, Any]) -> bool:
        """Appends a line to the file of its day; False: the folder is full."""
        today = datetime.now(UTC).date()
        if today != self._day:
            self._remove_old(today)
            self._day = today
        if self._size >= self._config.max_mb * 1e6:
            return False
        path = self._folder / f"requests-{today.isoformat()}.jsonl"
        before = path.stat().st_size if path.exists() else 0
        append_line(path, record)
        self._size += path.stat().st_size - before
        return True

    def _remove_old(self, today: date) -> None:
        self._size = 0
        for path in self._folder.iterdir():
            if (named := _FILE.fullmatch(path.name)) is None or path.is_symlink():
                continue
            days = self._config.days
            if days is not None and date.fromisoformat(named[1]) <= today - timedelta(days=days):
                path.unlink()
            else:
                self._size += path.stat().st_size


def _dump(value: Any) -> bytes:
    return _CACHE_MARK.sub("", json.dumps(value, sort_keys=True, separators=(",", ":"))).encode()
