"""Type variables of the adversarial API."""

from __future__ import annotations

from typing import TypeVar

StateT = TypeVar("StateT")
"""A conversation so far; text in ours."""

ActionT = TypeVar("ActionT")
"""What the tester says; text in ours."""

Step = TypeVar("Step")
"""What an algorithm makes of a tree."""

Batch = TypeVar("Batch")
"""Steps together."""
