"""The models that training may start from, by the names that clients write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reinforge.config.policy import LoRAConfig, PolicyConfig
from reinforge.engine.model.preflight import check_policy, has_adapters
from reinforge.engine.packages import check_packages
from reinforge.errors import ConfigError, Problem, did_you_mean
from reinforge.serving.api_error import ApiError
from reinforge.serving.loading import MODEL, ModelLoader, find_source
from reinforge.serving.models import ServedModels


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """What the command line says about training.

    Attributes:
        sources: The models.
        output_dir: Folder of the run folders.
        data_dir: Folder of what clients train.
        token: The server's key; None: it has none.
        device: `auto`, `cpu`, `cuda` or `mps`.
        dtype: Data type of the weights; None: that of the run, else float32.
        max_model_len: Maximum tokens of prompt and reply; None: the model's limit.
        max_num_seqs: Replies sampled at a time.
        max_tokens: Most tokens of a reply; None: 1024 in reinforcement jobs.
        lora_rank: Rank of the adapters; 0: all weights are trained.
        max_rank: Largest rank that a client of Tinker may ask for.
        max_jobs: Fine-tuning jobs that train at a time.
        max_models: Models trained at a time by each of the other protocols.
        allow_python: Whether graders in Python may run.
    """

    sources: tuple[str, ...]
    output_dir: Path
    data_dir: Path
    token: str | None = None
    device: str = "auto"
    dtype: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_tokens: int | None = None
    lora_rank: int = 16
    max_rank: int = 32
    max_jobs: int = 1
    max_models: int = 4
    allow_python: bool = False


@dataclass(frozen=True, slots=True)
class TrainingHost:
    """The server that a protocol's part is made for: its models, what loads more, and its options."""

    models: ServedModels
    loader: ModelLoader
    options: TrainingOptions


class BaseModels:
    """What the server's owner allows to be trained; a request names one and never a path or a hub id of its own.

    Args:
        policies: Name -> the model and how it is trained.
    """

    def __init__(self, policies: Mapping[str, PolicyConfig]):
        self._policies = dict(policies)

    @property
    def names(self) -> tuple[str, ...]:
        """All names."""
        return tuple(self._policies)

    def find(self, name: str, param: str = "base_model") -> PolicyConfig:
        """Returns the model of a name.

        Args:
            name: What the client wrote.
            param: The field of its request, for the error.

        Raises:
            ApiError: No model has that name.
        """
        if (policy := self._policies.get(name)) is not None:
            return policy
        listed = ", ".join(self._policies) or "none"
        message = (
            f"no model to train is named {name[:200]!r}{did_you_mean(name, self.names)}; this server has: {listed}"
        )
        raise ApiError(404, message, param=param, code="model_not_found")


async def find_bases(options: TrainingOptions) -> BaseModels:
    """Returns the models that clients may train.

    Raises:
        ConfigError: A model cannot be trained.
    """
    policies, problems = dict[str, PolicyConfig](), list[Problem]()
    for source in options.sources:
        name, path, settings = await find_source(source, options.output_dir)
        policies[name] = policy = _build_policy(path, settings, options)
        found = [*check_policy(policy), *check_packages(lora=has_adapters(policy))]
        problems += [Problem(MODEL, each.message, each.fix) for each in found]
    if problems:
        raise ConfigError(problems)
    return BaseModels(policies)


def _build_policy(path: str, settings: Mapping[str, Any], options: TrainingOptions) -> PolicyConfig:
    """Returns a model and how it is trained; `settings` are those of the run that it comes from."""
    folder = Path(path).expanduser()
    given = {"dtype": options.dtype, "max_model_len": options.max_model_len}
    chosen = {**settings, **{name: value for name, value in given.items() if value is not None}}
    chosen["model"] = str(folder.absolute()) if folder.exists() else path  # jobs run in folders of their own
    policy = PolicyConfig(**chosen)
    if options.lora_rank and not has_adapters(policy):
        return policy.model_copy(update={"lora": LoRAConfig(r=options.lora_rank)})
    return policy
