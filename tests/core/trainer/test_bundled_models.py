"""Bundled models, which are made on first use."""

import pytest

from reinforge.config.loader import build_config
from reinforge.registry import REGISTRY, TypedConfig
from reinforge.trainer.setup import components
from reinforge.trainer.setup.components import ComponentBuilder


class SlowModelConfig(TypedConfig, name="slow"):
    """A model that takes ten minutes to make."""


class Clock:
    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


async def test_the_time_of_making_a_model_is_known_since_only_the_first_run_takes_it(tmp_path, monkeypatch):
    clock, registry = Clock(), REGISTRY.child()

    async def make(config, builder):
        clock.now += 600
        yield tmp_path

    registry.add("model", SlowModelConfig, make)
    monkeypatch.setattr(components, "time", clock)
    settings = {"finetuning": {"policy": {"model": "bundled:slow"}}}
    async with ComponentBuilder(build_config(settings), registry) as builder:
        assert await builder.get_model_path() == str(tmp_path)
        assert await builder.get_model_path() == str(tmp_path)
        assert builder.making_s == pytest.approx(600)
