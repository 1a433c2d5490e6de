"""The workflow behind every protocol: one dialogue, or while it is trained on, a tree of them.

In a tree each round is said `num_responses` times, and each time is a branch. A reply is worth what its agent earns on
average over the dialogues that follow from it (MALT, arXiv:2412.01928, section 4.2).
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reinforge.errors import ConfigError, Problem
from reinforge.multiagent.agents import PureTextWholeAgent
from reinforge.multiagent.dialogue import Dialogue, Message
from reinforge.multiagent.dialogue import Problem as Question
from reinforge.multiagent.protocol import ProtocolHandler, Turn
from reinforge.rollout.workflow import BoundWorkflow, PolicyFailure, bind_workflow


class ProtocolOutput(dict[str, Any]):
    """What was said and what came of it, ready for JSON; as text it is the transcript.

    protocol, question, truth, stances     the problem
    agents      {name: {llm, trained, model_group}}
    messages    [{path, round, agent, channel, text, shown, call_id, num_retries}]
    branches    [{path, decision, terminated, rewards, failed}]; one unless it is a tree
    num_invalid replies that were drawn anew

    A message's path are the branches that lead to it, its own the last: a branch's messages are those whose path begins
    its own. `rewards` leaves out agents whose reward is not known, where another one failed.
    """

    def __str__(self) -> str:
        first = self["branches"][0]
        said = [m for m in self["messages"] if first["path"][: len(m["path"])] == m["path"]]
        lines = [f"{m['agent']}: {m['shown']}" for m in said]
        return "\n".join([*lines, f"decision: {first['decision']}"])


@dataclass(slots=True)
class _Branch:
    """One dialogue of a tree; `failed` says which agent gave no valid reply, and why."""

    dialogue: Dialogue
    path: list[int] = field(default_factory=list)
    failed: tuple[str, str] | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Asked:
    """One reply that a branch waits for."""

    branch: int
    turn: Turn
    messages: list[dict[str, Any]]
    reply: Any = None
    text: str = ""
    refused: str | None = None
    num_retries: int = 0


class ProtocolWorkflow:
    """Lets the agents of a protocol talk.

    Args:
        handler: The protocol.
        agents: Its agents by name.
        penalty: What an agent earns that gives no valid reply.
    """

    def __init__(self, handler: ProtocolHandler, agents: Mapping[str, PureTextWholeAgent], penalty: float = 0.0):
        self.handler, self.agents, self.penalty = handler, dict(agents), penalty

    async def __call__(self, item: Any, llm: Any, context: Any) -> ProtocolOutput:
        """Returns the dialogue.

        Args:
            item: The example; `expected_output_obj` is the right decision.
            llm: The first agent's model.
            context: Its `is_training` says whether to grow a tree.

        Raises:
            PolicyFailure: An agent gave no valid reply; in a tree, on every branch.
        """
        problem = Question.of(item)
        stances = self.handler.stances(problem, context.random("stances"))
        width = self.handler.config.num_responses if context.is_training else 1
        level, ended, said, num_invalid = [_Branch(Dialogue(problem, stances))], list[_Branch](), list[dict](), 0
        while level:
            grown, asked = await self._round(level, width, context)
            said += [_as_dict(one, grown[one.branch]) for one in asked if one.refused is None]
            num_invalid += sum(one.num_retries + (one.refused is not None) for one in asked)
            ended += [branch for branch in grown if branch.failed or branch.dialogue.step.done]
            level = [branch for branch in grown if not (branch.failed or branch.dialogue.step.done)]
        ended.sort(key=lambda branch: branch.path)
        for branch in ended:
            branch.rewards = await self._settle(branch, item)
        output = self._output(problem, stances, ended, said, num_invalid)
        if width > 1:
            self._mark(output, context)
        failures = [branch.failed for branch in ended if branch.failed]
        if len(failures) == len(ended):
            agent, reason = failures[0]
            raise PolicyFailure(f"{agent}: {reason}", output)
        return output

    async def _round(self, level: Sequence[_Branch], width: int, context: Any) -> tuple[list[_Branch], list[_Asked]]:
        """Returns every branch after one more round, `width` of each, and what was asked for in it."""
        grown = [
            _Branch(branch.dialogue, [*branch.path, index] if width > 1 else branch.path)
            for branch in level
            for index in range(width)
        ]
        asked = [
            _Asked(number, turn, self.agents[turn[0]].messages(branch.dialogue, self.handler, turn[1]))
            for number, branch in enumerate(grown)
            for turn in self.handler.speakers(branch.dialogue.round)
        ]
        waiting = asked
        while waiting:
            await asyncio.gather(*(self._ask(one, grown[one.branch].dialogue, context) for one in waiting))
            waiting = [one for one in waiting if one.refused is not None and self._may_retry(one)]
            for one in waiting:
                one.num_retries += 1
        for number, branch in enumerate(grown):
            own = [one for one in asked if one.branch == number]
            bad = next((one for one in own if one.refused is not None), None)
            if bad is not None:
                branch.failed = (bad.turn[0], str(bad.refused))
                continue
            dialogue = branch.dialogue.after(tuple(self._message(one, branch.dialogue) for one in own))
            branch.dialogue = dialogue.ended(self.handler.step_interaction_protocol(dialogue))
        return grown, asked

    async def _ask(self, one: _Asked, dialogue: Dialogue, context: Any) -> None:
        agent = self.agents[one.turn[0]]
        model = context.llm(agent.llm)
        one.reply = await model.chat.completions.create(messages=one.messages, **agent.arguments())
        one.text = str(one.reply.choices[0].message.content or "")
        one.refused = self.handler.refuse(agent.name, one.text, dialogue)

    def _may_retry(self, one: _Asked) -> bool:
        return one.num_retries < self.agents[one.turn[0]].parameters.num_invalid_generation_retries

    def _message(self, one: _Asked, dialogue: Dialogue) -> Message:
        agent, channel = one.turn
        shown = self.handler.shown(agent, channel, one.text, dialogue)
        return Message(dialogue.round, agent, channel, one.text, shown, one.reply.id, one.num_retries)

    async def _settle(self, branch: _Branch, item: Any) -> Mapping[str, float]:
        """Returns what each agent earns; where one gave no valid reply, that of the others is not known."""
        if branch.failed is not None:
            return {branch.failed[0]: self.penalty}
        return await self.handler.settle(branch.dialogue, item)

    def _mark(self, output: ProtocolOutput, context: Any) -> None:
        """Marks each reply with what its agent earns on average over the dialogues that follow from it."""
        for message in output["messages"]:
            path, agent = message["path"], message["agent"]
            following = [b["rewards"] for b in output["branches"] if b["path"][: len(path)] == path]
            known = [rewards[agent] for rewards in following if agent in rewards]
            if known:
                context.mark(step_reward=statistics.fmean(known), call_id=message["call_id"])

    def _output(
        self,
        problem: Question,
        stances: Mapping[str, str],
        ended: Sequence[_Branch],
        said: Sequence[dict[str, Any]],
        num_invalid: int,
    ) -> ProtocolOutput:
        return ProtocolOutput(
            protocol=str(self.handler.config.static_type),
            question=problem.question,
            truth=problem.truth,
            stances=dict(stances),
            agents={
                agent.name: {"llm": agent.llm, "trained": agent.is_trainable, "model_group": agent.model_group}
                for agent in self.agents.values()
            },
            messages=list(said),
            branches=[
                {
                    "path": branch.path,
                    "decision": branch.dialogue.step.decision,
                    "terminated": branch.dialogue.step.terminated,
                    "rewards": dict(branch.rewards),
                    "failed": list(branch.failed) if branch.failed else None,
                }
                for branch in ended
            ],
            num_invalid=num_invalid,
        )


def _as_dict(one: _Asked, branch: _Branch) -> dict[str, Any]:
    """Returns a valid reply as the output keeps it."""
    failed = branch.failed is not None
    dialogue = branch.dialogue
    round_ = dialogue.round if failed else dialogue.round - 1
    shown = one.text
    if not failed:
        shown = next(m.shown for m in dialogue.said_in(round_) if (m.agent, m.channel) == one.turn)
    return {
        "path": branch.path,
        "round": round_,
        "agent": one.turn[0],
        "channel": one.turn[1],
        "text": one.text,
        "shown": shown,
        "call_id": one.reply.id,
        "num_retries": one.num_retries,
    }


async def protocol_workflow(handler: ProtocolHandler, builder: Any) -> BoundWorkflow:
    """Returns a protocol ready to run, with the agents that its configuration describes.

    Raises:
        ConfigError: Agents are missing or unknown, or an entry of `llms` is, with every problem at once.
    """
    config, llms = handler.config, builder.config.llms
    problems = [
        Problem(f"agents.{name}", f"the protocol {config.static_type} has no agent {name}", "remove it")
        for name in config.agents
        if name not in handler.agent_names
    ]
    missing = [name for name in handler.agent_names if name not in config.agents]
    if missing:
        message = f"the protocol {config.static_type} needs the agents {', '.join(missing)}"
        problems.append(Problem("agents", message, "describe each: at least its prompt"))
    agents: dict[str, PureTextWholeAgent] = {}
    for name, parameters in config.agents.items():
        entry = parameters.llm or (next(iter(llms)) if len(llms) == 1 else None)
        if entry is None or entry not in llms:
            message = f"{entry!r} is not under llms" if entry else "it does not say which entry of llms it speaks by"
            problems.append(Problem(f"agents.{name}.llm", message, f"there: {', '.join(llms) or 'none'}"))
            continue
        if parameters.prompt_file is not None:
            file = Path(builder.project_root, parameters.prompt_file)
            if not file.is_file():
                problems.append(Problem(f"agents.{name}.prompt_file", f"there is no file {file}"))
                continue
            parameters = parameters.model_copy(update={"prompt": file.read_text()})
        is_policy = llms[entry].static_type == "policy"
        group = getattr(llms[entry], "adapter", None)
        agents[name] = PureTextWholeAgent(name, parameters, llm=entry, is_trainable=is_policy, model_group=group)
    if problems:
        raise ConfigError(problems)
    if not any(agent.is_trainable for agent in agents.values()) and builder.config.finetuning.enabled:
        message = "no agent can be trained: all are frozen, or none speaks by an entry `_type: policy`"
        raise ConfigError(Problem("agents", message, "leave one with freeze_agent: false"))
    ordered = {name: agents[name] for name in handler.agent_names}
    workflow = ProtocolWorkflow(handler, ordered, builder.config.finetuning.outcomes.policy_error)
    return bind_workflow(workflow, next(iter(ordered.values())).llm)
