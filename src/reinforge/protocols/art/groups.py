"""Trajectory groups as ART's clients send them: the exact conversations, with each trained reply as a choice.

    prompt [user q] -> "a";  prompt [user q, assistant a, user r] -> "b"
        => messages_and_choices [q, choice a, r, choice b]
    prompt [user s] -> "c"    (the history was rewritten)
        => additional_histories [{messages_and_choices: [s, choice c]}]

A choice has the log-probs, and the token ids where the endpoint reports them, as they were sampled. A reply without
log-probs is context: the server cannot train it. Tool calls, their ids and the tools of the request stay as they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from reinforge.protocols.histories import PromptedReply, split_histories
from reinforge.types.trajectory import Trajectory, TrajectoryGroup

ART_JOB = "reinforge_job"  # metadata key of the hash that identifies a job, in each of its groups
TOKEN_FIELDS = ("token_ids", "prompt_token_ids")


@dataclass(slots=True)
class ARTGroups:
    """The groups of one job."""

    groups: list[dict[str, Any]] = field(default_factory=list)
    num_trained: int = 0
    num_without_logprobs: int = 0  # replies of the policy that stay context, because the endpoint returned no log-probs
    num_empty: int = 0  # trajectories left out because none of their replies is trained


def build_groups(groups: Iterable[TrajectoryGroup], job: str, *, allow_without_logprobs: bool = False) -> ARTGroups:
    """Returns the groups of a job; a trajectory or group without a trained reply is left out."""
    built = ARTGroups()
    for group in groups:
        trajectories = [_build_trajectory(each, built, allow_without_logprobs) for each in group.trajectories]
        if any(trajectories):
            sent = [each for each in trajectories if each is not None]
            metadata = {ART_JOB: job, "group_id": group.group_id}
            empty = {"exceptions": [], "metadata": metadata, "metrics": {}, "logs": []}
            built.groups.append({"trajectories": sent, **empty})
    return built


def _build_trajectory(trajectory: Trajectory, built: ARTGroups, allow_without_logprobs: bool) -> dict[str, Any] | None:
    histories, num_trained = list[dict[str, Any]](), 0
    for history in split_histories(trajectory.turns):
        entries = list[dict[str, Any]]()
        for reply in history:
            logprobs: Any = reply.turn.logprobs if reply.turn.is_trained else None
            if not isinstance(logprobs, Mapping) or not logprobs.get("content"):
                logprobs = None
            is_missing = reply.turn.is_trained and logprobs is None
            built.num_without_logprobs += is_missing
            num_trained += logprobs is not None or (is_missing and allow_without_logprobs)
            entries += reply.prompt.messages[len(entries) :]
            entries.append(reply.message if logprobs is None else _build_choice(reply, logprobs))
        tools = history[0].prompt.tools
        histories.append({"messages_and_choices": entries, "tools": list(tools) if tools else None})
    built.num_trained += num_trained
    if not num_trained:
        built.num_empty += 1
        return None
    first, *others = histories
    return {
        **first,
        "additional_histories": others,
        "reward": trajectory.reward,
        "initial_policy_version": None,
        "final_policy_version": None,
        "metrics": {},
        "metadata": {"episode_id": trajectory.episode_id} if trajectory.episode_id else {},
        "logs": [],
    }


def _build_choice(reply: PromptedReply, logprobs: Mapping[str, Any]) -> dict[str, Any]:
    empty = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "tool_calls"))
    return {
        "finish_reason": reply.prompt.finish_reason,
        "index": 0,
        "logprobs": {"content": logprobs["content"], "refusal": logprobs.get("refusal")},
        "message": {**empty, **reply.message},
        **{name: logprobs[name] for name in TOKEN_FIELDS if logprobs.get(name) is not None},
    }
