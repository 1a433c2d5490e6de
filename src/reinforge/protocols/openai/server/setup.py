"""Makes the fine-tuning part of a server from the command line's options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reinforge.config.policy import LoRAConfig, PolicyConfig
from reinforge.engine.model.preflight import check_policy, has_adapters
from reinforge.engine.packages import check_packages
from reinforge.errors import ConfigError, Problem
from reinforge.protocols.openai.server.api import FineTuningApi, FineTuningSettings
from reinforge.protocols.openai.server.runner import JobSettings
from reinforge.serving.base_models import BaseModels
from reinforge.serving.loading import MODEL, ModelLoader, find_source
from reinforge.serving.models import ServedModels

FOLDER = "fine_tuning"
"""The folder of the API's data, in the server's."""


@dataclass(frozen=True, slots=True)
class FineTuningOptions:
    """The command line's options.

    Attributes:
        output_dir: Folder of the run folders.
        data_dir: Folder of what clients train.
        device: `auto`, `cpu`, `cuda` or `mps`.
        dtype: Data type of the weights; None: that of the run, else float32.
        max_model_len: Maximum tokens of prompt and reply; None: the model's limit.
        max_tokens: Most tokens of a reply; None: 1024 in reinforcement jobs.
        lora_rank: Rank of the adapters; 0: all weights are trained.
        max_jobs: Jobs that train at a time.
        allow_python: Whether graders in Python may run.
    """

    output_dir: Path
    data_dir: Path
    device: str = "auto"
    dtype: str | None = None
    max_model_len: int | None = None
    max_tokens: int | None = None
    lora_rank: int = 16
    max_jobs: int = 1
    allow_python: bool = False


async def make_fine_tuning(
    models: ServedModels, loader: ModelLoader, sources: Sequence[str], options: FineTuningOptions
) -> FineTuningApi:
    """Returns the part of the server that fine-tunes the models on its command line.

    Args:
        models: The server's models.
        loader: Loads what jobs make.
        sources: The models on the command line.
        options: The other options.

    Raises:
        ConfigError: A model cannot be trained.
        StorageError: Another server works on the folder.
    """
    bases = await find_bases(sources, options)
    jobs = JobSettings(max_running=options.max_jobs, device=options.device, allow_python=options.allow_python)
    if options.max_tokens is not None:
        jobs = replace(jobs, max_reply_tokens=options.max_tokens)
    folder = options.data_dir.absolute() / FOLDER
    return FineTuningApi(models, bases, loader, FineTuningSettings(folder, jobs))


async def find_bases(sources: Sequence[str], options: FineTuningOptions) -> BaseModels:
    """Returns the models that clients may train.

    Args:
        sources: The models on the command line.
        options: The other options.

    Raises:
        ConfigError: A model cannot be trained.
    """
    policies, problems = dict[str, PolicyConfig](), list[Problem]()
    for source in sources:
        name, path, settings = await find_source(source, options.output_dir)
        policies[name] = policy = build_policy(path, settings, options)
        found = [*check_policy(policy), *check_packages(lora=has_adapters(policy))]
        problems += [Problem(MODEL, each.message, each.fix) for each in found]
    if problems:
        raise ConfigError(problems)
    return BaseModels(policies)


def build_policy(path: str, settings: Mapping[str, Any], options: FineTuningOptions) -> PolicyConfig:
    """Returns a model and how it is trained.

    Args:
        path: Its folder, hub id, or file.
        settings: How the run that it comes from loaded it.
        options: The command line's options.
    """
    folder = Path(path).expanduser()
    given = {"dtype": options.dtype, "max_model_len": options.max_model_len}
    chosen = {**settings, **{name: value for name, value in given.items() if value is not None}}
    chosen["model"] = str(folder.absolute()) if folder.exists() else path  # jobs run in folders of their own
    policy = PolicyConfig(**chosen)
    if options.lora_rank and not has_adapters(policy):
        return policy.model_copy(update={"lora": LoRAConfig(r=options.lora_rank)})
    return policy
