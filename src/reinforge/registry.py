"""Components by kind and `_type`: each a configuration class and an async generator that yields the component.

    @register_evaluator(config_type=MyEvaluatorConfig)
    async def my_evaluator(config, builder):
        yield MyEvaluator(config)          # code after the yield is the teardown

Built-in modules are imported on first use; plugins come in through the entry-point group "reinforge.components",
whose value is a module (or a callable in it) that registers its components when it is loaded.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from reinforge.errors import ConfigError, Problem, describe_error, did_you_mean

ENTRY_POINT_GROUP = "reinforge.components"

BUILTIN_MODULES = (
    "reinforge.algorithms.cispo",
    "reinforge.algorithms.dapo",
    "reinforge.algorithms.dpo",
    "reinforge.algorithms.dr_grpo",
    "reinforge.algorithms.expert_iteration",
    "reinforge.algorithms.grpo",
    "reinforge.algorithms.gspo",
    "reinforge.algorithms.ipo",
    "reinforge.algorithms.malt",
    "reinforge.algorithms.ppo",
    "reinforge.algorithms.reinforce_pp",
    "reinforge.algorithms.rejection_sampling",
    "reinforge.algorithms.rloo",
    "reinforge.algorithms.sft",
    "reinforge.rollout.workflow",
    "reinforge.rollout.llms",
    "reinforge.rollout.openai_llm",
    "reinforge.rollout.local_llm",
    "reinforge.evaluation.datasets",
    "reinforge.evaluation.evaluators",
    "reinforge.adapters.local",
    "reinforge.adapters.openai",
    "reinforge.adapters.openpipe_art",
    "reinforge.trainer.builders.group",
    "reinforge.trainer.builders.dataset",
    "reinforge.trainer.builders.tree",
    "reinforge.trainer.loop",
    "reinforge.trainer.openpipe_art",
    "reinforge.multiagent.builder",
    "reinforge.multiagent.evaluators",
    "reinforge.multiagent.protocols",
    "reinforge.redteam.attack",
    "reinforge.redteam.evaluators",
    "reinforge.tasks.tic_tac_toe",
    "reinforge.tasks.tickets",
    "reinforge.tasks.debate",
    "reinforge.tasks.front_desk",
)

KINDS = (
    "llm",
    "workflow",
    "dataset",
    "evaluator",
    "trajectory_builder",
    "trainer_adapter",
    "trainer",
    "algorithm",
    "model",
)

Factory = Callable[[Any, Any], AsyncIterator[Any]]


class TypedConfig(BaseModel):
    """Base of every component's configuration; `class MyConfig(Base, name="my_type")` sets its `_type`.

    Unknown keys are refused, in the component's own fields and below.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    static_type: ClassVar[str | None] = None

    def __init_subclass__(cls, name: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if name is not None:
            cls.static_type = name


@dataclass(frozen=True, slots=True)
class Component:
    """One registered component.

    Attributes:
        kind: One of `KINDS`.
        name: Its `_type`.
        config_type: Its configuration class.
        factory: Async generator `(config, builder)` that yields the component once.
        origin: The module that registered it.
    """

    kind: str
    name: str
    config_type: type[TypedConfig]
    factory: Factory
    origin: str


@dataclass
class Registry:
    """Components by kind and name; `child()` adds to a registry without changing it."""

    parent: Registry | None = None
    _own: dict[tuple[str, str], Component] = field(default_factory=dict)
    _loaded: bool = False
    _plugin_errors: dict[str, str] = field(default_factory=dict)

    def add(self, kind: str, config_type: type[TypedConfig], factory: Factory, name: str | None = None) -> None:
        """Registers one component under `name`, by default its configuration's class keyword `name=`.

        Raises:
            ConfigError: The class has no name, or another module registered the same name.
        """
        name = name or config_type.static_type
        if not name:
            raise ConfigError(
                f"{config_type.__name__} has no type name; write "
                f'class {config_type.__name__}(..., name="my_type") so that YAML can say _type: my_type'
            )
        known = self._own.get((kind, name))
        origin = factory.__module__
        if known is not None and (known.origin, known.factory.__qualname__) != (origin, factory.__qualname__):
            raise ConfigError(f'{kind} "{name}" is registered by {known.origin} already; {origin} needs another name')
        self._own[kind, name] = Component(kind, name, config_type, factory, origin)

    def get(self, kind: str, name: str, path: str = "") -> Component:
        """Returns a component.

        Args:
            kind: One of `KINDS`.
            name: Its `_type`.
            path: Where the name stands in the configuration, for the message.

        Raises:
            ConfigError: No component has that name; the message names the nearest and all.
        """
        self.load()
        found = self._find(kind, name)
        if found is None:
            names = self.names(kind)
            hint = did_you_mean(name, names) or ";"
            failed = "".join(
                f' Plugin "{plugin}" failed to load: {why}.' for plugin, why in self.plugin_errors().items()
            )
            raise ConfigError(
                Problem(
                    f"{path}._type" if path else "_type",
                    f'no {kind.replace("_", " ")} named "{name}"{hint} registered: {", ".join(names)}.{failed}',
                    f'use one of these, or register your own (entry-point group "{ENTRY_POINT_GROUP}")',
                )
            )
        return found

    def components(self, kind: str | None = None) -> list[Component]:
        """Returns every component, or those of one kind, sorted by kind and name."""
        self.load()
        merged: dict[tuple[str, str], Component] = {}
        registry: Registry | None = self
        while registry is not None:
            merged = {**registry._own, **merged}
            registry = registry.parent
        return [merged[key] for key in sorted(merged) if kind is None or key[0] == kind]

    def names(self, kind: str) -> list[str]:
        """Returns the names of one kind, sorted."""
        return [component.name for component in self.components(kind)]

    @classmethod
    def empty(cls) -> Registry:
        """Returns a registry without built-in components and plugins."""
        return cls(_loaded=True)

    def child(self) -> Registry:
        """Returns a registry that sees everything of this one and keeps its own additions to itself."""
        return Registry(parent=self)

    def plugin_errors(self) -> dict[str, str]:
        """Returns why each plugin that failed to import did so, by entry-point name."""
        self.load()
        return {**(self.parent.plugin_errors() if self.parent else {}), **self._plugin_errors}

    def load(self) -> None:
        """Imports the built-in modules and the plugins, once."""
        if self.parent is not None:
            self.parent.load()
            return
        if self._loaded:
            return
        self._loaded = True
        for module in BUILTIN_MODULES:
            importlib.import_module(module)
        for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
            try:
                loaded = entry.load()
                if callable(loaded):
                    loaded()
            except Exception as error:  # noqa: BLE001  one broken plugin must not take the others down; it is named where it matters
                self._plugin_errors[entry.name] = describe_error(error)

    def _find(self, kind: str, name: str) -> Component | None:
        found = self._own.get((kind, name))
        return found if found is not None or self.parent is None else self.parent._find(kind, name)


REGISTRY = Registry()
"""The process-wide registry that the decorators below add to."""


def _register(kind: str, config_type: type[TypedConfig]) -> Callable[[Factory], Factory]:
    def decorate(factory: Factory) -> Factory:
        REGISTRY.add(kind, config_type, factory)
        return factory

    return decorate


def register_llm(config_type: type[TypedConfig]) -> Callable[[Factory], Factory]:
    """Registers an entry of `llms`."""
    return _register("llm", config_type)


def register_workflow(config_type: type[TypedConfig]) -> Callable[[Factory], Factory]:
    """Registers a workflow (an agent)."""
    return _register("workflow", config_type)


register_function = register_workflow
"""The reference's name for `register_workflow`."""


def register_dataset(config_type: type[TypedConfig]) -> Callable[[Factory], Factory]:
    """Registers a dataset loader."""
    return _register("dataset", config_type)


def register_evaluator(config_type: type[TypedConfig]) -> Callable[[Factory], Factory]:
    """Registers an evaluator."""
    return _register("evaluator", config_type)


def register_trajectory_builder(config_type: type[TypedConfig]) -> Callable[[Factory], Factory]:
    """Registers a trajectory builder."""
    return _register("trajectory_builder", config_type)


def register_trainer_adapter(config_type: type[TypedConfig]) -> Callable[[Factory], Factory]:
    """Registers a trainer adapter."""
    return _register("trainer_adapter", config_type)


def register_trainer(config_type: type[TypedConfig]) -> Callable[[Factory], Factory]:
    """Registers a trainer."""
    return _register("trainer", config_type)


def register_algorithm(config_type: type[TypedConfig]) -> Callable[[Factory], Factory]:
    """Registers an algorithm."""
    return _register("algorithm", config_type)


def register_model(config_type: type[TypedConfig]) -> Callable[[Factory], Factory]:
    """Registers a model that makes itself: its component is the folder, and `bundled:NAME` means it in a file."""
    return _register("model", config_type)
