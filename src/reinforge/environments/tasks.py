"""The tasks of the configured environment as the dataset of a run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from reinforge.config.schema import DatasetConfig
from reinforge.errors import ConfigError, Problem
from reinforge.evaluation.datasets import RowDataset
from reinforge.interfaces import DatasetLoader
from reinforge.registry import register_dataset


class EnvironmentDatasetConfig(DatasetConfig, name="environment"):
    """The tasks of the configured `environment`."""


@register_dataset(config_type=EnvironmentDatasetConfig)
async def environment_tasks(config: EnvironmentDatasetConfig, builder: Any) -> AsyncIterator[DatasetLoader]:
    if (host := await builder.get_environment()) is None:
        fix = "add `environment: TYPE:NAME`; `reinforge environments list` has them"
        raise ConfigError(Problem("environment", "the dataset has an environment's tasks, but none is configured", fix))
    yield RowDataset(await host.load())
