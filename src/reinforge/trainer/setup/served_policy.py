"""Whether the agent calls the model that is trained."""

from __future__ import annotations

from reinforge.config.blocks import SamplingConfig
from reinforge.config.schema import Config, FinetuneConfig
from reinforge.errors import Problem
from reinforge.interfaces import TrainerAdapter
from reinforge.rollout.models.llms import find_served_entries


def can_serve_policy(adapter: TrainerAdapter) -> bool:
    """Returns False if the adapter's class leaves `policy()` as it is: it trains a model that something else serves."""
    return type(adapter).policy is not TrainerAdapter.policy


def refuse_policy_llm(config: Config, adapter: TrainerAdapter) -> list[Problem]:
    """Returns the problem of entries that are `_type: policy` although the adapter serves none."""
    name = type(adapter).__name__
    message = f"the trainer adapter {name} serves no policy, since it has no method policy()"
    fix = "name the model that your backend serves: `_type: openai`, model_name and base_url; or use `_type: local`"
    return [
        Problem(f"llms.{entry}._type", message, f"{fix} under trainer_adapters")
        for entry, llm in config.llms.items()
        if llm.static_type == "policy"
    ]


def refuse_sampling(config: FinetuneConfig) -> list[Problem]:
    """Returns the problem of sampling settings that no remote model would be given."""
    written, defaults = config.sampling, SamplingConfig()
    changed = [name for name in SamplingConfig.model_fields if getattr(written, name) != getattr(defaults, name)]
    message = "has no effect on a model that the trainer adapter does not serve itself"
    fix = "set it in the agent, or in the entry of llms that it calls"
    return [Problem(f"finetuning.sampling.{name}", message, fix) for name in changed]


def require_policy_llm(config: Config) -> list[Problem]:
    """Returns the problem of a model that is trained although the agent calls only other models."""
    if any(llm.static_type == "policy" for llm in config.llms.values()) or find_served_entries(config):
        return []
    names = ", ".join(f"{name} is {llm.static_type}" for name, llm in config.llms.items())
    message = f"no entry is `_type: policy`, so the agent never calls the model that is trained ({names})"
    adapter = config.trainer_adapters.get(str(config.finetuning.trainer_adapter))
    served = None if adapter is None else adapter.served_model
    by_name = f", or name the trained model there: model_name: {served}" if served else ""
    return [Problem("llms", message, f"set `_type: policy` for the entry that the agent calls{by_name}")]
