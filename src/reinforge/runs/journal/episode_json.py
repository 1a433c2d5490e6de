"""Converts finished episodes to the JSON of the journal and its exports, and back."""

from __future__ import annotations

import base64
import math
import zlib
from dataclasses import asdict, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reinforge.types.episode import EpisodeKey, EpisodeRecord, Mark, ModelCall
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem
from reinforge.types.request import Grammar, ModelReply, ModelRequest, SamplingParams, TokenLogprobs
from reinforge.types.supports import Supports
from reinforge.types.trajectory import Outcome


def dump_episode(record: EpisodeRecord) -> dict[str, Any]:
    return {
        "example_id": record.key.example_id,
        "generation": record.key.generation,
        "phase": record.key.phase,
        "epoch": record.key.epoch,
        "round": record.key.round,
        "attempt": record.attempt,
        "seed": record.seed,
        "outcome": record.outcome.value,
        "reason": record.reason,
        "reward": record.reward,
        "scores": {
            name: {"score": item.score, "reasoning": item.reasoning, "error": item.error}
            for name, item in record.scores.items()
        },
        "output": record.item.output_obj,
        **({} if record.item.expected_output_obj is None else {"expected": record.item.expected_output_obj}),
        "wall_s": round(record.wall_s, 6),
        **({} if record.overflow is None else {"overflow": record.overflow}),
        "calls": [_dump_call(call) for call in record.calls],
        "marks": [asdict(mark) for mark in record.marks],
    }


def parse_episode(data: dict[str, Any], item: EvalInputItem) -> EpisodeRecord:
    """Returns an episode of an example; the data of its marks comes back as plain JSON values."""
    key = EpisodeKey(data["phase"], data["epoch"], data["example_id"], data["generation"], data["round"])
    return EpisodeRecord(
        key,
        item.copy_with_updates(output_obj=data["output"]),
        outcome=Outcome(data["outcome"]),
        reason=data["reason"],
        seed=data["seed"],
        attempt=data["attempt"],
        calls=[parse_call(call) for call in data["calls"]],
        marks=[Mark(**{**mark, "functions": tuple(mark["functions"])}) for mark in data["marks"]],
        scores={name: EvalOutputItem(id=item.id, **score) for name, score in data["scores"].items()},
        reward=data["reward"],
        wall_s=data["wall_s"],
        overflow=data.get("overflow"),
    )


