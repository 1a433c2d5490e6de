"""The second bundled agent: files support e-mails as tickets in JSON, and may correct a ticket that is not valid.

ticket.py      the fields and their values, and what is wrong with a text
grammar.py     e-mails with their true tickets
workflow.py    the agent: an answer, and one correction
dataset.py     the e-mails to file
evaluators.py  all fields right, share of fields, schema, training reward
starter.py     the small model that it starts from, made on first use
tickets.yml    `reinforge finetune` runs it
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from reinforge.registry import TypedConfig, register_model
from reinforge.tasks.tickets import dataset, evaluators, workflow

TICKETS = Path(__file__).with_name("tickets.yml")


class StarterConfig(TypedConfig, name="tickets"):
    """The starter has no settings: its recipe stands in `starter.py`."""


@register_model(config_type=StarterConfig)
async def tickets_starter(config: StarterConfig, builder: Any) -> AsyncIterator[Path]:
    """Yields the folder of the starter, made now if it is not there yet."""
    from reinforge.tasks.tickets.starter import ensure_starter

    yield await asyncio.to_thread(ensure_starter)


__all__ = ["TICKETS", "StarterConfig", "dataset", "evaluators", "workflow"]
