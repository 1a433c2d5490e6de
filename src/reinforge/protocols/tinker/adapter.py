"""`_type: tinker`: our loop trains on Tinker's service, through its SDK, or on a server of its protocol."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reinforge.adapters.local import LocalAdapter
from reinforge.config.policy import PolicyConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.engine.packages import check_packages
from reinforge.errors import ConfigError, Problem
from reinforge.interfaces import Algorithm, Builder
from reinforge.protocols.tinker.engine import translate_loss
from reinforge.protocols.tinker.service import SDK, OpenService, TinkerAdapterConfig, TinkerService
from reinforge.registry import register_trainer_adapter
from reinforge.rollout.models.policy_llm import find_adapters

if TYPE_CHECKING:
    from reinforge.engine import Engine

POLICY = "finetuning.policy"


class TinkerAdapter(LocalAdapter):
    """Runs jobs like the local adapter, on an engine whose weights are at the service.

    Args:
        adapters: Names of the entries of `llms` that ask for an adapter of their own; there must be none.
        tokenizer: Folder of a bundled model, whose tokenizer is used; None: that of `policy`.
    """

    trains_stages = False
    serves_during_jobs = False
    backend = "tinker"
    adapter_config: TinkerAdapterConfig  # type: ignore[assignment]

    def __init__(
        self,
        adapter_config: TinkerAdapterConfig,
        algorithm: Algorithm,
        model: str | None = None,
        adapters: tuple[str, ...] = (),
        open_service: OpenService = TinkerService,
        tokenizer: str | None = None,
    ):
        self._open_service, self._tokenizer = open_service, tokenizer
        super().__init__(adapter_config, algorithm, model)  # type: ignore[arg-type]  # has what is read of it
        self._named = adapters

    def validate(self, run_config: FinetuneConfig) -> list[Problem]:
        where = f"trainer_adapters.{run_config.trainer_adapter}" if run_config.trainer_adapter else ""
        problems = [replace(each, path=where) for each in check_packages(lora=False)]
        if self._open_service is TinkerService and importlib.util.find_spec("tinker") is None:
            fix = 'pip install "reinforge[tinker]"'
            problems.append(Problem(where, f"the package tinker {SDK} is not installed", fix))
        if self._named:
            message = f"llms asks for the adapters {', '.join(self._named)}; the service trains one"
            problems.append(Problem("llms", message, "leave `adapter` out"))
        return [*problems, *self._check_policy(run_config), *self._check_algorithm(run_config)]

    def _policy_config(self, run_config: FinetuneConfig) -> PolicyConfig:
        policy = super()._policy_config(run_config)
        return policy.model_copy(update={"tokenizer": self._tokenizer or policy.tokenizer})

    def _check_policy(self, run_config: FinetuneConfig) -> list[Problem]:
        policy, problems = self._policy_config(run_config), []
        if policy.model is None and policy.tokenizer is None:
            fix = "name the folder or the hub id of the model's tokenizer"
            problems.append(Problem(f"{POLICY}.tokenizer", "no tokenizer is named", fix))
        if policy.optimizer.learning_rate is None:
            message = "the size of the service's model is not known here, so there is no default"
            problems.append(Problem(f"{POLICY}.optimizer.learning_rate", message, "set it, such as 4.0e-5"))
        if policy.optimizer.name != "adamw":
            message = f"the service has adamw, not {policy.optimizer.name}"
            problems.append(Problem(f"{POLICY}.optimizer.name", message, "remove it"))
        for name in ("lora", "quantization"):
            if getattr(policy, name) is not None:
                message = "the service has its own adapters"
                problems.append(Problem(f"{POLICY}.{name}", message, "remove it; see rank of the trainer adapter"))
        return problems

    def _check_algorithm(self, run_config: FinetuneConfig) -> list[Problem]:
        algorithm, problems = self.algorithm, []
        if run_config.pipeline:
            problems.append(Problem("finetuning.pipeline", "the service trains one stage", "run the stages one by one"))
        if algorithm.needs.ref_logprobs or algorithm.needs.values:
            message = f"{type(algorithm).__name__} needs a reference model or a critic, which the service has not"
            problems.append(Problem("finetuning.algorithm", message, "use an algorithm without, such as grpo"))
        try:
            translate_loss(algorithm.loss)
        except ConfigError as error:
            problems += error.problems
        for name, value in (("temperature", 1.0), ("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            if (found := getattr(run_config.sampling, name)) != value:
                message = f"found {found:g}; the service's losses compute log-probs at temperature 1 over all tokens"
                problems.append(Problem(f"finetuning.sampling.{name}", message, f"set it to {value:g}"))
        if run_config.limits.max_staleness:
            message = "the service's adapter collects and trains in turns"
            problems.append(Problem("finetuning.limits.max_staleness", message, "set it to 0"))
        return problems

    def effective_settings(self, run_config: FinetuneConfig) -> list[tuple[str, str]]:
        config = self.adapter_config
        place = config.base_url or "TINKER_BASE_URL, else Tinker's own service"
        rate = self._policy_config(run_config).optimizer.peak
        return [
            ("service", f"{place} (receives all prompts of the agent and the trajectories)"),
            ("model", f"{config.base_model}, LoRA of rank {config.rank}"),
            ("learning rate", f"{rate:g}"),
        ]

    def _prepare_loading(self, run_config: FinetuneConfig) -> Callable[..., Engine]:
        return self._load

    def _load(self, policy: PolicyConfig, *, seed: int, **_: Any) -> Any:
        from reinforge.protocols.tinker.engine import TinkerEngine

        return TinkerEngine(policy, self.adapter_config, seed, self._open_service)

    def measure_memory(self) -> None:
        return


@register_trainer_adapter(config_type=TinkerAdapterConfig)
async def tinker_adapter(config: TinkerAdapterConfig, builder: Builder) -> AsyncIterator[TinkerAdapter]:
    adapters = tuple(dict.fromkeys(find_adapters(builder.config.llms).values()))
    named = builder.config.finetuning.policy.tokenizer
    tokenizer = await builder.get_bundled(named, f"{POLICY}.tokenizer") if named is not None else None
    model = await builder.get_model_path()
    adapter = TinkerAdapter(config, await builder.get_algorithm(), model, adapters, tokenizer=tokenizer)
    try:
        yield adapter
    finally:
        await adapter.cleanup()
