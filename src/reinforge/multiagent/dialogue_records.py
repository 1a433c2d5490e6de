"""Dialogues read back from what an episode of a protocol left (`ProtocolOutput`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reinforge.multiagent.dialogue import Dialogue, DialogueProblem, Message, Step

MESSAGE_FIELDS = ("round", "agent", "channel", "text", "shown", "call_id", "num_retries")


def parse_dialogues(output: Mapping[str, Any], row: Mapping[str, Any] | None = None) -> list[Dialogue]:
    """Returns the dialogues of one episode: one, or one per branch of its tree.

    Args:
        row: The example's columns.
    """
    problem = DialogueProblem(output["question"], output["truth"], {"question": output["question"], **(row or {})})
    return [_parse_branch(output, problem, branch) for branch in output["branches"]]


def _parse_branch(output: Mapping[str, Any], problem: DialogueProblem, branch: Mapping[str, Any]) -> Dialogue:
    on_branch = [
        record
        for record in output["messages"]
        if branch["path"][: len(record["path"])] == record["path"] and not record.get("refused")
    ]
    messages = [Message(**{name: record[name] for name in MESSAGE_FIELDS}) for record in on_branch]
    rewards = dict(branch["rewards"])
    return Dialogue(
        problem,
        dict(output["stances"]),
        tuple(sorted(messages, key=lambda message: message.round)),
        1 + max((message.round for message in messages), default=-1),
        Step(True, branch["decision"], branch["terminated"], rewards),
        rewards,
        frozenset(output.get("absent", ())),
        tuple(output.get("order", ())),
    )
