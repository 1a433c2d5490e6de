"""OpenAI adapters connected to the stand-in, collections of episodes without tokens, and projects that use both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pydantic import SecretStr

from reinforge.algorithms.sft import SFT
from reinforge.config.schema import FinetuneConfig
from reinforge.interfaces import Algorithm
from reinforge.protocols.openai.adapter import OpenAIAdapter, OpenAIAdapterConfig
from reinforge.types.request import ChatPrompt
from reinforge.types.trajectory import EpisodeItem, Trajectory, TrajectoryCollection
from tests.project import Project
from tests.protocols.openai_service import OpenAIService

FAST_SETTINGS = {"base_model": "gpt-test", "poll_interval_s": 0.01, "timeout_s": 5.0, "ready_s": 5.0}


@asynccontextmanager
async def connect_adapter(
    service: OpenAIService,
    algorithm: Algorithm | None = None,
    kind: type[OpenAIAdapter] = OpenAIAdapter,
    **settings: Any,
) -> AsyncIterator[Any]:
    config = OpenAIAdapterConfig(base_url=service.url, **{**FAST_SETTINGS, **settings})
    adapter = kind(config, algorithm or SFT(), service.url, SecretStr(service.key))
    await adapter.initialize(FinetuneConfig())
    try:
        yield adapter
    finally:
        await adapter.cleanup()


def make_trajectory(question: str, answer: str, reward: float = 1.0) -> Trajectory:
    user = EpisodeItem(role="user", content=question)
    prompt = ChatPrompt(({"role": "user", "content": question},))
    return Trajectory(episode=[user, EpisodeItem(role="assistant", content=answer, logprobs=prompt)], reward=reward)


def make_collection(count: int = 12, run_id: str = "r", **fields: Any) -> TrajectoryCollection:
    """Returns `count` examples with two answers each: `good` with reward 1 and `bad` with reward 0."""
    groups = [[make_trajectory(f"q{i}", f"good {i}"), make_trajectory(f"q{i}", f"bad {i}", 0.0)] for i in range(count)]
    return TrajectoryCollection(trajectories=groups, run_id=run_id, **fields)


def use_openai_adapter(project: Project, service: OpenAIService, key: str = "${STANDIN_KEY}", **settings: Any) -> None:
    """Configures a project to train through the service: supervised, on answers that are mostly vowels."""
    endpoint = {"base_url": service.url, "api_key": key, "max_retries": 4, **FAST_SETTINGS, **settings}
    project.settings["trainer_adapters"] = {"adapter": {"_type": "openai", **endpoint}}
    project.settings["trajectory_builders"] = {
        "builder": {"_type": "group", "num_generations": 4, "examples_per_epoch": 16}
    }
    set_finetuning(project, num_epochs=2, algorithm={"_type": "sft", "min_reward": 0.9}, gate={"num_samples": 2})


def set_finetuning(project: Project, **block: Any) -> None:
    """Replaces all of a project's `finetuning` but the names of its components."""
    before = project.settings["finetuning"]
    project.settings["finetuning"] = {**{key: before[key] for key in KEPT_KEYS if key in before}, **block}


KEPT_KEYS = (
    "enabled", "trainer", "trajectory_builder", "trainer_adapter", "reward_function", "output_dir", "run_configuration",
)  # fmt: skip
