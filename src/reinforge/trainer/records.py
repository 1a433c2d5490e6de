"""One finished episode as the journal and its export hold it, and back."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from reinforge.files import plain
from reinforge.types.episode import EpisodeKey, EpisodeRecord, Mark, ModelCall
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem
from reinforge.types.request import ModelReply, ModelRequest, SamplingParams, TokenLogprobs
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
    tokens, request, sampling = call.reply.tokens, call.request, call.request.sampling
    return {
        "call_id": call.call_id,
        "llm": call.llm,
        "model": call.model,
        "functions": call.functions,
        "messages": request.messages,
        "tools": request.tools,
        "reply": call.reply.message,
        "finish_reason": call.reply.finish_reason,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "num_prompt_tokens": call.reply.num_prompt_tokens,
        "num_completion_tokens": call.reply.num_completion_tokens,
        "prompt_token_ids": tokens.prompt_token_ids if tokens else None,
        "token_ids": tokens.token_ids if tokens else None,
        "logprobs": tokens.logprobs if tokens else None,
        "policy_version": tokens.policy_version if tokens else None,
        "started_s": round(call.started_s, 6),
        "ended_s": round(call.ended_s, 6),
    }


def _call_of(data: dict[str, Any]) -> ModelCall:
    sampling = SamplingParams(data["temperature"], data["top_p"], data["top_k"])
    tokens = None
    if data["token_ids"] is not None:
        tokens = TokenLogprobs(
            prompt_token_ids=tuple(data["prompt_token_ids"]),
            token_ids=tuple(data["token_ids"]),
            logprobs=tuple(data["logprobs"]),
            policy_version=data["policy_version"],
            finish_reason=data["finish_reason"],
            temperature=sampling.temperature,
            restricted=sampling.restricts_support,
        )
    reply = ModelReply(
        data["reply"], data["finish_reason"], tokens, data["num_prompt_tokens"], data["num_completion_tokens"]
    )
    request = ModelRequest(data["messages"], sampling, data["tools"])
    functions = tuple(data["functions"])
    return ModelCall(
        data["call_id"], data["llm"], data["model"], request, reply, functions, data["started_s"], data["ended_s"]
    )
