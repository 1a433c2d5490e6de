"""Type variables of the adversarial training API."""

from typing import Any

from typing_extensions import TypeVar

StateT = TypeVar("StateT")
"""The conversation so far; text in the bundled systems."""
ActionT = TypeVar("ActionT")
"""A probe of the tester; text in the bundled systems."""
Step = TypeVar("Step")
"""One training step that an algorithm builds from a tree."""
Batch = TypeVar("Batch")
"""Several steps, collated."""
SeedT = TypeVar("SeedT", default=Any)
"""A seed of an evaluation: a number, or the opening of a conversation."""
