"""An agent that is ready to run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from reinforge.errors import Problem
from reinforge.types.evaluation import EvalInputItem


@dataclass(frozen=True, slots=True)
class BoundWorkflow:
    """A workflow and the entry of `llms` that it is given.

    Attributes:
        function: The callable.
        llm: Entry of `llms` passed as `llm`; None: the only entry.
        is_async: True if calling it returns an awaitable.
        share_environment_seed: True if siblings run with the same environment seed.
    """

    function: Callable[..., Any]
    llm: str | None
    is_async: bool
    share_environment_seed: bool = True

    def example_problems(self, items: Sequence[EvalInputItem]) -> list[Problem]:
        """Returns what the workflow's own `example_problems` finds wrong with examples before any of them is run."""
        find = getattr(self.function, "example_problems", None)
        return list(find(items)) if callable(find) else []
