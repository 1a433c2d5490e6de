"""The second bundled agent: files support e-mails as JSON tickets, with one chance to correct an invalid ticket.

ticket.py      the fields and their values, and the parser
grammar.py     e-mails with their true tickets
workflow.py    the agent: one answer, and one correction
dataset.py     the dataset of e-mails
evaluators.py  all fields right, share of right fields, valid answers, training reward
starter.py     the agent's initial model, trained on first use
tickets.yml    `reinforge finetune` runs it
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from reinforge.interfaces import Builder
from reinforge.registry import TypedConfig, register_model
from reinforge.tasks.tickets import dataset, evaluators, workflow

TICKETS = Path(__file__).with_name("tickets.yml")


class TicketsStarterConfig(TypedConfig, name="tickets"):
    """A small model that files support e-mails as JSON, with errors; trained on first use."""


@register_model(config_type=TicketsStarterConfig)
async def tickets_starter(config: TicketsStarterConfig, builder: Builder) -> AsyncIterator[Path]:
    """Yields the folder of the starter, after training it if needed."""
    from reinforge.tasks.tickets.starter import ensure_starter

    yield await asyncio.to_thread(ensure_starter)


__all__ = ["TICKETS", "TicketsStarterConfig", "dataset", "evaluators", "workflow"]
