"""The rows of a training file: the exact prompts and replies, with weight 1 on the replies to train.

    prompt [user q] -> "a";  prompt [user q, assistant a, user r] -> "b"
        => one row: messages [q, a (weight 1), r, b (weight 1)]
    prompt [user s] -> "c"    (the history was rewritten)
        => a second row: [s, c (weight 1)]
    siblings "a" of reward 1 and "x" of reward 0
        => {"input": {"messages": [q]}, "preferred_output": [a], "non_preferred_output": [x]}

Messages of other models, and the policy's own messages before a tree's node, are context with weight 0. So is a reply
truncated at `max_tokens`, because the service would train the model to stop there. Duplicate rows are written once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from reinforge.algorithms.preference import Preference
from reinforge.bounded import find_surrogate
from reinforge.errors import TrajectoryError
from reinforge.files import to_json
from reinforge.protocols.histories import PromptedReply, split_histories
from reinforge.types.request import ChatPrompt, Message
from reinforge.types.trajectory import DPOItem, Trajectory, TrajectoryGroup

TRUNCATED = "length"


@dataclass(slots=True)
class TrainingFile:
    """A training file in JSONL."""

    lines: list[str] = field(default_factory=list)
    num_duplicates: int = 0  # rows left out because they are duplicates
    num_truncated: int = 0  # replies not trained because they were truncated at `max_tokens`
    num_identical: int = 0  # pairs left out because both replies are the same
    num_unencodable: int = 0  # rows left out because they have an unpaired surrogate; a service refuses the whole file
    _known: set[str] = field(default_factory=set)

    @property
    def content(self) -> bytes:
        return "".join(f"{line}\n" for line in self.lines).encode()

    @property
    def left_out(self) -> dict[str, int]:
        """How much was left out, by reason; reasons with 0 are omitted."""
        counts = {
            "duplicates": self.num_duplicates,
            "truncated at max_tokens": self.num_truncated,
            "identical pairs": self.num_identical,
            "no valid Unicode": self.num_unencodable,
        }
        return {reason: count for reason, count in counts.items() if count}

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        for line in map(to_json, rows):
            if not _is_unicode(line):
                self.num_unencodable += 1
                continue
            self.num_duplicates += line in self._known
            if line not in self._known:
                self._known.add(line)
                self.lines.append(line)


def _is_unicode(line: str) -> bool:
    """Returns False for JSON with an unpaired surrogate, which JSON can write and UTF-8 cannot."""
    return "\\ud" not in line or find_surrogate(json.dumps(json.loads(line), ensure_ascii=False)) is None


def build_supervised_file(trajectories: Iterable[Trajectory]) -> TrainingFile:
    """Returns the training file of the supervised method: one row for each history with a reply to train."""
    file = TrainingFile()
    for history in chain.from_iterable(split_histories(trajectory.turns) for trajectory in trajectories):
        trained = [reply for reply in history if reply.turn.is_trained]
        complete = [reply for reply in trained if reply.prompt.finish_reason != TRUNCATED]
        file.num_truncated += len(trained) - len(complete)
        if complete:
            file.add([_build_row(history, [len(reply.prompt.messages) for reply in complete])])
    return file


def _build_row(history: Sequence[PromptedReply], trained: Sequence[int]) -> dict[str, Any]:
    messages = [
        {**message, "weight": int(position in trained)} if message["role"] == "assistant" else message
        for position, message in enumerate(history[-1].messages[: trained[-1] + 1])
    ]
    tools = history[0].prompt.tools
    return {"messages": messages, **({"tools": list(tools)} if tools else {})}


def build_preference_file(groups: Iterable[TrajectoryGroup], algorithm: Preference) -> TrainingFile:
    """Returns the training file of the DPO method: one row for each pair of siblings and each stored pair."""
    file = TrainingFile()
    for group in groups:
        _add_sibling_pairs(file, algorithm.select_pairs(group), f"group {group.group_id}")
        _add_stored_pairs(file, (item for trajectory in group.trajectories for item in trajectory.pairs))
    return file


def _add_sibling_pairs(file: TrainingFile, pairs: Iterable[tuple[Trajectory, Trajectory]], where: str) -> None:
    for chosen, rejected in pairs:
        (prompt, preferred), (other_prompt, non_preferred) = (
            _get_single_reply(trajectory, where) for trajectory in (chosen, rejected)
        )
        if (prompt.messages, prompt.tools) != (other_prompt.messages, other_prompt.tools):
            raise TrajectoryError(
                f"{where}: the replies of a pair answer different prompts, so the API cannot compare them; start "
                "siblings from the same prompt, or use another algorithm"
            )
        _add_pair(file, prompt, preferred, non_preferred)


def _add_stored_pairs(file: TrainingFile, items: Iterable[DPOItem]) -> None:
    for item in items:
        prompt = [{"role": "user", "content": item.prompt}] if isinstance(item.prompt, str) else item.prompt
        messages = tuple(each if isinstance(each, dict) else each.model_dump() for each in prompt)
        replies = ({"role": "assistant", "content": text} for text in (item.chosen_response, item.rejected_response))
        _add_pair(file, ChatPrompt(messages), *replies)


def _add_pair(file: TrainingFile, prompt: ChatPrompt, preferred: Message, non_preferred: Message) -> None:
    if preferred == non_preferred:
        file.num_identical += 1
    elif prompt.finish_reason == TRUNCATED:
        file.num_truncated += 1
    else:
        context: dict[str, Any] = {"messages": list(prompt.messages)}
        if prompt.tools:
            context["tools"] = list(prompt.tools)
        file.add([{"input": context, "preferred_output": [preferred], "non_preferred_output": [non_preferred]}])


def _get_single_reply(trajectory: Trajectory, where: str) -> tuple[ChatPrompt, Message]:
    trained = [reply for history in split_histories(trajectory.turns) for reply in history if reply.turn.is_trained]
    if len(trained) != 1:
        raise TrajectoryError(
            f"{where}: a trajectory of a pair has {len(trained)} trained turns, but the fine-tuning API compares "
            "single replies; train a single turn (a tree's node, target_functions), or use rejection_sampling"
        )
    return trained[0].prompt, trained[0].message
