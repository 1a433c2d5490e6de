"""The bundled agent: plays tic-tac-toe against an opponent that moves at random.

game.py        the rules, and the board as text
workflow.py    the agent: one game, one model call per move
dataset.py     the dataset of games
evaluators.py  win rate, training reward, share of legal moves
starter.py     the agent's initial model, trained on first use
display.py     games as boards side by side, for the demo
demo.yml       configuration of `reinforge demo`; demo_long.yml: of `reinforge demo --long`
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from reinforge.interfaces import Builder
from reinforge.registry import TypedConfig, register_model
from reinforge.tasks.tic_tac_toe import dataset, evaluators, workflow

DEMO = Path(__file__).with_name("demo.yml")
DEMO_LONG = Path(__file__).with_name("demo_long.yml")


class TicTacToeStarterConfig(TypedConfig, name="tic_tac_toe"):
    """A small model that knows the rules of tic-tac-toe and plays at random; trained on first use."""


@register_model(config_type=TicTacToeStarterConfig)
async def tic_tac_toe_starter(config: TicTacToeStarterConfig, builder: Builder) -> AsyncIterator[Path]:
    """Yields the folder of the starter, after training it if needed."""
    from reinforge.tasks.tic_tac_toe.starter import ensure_starter

    yield await asyncio.to_thread(ensure_starter)


__all__ = ["DEMO", "DEMO_LONG", "TicTacToeStarterConfig", "dataset", "evaluators", "workflow"]
