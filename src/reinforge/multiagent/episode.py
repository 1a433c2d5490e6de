"""The workflow behind every protocol: one dialogue, or while it is trained on, a tree of them.

In a tree each round in which a trained agent speaks is said `num_responses` times, and each time is a branch. A reply
is worth what its agent earns on average over the dialogues that follow from it (MALT, arXiv:2412.01928).

    num_responses 2; A is trained, B is not
    A: x [0]   B: p [0]   A: u [0, 0]  A: v [0, 1]
    A: y [1]   B: q [1]   A: w [1, 0]  A: z [1, 1]      four dialogues; what x is worth is the mean of those of u and v
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reinforge.errors import EvaluationError, describe_error
from reinforge.errors import Problem as Wrong
from reinforge.interfaces import ContextOverflow
from reinforge.multiagent.agents import PureTextWholeAgent
from reinforge.multiagent.dialogue import Dialogue, Message
from reinforge.multiagent.protocol import ProtocolHandler, Turn
from reinforge.rollout.workflow import PolicyFailure
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.request import Message as ChatMessage


class ProtocolOutput(dict[str, Any]):
    """What was said and what came of it, ready for JSON; as text it is a team's answer, or the transcript.

    protocol, question, truth, stances     the problem
    absent, order                          who does not speak, and in which order those are told who speak at once
    agents      {name: {llm, trained, model_group}}
    messages    [{path, round, agent, channel, text, shown, call_id, num_retries, refused}]
    branches    [{path, decision, terminated, answer, rewards, failed}]; one unless it is a tree
    num_invalid replies that were refused: drawn anew, or the last straw

    A message's path are the branches that lead to it, its own the last: a branch's messages are those whose path begins
    its own; all are [] where there is one branch. `rewards` leaves out agents whose reward nobody can tell, such as the
    others of a branch in which one gave no valid reply: `failed` is its name and why, and its last reply is among the
    messages, `refused`, since that is what it is penalised for.
    """

    def __str__(self) -> str:
        first = self["branches"][0]
        if first["answer"] is not None:
            return str(first["answer"])
        said = [m for m in self["messages"] if first["path"][: len(m["path"])] == m["path"] and not m["refused"]]
        lines = [f"{m['agent']}: {m['shown']}" for m in said]
        return "\n".join([*lines, f"decision: {first['decision']}"])


@dataclass(slots=True)
class _Branch:
    """One dialogue of a tree; `failed` says which agent gave no valid reply, and why."""

    dialogue: Dialogue
    path: list[int] = field(default_factory=list)
    failed: tuple[str, str] | None = None
    overflow: ContextOverflow | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Asked:
    """One reply that a branch waits for: its message, or why the last one was refused or could not be asked for.

    Attributes:
        last: The last reply; where it was refused, what its agent is penalised for.
    """

    turn: Turn
    messages: list[ChatMessage]
    dialogue: Dialogue
    refused: str | None = None
    num_retries: int = 0
    overflow: ContextOverflow | None = None
    last: Message | None = None

    @property
    def message(self) -> Message | None:
        """The valid reply."""
        return self.last if self.refused is None else None

    @property
    def num_invalid(self) -> int:
        """Replies that were refused."""
        return self.num_retries + (self.refused is not None and self.overflow is None)


class ProtocolWorkflow:
    """Lets the agents of a protocol talk.

    Args:
        handler: The protocol.
        agents: Its agents by name.
        penalty: What an agent earns that gives no valid reply.
    """

    def __init__(self, handler: ProtocolHandler, agents: Mapping[str, PureTextWholeAgent], penalty: float = 0.0):
        self.handler, self.agents, self.penalty = handler, dict(agents), penalty
        told = [name if agent.is_trainable else f"{name} (frozen)" for name, agent in self.agents.items()]
        self.__qualname__ = f"{type(handler).__name__}: {', '.join(told)}"  # what a run prints as its agent

    async def __call__(self, item: Any, llm: Any, context: Any) -> ProtocolOutput:
        """Returns the dialogue.

        Args:
            item: The example; `expected_output_obj` is the right decision.
            llm: The first agent's model.
            context: Its `is_training` says whether to grow a tree.

        Raises:
            PolicyFailure: An agent gave no valid reply; in a tree, on every branch.
            ContextOverflow: The same, and a prompt was longer than the context.
        """
        opening = self._opening(item, context)
        width = self.handler.config.num_responses if context.is_training else 1
        level, ended, said, num_invalid = [_Branch(opening)], list[_Branch](), list[dict[str, Any]](), 0
        while level:
            grown, asked = await self._round(level, width, context)
            for branch, replies in zip(grown, asked, strict=True):
                messages = [one.last for one in replies if one.last is not None]
                said += [{"path": branch.path, **_as_dict(message)} for message in messages]
                num_invalid += sum(one.num_invalid for one in replies)
            ended += [branch for branch in grown if branch.failed or branch.dialogue.step.done]
            level = [branch for branch in grown if not (branch.failed or branch.dialogue.step.done)]
        ended.sort(key=lambda branch: branch.path)
        await _all(self._settle(branch, item) for branch in ended)
        output = self._output(opening, ended, said, num_invalid)
        if len(ended) > 1:
            self._mark(output, context)
        failures = [branch.failed for branch in ended if branch.failed]
        if len(failures) == len(ended):
            if overflow := next((branch.overflow for branch in ended if branch.overflow), None):
                raise overflow
            agent, reason = failures[0]
            raise PolicyFailure(f"{agent}: {reason}", output)
        return output

    def example_problems(self, items: Sequence[EvalInputItem]) -> list[Wrong]:
        """Returns what is wrong with examples before any is talked about: the first of each kind."""
        problems = dict[str, Wrong]()
        for item in items:
            try:
                problem = self.handler.problem(item)
            except Exception as error:  # noqa: BLE001  whatever a user's protocol raises about a row is wrong with the row
                told = (
                    str(error) if isinstance(error, EvaluationError) else f"example {item.id}: {describe_error(error)}"
                )
                problems.setdefault("", Wrong("eval.general.dataset", told))
                continue
            if self.handler.needs_truth and problem.truth is None:
                message = f"example {item.id} does not say what is right, and the protocol needs it"
                problems.setdefault("", Wrong("eval.general.dataset", message, "give every row an answer"))
            for name in self.agents.keys() - problems.keys():
                if found := self.agents[name].prompt_problem(problem, item.id):
                    problems[name] = found
        return [problems[name] for name in ("", *self.agents) if name in problems]

    def _opening(self, item: EvalInputItem, context: Any) -> Dialogue:
        """Returns what an episode begins with; what is drawn for it is the world's, equal for siblings."""
        handler, problem = self.handler, self.handler.problem(item)
        return Dialogue(
            problem,
            stances=handler.stances(problem, context.random("stances")),
            absent=handler.absent(problem, context.random("absent")),
            order=handler.order(problem, context.random("order")),
        )

    async def _round(
        self, level: Sequence[_Branch], width: int, context: Any
    ) -> tuple[list[_Branch], list[list[_Asked]]]:
        """Returns every branch after one more round, `width` of each, and what was asked for on each."""
        turns = self.handler.active(level[0].dialogue)
        times = width if any(self.agents[name].is_trainable for name, _ in turns) else 1
        grown, asked = list[_Branch](), list[list[_Asked]]()
        for branch in level:
            prompts = [self.agents[name].messages(branch.dialogue, self.handler, channel) for name, channel in turns]
            for index in range(times):
                grown.append(_Branch(branch.dialogue, [*branch.path, index] if times > 1 else branch.path))
                asked.append([_Asked(turn, p, branch.dialogue) for turn, p in zip(turns, prompts, strict=True)])
        waiting = [one for replies in asked for one in replies]
        while waiting:  # all at once and in this order, so that no seed depends on who answers first
            await _all(self._ask(one, context) for one in waiting)
            waiting = [one for one in waiting if one.refused is not None and self._may_retry(one)]
            for one in waiting:
                one.num_retries += 1
        for branch, replies in zip(grown, asked, strict=True):
            self._say(branch, replies)
        return grown, asked

    async def _ask(self, one: _Asked, context: Any) -> None:
        (name, channel), dialogue, agent = one.turn, one.dialogue, self.agents[one.turn[0]]
        create = context.llm(agent.llm).chat.completions.create
        try:
            reply = await create(messages=one.messages, **agent.arguments())
        except ContextOverflow as overflow:
            one.overflow, one.refused = overflow, str(overflow)
            return
        text = str(reply.choices[0].message.content or "")
        one.refused = self.handler.refuse(name, text, dialogue)
        shown = self.handler.shown(name, channel, text, dialogue) if one.refused is None else ""
        one.last = Message(dialogue.round, name, channel, text, shown, reply.id, one.num_retries, one.refused)

    def _may_retry(self, one: _Asked) -> bool:
        return (
            one.overflow is None
            and one.num_retries < self.agents[one.turn[0]].parameters.num_invalid_generation_retries
        )

    def _say(self, branch: _Branch, replies: Sequence[_Asked]) -> None:
        """Goes on with a branch by what was said, or ends it where somebody gave no valid reply."""
        bad = next((one for one in replies if one.refused is not None), None)
        if bad is not None:
            times = f", {bad.num_invalid} times" if bad.overflow is None else ""
            branch.failed, branch.overflow = (bad.turn[0], f"{bad.refused}{times}"), bad.overflow
            return
        dialogue = branch.dialogue.after(tuple(one.message for one in replies if one.message))
        step = self.handler.step_interaction_protocol(dialogue)
        if not step.done and dialogue.round >= self.handler.max_message_rounds:
            step = replace(step, done=True, terminated=True)
        branch.dialogue = dialogue.ended(step)

    async def _settle(self, branch: _Branch, item: Any) -> None:
        """Says what each agent earns; where one gave no valid reply, that of the others is not known."""
        if branch.failed is not None:
            branch.rewards = {branch.failed[0]: self.penalty}
        else:
            branch.rewards = await self.handler.settle(branch.dialogue, item)

    def _mark(self, output: ProtocolOutput, context: Any) -> None:
        """Marks each reply with what its agent earns on average over the dialogues that follow from it."""
        following: dict[tuple[int, ...], list[Mapping[str, float]]] = {}
        for branch in output["branches"]:
            path = tuple(branch["path"])
            for end in range(len(path) + 1):
                following.setdefault(path[:end], []).append(branch["rewards"])
        for message in output["messages"]:
            agent = message["agent"]
            known = [rewards[agent] for rewards in following[tuple(message["path"])] if agent in rewards]
            if known:
                context.mark(step_reward=statistics.fmean(known), call_id=message["call_id"])

    def _output(
        self, opening: Dialogue, ended: Sequence[_Branch], said: Sequence[dict[str, Any]], num_invalid: int
    ) -> ProtocolOutput:
        return ProtocolOutput(
            protocol=str(self.handler.config.static_type),
            question=opening.problem.question,
            truth=opening.problem.truth,
            stances=dict(opening.stances),
            absent=sorted(opening.absent),
            order=list(opening.order),
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
                    "answer": None if branch.failed else self.handler.answer(branch.dialogue),
                    "rewards": dict(branch.rewards),
                    "failed": list(branch.failed) if branch.failed else None,
                }
                for branch in ended
            ],
            num_invalid=num_invalid,
        )


def _as_dict(message: Message) -> dict[str, Any]:
    return {name: getattr(message, name) for name in Message.__slots__}


async def _all(waiting: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Waits for all; where one fails, nobody waits for the others."""
    tasks = [asyncio.ensure_future(each) for each in waiting]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
