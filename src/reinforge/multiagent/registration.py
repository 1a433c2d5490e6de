"""Registers a protocol as a workflow."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from reinforge.multiagent.protocol import DialogueConfig, ProtocolHandler
from reinforge.multiagent.workflow import protocol_workflow
from reinforge.registry import register_workflow
from reinforge.rollout.workflow import BoundWorkflow

HandlerT = TypeVar("HandlerT", bound=type[ProtocolHandler])


def register_protocol(config_type: type[DialogueConfig]) -> Callable[[HandlerT], HandlerT]:
    """Registers a protocol as a workflow under its configuration's name."""

    def decorate(handler: HandlerT) -> HandlerT:
        async def protocol(config: Any, builder: Any) -> AsyncIterator[BoundWorkflow]:
            yield await protocol_workflow(handler(config), builder)

        protocol.__module__, protocol.__qualname__ = handler.__module__, handler.__qualname__
        protocol.handler = handler  # type: ignore[attr-defined]  # finds the handler of a `_type`
        register_workflow(config_type=config_type)(protocol)
        return handler

    return decorate
