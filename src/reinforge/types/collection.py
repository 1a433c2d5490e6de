"""What a trajectory builder plans to collect."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CollectionPlan:
    """The episodes of one epoch, before any of them is run.

    Attributes:
        example_ids: The training examples, each once.
        episodes_per_example: Siblings of each example.
        groups_per_example: Most groups that the episodes of one example make: one for each adapter.
    """

    example_ids: tuple[str, ...]
    episodes_per_example: int
    groups_per_example: int = 1
