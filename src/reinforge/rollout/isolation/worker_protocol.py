"""What the run and its worker processes say to each other: one JSON object per line, over any connection.

run -> worker   start    once: what to load, and how
                job      one call of the function, or one episode of the agent
                reply    the answer to a request, with its id
                cancel   the result of the job is no longer needed
worker -> run   ready    or `refused`, with the problems of the function
                call     a model call of the agent, with an id
                mark     a mark of the agent
                text     a text that the agent asked for, with its own wording
                refused  why a model call of the agent was
                blame    why the latest reply of a model is unusable
                done     the result of the job, or `failed` with the exception

Every message names its job by a number, since several jobs may run in one worker; the start is job 0. Nothing is
unpickled: a message can only be data.
"""

from __future__ import annotations

import asyncio
import builtins
import time
from collections.abc import Sequence
from typing import Any

from reinforge import errors
from reinforge.bounded import check_depth, dump_json, load_json
from reinforge.errors import (
    ConfigError,
    ContextOverflow,
    InvalidCall,
    PolicyFailure,
    Problem,
    ReinforgeError,
    describe_error,
    show,
)
from reinforge.limits import get_limits
from reinforge.rollout.isolation.containment import Abandoned, TimedOut
from reinforge.types.episode import ModelCall
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.request import ModelReply, ModelRequest, TokenLogprob, TokenLogprobs

Message = dict[str, Any]

ITEM_FIELDS = ("id", "input_obj", "expected_output_obj", "output_obj", "full_dataset_entry")

_ENDS = {each.__name__: each for each in (asyncio.CancelledError, Abandoned, TimedOut)}
_KNOWN = {**vars(builtins), **vars(errors), **_ENDS}
_RAISED = (Exception, SystemExit, asyncio.CancelledError)
"""What a job may raise in the run; a worker that sends any other class is not believed."""


def encode(message: Message) -> bytes:
    text = dump_json(message, separators=(",", ":"))
    check_depth(text, 0, get_limits().json_depth)
    line = text.encode() + b"\n"
    if len(line) > (most := get_limits().message_bytes):
        raise ValueError(f"it has {len(line):,} bytes; the most are {most:,}")
    _refuse_other_keys(message)
    return line


def decode(line: bytes) -> Message:
    message = load_json(line)
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ValueError("not a message")
    if not isinstance(message.get("job"), int):
        raise ValueError("not a message of a job")
    return message


def _refuse_other_keys(value: Any) -> None:
    """Raises a `TypeError` for a key that JSON would turn into text."""
    open_ = [value]
    while open_:
        value = open_.pop()
        if isinstance(value, dict):
            if other := next((key for key in value if not isinstance(key, str)), None):
                raise TypeError(f"the key {other!r} is a {type(other).__name__}; keys must be strings")
            open_ += value.values()
        elif isinstance(value, list | tuple):
            open_ += value


def dump_item(item: EvalInputItem) -> Message:
    return {name: getattr(item, name) for name in ITEM_FIELDS}


def load_item(data: Message) -> EvalInputItem:
    return EvalInputItem(**data)


def dump_call(call: ModelCall) -> Message:
    """Returns what `build_completion` reads of a finished call; the kept tokens of a sampling filter are left out."""
    names = ("call_id", "llm", "model", "functions", "started_s", "choice")
    return {**{name: getattr(call, name) for name in names}, "replies": list(map(_dump_reply, call.choices))}


def load_call(data: Message, messages: Sequence[Message] = ()) -> ModelCall:
    """Returns the call that `dump_call` was given, as far as an agent sees it."""
    reply, *others = [_load_reply(each) for each in data["replies"]]
    call = ModelCall(
        data["call_id"],
        data["llm"],
        data["model"],
        ModelRequest(list(messages)),
        reply,
        tuple(data["functions"]),
        data["started_s"],
        time.time(),
        others=tuple(others),
    )
    call.choose(data["choice"])
    return call


_TOKEN_FIELDS = tuple(name for name in TokenLogprobs.__dataclass_fields__ if name not in ("supports", "top_logprobs"))


def _dump_reply(reply: ModelReply) -> Message:
    names = ("message", "finish_reason", "num_prompt_tokens", "num_completion_tokens", "logprobs", "failure")
    tokens = reply.tokens
    dumped = None if tokens is None else {name: getattr(tokens, name) for name in _TOKEN_FIELDS}
    if dumped is not None and tokens is not None:
        dumped["prompt_token_ids"] = list(tokens.prompt_token_ids)
    if dumped is not None and tokens is not None and tokens.top_logprobs:
        dumped["top_logprobs"] = [[(each.token, each.logprob) for each in top] for top in tokens.top_logprobs]
    return {**{name: getattr(reply, name) for name in names}, "tokens": dumped}


def _load_reply(data: Message) -> ModelReply:
    tokens = data.pop("tokens")
    if tokens is not None:
        tops = tokens.pop("top_logprobs", ())
        tuples = {name: tuple(value) for name, value in tokens.items() if isinstance(value, list)}
        tuples["top_logprobs"] = tuple(tuple(TokenLogprob(*each) for each in top) for top in tops)
        tokens = TokenLogprobs(**{**tokens, **tuples})
    return ModelReply(tokens=tokens, **data)


def dump_error(error: BaseException, *, is_final: bool = False) -> Message:
    """Returns an exception as plain data.

    Args:
        is_final: True where it ended the job, so that the line of the user's code is added as `describe_error` does.
    """
    name, text = type(error).__name__, show(error)
    unplaced = (ReinforgeError, ContextOverflow, PolicyFailure, ConnectionError, TimeoutError)
    if is_final and not isinstance(error, unplaced):
        text = describe_error(error).removeprefix(f"{name}: ")
    dumped: Message = {"types": [each.__name__ for each in type(error).__mro__], "text": text}
    if isinstance(error, PolicyFailure):
        dumped["output"] = error.output
    if isinstance(error, InvalidCall):
        dumped["param"] = error.param
    return dumped


def load_error(data: Message) -> BaseException:
    """Returns an exception of the same name, with the same text, of the nearest class that is known here."""
    known = (_KNOWN.get(name) for name in data["types"])
    base = next((each for each in known if isinstance(each, type) and issubclass(each, _RAISED)), RuntimeError)
    text = str(data["text"])
    entries = {"__str__": lambda self: text, "__module__": base.__module__}
    made: type[BaseException] = type(str(data["types"][0]), (base,), entries)
    error = made.__new__(made)  # not every exception can be made from its text alone
    error.args = (text,)
    if isinstance(error, PolicyFailure):
        error.output = data.get("output")
    if isinstance(error, InvalidCall):
        error.param = str(data.get("param"))
    if isinstance(error, ConfigError):
        error.problems = [Problem("", text)]
    return error
