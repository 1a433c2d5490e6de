"""An environment of one's own: `environment: python:my_module:MySource`."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from pydantic import Field

from reinforge.config.imports import import_object
from reinforge.config.schema import EnvironmentConfig
from reinforge.errors import ConfigError, Problem
from reinforge.interfaces import EnvironmentSource
from reinforge.registry import register_environment


class PythonEnvironmentConfig(EnvironmentConfig, name="python"):
    """An `EnvironmentSource` in the project's folder."""

    main_key: ClassVar[str] = "source"

    source: str = Field(description="`module:name` of an EnvironmentSource, or of a function that returns one.")
    arguments: dict[str, Any] = Field(default={}, description="Keyword arguments that it is called with.")


@register_environment(config_type=PythonEnvironmentConfig)
async def python_environment(config: PythonEnvironmentConfig, builder: Any) -> AsyncIterator[EnvironmentSource]:
    found = import_object(config.source, builder.project_root, path="source")
    source = found if isinstance(found, EnvironmentSource) and not config.arguments else found(**config.arguments)
    if not isinstance(source, EnvironmentSource) or inspect.isclass(source):
        message = f"{config.source} is {type(source).__name__}, but an EnvironmentSource is needed"
        raise ConfigError(Problem("source", message, "derive its class from reinforge.EnvironmentSource"))
    yield source