def _dump_call(call: ModelCall) -> dict[str, Any]:
    request, sampling = call.request, call.request.sampling
    several = {"choice": call.choice, "others": [_dump_reply(reply) for reply in call.others]}
    return {
        "call_id": call.call_id,
        "llm": call.llm,
        "model": call.model,
        "functions": call.functions,
        "messages": request.messages,
        "tools": request.tools,
        **{name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p", "seed")},
        **_dump_settings(request),
        **_dump_reply(call.reply),
        **(several if call.others else {}),
        "started_s": round(call.started_s, 6),
        "ended_s": round(call.ended_s, 6),
    }


_SAMPLING = ("max_tokens", "stop", "frequency_penalty", "presence_penalty", "logit_bias")
_REQUEST = ("template_kwargs", "tool_choice", "parallel_tool_calls", "prompt")
_DEFAULT_SAMPLING = [(name, getattr(SamplingParams(), name)) for name in _SAMPLING]
_DEFAULT_REQUEST = [(name, getattr(ModelRequest([]), name)) for name in _REQUEST]


def _dump_settings(request: ModelRequest) -> dict[str, Any]:
    sampling = request.sampling
    dumped = {name: value for name, default in _DEFAULT_SAMPLING if (value := getattr(sampling, name)) != default}
    dumped |= {name: value for name, default in _DEFAULT_REQUEST if (value := getattr(request, name)) != default}
    if request.grammar is not None:
        dumped["grammar"] = {"kind": request.grammar.kind, "text": request.grammar.text}
    return dumped


def _parse_request(data: dict[str, Any], sampling: SamplingParams) -> ModelRequest:
    given = {name: data[name] for name in _REQUEST if name in data}
    if isinstance(given.get("prompt"), list):
        given["prompt"] = tuple(given["prompt"])
    grammar = Grammar(**data["grammar"]) if "grammar" in data else None
    return ModelRequest(data["messages"], sampling, data["tools"], grammar=grammar, **given)


def _parse_sampling(data: dict[str, Any]) -> SamplingParams:
    given = {name: data[name] for name in _SAMPLING if name in data}
    if "stop" in given:
        given["stop"] = tuple(given["stop"])
    if "logit_bias" in given:
        given["logit_bias"] = tuple((token, bias) for token, bias in given["logit_bias"])
    filters = data["temperature"], data["top_p"], data["top_k"], data["min_p"]
    return SamplingParams(*filters, seed=data["seed"], **given)


def _dump_reply(reply: ModelReply) -> dict[str, Any]:
    tokens = reply.tokens
    dumped = {
        "reply": reply.message,
        "finish_reason": reply.finish_reason,
        "num_prompt_tokens": reply.num_prompt_tokens,
        "num_completion_tokens": reply.num_completion_tokens,
        "prompt_token_ids": tokens.prompt_token_ids if tokens else None,
        "token_ids": tokens.token_ids if tokens else None,
        "logprobs": tokens.logprobs if tokens else None,
        "policy_version": reply.version,
        "restricted": tokens.restricted if tokens else None,
    }
    if reply.logprobs is not None:
        dumped["endpoint_logprobs"] = reply.logprobs
    if reply.worker:
        dumped["worker"] = reply.worker
    if tokens is not None and tokens.later_versions:
        dumped["later_versions"] = tokens.later_versions
    if tokens is None or not tokens.restricted:
        return dumped
    supports = None if tokens.supports is None else _dump_supports(tokens.supports)
    return {**dumped, "processed_logprobs": tokens.processed_logprobs, "supports": supports}


def parse_call(data: dict[str, Any]) -> ModelCall:
    sampling = _parse_sampling(data)
    return ModelCall(
        data["call_id"],
        data["llm"],
        data["model"],
        _parse_request(data, sampling),
        _parse_reply(data, sampling),
        tuple(data["functions"]),
        data["started_s"],
        data["ended_s"],
        others=tuple(_parse_reply(other, sampling) for other in data.get("others", ())),
        choice=data.get("choice", 0),
    )


def _parse_reply(data: dict[str, Any], sampling: SamplingParams) -> ModelReply:
    tokens = None
    if data["token_ids"] is not None:
        names = {"prompt_token_ids", "token_ids", "logprobs", "policy_version", "finish_reason", "restricted"}
        names |= {"processed_logprobs", "supports", "later_versions"} & data.keys()
        sampled = {name: data[name] for name in names}
        tokens = parse_tokens({"supports": None, **sampled, "temperature": sampling.temperature})
    return ModelReply(
        data["reply"],
        data["finish_reason"],
        tokens,
        data["num_prompt_tokens"],
        data["num_completion_tokens"],
        policy_version=data["policy_version"] if tokens is None else None,
        logprobs=data.get("endpoint_logprobs"),
        worker=data.get("worker", ""),
    )


def dump_tokens(tokens: TokenLogprobs) -> dict[str, Any]:
    """Returns the exact tokens of one reply, ready for JSON, without their texts and without other likely tokens."""
    supports = None if tokens.supports is None else _dump_supports(tokens.supports)
    dumped = {each.name: getattr(tokens, each.name) for each in fields(tokens) if each.name != "top_logprobs"}
    return {**dumped, "prompt_token_ids": tuple(tokens.prompt_token_ids), "texts": (), "supports": supports}


def parse_tokens(data: dict[str, Any]) -> TokenLogprobs:
    """Returns tokens from what `dump_tokens` wrote; a null log-prob becomes NaN: the token was not sampled."""
    lists = {name: tuple(value) for name, value in data.items() if isinstance(value, list)}
    lists["logprobs"] = tuple(math.nan if value is None else value for value in data["logprobs"])
    if "later_versions" in data:
        lists["later_versions"] = tuple(map(tuple, data["later_versions"]))
    supports = None if data["supports"] is None else _parse_supports(data["supports"])
    return TokenLogprobs(**{**data, **lists, "supports": supports})


def _dump_supports(supports: Supports) -> dict[str, Any]:
    """Returns supports as base64 of deflated differences between neighbors, which are small in sorted sets."""

    def pack(numbers: NDArray[np.int32]) -> str:
        differences = np.diff(numbers, prepend=np.int32(0)).astype("<i4")
        return base64.b64encode(zlib.compress(differences.tobytes(), 1)).decode()

    dumped: dict[str, Any] = {"counts": pack(supports.counts), "token_ids": pack(supports.token_ids)}
    if supports.masks:
        masks = base64.b64encode(zlib.compress(b"".join(supports.masks), 1)).decode()
        dumped |= {"masks": masks, "num_masks": len(supports.masks)}
    return dumped


def _parse_supports(data: dict[str, Any]) -> Supports:
    def unpack(text: str) -> bytes:
        differences = np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i4")
        return differences.cumsum(dtype=np.int32).tobytes()

    masks: tuple[bytes, ...] = ()
    if "masks" in data:
        joined = zlib.decompress(base64.b64decode(data["masks"]))
        size = len(joined) // data["num_masks"]
        masks = tuple(joined[start : start + size] for start in range(0, len(joined), size))
    return Supports(unpack(data["counts"]), unpack(data["token_ids"]), masks)
