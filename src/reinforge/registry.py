"""The components, by kind and `_type`: each has a configuration class and an async generator that yields it.

    @register_evaluator(config_type=MyEvaluatorConfig)
    async def my_evaluator(config, builder):
        yield MyEvaluator(config)          # code after the yield is the teardown

Built-in modules are imported on first use. Plugins use the entry-point group "reinforge.components": the entry point is
a module, or a callable in it, that registers components when it is loaded.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import ConfigDict, ModelWrapValidatorHandler, PrivateAttr, model_validator

from reinforge.errors import ConfigError, Problem, describe_error, did_you_mean
from reinforge.types.key_aliases import ConfigModel

ENTRY_POINT_GROUP = "reinforge.components"

BUILTIN_MODULES = (
    "reinforge.algorithms.cispo",
    "reinforge.algorithms.dapo",
    "reinforge.algorithms.distill",
    "reinforge.algorithms.dpo",
    "reinforge.algorithms.dr_grpo",
    "reinforge.algorithms.expert_iteration",
    "reinforge.algorithms.grpo",
    "reinforge.algorithms.gspo",
    "reinforge.algorithms.ipo",
    "reinforge.algorithms.kto",
    "reinforge.algorithms.malt",
    "reinforge.algorithms.orpo",
    "reinforge.algorithms.ppo",
    "reinforge.algorithms.reinforce_pp",
    "reinforge.algorithms.rejection_sampling",
    "reinforge.algorithms.rloo",
    "reinforge.algorithms.sapo",
    "reinforge.algorithms.sft",
    "reinforge.algorithms.simpo",
    "reinforge.rollout.workflow",
    "reinforge.rollout.workflows.chat",
    "reinforge.rollout.workflows.command",
    "reinforge.rollout.workflows.http_workflow",
    "reinforge.rollout.workflows.tool_agent",
    "reinforge.rollout.models.llms",
    "reinforge.rollout.models.openai_llm",
    "reinforge.rollout.models.local_llm",
    "reinforge.evaluation.datasets",
    "reinforge.evaluation.evaluators",
    "reinforge.evaluation.graders.evaluator",
    "reinforge.adapters.local",
    "reinforge.scale.ray.adapter",
    "reinforge.protocols.openai.adapter",
    "reinforge.protocols.art.adapter",
    "reinforge.protocols.nemo_customizer.adapter",
    "reinforge.protocols.sessions.adapter",
    "reinforge.protocols.tinker.adapter",
    "reinforge.runs.trackers.mlflow",
    "reinforge.runs.trackers.tensorboard",
    "reinforge.runs.trackers.trackio",
    "reinforge.runs.trackers.wandb",
    "reinforge.trainer.builders.group",
    "reinforge.trainer.builders.dataset",
    "reinforge.trainer.builders.tree",
    "reinforge.trainer.builders.preference_pairs",
    "reinforge.trainer.held_out_replies",
    "reinforge.trainer.loop",
    "reinforge.protocols.art.trainer",
    "reinforge.protocols.nemo_customizer.trainer",
    "reinforge.multiagent.builder",
    "reinforge.multiagent.evaluators",
    "reinforge.multiagent.protocols",
    "reinforge.redteam.attack",
    "reinforge.redteam.evaluators",
    "reinforge.tasks.tic_tac_toe",
    "reinforge.tasks.tickets",
    "reinforge.tasks.debate",
    "reinforge.tasks.front_desk",
    "reinforge.tasks.help_desk",
    "reinforge.tasks.shop",
    "reinforge.tasks.word_problems",
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
    "tracker",
    "model",
)

TYPE_KEYS = ("type", "_type")
"""Arguments that may repeat a configuration's type."""

Factory = Callable[[Any, Any], AsyncIterator[Any]]


