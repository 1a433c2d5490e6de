"""What `environment: TYPE:NAME` stands for: the sections that a configuration leaves out."""

from __future__ import annotations

from typing import Any

from reinforge.config.document import Document
from reinforge.registry import Registry

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
    scores = {name: {"_type": "reported_reward", "metric": name} for name in metrics}
    _set_missing(data, {"llms": {"agent": {"_type": "policy"}}, "workflow": {"_type": KIND}, "eval": {}})
    _set_missing(data["eval"], {"general": {}, "evaluators": {"reward": {"_type": "reported_reward"}, **scores}})
    _set_missing(document.get_block(("eval", "general")), {"dataset": {"_type": KIND}, "max_concurrency": 64})
    _set_missing(data, {"finetuning": {}})
    finetuning = document.get_block(("finetuning",))
    if finetuning.get("enabled") is False:
        return
    parts = {
        "trajectory_builders": {"builder": {"_type": "group"}},
        "trainer_adapters": {"adapter": {"_type": "local"}},
        "trainers": {"trainer": {"_type": "epoch"}},
    }
    _set_missing(data, parts)
    chosen = {section.removesuffix("s"): next(iter(document.get_block((section,))), None) for section in parts}
    evaluators = document.get_block(("eval", "evaluators"))
    reward = {"name": next(iter(evaluators), None)}
    if metrics and metrics[0] in evaluators:
        _set_missing(finetuning, {"gate": {}})
        _set_missing(finetuning["gate"], {"metric": metrics[0]})
    _set_missing(finetuning, {"enabled": True, **chosen, "reward_function": reward})


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
