"""Type variables of the adversarial training API."""

from typing import Any

from typing_extensions import TypeVar

StateT = TypeVar("StateT")  # the conversation so far; text in the bundled systems
ActionT = TypeVar("ActionT")  # a probe of the tester; text in the bundled systems
Step = TypeVar("Step")  # one training step that an algorithm builds from a tree
Batch = TypeVar("Batch")  # several steps, collated
SeedT = TypeVar("SeedT", default=Any)  # a seed of an evaluation: a number, or the opening of a conversation
