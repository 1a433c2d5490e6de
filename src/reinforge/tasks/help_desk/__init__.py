"""A help desk whose logged chats carry thumbs: `reinforge init --template logs` makes a project of them.

grammar.py   questions, replies, the house rules, and logs with thumbs
starter.py   the model behind the logged replies, careless as they are; trained on first use
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from reinforge.interfaces import Builder
from reinforge.registry import TypedConfig, register_model


class HelpDeskStarterConfig(TypedConfig, name="help_desk"):
    """A small model that answers customers of a shop and often breaks the house rules; trained on first use."""


@register_model(config_type=HelpDeskStarterConfig)
async def help_desk_starter(config: HelpDeskStarterConfig, builder: Builder) -> AsyncIterator[Path]:
    """Yields the folder of the starter, after training it if needed."""
    from reinforge.tasks.help_desk.starter import ensure_starter

    yield await asyncio.to_thread(ensure_starter)


__all__ = ["HelpDeskStarterConfig"]
