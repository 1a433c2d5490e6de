"""Builds trees from episodes: several replies to the same prompt are siblings, and each such prompt is a group.

    prompt P -> a, b        prompt P a x -> c, d
    =>  siblings a and b after P, siblings c and d after P a x; c and d follow a

An agent makes a tree by sampling a prompt several times and continuing from each reply. Everything above a reply is
context, so each sampled reply is trained exactly once.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from reinforge.rollout.episode import build_episode_item, build_turn, sum_step_rewards
from reinforge.types.episode import EpisodeRecord, ModelCall
from reinforge.types.request import Message
from reinforge.types.trajectory import Trajectory

BackUp = Literal["none", "mean", "max"]


@dataclass(slots=True)
class TreeNode:
    """One branching point: a prompt and its replies."""

    messages: list[Message]
    calls: list[ModelCall] = field(default_factory=list)  # the trained replies, by seed, so that timing plays no part
    rewards: list[float] = field(default_factory=list)
    adapter: str | None = None  # the adapter that replied; None: the only policy
    name: str = ""  # indices of the replies that lead here: "0.2" for the third reply to the first; "" at the root
    children: list[list[TreeNode]] = field(default_factory=list)

    def compute_values(self, back_up: BackUp) -> list[float]:
        """Returns the value of each reply: its own reward plus the value of the replies that follow it.

        Example: rewards [0, 1], and two replies with rewards 1 and 0 follow the first: none -> [0, 1];
        mean -> [0.5, 1]; max -> [1, 1].
        """
        if back_up == "none":
            return list(self.rewards)
        pick = statistics.fmean if back_up == "mean" else max
        values = []
        for reward, nodes in zip(self.rewards, self.children, strict=True):
            following = [value for node in nodes for value in node.compute_values(back_up)]
            values.append(reward + (pick(following) if following else 0.0))
        return values


def build_tree(
    record: EpisodeRecord, targets: Sequence[bool], policies: Mapping[str, str | None] | None = None
) -> list[TreeNode]:
    """Returns an episode's branching points, parents before children.

    Args:
        targets: For each call, whether its reply is trained.
        policies: The adapter of each entry of `llms`; replies of different adapters are not siblings.
    """
    rewards = sum_step_rewards(record) or [0.0] * len(record.calls)
    chosen = [(c, r) for c, r, trained in zip(record.calls, rewards, targets, strict=True) if trained]
    chosen.sort(key=lambda each: (len(each[0].request.messages), each[0].request.sampling.seed or 0))
    nodes: dict[tuple[str, str | None], TreeNode] = {}
    for call, reward in chosen:
        adapter = (policies or {}).get(call.llm)
        key = _build_key(call.request.messages), adapter
        node = nodes.setdefault(key, TreeNode(call.request.messages, adapter=adapter))
        node.calls.append(call)
        node.rewards.append(reward)
        node.children.append([])
    replies: dict[str, list[tuple[TreeNode, int]]] = {}
    num_roots = 0
    for node in nodes.values():
        parents = _find_parents(node, replies)
        for parent, index in parents:
            parent.children[index].append(node)
        if parents:
            parent, index = parents[0]
            name = f"{parent.name}.{index}" if parent.name else str(index)
            number = parent.children[index].index(node)
            node.name = f"{name}'{number}" if number else name
        else:
            node.name = f"root{num_roots}" if num_roots else ""
            num_roots += 1
        for index, call in enumerate(node.calls):
            conversation = _build_key([*call.request.messages, call.reply.message])
            replies.setdefault(conversation, []).append((node, index))
    return list(nodes.values())


def groups_from_tree(
    record: EpisodeRecord,
    targets: Sequence[bool],
    back_up: BackUp = "none",
    policies: Mapping[str, str | None] | None = None,
) -> list[list[Trajectory]]:
    """Returns the siblings of each branching point as trajectories; the path above them is context.

    Args:
        back_up: How the rewards of following replies, also of other adapters, count for a reply.
    """
    nodes = build_tree(record, targets, policies)
    return [_build_siblings(record, node, node.compute_values(back_up)) for node in nodes]


def _build_siblings(record: EpisodeRecord, node: TreeNode, values: Sequence[float]) -> list[Trajectory]:
    depth = 0 if not node.name or node.name.startswith("root") else node.name.count(".") + 1
    path = [build_episode_item(message, trained=False) for message in node.messages]
    group_id = f"{record.key.example_id}/{record.key.generation}/{node.name}"
    return [
        Trajectory.model_construct(
            episode=[*path, build_turn(call, trained=True)],
            reward=value,
            shaped_rewards=None,
            metadata={"node": node.name, "depth": depth, "call_id": call.call_id},
            group_id=group_id if node.adapter is None else f"{group_id}/{node.adapter}",
            episode_id=str(record.key),
            agent=None,
            model_group=node.adapter,
            outcome=record.outcome,
        )
        for call, value in zip(node.calls, values, strict=True)
    ]


def _find_parents(node: TreeNode, replies: dict[str, list[tuple[TreeNode, int]]]) -> list[tuple[TreeNode, int]]:
    """Returns the replies at the end of the prompt's longest known prefix; several if replies are equal."""
    for end in range(len(node.messages) - 1, 0, -1):
        if node.messages[end - 1].get("role") == "assistant":
            parents = replies.get(_build_key(node.messages[:end]))
            if parents:
                return parents
    return []


def _build_key(messages: Sequence[Message]) -> str:
    return json.dumps(list(messages), sort_keys=True, default=str)
