"""A protocol made ready from its configuration; everything about it that cannot work is refused before work starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reinforge.errors import ConfigError, Problem
from reinforge.multiagent.agent_parameters import AgentParameters
from reinforge.multiagent.agents import PureTextWholeAgent
from reinforge.multiagent.episode import ProtocolWorkflow
from reinforge.multiagent.protocol import ProtocolHandler
from reinforge.rollout.workflow import BoundWorkflow, bind_workflow

ONE_VIEW = ("group", "tree")
"""Builders that take an episode for the view of one agent."""


async def protocol_workflow(handler: ProtocolHandler, builder: Any) -> BoundWorkflow:
    """Returns a protocol ready to run, with the agents that its configuration describes.

    Raises:
        ConfigError: Agents are missing or unknown, an entry of `llms` is, or somebody never speaks or never decides,
            with every problem at once.
    """
    problems = [*protocol_problems(handler), *_names(handler), *_builder_problems(builder)]
    agents: dict[str, PureTextWholeAgent] = {}
    for name, parameters in handler.config.agents.items():
        try:
            agents[name] = _agent(name, parameters, builder)
        except ConfigError as error:
            problems += error.problems
    try:
        await handler.prepare(builder)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    config = builder.config.finetuning
    if config.enabled and not any(agent.is_trainable for agent in agents.values()):
        message = "no agent can be trained: all are frozen, or none speaks by an entry `_type: policy`"
        raise ConfigError(Problem("agents", message, "leave one with freeze_agent: false"))
    ordered = {name: agents[name] for name in handler.agent_names}
    workflow = ProtocolWorkflow(handler, ordered, config.outcomes.policy_error)
    return bind_workflow(workflow, next(iter(ordered.values())).llm)


def protocol_problems(handler: ProtocolHandler) -> list[Problem]:
    """Returns what is wrong with a protocol itself: nobody in a round, a channel that is not there, a silent agent."""
    channels, problems = handler.channels(), list[Problem]()
    for channel, members in channels.items():
        problems += [
            Problem("", f"the channel {channel} is seen by {name}, which is no agent of the protocol")
            for name in members
            if name not in handler.agent_names
        ]
    cycle = handler.turns()
    turns = list(dict.fromkeys(turn for round_ in cycle for turn in round_))
    for agent, channel in turns:
        if agent not in handler.agent_names:
            problems.append(Problem("", f"{agent} is given a turn and is no agent of the protocol"))
        elif channel not in channels:
            known = ", ".join(channels)
            problems.append(Problem("", f"{agent} speaks in the channel {channel}; the channels are {known}"))
        elif agent not in channels[channel]:
            problems.append(Problem("", f"{agent} speaks in the channel {channel}, which it does not see"))
    return problems + (_silent(handler) if turns else [Problem("", "nobody is ever given a turn")])


def _silent(handler: ProtocolHandler) -> list[Problem]:
    """Returns who never speaks, and whether nobody can decide."""
    problems, rounds = [], handler.max_message_rounds
    heard = {agent for round_ in range(rounds) for agent, _ in handler.speakers(round_)}
    cycle = [{agent for agent, _ in round_} for round_ in handler.turns()]
    for name in handler.agent_names:
        if name in heard:
            continue
        first = next((number for number, speakers in enumerate(cycle, 1) if name in speakers), None)
        fix = f"set it to {first} or more" if first else "give it a turn, or leave it out"
        path = "max_message_rounds" if first else "agents"
        problems.append(Problem(path, f"{name} never speaks: there are {rounds} rounds", fix))
    judge = handler.verifier_names[:1]
    may_decide = range(handler.min_message_rounds - 1, rounds)
    if judge and judge[0] in heard and not any(judge[0] in cycle[round_ % len(cycle)] for round_ in may_decide):
        message = f"{judge[0]} speaks in none of the rounds {handler.min_message_rounds} to {rounds} and never decides"
        problems.append(Problem("min_message_rounds", message, "lower it, or raise max_message_rounds"))
    return problems


def _names(handler: ProtocolHandler) -> list[Problem]:
    """Returns what is wrong with the names under `agents`."""
    given, name = handler.config.agents, handler.config.static_type
    known = ", ".join(handler.agent_names)
    problems = [
        Problem(f"agents.{agent}", f"the protocol {name} has no agent {agent}", f"its agents are {known}")
        for agent in given
        if agent not in handler.agent_names
    ]
    if missing := [agent for agent in handler.agent_names if agent not in given]:
        message = f"the protocol {name} needs the agents {', '.join(missing)}"
        problems.append(Problem("agents", message, "describe each: at least its prompt"))
    return problems


def _agent(name: str, parameters: AgentParameters, builder: Any) -> PureTextWholeAgent:
    """Returns one agent.

    Raises:
        ConfigError: The model or the file that it names is not there.
    """
    llms, problems = builder.config.llms, []
    entry = parameters.llm or (next(iter(llms)) if len(llms) == 1 else None)
    if entry not in llms:
        message = f"{entry!r} is not under llms" if entry else "it does not say which entry of llms it speaks by"
        problems.append(Problem(f"agents.{name}.llm", message, f"there: {', '.join(llms) or 'none'}"))
    if parameters.prompt_file is not None:
        file = Path(builder.project_root, parameters.prompt_file)
        if file.is_file():
            parameters = parameters.model_copy(update={"prompt": file.read_text(encoding="utf-8")})
        else:
            problems.append(Problem(f"agents.{name}.prompt_file", f"there is no file {file}"))
    if problems:
        raise ConfigError(problems)
    is_policy = llms[entry].static_type == "policy"
    group = getattr(llms[entry], "adapter", None)
    return PureTextWholeAgent(name, parameters, llm=str(entry), is_trainable=is_policy, model_group=group)


def _builder_problems(builder: Any) -> list[Problem]:
    """Returns the problem of a trajectory builder that would train all that is said as one agent's."""
    config = builder.config.finetuning
    settings = builder.config.trajectory_builders.get(config.trajectory_builder)
    if not config.enabled or settings is None or settings.static_type not in ONE_VIEW:
        return []
    message = f"`{settings.static_type}` would train every reply as one agent's, invalid ones too, by one reward"
    path = f"trajectory_builders.{config.trajectory_builder}._type"
    return [Problem(path, message, "use `agents`: each agent's own view, by its own reward")]
