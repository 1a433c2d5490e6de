"""The rows of a fine-tuning file: what exactly was asked and answered, and which of it is learnt.

    asked [user q] -> "a";  asked [user q, assistant a, user r] -> "b"
        => one row: messages [q, a (weight 1), r, b (weight 1)]
    asked [user s] -> "c"    (the history was rewritten)
        => a second row: [s, c (weight 1)]
    a sibling of reward 1 said "a", one of reward 0 "x"
        => {"input": {"messages": [q]}, "preferred_output": [a], "non_preferred_output": [x]}

What others said, and what the policy said before a tree's node, is context: weight 0. A reply that was cut at
`max_tokens` is context too, since the service would teach the model to stop there. Equal rows count once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from reinforge.algorithms.preference import Preference
from reinforge.errors import TrajectoryError
from reinforge.files import to_json
from reinforge.rollout.episode import message_of
from reinforge.types.request import ChatPrompt, Message
from reinforge.types.trajectory import DPOItem, EpisodeItem, Trajectory, TrajectoryGroup

CUT = "length"


@dataclass(slots=True)
class Rows:
    """The lines of one file.

    Attributes:
        lines: One JSON object each.
        num_duplicates: Rows left out since they are there already.
        num_cut: Replies that are not learnt since they were cut at `max_tokens`.
        num_same: Pairs left out since both replies are the same.
    """

    lines: list[str] = field(default_factory=list)
    num_duplicates: int = 0
    num_cut: int = 0
    num_same: int = 0
    _known: set[str] = field(default_factory=set)

    @property
    def content(self) -> bytes:
        """The file."""
        return "".join(f"{line}\n" for line in self.lines).encode()

    @property
    def left_out(self) -> dict[str, int]:
        """What was left out, by reason, as far as anything was."""
        counts = {"duplicates": self.num_duplicates, "cut at max_tokens": self.num_cut, "equal pairs": self.num_same}
        return {reason: count for reason, count in counts.items() if count}

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Adds rows, each once."""
        for line in map(to_json, rows):
            self.num_duplicates += line in self._known
            if line not in self._known:
                self._known.add(line)
                self.lines.append(line)


@dataclass(slots=True)
class _Conversation:
    """A history without a break, while it grows; `learnt` are the places of the replies to learn."""

    messages: list[Message]
    tools: tuple[dict[str, Any], ...] | None
    learnt: list[int] = field(default_factory=list)

    def goes_on_in(self, prompt: ChatPrompt) -> bool:
        return prompt.tools == self.tools and list(prompt.messages[: len(self.messages)]) == self.messages

    def row(self) -> dict[str, Any]:
        shown = [
            {**message, "weight": int(place in self.learnt)} if message["role"] == "assistant" else message
            for place, message in enumerate(self.messages[: self.learnt[-1] + 1])
        ]
        return {"messages": shown, **({"tools": list(self.tools)} if self.tools else {})}


def supervised_rows(trajectories: Iterable[Trajectory]) -> Rows:
    """Returns a row for each history of each trajectory in which something is learnt."""
    rows = Rows()
    for trajectory in trajectories:
        conversations, num_cut = _conversations_of(trajectory)
        rows.num_cut += num_cut
        rows.add(each.row() for each in conversations if each.learnt)
    return rows


def preference_rows(groups: Iterable[TrajectoryGroup], algorithm: Preference) -> Rows:
    """Returns a row for each pair of siblings' replies, and for each pair that a trajectory holds.

    Args:
        groups: The siblings.
        algorithm: Makes the pairs.

    Raises:
        TrajectoryError: The two of a pair are not one reply each to the same prompt.
    """
    rows = Rows()
    for group in groups:
        _add_siblings(rows, algorithm.pairs_of(group), f"group {group.group_id}")
        _add_given(rows, (item for trajectory in group.trajectories for item in trajectory.pairs))
    return rows


def _add_siblings(rows: Rows, pairs: Iterable[tuple[Trajectory, Trajectory]], where: str) -> None:
    for chosen, other in pairs:
        (prompt, preferred), (other_prompt, non_preferred) = (_reply_of(each, where) for each in (chosen, other))
        if (prompt.messages, prompt.tools) != (other_prompt.messages, other_prompt.tools):
            raise TrajectoryError(
                f"{where}: its replies answer different prompts, so neither can be preferred to the other; give "
                "siblings the same start, or use another algorithm"
            )
        _add_pair(rows, prompt, preferred, non_preferred)


def _add_given(rows: Rows, items: Iterable[DPOItem]) -> None:
    for item in items:
        asked = [{"role": "user", "content": item.prompt}] if isinstance(item.prompt, str) else item.prompt
        messages = tuple(each if isinstance(each, dict) else each.model_dump() for each in asked)
        replies = ({"role": "assistant", "content": said} for said in (item.chosen_response, item.rejected_response))
        _add_pair(rows, ChatPrompt(messages), *replies)


def _add_pair(rows: Rows, prompt: ChatPrompt, preferred: Message, non_preferred: Message) -> None:
    if preferred == non_preferred:
        rows.num_same += 1
    elif prompt.finish_reason == CUT:
        rows.num_cut += 1
    else:
        asked: dict[str, Any] = {"messages": list(prompt.messages)}
        if prompt.tools:
            asked["tools"] = list(prompt.tools)
        rows.add([{"input": asked, "preferred_output": [preferred], "non_preferred_output": [non_preferred]}])


def _reply_of(trajectory: Trajectory, where: str) -> tuple[ChatPrompt, Message]:
    """Returns the one reply of a trajectory, with what it answered."""
    found = _learnt(trajectory)
    if len(found) != 1:
        raise TrajectoryError(
            f"{where}: the service compares one reply with another, and a trajectory of the pair holds {len(found)} "
            "trained turns; train a single turn (a tree's node, target_functions), or use rejection_sampling"
        )
    turn, prompt = found[0]
    return prompt, message_of(turn)


def _learnt(trajectory: Trajectory) -> list[tuple[EpisodeItem, ChatPrompt]]:
    return [(turn, turn.prompt) for turn in trajectory.turns if turn.prompt is not None and turn.is_trained]


def _conversations_of(trajectory: Trajectory) -> tuple[Sequence[_Conversation], int]:
    """Returns a trajectory's histories, and how many replies are context since they were cut."""
    found: list[_Conversation] = []
    num_cut = 0
    for turn in trajectory.turns:
        prompt = turn.prompt
        if prompt is None:
            continue
        if not found or not found[-1].goes_on_in(prompt):
            found.append(_Conversation([], prompt.tools))
        conversation = found[-1]
        conversation.messages = [*prompt.messages, message_of(turn)]
        if turn.is_trained and prompt.finish_reason == CUT:
            num_cut += 1
        elif turn.is_trained:
            conversation.learnt.append(len(conversation.messages) - 1)
    return found, num_cut
