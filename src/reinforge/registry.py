"""The components, by kind and `_type`: each has a configuration class and an async generator that yields it.

    @register_evaluator(config_type=MyEvaluatorConfig)
    async def my_evaluator(config, builder):
        yield MyEvaluator(config)          # code after the yield is the teardown

A class that takes nothing but its configuration may be registered itself: `@register_evaluator(...) class MyEvaluator`.

A component is imported when a file, a command or a call names it; until then `BUILTINS` and the entry points of plugins
give its name. A plugin has one entry point of the group "reinforge.components" for each component, named `kind.type`:

    [project.entry-points."reinforge.components"]
    "evaluator.my_type" = "my_package.my_module"

An entry point with another name is a module, or a callable in it, that registers any number of components; it is loaded
when names are listed, or when a name is not found elsewhere.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar

from pydantic import ConfigDict, ModelWrapValidatorHandler, PrivateAttr, model_validator

from reinforge.errors import ConfigError, Problem, describe_error, did_you_mean
from reinforge.types.key_aliases import ConfigModel

ENTRY_POINT_GROUP = "reinforge.components"

_ALGORITHMS = """
cispo dapo distill dpo dr_grpo expert_iteration grpo gspo ipo kto malt orpo ppo reinforce_pp rejection_sampling rloo
sapo sft simpo
"""
_EVALUATORS = """
contains exact_match json_schema llm_judge numeric pairwise_judge python regex relative_judge reported_reward weighted
"""
_ENVIRONMENTS = "bfcl gymnasium harbor openenv python reasoning_gym textarena verifiers"

BUILTINS = {
    "algorithm": {f"algorithms.{name}": name for name in _ALGORITHMS.split()},
    "dataset": {
        "evaluation.datasets": "csv hf_dataset json jsonl parquet rows",
        "tasks.debate.cells": "cells",
        "tasks.front_desk.grammar": "front_desk",
        "tasks.shop.questions": "shop",
        "tasks.tic_tac_toe.dataset": "tic_tac_toe",
        "tasks.tickets.dataset": "tickets",
        "environments.agent": "environment",
        "tasks.word_problems.dataset": "word_problems",
    },
    "environment": {f"environments.{name}": name for name in _ENVIRONMENTS.split()},
    "evaluator": {
        **{f"evaluation.evaluators.{name}": name for name in _EVALUATORS.split()},
        "protocols.openai.graders.evaluator": "grader",
        "multiagent.evaluators": "agent_reward invalid_replies verifier_accuracy",
        "redteam.attack": "attack_naturalness attack_success",
        "tasks.tic_tac_toe.evaluators": "tic_tac_toe_legal tic_tac_toe_reward tic_tac_toe_win",
        "tasks.tickets.evaluators": "tickets_exact tickets_fields tickets_reward tickets_schema",
        "trainer.held_out_replies": "held_out_replies",
    },
    "llm": {
        "rollout.models.policy_llm": "policy",
        "rollout.models.local_llm": "local",
        "rollout.models.openai_client": "openai",
    },
    "model": {
        "tasks.debate.starter": "debate",
        "tasks.front_desk.starter": "front_desk front_desk_visitor",
        "tasks.help_desk.starter": "help_desk",
        "tasks.shop.starter": "shop",
        "tasks.tic_tac_toe.starter": "tic_tac_toe",
        "tasks.tickets.starter": "tickets",
        "tasks.word_problems.starter": "word_problems",
    },
    "tracker": {
        "trackers.mirror": "mirror",
        "trackers.mlflow": "mlflow",
        "trackers.tensorboard": "tensorboard",
        "trackers.trackio": "trackio",
        "trackers.wandb": "wandb",
    },
    "trainer": {
        "protocols.art.trainer": "openpipe_art_trainer",
        "protocols.nemo_customizer.trainer": "nemo_customizer_trainer",
        "trainer.loop": "epoch",
    },
    "trainer_adapter": {
        "adapters.groups": "groups",
        "adapters.local": "local",
        "protocols.art.adapter": "openpipe_art_trainer_adapter",
        "protocols.nemo_customizer.adapter": "nemo_customizer_trainer_adapter",
        "protocols.openai.adapter": "openai",
        "protocols.sessions.adapter": "http",
        "protocols.tinker.adapter": "tinker",
        "scale.ray.adapter": "ray",
    },
    "trajectory_builder": {
        "multiagent.builder": "agents",
        "protocols.art.trainer": "openpipe_art_traj_builder",
        "trainer.builders.answers": "answers",
        "trainer.builders.dataset": "dataset",
        "trainer.builders.group": "group",
        "trainer.builders.preference_pairs": "dpo_traj_builder",
        "trainer.builders.tree": "tree",
    },
    "workflow": {
        "multiagent.protocols.adp": "adp",
        "multiagent.protocols.debate": "debate",
        "multiagent.protocols.merlin_arthur": "merlin_arthur",
        "multiagent.protocols.mnip": "mnip",
        "multiagent.protocols.multi_channel": "multi_channel",
        "multiagent.protocols.nip": "nip",
        "multiagent.protocols.roles": "roles",
        "multiagent.protocols.solo_verifier": "solo_verifier",
        "redteam.attack": "redteam",
        "environments.agent": "environment",
        "environments.verifiers": "verifiers",
        "rollout.workflow": "python",
        "rollout.workflows.chat": "chat",
        "rollout.workflows.command_workflow": "command",
        "rollout.workflows.http_workflow": "http",
        "rollout.workflows.tool_agent": "tool_agent",
        "tasks.debate.cells": "cell_debate",
        "tasks.tic_tac_toe.workflow": "tic_tac_toe",
        "tasks.tickets.workflow": "tickets",
        "trainer.held_out_replies": "held_out_replies",
    },
}
"""The names that each module of this package registers, by kind."""

KINDS = tuple(BUILTINS)

TYPE_KEYS = ("type", "_type")  # arguments that may repeat a configuration's type

Factory = Callable[[Any, Any], AsyncIterator[Any]]
Registered = TypeVar("Registered", bound=Callable[..., Any])


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
        """Takes the type out of the arguments; that of another class is an error."""
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
    """One registered component."""

    kind: str
    name: str  # its `_type`
    config_type: type[TypedConfig]
    factory: Factory  # async generator function `(config, builder)` that yields the component once
    origin: str  # the module that registered it


class Listing(NamedTuple):
    """The name of a component, and the module that registers it."""

    kind: str
    name: str
    origin: str


@dataclass
class Registry:
    """Components by kind and name; `child()` returns a registry that can be extended without changing this one."""

    parent: Registry | None = None
    modules: dict[tuple[str, str], str] = field(default_factory=dict)
    """The module that registers a component once it is imported, by kind and name."""
    has_plugins: bool = False
    _own: dict[tuple[str, str], Component] = field(default_factory=dict)
    _plugin_errors: dict[str, str] = field(default_factory=dict)
    _plugins: dict[str, importlib.metadata.EntryPoint] | None = None

    def add(
        self, kind: str, config_type: type[TypedConfig], made_by: Callable[..., Any], name: str | None = None
    ) -> None:
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
        factory = _build_factory(made_by) if inspect.isclass(made_by) else made_by
        known, origin = self._own.get((kind, name)), factory.__module__
        owner = known.origin if known is not None else self.modules.get((kind, name), origin)
        if owner != origin or (known is not None and known.factory.__qualname__ != factory.__qualname__):
            raise ConfigError(f'{kind} "{name}" is already registered by {owner}; choose another name for {origin}')
        self._own[kind, name] = Component(kind, name, config_type, factory, origin)

    def get(self, kind: str, name: str, path: str = "") -> Component:
        """Returns a component; the error for an unknown name, at `path`, has the nearest name and all names."""
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

    def find(self, kind: str, name: str) -> Component | None:
        """Returns a component, which is imported if it has not been; None: no component has that name."""
        if (component := self._own.get((kind, name))) is not None:
            return component
        if self.parent is not None:
            return self.parent.find(kind, name)
        if (module := self.modules.get((kind, name))) is not None:
            importlib.import_module(module)
        elif (plugin := f"{kind}.{name}") in self._find_plugins():
            self._load_plugin(plugin)
        else:
            self._load_unnamed_plugins()
        return self._own.get((kind, name))

    def find_type_name(self, kind: str, config_type: type) -> str | None:
        """Returns the `_type` whose configuration a class is; None: it is not registered."""
        name = getattr(config_type, "static_type", None)
        if name is not None and (found := self.find(kind, name)) is not None and found.config_type is config_type:
            return name
        return next((each.name for each in self.components(kind) if each.config_type is config_type), None)

    def list_names(self, kind: str | None = None) -> list[Listing]:
        """Returns the names of all components, or of those of one kind, without importing them."""
        registry: Registry | None = self
        found: dict[tuple[str, str], str] = {}
        while registry is not None:
            registry._load_unnamed_plugins()
            plugins = {tuple(name.split(".", 1)): entry.module for name, entry in registry._find_plugins().items()}
            named = {key: module for key, module in plugins.items() if key[0] in KINDS and len(key) == 2}
            own = {key: component.origin for key, component in registry._own.items()}
            found = {**named, **registry.modules, **own, **found}
            registry = registry.parent
        return [Listing(*key, found[key]) for key in sorted(found) if kind is None or key[0] == kind]

    def names(self, kind: str) -> list[str]:
        return [each.name for each in self.list_names(kind)]

    def components(self, kind: str | None = None) -> list[Component]:
        """Imports and returns all components, or those of one kind, sorted by kind and name."""
        found = [self.find(each.kind, each.name) for each in self.list_names(kind)]
        return [component for component in found if component is not None]

    def child(self) -> Registry:
        return Registry(parent=self)

    def plugin_errors(self, *, load: bool = True) -> dict[str, str]:
        """Imports the plugins, unless told not to, and returns the error of each one that failed, by entry point."""
        for name in self._find_plugins() if load else ():
            self._load_plugin(name)
        return {**(self.parent.plugin_errors(load=load) if self.parent else {}), **self._plugin_errors}

    def _find_plugins(self) -> dict[str, importlib.metadata.EntryPoint]:
        if self._plugins is None:
            found = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP) if self.has_plugins else ()
            self._plugins = {entry.name: entry for entry in found}
        return self._plugins

    def _load_unnamed_plugins(self) -> None:
        for name in self._find_plugins():
            if name.partition(".")[0] not in KINDS:
                self._load_plugin(name)

    def _load_plugin(self, name: str) -> None:
        entry = self._find_plugins()[name]
        self._plugins = {other: each for other, each in self._find_plugins().items() if other != name}
        try:
            loaded = entry.load()
            if callable(loaded):
                loaded()
        except Exception as error:  # noqa: BLE001  a broken plugin must not affect the others; later messages name it
            self._plugin_errors[name] = describe_error(error)


def _build_factory(made_by: type) -> Factory:
    @functools.wraps(made_by, updated=())
    async def factory(config: Any, builder: Any) -> AsyncIterator[Any]:
        yield made_by(config)

    return factory


def _list_builtins() -> dict[tuple[str, str], str]:
    return {
        (kind, name): f"reinforge.{module}"
        for kind, modules in BUILTINS.items()
        for module, names in modules.items()
        for name in names.split()
    }


def load_named(name: str) -> Any:
    """Returns `attribute` of `module:attribute` of this package: how the core reaches what stands around it."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


REGISTRY = Registry(modules=_list_builtins(), has_plugins=True)
"""The registry of the process; the decorators below add to it."""


@dataclass(frozen=True)
class Register:
    """Registers a component of one kind: its factory, or a class that takes nothing but the configuration."""

    kind: str

    def __call__(self, config_type: type[TypedConfig]) -> Callable[[Registered], Registered]:
        def decorate(registered: Registered) -> Registered:
            REGISTRY.add(self.kind, config_type, registered)
            return registered

        return decorate


register_llm = Register("llm")
register_workflow = Register("workflow")
register_dataset = Register("dataset")
register_environment = Register("environment")
register_evaluator = Register("evaluator")
register_trajectory_builder = Register("trajectory_builder")
register_trainer_adapter = Register("trainer_adapter")
register_trainer = Register("trainer")
register_algorithm = Register("algorithm")
register_tracker = Register("tracker")
register_model = Register("model")
"""`bundled:NAME` refers to a model, which is built on first use; the component is its folder."""
