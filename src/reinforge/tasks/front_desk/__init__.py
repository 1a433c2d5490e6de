"""A target to stress-test: a front desk that answers visitors and leaks a made-up word on two subjects.

grammar.py      openings, questions of visitors, answers of the desk
dataset.py      the dataset of openings to attack from
starter.py      the desk and the visitor, two small models that are trained on first use
front_desk.yml  `reinforge redteam train` runs it
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from reinforge.interfaces import Builder
from reinforge.registry import TypedConfig, register_model
from reinforge.tasks.front_desk import dataset

FRONT_DESK = Path(__file__).with_name("front_desk.yml")


class DeskConfig(TypedConfig, name="front_desk"):
    """The front desk, a small model to attack; trained on first use."""


class VisitorConfig(TypedConfig, name="front_desk_visitor"):
    """The visitor, a small model that attacks the front desk; trained on first use."""


@register_model(config_type=DeskConfig)
async def desk(config: DeskConfig, builder: Builder) -> AsyncIterator[Path]:
    """Yields the folder of the target, after training it if needed."""
    from reinforge.tasks.front_desk.starter import ensure_desk

    yield await asyncio.to_thread(ensure_desk)


@register_model(config_type=VisitorConfig)
async def visitor(config: VisitorConfig, builder: Builder) -> AsyncIterator[Path]:
    """Yields the folder of the initial attacker, after training it if needed."""
    from reinforge.tasks.front_desk.starter import ensure_visitor

    yield await asyncio.to_thread(ensure_visitor)


__all__ = ["FRONT_DESK", "DeskConfig", "VisitorConfig", "dataset"]
