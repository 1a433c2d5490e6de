"""The check that a tree has siblings, for algorithms that compare them."""

from __future__ import annotations

from typing import Any

from reinforge.errors import ConfigError, Problem
from reinforge.redteam.core.sampler import Graph


def refuse_single_children(graph: Graph[Any, Any], name: str) -> None:
    """Raises if no branching point of a tree has two children.

    Raises:
        ConfigError: The tree is a chain.
    """
    if graph.children and all(len(group) < 2 for group in graph.sibling_groups()):
        message = f"{name} compares siblings, but every point of this tree has one child"
        raise ConfigError(Problem("tree_width", message, "set it to 2 or more, or use PPO, which needs no siblings"))
