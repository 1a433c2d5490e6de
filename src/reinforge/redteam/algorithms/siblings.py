"""What algorithms that compare siblings refuse."""

from __future__ import annotations

from typing import Any

from reinforge.errors import ConfigError, Problem
from reinforge.redteam.core.sampler import Graph


def refuse_single_children(graph: Graph[Any, Any], name: str) -> None:
    """Raises where no point of a tree has two children.

    Raises:
        ConfigError: The tree is a chain.
    """
    if graph.children and all(len(group) < 2 for group in graph.sibling_groups()):
        message = f"{name} compares siblings, and every point of this tree has one child"
        raise ConfigError(Problem("tree_width", message, "write 2 or more, or use PPO, which needs no siblings"))
