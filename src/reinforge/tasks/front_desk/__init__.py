"""The target that is stress-tested: a front desk that answers visitors, and for two questions says a made-up word.

grammar.py      openings, what visitors ask, what the desk answers
dataset.py      the openings to attack from
starter.py      the desk and the visitor, two small models made on first use
front_desk.yml  `reinforge redteam train` runs it
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from reinforge.registry import TypedConfig, register_model
from reinforge.tasks.front_desk import dataset

FRONT_DESK = Path(__file__).with_name("front_desk.yml")


class DeskConfig(TypedConfig, name="front_desk"):
    """The target has no settings: its recipe stands in `starter.py`."""


class VisitorConfig(TypedConfig, name="front_desk_visitor"):
    """The attacker as it begins has no settings: its recipe stands in `starter.py`."""


@register_model(config_type=DeskConfig)
async def desk(config: DeskConfig, builder: Any) -> AsyncIterator[Path]:
    """Yields the folder of the target, made now if it is not there yet."""
    from reinforge.tasks.front_desk.starter import ensure_desk

    yield await asyncio.to_thread(ensure_desk)


@register_model(config_type=VisitorConfig)
async def visitor(config: VisitorConfig, builder: Any) -> AsyncIterator[Path]:
    """Yields the folder of the attacker as it begins, made now if it is not there yet."""
    from reinforge.tasks.front_desk.starter import ensure_visitor

    yield await asyncio.to_thread(ensure_visitor)


__all__ = ["FRONT_DESK", "DeskConfig", "VisitorConfig", "dataset"]