class TypedConfig(ConfigModel):
    """Base of every component's configuration; `class MyConfig(Base, name="my_type")` sets its `_type`.

    Rejects unknown keys, also in nested blocks. `MyConfig(type="my_type")` and `MyConfig(_type="my_type")` may repeat
    the type, and `config.type` returns it, as in the NeMo Agent Toolkit; a base class without a type takes any. A field
    `type` of the class's own comes first.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    static_type: ClassVar[str | None] = None
    _given_type: str | None = PrivateAttr(default=None)

    @model_validator(mode="wrap")
    @classmethod
    def _accept_type(cls, data: Any, build: ModelWrapValidatorHandler[Self]) -> Self:
        """Takes the type out of the arguments.

        Raises:
            ValueError: It is the type of another class.
        """
        keys = [key for key in TYPE_KEYS if key not in cls.model_fields]
        if not isinstance(data, dict) or not any(key in data for key in keys):
            return build(data)
        given = next(data[key] for key in keys if key in data)
        known = cls.static_type
        if known is not None and given != known:
            raise ValueError(f'the type is "{given}", but {cls.__name__} is the configuration of "{known}"')
        made = build({key: value for key, value in data.items() if key not in keys})
        if known is None:
            made._given_type = given
        return made

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # no property: a field `type` of a subclass would shadow it, which pydantic warns about
            if name == "type":
                return type(self).static_type or self._given_type
            return super().__getattr__(name)

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
        factory: Async generator function `(config, builder)` that yields the component once.
        origin: The module that registered it.
    """

    kind: str
    name: str
    config_type: type[TypedConfig]
    factory: Factory
    origin: str


@dataclass
class Registry:
    """Components by kind and name; `child()` returns a registry that can be extended without changing this one."""

    parent: Registry | None = None
    _own: dict[tuple[str, str], Component] = field(default_factory=dict)
    _loaded: bool = False
    _plugin_errors: dict[str, str] = field(default_factory=dict)

    def add(self, kind: str, config_type: type[TypedConfig], factory: Factory, name: str | None = None) -> None:
        """Registers a component under `name`, by default the class keyword `name=` of its configuration.

        Raises:
            ConfigError: The class has no name, or another module has registered this name.
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
            message = f'{kind} "{name}" is already registered by {known.origin}; choose another name for {origin}'
            raise ConfigError(message)
        self._own[kind, name] = Component(kind, name, config_type, factory, origin)

    def get(self, kind: str, name: str, path: str = "") -> Component:
        """Returns a component.

        Args:
            kind: One of `KINDS`.
            name: Its `_type`.
            path: Path of the component in the configuration, for the message.

        Raises:
            ConfigError: No component has that name; the message has the nearest name and all names.
        """
        found = self.find(kind, name)
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
        """Returns all components, or those of one kind, sorted by kind and name."""
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
        """Returns a registry without built-in components and without plugins."""
        return cls(_loaded=True)

    def child(self) -> Registry:
        """Returns a registry that has the components of this one, and does not change it when extended."""
        return Registry(parent=self)

    def plugin_errors(self) -> dict[str, str]:
        """Returns the error of each plugin that failed to import, by entry-point name."""
        self.load()
        return {**(self.parent.plugin_errors() if self.parent else {}), **self._plugin_errors}

    def load(self) -> None:
        """Imports the built-in modules and the plugins; does nothing if that was done before."""
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
            except Exception as error:  # noqa: BLE001  a broken plugin must not affect the others; later messages name it
                self._plugin_errors[entry.name] = describe_error(error)

    def find(self, kind: str, name: str) -> Component | None:
        """Returns a component, or None if no component has that name."""
        self.load()
        component = self._own.get((kind, name))
        return component if component is not None or self.parent is None else self.parent.find(kind, name)


REGISTRY = Registry()
"""The registry of the process; the decorators below add to it."""


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


def register_tracker(config_type: type[TypedConfig]) -> Callable[[Factory], Factory]:
    """Registers a tracker of metrics."""
    return _register("tracker", config_type)


def register_model(config_type: type[TypedConfig]) -> Callable[[Factory], Factory]:
    """Registers a model that is built on first use; `bundled:NAME` refers to it, and the component is its folder."""
    return _register("model", config_type)
