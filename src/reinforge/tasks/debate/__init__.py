"""Debate about what one agent cannot see: two provers each show one cell, and a verifier decides (examples/debate).

cells.py      the problems, and how evidence is checked
protocol.py   the debate with that check
dataset.py    the problems of a run
starter.py    the debaters as they begin, a small model made on first use
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from reinforge.registry import TypedConfig, register_model
from reinforge.tasks.debate import dataset, protocol


class DebaterConfig(TypedConfig, name="debate"):
    """The debaters have no settings: their recipe stands in `starter.py`."""


@register_model(config_type=DebaterConfig)
async def debater(config: DebaterConfig, builder: Any) -> AsyncIterator[Path]:
    """Yields the folder of the debaters as they begin, made now if it is not there yet."""
    from reinforge.tasks.debate.starter import ensure_debater

    yield await asyncio.to_thread(ensure_debater)


__all__ = ["DebaterConfig", "dataset", "protocol"]
