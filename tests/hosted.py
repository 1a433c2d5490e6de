"""An OpenAI adapter over the stand-in, collections of episodes whose tokens nobody tells, and projects that use it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pydantic import SecretStr

from reinforge.adapters.openai import OpenAIAdapter
from reinforge.adapters.openai_config import OpenAIAdapterConfig
from reinforge.algorithms.sft import SFT
from reinforge.config.schema import FinetuneConfig
from reinforge.interfaces import Algorithm
from reinforge.types.request import ChatPrompt
from reinforge.types.trajectory import EpisodeItem, Trajectory, TrajectoryCollection
from tests.openai_service import OpenAIService
from tests.project import Project

QUICK = {"base_model": "gpt-test", "poll_interval_s": 0.01, "timeout_s": 5.0, "ready_s": 5.0}


@asynccontextmanager
async def hosted(
    service: OpenAIService,
    algorithm: Algorithm | None = None,
    kind: type[OpenAIAdapter] = OpenAIAdapter,
    **settings: Any,
) -> AsyncIterator[OpenAIAdapter]:
    """Yields an adapter that is connected."""
    config = OpenAIAdapterConfig(base_url=service.url, **{**QUICK, **settings})
    adapter = kind(config, algorithm or SFT(), service.url, SecretStr(service.key))
    await adapter.initialize(FinetuneConfig())
    try:
        yield adapter
    finally:
        await adapter.cleanup()


def answered(question: str, answer: str, reward: float = 1.0) -> Trajectory:
    """One question and one answer that is learnt."""
    asked = EpisodeItem(role="user", content=question)
    prompt = ChatPrompt(({"role": "user", "content": question},))
    return Trajectory(episode=[asked, EpisodeItem(role="assistant", content=answer, logprobs=prompt)], reward=reward)


def collected(count: int = 12, run_id: str = "r", **fields: Any) -> TrajectoryCollection:
    """`count` examples with two answers each: `good` of reward 1 and `bad` of reward 0."""
    groups = [[answered(f"q{i}", f"good {i}"), answered(f"q{i}", f"bad {i}", 0.0)] for i in range(count)]
    return TrajectoryCollection(trajectories=groups, run_id=run_id, **fields)


def through_the_service(project: Project, service: OpenAIService, key: str = "${STANDIN_KEY}", **settings: Any) -> None:
    """Makes a project train through the service: supervised, on answers of mostly vowels."""
    endpoint = {"base_url": service.url, "api_key": key, "max_retries": 4, **QUICK, **settings}
    project.settings["trainer_adapters"] = {"adapter": {"_type": "openai", **endpoint}}
    project.settings["trajectory_builders"] = {
        "builder": {"_type": "group", "num_generations": 4, "examples_per_epoch": 16}
    }
    project.settings["finetuning"] = {
        **{key: project.settings["finetuning"][key] for key in KEPT if key in project.settings["finetuning"]},
        "num_epochs": 2,
        "algorithm": {"_type": "sft", "min_reward": 0.9},
        "gate": {"draws": 2},
    }


KEPT = (
    "enabled", "trainer", "trajectory_builder", "trainer_adapter", "reward_function", "output_dir", "run_configuration",
)  # fmt: skip
