"""Registers a protocol as a workflow."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from reinforge.interfaces import Builder
from reinforge.multiagent.protocol import DialogueConfig, ProtocolHandler
from reinforge.multiagent.workflow import build_protocol_workflow
from reinforge.registry import register_workflow
from reinforge.types.workflow import BoundWorkflow

HandlerT = TypeVar("HandlerT", bound=type[ProtocolHandler])


def register_protocol(config_type: type[DialogueConfig]) -> Callable[[HandlerT], HandlerT]:
    """Registers a protocol as a workflow under its configuration's name."""

    def decorate(handler: HandlerT) -> HandlerT:
        async def protocol(config: Any, builder: Builder) -> AsyncIterator[BoundWorkflow]:
            yield await build_protocol_workflow(handler(config), builder)

        protocol.__module__, protocol.__qualname__ = handler.__module__, handler.__qualname__
        protocol.handler = handler  # type: ignore[attr-defined]  # `build_protocol` finds a handler by its `_type`
        register_workflow(config_type=config_type)(protocol)
        return handler

    return decorate
