"""Makes Tinker's part of a server from the command line's options."""

from __future__ import annotations

from pathlib import Path

from reinforge.config.policy import LoRAConfig, PolicyConfig
from reinforge.engine.model.model_files import ADAPTER_CONFIG
from reinforge.engine.model.preflight import check_adapters, check_policy
from reinforge.engine.packages import check_packages
from reinforge.errors import ConfigError, Problem
from reinforge.protocols.tinker.server.api import TinkerApi, TinkerSettings
from reinforge.protocols.tinker.server.slots import list_slots
from reinforge.serving.base_models import TrainingHost
from reinforge.serving.loading import MODEL, find_source

KEY_PREFIX = "tml-"
"""What every key of Tinker's SDK begins with."""


async def make_tinker(host: TrainingHost) -> TinkerApi:
    """Returns the part of the server that trains adapters of one base model.

    Raises:
        ConfigError: The model cannot be trained, or a key of Tinker's SDK cannot be the server's.
    """
    options, sources, token = host.options, host.options.sources, host.options.token
    if token is not None and not token.startswith(KEY_PREFIX):
        message = f"the key in the file does not begin with {KEY_PREFIX}, as the keys of Tinker's SDK do"
        raise ConfigError(Problem("--token_file", message, f"put {KEY_PREFIX} in front of it"))
    if len(sources) != 1:
        message = f"found {len(sources)} models, but Tinker's clients train adapters of one base model"
        raise ConfigError(Problem("--tinker", message, "name one"))
    name, path, settings = await find_source(sources[0], options.output_dir)
    if (Path(path) / ADAPTER_CONFIG).is_file():
        fix = "merge it first: reinforge export RUN --format merged, or name its base model"
        raise ConfigError(Problem(MODEL, f"{path} is an adapter; adapters are trained on a whole model", fix))
    named = {"dtype": options.dtype, "max_model_len": options.max_model_len}
    given = {key: value for key, value in named.items() if value is not None}
    lora = LoRAConfig(r=options.max_rank, lora_alpha=options.max_rank)
    policy = PolicyConfig(**{**settings, **given, "model": path, "lora": lora, "max_num_seqs": options.max_num_seqs})
    chosen = TinkerSettings(
        policy,
        name,
        options.data_dir,
        options.device,
        max_models=options.max_models,
        max_rank=options.max_rank,
    )
    problems = [*check_policy(policy), *check_packages(lora=True)]
    problems += check_adapters(policy, list_slots(chosen.max_models, chosen.max_samplers), critic=False)
    if problems:
        raise ConfigError([Problem(MODEL, each.message, each.fix) for each in problems])
    return TinkerApi(host.models, chosen)
