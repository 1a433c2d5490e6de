"""An agent that is ready to run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from reinforge.errors import Problem
from reinforge.types.evaluation import EvalInputItem


@dataclass(frozen=True, slots=True)
class BoundWorkflow:
    """A workflow and the entry of `llms` that it is given."""

    function: Callable[..., Any]  # the callable
    llm: str | None  # entry of `llms` passed as `llm`; None: the only entry, or the only one that is trained
    is_async: bool  # True if calling it returns an awaitable
    share_environment_seed: bool = True  # True if siblings run with the same environment seed
    is_isolated: ClassVar[bool] = False  # True if its episodes run in worker processes

    @property
    def source(self) -> str:
        """The function with its file and line, as `agent (task.py:3)`; without them where Python does not know them."""
        function = self.function.func if isinstance(self.function, partial) else self.function
        call = inspect.unwrap(function)
        name = getattr(call, "__qualname__", type(call).__name__).rpartition("<locals>.")[2]
        code = getattr(call if inspect.isroutine(call) else type(call).__call__, "__code__", None)
        return f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})" if code is not None else name

    def example_problems(self, items: Sequence[EvalInputItem]) -> list[Problem]:
        find = getattr(self.function, "example_problems", None)
        return list(find(items)) if callable(find) else []
