"""Registers a protocol as a workflow, which is built from its configuration and validated before work starts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

from reinforge.errors import ConfigError, Problem
from reinforge.interfaces import Builder
from reinforge.multiagent.agents import PureTextWholeAgent
from reinforge.multiagent.builder import count_single_dialogue_epochs
from reinforge.multiagent.episode import ProtocolWorkflow
from reinforge.multiagent.protocol import AgentParameters, DialogueConfig, ProtocolHandler
from reinforge.multiagent.zero_knowledge import ZeroKnowledge
from reinforge.registry import register_workflow
from reinforge.rollout.workflow import bind_workflow
from reinforge.types.workflow import BoundWorkflow

HandlerT = TypeVar("HandlerT", bound=type[ProtocolHandler])


def register_protocol(config_type: type[DialogueConfig]) -> Callable[[HandlerT], HandlerT]:
    """Registers a protocol as a workflow under its configuration's name."""

    def decorate(handler: HandlerT) -> HandlerT:
        def build_handler(config: Any) -> ProtocolHandler:
            base = handler(config)
            return ZeroKnowledge(base) if getattr(config, "zero_knowledge", False) else base

        async def protocol(config: Any, builder: Builder) -> AsyncIterator[BoundWorkflow]:
            yield await build_protocol_workflow(build_handler(config), builder)

        protocol.__module__, protocol.__qualname__ = handler.__module__, handler.__qualname__
        protocol.build_handler = build_handler  # type: ignore[attr-defined]  # found by `_type` outside a run
        register_workflow(config_type=config_type)(protocol)
        return handler

    return decorate


SINGLE_AGENT_BUILDERS = ("group", "tree")  # trajectory builders that treat an episode as the work of a single agent


async def build_protocol_workflow(handler: ProtocolHandler, builder: Builder) -> BoundWorkflow:
    """Returns a protocol ready to run, with the agents that its configuration describes."""
    problems = [*find_protocol_problems(handler), *_find_name_problems(handler), *_find_builder_problems(builder)]
    agents: dict[str, PureTextWholeAgent] = {}
    for name, parameters in handler.config.agents.items():
        try:
            agents[name] = _build_agent(name, parameters, builder)
        except ConfigError as error:
            problems += error.problems
    try:
        await handler.setup(builder)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    config = builder.config.finetuning
    if config.enabled and not any(agent.is_trainable for agent in agents.values()):
        message = "no agent can be trained: all are frozen, or none uses an entry of llms with `_type: policy`"
        raise ConfigError(Problem("agents", message, "set freeze_agent: false and a policy for at least one"))
    ordered = {name: agents[name] for name in handler.agent_names}
    num_single = count_single_dialogue_epochs(config)
    workflow = ProtocolWorkflow(handler, ordered, config.outcomes.policy_error, first_tree_epoch=num_single)
    return bind_workflow(workflow, next(iter(ordered.values())).llm)


def find_protocol_problems(handler: ProtocolHandler) -> list[Problem]:
    """Returns what is wrong with the protocol itself: unknown agents or channels, and agents that never speak."""
    channels, problems = handler.channels(), list[Problem]()
    for channel, members in channels.items():
        problems += [
            Problem("", f"the channel {channel} lists {name}, which is not an agent of the protocol")
            for name in members
            if name not in handler.agent_names
        ]
    cycle = handler.turns()
    turns = list(dict.fromkeys(turn for round_ in cycle for turn in round_))
    for agent, channel in turns:
        if agent not in handler.agent_names:
            problems.append(Problem("", f"{agent} has a turn but is not an agent of the protocol"))
        elif channel not in channels:
            known = ", ".join(channels)
            problems.append(Problem("", f"{agent} speaks in the unknown channel {channel}; the channels are {known}"))
        elif agent not in channels[channel]:
            problems.append(Problem("", f"{agent} speaks in the channel {channel} but does not see it"))
    return problems + (_find_silent_agents(handler) if turns else [Problem("", "no agent has a turn")])


def _find_silent_agents(handler: ProtocolHandler) -> list[Problem]:
    problems, rounds = [], handler.max_message_rounds
    speaking = {agent for round_ in range(rounds) for agent, _ in handler.turns_in_round(round_)}
    cycle = [{agent for agent, _ in round_} for round_ in handler.turns()]
    for name in handler.agent_names:
        if name in speaking:
            continue
        first = next((number for number, speakers in enumerate(cycle, 1) if name in speakers), None)
        fix = f"set it to {first} or more" if first else "give it a turn, or remove it"
        path = "max_message_rounds" if first else "agents"
        problems.append(Problem(path, f"{name} never speaks in {rounds} round{'s' * (rounds != 1)}", fix))
    judge = handler.verifier_names[:1]
    may_decide = range(handler.min_message_rounds - 1, rounds)
    if judge and judge[0] in speaking and not any(judge[0] in cycle[round_ % len(cycle)] for round_ in may_decide):
        message = f"{judge[0]} has no turn in rounds {handler.min_message_rounds} to {rounds}, so it can never decide"
        problems.append(Problem("min_message_rounds", message, "lower it, or raise max_message_rounds"))
    return problems


def _find_name_problems(handler: ProtocolHandler) -> list[Problem]:
    configured, name = handler.config.agents, handler.config.static_type
    known = ", ".join(handler.agent_names)
    problems = [
        Problem(f"agents.{agent}", f"the protocol {name} has no agent {agent}", f"use one of: {known}")
        for agent in configured
        if agent not in handler.agent_names
    ]
    if missing := [agent for agent in handler.agent_names if agent not in configured]:
        message = f"the protocol {name} needs the agents {', '.join(missing)}"
        problems.append(Problem("agents", message, "add a block for each, with a prompt"))
    return problems


def _build_agent(name: str, parameters: AgentParameters, builder: Builder) -> PureTextWholeAgent:
    llms, problems = builder.config.llms, []
    entry = parameters.llm or (next(iter(llms)) if len(llms) == 1 else None)
    if entry not in llms:
        message = f"{entry!r} is not an entry of llms" if entry else "the agent names no entry of llms"
        fix = f"use one of: {', '.join(llms)}" if llms else "add an entry to llms"
        problems.append(Problem(f"agents.{name}.llm", message, fix))
    if parameters.prompt_file is not None:
        file = Path(builder.project_root, parameters.prompt_file)
        if file.is_file():
            parameters = parameters.model_copy(update={"prompt": file.read_text(encoding="utf-8")})
        else:
            problems.append(Problem(f"agents.{name}.prompt_file", f"file not found: {file}"))
    if problems:
        raise ConfigError(problems)
    is_policy = llms[str(entry)].static_type == "policy"
    group = getattr(llms[str(entry)], "adapter", None)
    return PureTextWholeAgent(name, parameters, llm=str(entry), is_trainable=is_policy, model_group=group)


def _find_builder_problems(builder: Builder) -> list[Problem]:
    """Returns the problem of a trajectory builder that would train all replies as one agent's."""
    config = builder.config.finetuning
    settings = builder.config.trajectory_builders.get(str(config.trajectory_builder))
    if not config.enabled or settings is None or settings.static_type not in SINGLE_AGENT_BUILDERS:
        return []
    message = (
        f"`{settings.static_type}` would train on all replies, even invalid ones, as if one agent had written them"
    )
    path = f"trajectory_builders.{config.trajectory_builder}._type"
    return [Problem(path, message, "use `agents`: each agent has its own view and its own reward")]
