"""Registers a protocol as a workflow."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from reinforge.interfaces import Builder
from reinforge.multiagent.protocol import DialogueConfig, ProtocolHandler
from reinforge.multiagent.workflow import build_protocol_workflow
from reinforge.multiagent.zero_knowledge import ZeroKnowledge
from reinforge.registry import register_workflow
from reinforge.types.workflow import BoundWorkflow

HandlerT = TypeVar("HandlerT", bound=type[ProtocolHandler])


def register_protocol(config_type: type[DialogueConfig]) -> Callable[[HandlerT], HandlerT]:
    """Registers a protocol as a workflow under its configuration's name."""

    def decorate(handler: HandlerT) -> HandlerT:
        def build_handler(config: Any) -> ProtocolHandler:
            base = handler(config)
            return ZeroKnowledge(base) if getattr(config, "zero_knowledge", False) else base

        async def protocol(config: Any, builder: Builder) -> AsyncIterator[BoundWorkflow]:
            yield await build_protocol_workflow(build_handler(config), builder)

        protocol.__module__, protocol.__qualname__ = handler.__module__, handler.__qualname__
        protocol.build_handler = build_handler  # type: ignore[attr-defined]  # found by `_type` outside a run
        register_workflow(config_type=config_type)(protocol)
        return handler

    return decorate
