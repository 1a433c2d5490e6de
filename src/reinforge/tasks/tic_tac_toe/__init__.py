"""The bundled agent: plays tic-tac-toe against an opponent that moves at random.

game.py        the rules, and how a board is shown
workflow.py    the agent: one game, one call a move
dataset.py     the games to play
evaluators.py  win rate, training reward, legality
starter.py     the small model that it starts from, made on first use
demo.yml       what `reinforge demo` runs; demo_long.yml the longer one
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from reinforge.registry import TypedConfig, register_model
from reinforge.tasks.tic_tac_toe import dataset, evaluators, workflow

DEMO = Path(__file__).with_name("demo.yml")
DEMO_LONG = Path(__file__).with_name("demo_long.yml")


class StarterConfig(TypedConfig, name="tic_tac_toe"):
    """The starter has no settings: its recipe stands in `starter.py`."""


@register_model(config_type=StarterConfig)
async def tic_tac_toe_starter(config: StarterConfig, builder: Any) -> AsyncIterator[Path]:
    """Yields the folder of the starter, made now if it is not there yet."""
    from reinforge.tasks.tic_tac_toe.starter import ensure_starter

    yield await asyncio.to_thread(ensure_starter)


__all__ = ["DEMO", "DEMO_LONG", "StarterConfig", "dataset", "evaluators", "workflow"]
