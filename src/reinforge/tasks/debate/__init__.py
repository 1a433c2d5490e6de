"""Debate about cells that the verifier cannot see: each of two provers shows one, then it decides (examples/debate).

cells.py      the problems, and the check of the evidence
protocol.py   the debate with that check
dataset.py    the dataset of problems
starter.py    the debaters' initial model, trained on first use
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from reinforge.interfaces import Builder
from reinforge.registry import TypedConfig, register_model
from reinforge.tasks.debate import dataset, protocol


class DebaterConfig(TypedConfig, name="debate"):
    """A small model that speaks as any debater of the debate task; trained on first use."""


@register_model(config_type=DebaterConfig)
async def debater(config: DebaterConfig, builder: Builder) -> AsyncIterator[Path]:
    """Yields the folder of the debaters' initial model, after training it if needed."""
    from reinforge.tasks.debate.starter import ensure_debater

    yield await asyncio.to_thread(ensure_debater)


__all__ = ["DebaterConfig", "dataset", "protocol"]
