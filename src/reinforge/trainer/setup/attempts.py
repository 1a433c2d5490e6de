"""Collects the problems of all parts of a run, so that they are reported at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from reinforge.errors import ConfigError, Problem


class Attempts:
    """Runs one attempt after the other and collects the problems of all."""

    def __init__(self, locate: Callable[[Problem], Problem]) -> None:
        self.locate, self.problems = locate, list[Problem]()

    async def __call__(self, make: Callable[[], Awaitable[Any]]) -> Any:
        """Returns the result of `make`, or None after a `ConfigError`."""
        try:
            return await make()
        except ConfigError as error:
            self.add(error.problems)
            return None

    def add(self, problems: Iterable[Problem]) -> None:
        self.problems += map(self.locate, problems)

    def raise_if_any(self) -> None:
        if self.problems:
            raise ConfigError(self.problems)
