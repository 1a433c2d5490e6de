"""Which nodes of a tree algorithms train on: the check that there are siblings, and probes that have tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from reinforge.errors import ConfigError, Problem
from reinforge.redteam.core.common import ActionT, StateT
from reinforge.redteam.core.sampler import Graph, Node


def find_trainable(nodes: Iterable[Node[StateT, ActionT]]) -> list[Node[StateT, ActionT]]:
    """Returns the nodes whose probes have tokens.

    An empty text has none unless it carries them, as a `GeneratedText` that is only the end token does. It has no
    log-prob to train, and the perplexity that the others pay for is missing from its reward.
    """
    return [node for node in nodes if not _is_empty_text(node.probe)]


def _is_empty_text(probe: object) -> bool:
    return isinstance(probe, str) and not probe and getattr(probe, "tokens", None) is None


def refuse_single_children(graph: Graph[Any, Any], name: str) -> None:
    """Raises if no branching point of a tree has two children.

    Raises:
        ConfigError: The tree is a chain.
    """
    if graph.children and all(len(group) < 2 for group in graph.sibling_groups()):
        message = f"{name} compares siblings, but every point of this tree has one child"
        raise ConfigError(Problem("tree_width", message, "set it to 2 or more, or use PPO, which needs no siblings"))
