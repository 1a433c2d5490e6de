"""A tree is a list of groups: where an episode asks the same prompt several times, the replies are siblings.

    prompt P -> a, b        prompt P a x -> c, d
    =>  siblings a and b after P, siblings c and d after P a x; c and d follow from a

An agent grows a tree by asking again and by going on from each reply; nothing else is needed. Everything above a reply
is context, so each sampled reply is trained exactly once.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from reinforge.rollout.episode import item_of, step_rewards
from reinforge.types.episode import EpisodeRecord, ModelCall
from reinforge.types.request import Message
from reinforge.types.trajectory import Trajectory

BackUp = Literal["none", "mean", "max"]


@dataclass(slots=True)
class TreeNode:
    """One branching point: a prompt and the replies to it.

    Attributes:
        messages: The prompt.
        calls: The replies to it that are trained, in the order of their seeds, which does not depend on timing.
        rewards: The marked reward of each reply.
        adapter: Whose replies they are; None: the one policy's.
        name: Indices of the replies that lead here, "0.2" for the third reply to the first reply; "" at the root.
        children: What follows from each reply.
    """

    messages: list[Message]
    calls: list[ModelCall] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    adapter: str | None = None
    name: str = ""
    children: list[list[TreeNode]] = field(default_factory=list)

    def values(self, back_up: BackUp) -> list[float]:
        """Returns what each reply is worth: its own reward, and what follows from it.

        Example: rewards [0, 1], two replies of 1 and 0 follow from the first: none -> [0, 1]; mean -> [0.5, 1];
        max -> [1, 1].

        Args:
            back_up: none: its own reward alone; mean, max: plus that of the values of the replies that follow.
        """
        if back_up == "none":
            return list(self.rewards)
        pick = statistics.fmean if back_up == "mean" else max
        values = []
        for reward, nodes in zip(self.rewards, self.children, strict=True):
            following = [value for node in nodes for value in node.values(back_up)]
            values.append(reward + (pick(following) if following else 0.0))
        return values


def tree_of(
    record: EpisodeRecord, targets: Sequence[bool], policies: Mapping[str, str | None] | None = None
) -> list[TreeNode]:
    """Returns an episode's branching points, each after the one that it follows from.

    Args:
        record: The episode.
        targets: For each call, whether its reply is trained.
        policies: The adapter of each entry of `llms`: replies of two are no siblings, though they follow each other.
    """
    rewards = step_rewards(record) or [0.0] * len(record.calls)
    chosen = [(c, r) for c, r, trained in zip(record.calls, rewards, targets, strict=True) if trained]
    chosen.sort(key=lambda each: (len(each[0].request.messages), each[0].request.sampling.seed or 0))
    nodes: dict[tuple[str, str | None], TreeNode] = {}
    for call, reward in chosen:
        adapter = (policies or {}).get(call.llm)
        place = _key(call.request.messages), adapter
        node = nodes.setdefault(place, TreeNode(call.request.messages, adapter=adapter))
        node.calls.append(call)
        node.rewards.append(reward)
        node.children.append([])
    followed: dict[str, list[tuple[TreeNode, int]]] = {}
    roots = 0
    for node in nodes.values():
        parents = _parents(node, followed)
        for parent, index in parents:
            parent.children[index].append(node)
        if parents:
            parent, index = parents[0]
            name = f"{parent.name}.{index}" if parent.name else str(index)
            twins = parent.children[index].index(node)
            node.name = f"{name}'{twins}" if twins else name
        else:
            node.name = f"root{roots}" if roots else ""
            roots += 1
        for index, call in enumerate(node.calls):
            said = _key([*call.request.messages, call.reply.message])
            followed.setdefault(said, []).append((node, index))
    return list(nodes.values())


def groups_from_tree(
    record: EpisodeRecord,
    targets: Sequence[bool],
    back_up: BackUp = "none",
    policies: Mapping[str, str | None] | None = None,
) -> list[list[Trajectory]]:
    """Returns the siblings of each branching point; the path above them is context.

    Args:
        record: The episode.
        targets: For each call, whether its reply is trained.
        back_up: How a reply is rewarded for what follows from it, of other adapters too.
        policies: The adapter of each entry of `llms`; None: there is one policy.
    """
    return [_siblings(record, node, node.values(back_up)) for node in tree_of(record, targets, policies)]


def _siblings(record: EpisodeRecord, node: TreeNode, values: Sequence[float]) -> list[Trajectory]:
    path = [item_of(message, trained=False) for message in node.messages]
    group_id = f"{record.key.example_id}/{record.key.generation}/{node.name}"
    return [
        Trajectory.model_construct(
            episode=[*path, item_of(call.reply.message, logprobs=call.known)],
            reward=value,
            shaped_rewards=None,
            metadata={"node": node.name, "depth": _depth(node), "call_id": call.call_id},
            group_id=group_id if node.adapter is None else f"{group_id}/{node.adapter}",
            episode_id=str(record.key),
            agent=None,
            model_group=node.adapter,
            outcome=record.outcome,
        )
        for call, value in zip(node.calls, values, strict=True)
    ]


def _depth(node: TreeNode) -> int:
    return 0 if not node.name or node.name.startswith("root") else node.name.count(".") + 1


def _parents(node: TreeNode, followed: dict[str, list[tuple[TreeNode, int]]]) -> list[tuple[TreeNode, int]]:
    """Returns the replies that a prompt goes on from: those of its longest beginning that is one; equal ones all."""
    for end in range(len(node.messages) - 1, 0, -1):
        if node.messages[end - 1].get("role") == "assistant":
            found = followed.get(_key(node.messages[:end]))
            if found:
                return found
    return []


def _key(messages: Sequence[Message]) -> str:
    return json.dumps(list(messages), sort_keys=True, default=str)
