"""One finished episode as the journal and its export hold it, and back."""

from __future__ import annotations

import base64
import math
import zlib
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reinforge.files import plain
from reinforge.types.episode import EpisodeKey, EpisodeRecord, Mark, ModelCall
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem
from reinforge.types.request import ModelReply, ModelRequest, SamplingParams, TokenLogprobs
from reinforge.types.supports import Supports
from reinforge.types.trajectory import Outcome


def episode_json(record: EpisodeRecord) -> dict[str, Any]:
    """Returns messages, token ids, log-probs, outcome and reward of one episode, ready for JSON."""
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
        "wall_s": round(record.wall_s, 6),
        "calls": [_call_json(call) for call in record.calls],
        "marks": [
            {**asdict(mark), "data": plain(mark.data) if mark.data is not None else None} for mark in record.marks
        ],
    }


def episode_of(data: dict[str, Any], item: EvalInputItem) -> EpisodeRecord:
    """Returns an episode as `episode_json` wrote it; what its agent marked comes back as plain data.

    Args:
        data: The episode, read from JSON.
        item: Its example.
    """
    key = EpisodeKey(data["phase"], data["epoch"], data["example_id"], data["generation"], data["round"])
    return EpisodeRecord(
        key,
        item.copy_with_updates(output_obj=data["output"]),
        outcome=Outcome(data["outcome"]),
        reason=data["reason"],
        seed=data["seed"],
        attempt=data["attempt"],
        calls=[_call_of(call) for call in data["calls"]],
        marks=[Mark(**{**mark, "functions": tuple(mark["functions"])}) for mark in data["marks"]],
        scores={name: EvalOutputItem(id=item.id, **score) for name, score in data["scores"].items()},
        reward=data["reward"],
        wall_s=data["wall_s"],
    )


def _call_json(call: ModelCall) -> dict[str, Any]:
    request, sampling = call.request, call.request.sampling
    several = {"choice": call.choice, "others": [_reply_json(reply) for reply in call.others]}
    return {
        "call_id": call.call_id,
        "llm": call.llm,
        "model": call.model,
        "functions": call.functions,
        "messages": request.messages,
        "tools": request.tools,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        **_reply_json(call.reply),
        **(several if call.others else {}),
        "started_s": round(call.started_s, 6),
        "ended_s": round(call.ended_s, 6),
    }


def _reply_json(reply: ModelReply) -> dict[str, Any]:
    tokens = reply.tokens
    made = {
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
    if tokens is None or not tokens.restricted:
        return made
    supports = None if tokens.supports is None else _supports_json(tokens.supports)
    return {**made, "processed_logprobs": tokens.processed_logprobs, "supports": supports}


def _call_of(data: dict[str, Any]) -> ModelCall:
    sampling = SamplingParams(
        data["temperature"], data["top_p"], data["top_k"], data.get("min_p", 0.0), seed=data.get("seed")
    )
    return ModelCall(
        data["call_id"],
        data["llm"],
        data["model"],
        ModelRequest(data["messages"], sampling, data["tools"]),
        _reply_of(data, sampling),
        tuple(data["functions"]),
        data["started_s"],
        data["ended_s"],
        others=tuple(_reply_of(other, sampling) for other in data.get("others", ())),
        choice=data.get("choice", 0),
    )


def _reply_of(data: dict[str, Any], sampling: SamplingParams) -> ModelReply:
    tokens = None
    if data["token_ids"] is not None:
        kept = {name: data[name] for name in ("prompt_token_ids", "token_ids", "logprobs", "policy_version")}
        drawn: dict[str, Any] = {"finish_reason": data["finish_reason"], "temperature": sampling.temperature}
        cut: dict[str, Any] = {name: data[name] for name in ("restricted", "processed_logprobs") if name in data}
        given: dict[str, Any] = {"restricted": sampling.restricts_support, "supports": data.get("supports"), **cut}
        tokens = tokens_of({**kept, **drawn, **given})
    return ModelReply(
        data["reply"],
        data["finish_reason"],
        tokens,
        data["num_prompt_tokens"],
        data["num_completion_tokens"],
        policy_version=data["policy_version"] if tokens is None else None,
    )


def tokens_json(tokens: TokenLogprobs) -> dict[str, Any]:
    """Returns the exact tokens of one reply, ready for JSON; the texts of single tokens are left out."""
    supports = None if tokens.supports is None else _supports_json(tokens.supports)
    return {**asdict(replace(tokens, texts=(), supports=None)), "supports": supports}


def tokens_of(data: dict[str, Any]) -> TokenLogprobs:
    """Returns tokens as `tokens_json` wrote them; JSON has no NaN, which says that nobody sampled a token."""
    lists = {name: tuple(value) for name, value in data.items() if isinstance(value, list)}
    lists["logprobs"] = tuple(math.nan if value is None else value for value in data["logprobs"])
    supports = None if data["supports"] is None else _supports_of(data["supports"])
    return TokenLogprobs(**{**data, **lists, "supports": supports})


def _supports_json(supports: Supports) -> dict[str, str]:
    """Returns supports as text: the differences between neighbours, which are small in sorted sets, deflated."""

    def packed(numbers: NDArray[np.int32]) -> str:
        differences = np.diff(numbers, prepend=np.int32(0)).astype("<i4")
        return base64.b64encode(zlib.compress(differences.tobytes(), 1)).decode()

    return {"counts": packed(supports.counts), "token_ids": packed(supports.token_ids)}


def _supports_of(data: dict[str, str]) -> Supports:
    def unpacked(text: str) -> bytes:
        differences = np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i4")
        return differences.cumsum(dtype=np.int32).tobytes()

    return Supports(unpacked(data["counts"]), unpacked(data["token_ids"]))
