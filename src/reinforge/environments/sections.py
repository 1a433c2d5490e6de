"""What `environment: TYPE:NAME` stands for: the sections that a configuration leaves out."""

from __future__ import annotations

from typing import Any

from reinforge.config.document import Document
from reinforge.engine.small_models import fill_in_training
from reinforge.errors import did_you_mean
from reinforge.registry import Registry
from reinforge.types.environment import RANDOM, SELF

KIND = "environment"


def fill_in(document: Document, registry: Registry) -> None:
    """Adds the sections that a configuration with an environment leaves out; what it has stays."""
    data = document.data
    if isinstance(name := data[KIND], str):
        data[KIND] = expand_name(name, registry)
    config_type = _find_config(data[KIND], registry)
    if (build := getattr(config_type, "build_sections", None)) is not None:
        _merge(data, build(data[KIND] if isinstance(data[KIND], dict) else vars(data[KIND])))
    metrics = getattr(config_type, "metrics", ())
    scores = {name: {"_type": "reported_reward", "metric": name, "failed": 0.0} for name in metrics}
    _set_missing(data, {"llms": {"agent": {"_type": "policy"}}, "workflow": {}, "eval": {}})
    _set_missing(data["workflow"], {"_type": KIND})
    _check_opponent(document)
    _set_missing(data["eval"], {"general": {}, "evaluators": {"reward": {"_type": "reported_reward"}, **scores}})
    _set_missing(document.get_block(("eval", "general")), {"dataset": {"_type": KIND}, "max_concurrency": 64})
    _set_missing(data, {"finetuning": {}})
    finetuning = document.get_block(("finetuning",))
    if finetuning.get("enabled") is False:
        return
    chosen = {}
    for section, type_name in (("trajectory_builders", "group"), ("trainer_adapters", "local"), ("trainers", "epoch")):
        chosen[section.removesuffix("s")] = name = next(iter(data.get(section) or ()), section.split("_")[-1][:-1])
        _set_missing(data, {section: {}})
        _set_missing(data[section], {name: {}})
        _set_missing(data[section][name], {"_type": type_name})
    builder, adapter = (data[f"{name}s"][chosen[name]] for name in ("trajectory_builder", "trainer_adapter"))
    trainer = data["trainers"][chosen["trainer"]]
    is_usual = adapter == {"_type": "local"} and isinstance(trainer, dict) and trainer.get("_type") == "epoch"
    if isinstance(builder, dict) and builder["_type"] == "group" and is_usual:
        _set_missing(data["trajectory_builders"], fill_in_training(finetuning, builder))
    evaluators = document.get_block(("eval", "evaluators"))
    reward = {"name": next(iter(evaluators), None)}
    if metrics and metrics[0] in evaluators:
        _set_missing(finetuning, {"gate": {}})
        _set_missing(finetuning["gate"], {"metric": metrics[0]})
    _set_missing(finetuning, {"enabled": True, **chosen, "reward_function": reward})


def _check_opponent(document: Document) -> None:
    """Adds the policy as its own opponent, untrained, to `llms`, and reports an opponent that is not there."""
    opponent, llms = document.get_block((KIND,)).get("opponent"), document.get_block(("llms",))
    if opponent == SELF:
        policies = [entry for entry in llms.values() if isinstance(entry, dict) and entry.get("_type") == "policy"]
        _set_missing(llms, {SELF: {**(policies[0] if policies else {"_type": "policy"}), "train": False}})
    elif isinstance(opponent, str) and opponent not in (RANDOM, *llms):
        fix = f"use {RANDOM}, {SELF}, or an entry of llms"
        document.report((KIND, "opponent"), f'llms has no entry "{opponent}"{did_you_mean(opponent, llms)}', fix)


def expand_name(name: str, registry: Registry) -> dict[str, Any]:
    """Returns the component that a name stands for: "gym:Taxi-v3" -> {"_type": "gym", "name": "Taxi-v3"}."""
    type_name, _, main = name.partition(":")
    config_type = _find_config({"_type": type_name}, registry)
    if config_type is None or not main:
        return {"_type": type_name}
    return {"_type": type_name, config_type.main_key: main}


def _find_config(value: Any, registry: Registry) -> Any:
    """Returns the configuration class of an environment, or None where there is none of that name."""
    if not isinstance(value, dict):
        return type(value)
    component = registry.find(KIND, str(value.get("_type")))
    return None if component is None else component.config_type


def _set_missing(block: Any, values: dict[str, Any]) -> None:
    if isinstance(block, dict):
        for key, value in values.items():
            if block.get(key) is None:
                block[key] = value


def _merge(block: Any, values: dict[str, Any]) -> None:
    """Adds what a block leaves out; a component that it has stays as it is."""
    for key, value in values.items():
        if block.get(key) is None:
            block[key] = value
        elif isinstance(block[key], dict) and isinstance(value, dict) and "_type" not in value:
            _merge(block[key], value)
