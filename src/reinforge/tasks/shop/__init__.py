"""Questions at a shop's counter, for agents with two tools: `lookup`, the price of an article, and `calculate`.

questions.py   articles, wordings, and what a clerk does step by step
dataset.py     the dataset of questions
starter.py     the agent's initial model, trained on first use; it often skips a tool or misuses one

`examples/tool_agent` trains agents of several frameworks on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from reinforge.interfaces import Builder
from reinforge.registry import TypedConfig, register_model
from reinforge.tasks.shop import dataset


class ShopStarterConfig(TypedConfig, name="shop"):
    """A small model that answers questions about prices with two tools, carelessly; trained on first use."""


@register_model(config_type=ShopStarterConfig)
async def shop_starter(config: ShopStarterConfig, builder: Builder) -> AsyncIterator[Path]:
    """Yields the folder of the starter, after training it if needed."""
    from reinforge.tasks.shop.starter import ensure_starter

    yield await asyncio.to_thread(ensure_starter)


__all__ = ["ShopStarterConfig", "dataset"]
