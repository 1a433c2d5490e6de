"""The workflow of every protocol: one dialogue, or during training a tree of dialogues.

In a tree, each round in which a trained agent speaks is sampled `num_responses` times, and each sample is a branch. A
reply's value is its agent's mean reward over the dialogues that continue from it (MALT, arXiv:2412.01928).

    num_responses 2; A is trained, B is not
    A: x [0]   B: p [0]   A: u [0, 0]  A: v [0, 1]
    A: y [1]   B: q [1]   A: w [1, 0]  A: z [1, 1]      four dialogues; the value of x is the mean over u and v
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from reinforge.errors import ContextOverflow, EvaluationError, Problem, describe_error
from reinforge.multiagent.agents import PureTextWholeAgent
from reinforge.multiagent.dialogue import Dialogue, Message
from reinforge.multiagent.protocol import ProtocolHandler, Turn
from reinforge.rollout.workflow import PolicyFailure
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.request import Message as ChatMessage


class ProtocolOutput(dict[str, Any]):
    """The messages and the result of an episode, ready for JSON; `str()` is a team's answer, or the transcript.

    protocol, question, truth, stances     the problem
    absent, order                          agents that do not speak, and the delivery order within a round
    agents      {name: {llm, trained, model_group}}
    messages    [{path, round, agent, channel, text, shown, call_id, num_retries, refused, token_limit}]
    branches    [{path, decision, terminated, answer, rewards, failed}]; one unless it is a tree
    num_invalid number of invalid replies

    A message's path lists the branches that lead to it, its own last: a branch contains the messages whose path is a
    prefix of its own. With a single branch every path is []. `rewards` leaves out agents whose reward is unknown. If an
    agent gives no valid reply, `failed` is its name and the reason, the rewards of the other agents on that branch are
    unknown, and the agent's last reply stays among the messages with `refused` set, because it is penalized for it.
    """

    def __str__(self) -> str:
        first = self["branches"][0]
        if first["answer"] is not None:
            return str(first["answer"])
        valid = [m for m in self["messages"] if first["path"][: len(m["path"])] == m["path"] and not m["refused"]]
        lines = [f"{m['agent']}: {m['shown']}" for m in valid]
        return "\n".join([*lines, f"decision: {first['decision']}"])


@dataclass(slots=True)
class _DialogueBranch:
    """One dialogue of a tree; `failed` is the agent that gave no valid reply, and the reason."""

    dialogue: Dialogue
    path: list[int] = field(default_factory=list)
    failed: tuple[str, str] | None = None
    overflow: ContextOverflow | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class _PendingReply:
    """A reply that a branch waits for."""

    turn: Turn
    messages: list[ChatMessage]  # the prompt
    dialogue: Dialogue
    invalid_reason: str | None = None  # why the last reply is invalid or could not be sampled; None if it is valid
    num_retries: int = 0  # invalid replies before the last one
    overflow: ContextOverflow | None = None  # set if the prompt does not fit the context
    last: Message | None = None  # the last reply, valid or not; its agent is penalized for an invalid one

    @property
    def message(self) -> Message | None:
        return self.last if self.invalid_reason is None else None

    @property
    def num_invalid(self) -> int:
        return self.num_retries + (self.invalid_reason is not None and self.overflow is None)


class ProtocolWorkflow:
    """Runs the dialogues of a protocol.

    Args:
        penalty: Reward of an agent that gives no valid reply.
        first_tree_epoch: Epochs before this one collect single dialogues.
    """

    def __init__(
        self,
        handler: ProtocolHandler,
        agents: Mapping[str, PureTextWholeAgent],
        penalty: float = 0.0,
        *,
        first_tree_epoch: int = 0,
    ):
        self.handler, self.agents, self.penalty = handler, dict(agents), penalty
        self.first_tree_epoch = first_tree_epoch
        names = [name if agent.is_trainable else f"{name} (frozen)" for name, agent in self.agents.items()]
        self.__qualname__ = f"{type(handler).__name__}: {', '.join(names)}"  # a run prints this as its agent

    async def __call__(self, item: Any, llm: Any, context: Any) -> ProtocolOutput:
        """Returns the output of one episode.

        Raises:
            PolicyFailure: An agent gave no valid reply; in a tree, on every branch.
            ContextOverflow: The same, because a prompt was longer than the context.
        """
        opening = self._open_dialogue(item, context)
        grows_tree = context.is_training and context.epoch >= self.first_tree_epoch
        width = self.handler.config.num_responses if grows_tree else 1
        level, ended, messages, num_invalid = [_DialogueBranch(opening)], list[_DialogueBranch](), list[dict](), 0
        while level:
            grown, pending = await self._play_round(level, width, context)
            for branch, replies in zip(grown, pending, strict=True):
                messages += [{"path": branch.path, **asdict(reply.last)} for reply in replies if reply.last is not None]
                num_invalid += sum(reply.num_invalid for reply in replies)
            ended += [branch for branch in grown if branch.failed or branch.dialogue.step.done]
            level = [branch for branch in grown if not (branch.failed or branch.dialogue.step.done)]
        ended.sort(key=lambda branch: branch.path)
        await _gather(self._settle_rewards(branch, item) for branch in ended)
        output = self._build_output(opening, ended, messages, num_invalid)
        if len(ended) > 1:
            self._mark_reply_values(output, context)
        failures = [branch.failed for branch in ended if branch.failed]
        if len(failures) == len(ended):
            if overflow := next((branch.overflow for branch in ended if branch.overflow), None):
                raise overflow
            agent, reason = failures[0]
            raise PolicyFailure(f"{agent}: {reason}", output)
        return output

    def example_problems(self, items: Sequence[EvalInputItem]) -> list[Problem]:
        """Returns what is wrong with the examples, the first problem of each kind, before any episode runs."""
        problems = dict[str, Problem]()
        for item in items:
            try:
                problem = self.handler.parse_problem(item)
            except Exception as error:  # noqa: BLE001  a user's protocol may raise anything about a bad row
                is_ours = isinstance(error, EvaluationError)
                message = str(error) if is_ours else f"example {item.id}: {describe_error(error)}"
                problems.setdefault("", Problem("eval.general.dataset", message))
                continue
            if self.handler.needs_truth and problem.truth is None:
                message = f"example {item.id} has no right decision, which this protocol needs"
                problems.setdefault("", Problem("eval.general.dataset", message, "give every row an answer"))
            for name in self.agents.keys() - problems.keys():
                if found := self.agents[name].find_prompt_problem(problem, item.id):
                    problems[name] = found
        return [problems[name] for name in ("", *self.agents) if name in problems]

    def _open_dialogue(self, item: EvalInputItem, context: Any) -> Dialogue:
        """Returns the empty dialogue of an episode; its random choices are the environment's, equal for siblings."""
        handler, problem = self.handler, self.handler.parse_problem(item)
        return Dialogue(
            problem,
            stances=handler.stances(problem, context.random("stances")),
            absent=handler.absent(problem, context.random("absent")),
            order=handler.order(problem, context.random("order")),
        )

    async def _play_round(
        self, level: Sequence[_DialogueBranch], width: int, context: Any
    ) -> tuple[list[_DialogueBranch], list[list[_PendingReply]]]:
        grown, pending = list[_DialogueBranch](), list[list[_PendingReply]]()
        for branch in level:
            turns = self.handler.active_turns(branch.dialogue)
            times = width if any(self.agents[name].is_trainable for name, _ in turns) else 1
            dialogue = branch.dialogue
            prompts = [(turn, self.agents[turn[0]].build_messages(dialogue, self.handler, turn[1])) for turn in turns]
            for index in range(times):
                grown.append(_DialogueBranch(dialogue, [*branch.path, index] if times > 1 else branch.path))
                pending.append([_PendingReply(turn, prompt, dialogue) for turn, prompt in prompts])
        waiting = [reply for replies in pending for reply in replies]
        while waiting:  # concurrently, but started in this order: no seed depends on which reply comes first
            await _gather(self._sample_reply(reply, context) for reply in waiting)
            waiting = [reply for reply in waiting if reply.invalid_reason is not None and self._may_retry(reply)]
            for reply in waiting:
                reply.num_retries += 1
        for branch, replies in zip(grown, pending, strict=True):
            self._advance_branch(branch, replies)
        return grown, pending

    async def _sample_reply(self, pending: _PendingReply, context: Any) -> None:
        (name, channel), dialogue, agent = pending.turn, pending.dialogue, self.agents[pending.turn[0]]
        create = context.llm(agent.llm).chat.completions.create
        try:
            reply = await create(messages=pending.messages, **agent.sampling_arguments())
        except ContextOverflow as overflow:
            pending.overflow, pending.invalid_reason = overflow, str(overflow)
            return
        text, is_cut = str(reply.choices[0].message.content or ""), reply.choices[0].finish_reason == "length"
        pending.invalid_reason = reason = self.handler.check_reply(name, text, dialogue)
        shown = self.handler.visible_text(name, channel, text, dialogue) if reason is None else ""
        pending.last = Message(
            dialogue.round, name, channel, text, shown, reply.id, pending.num_retries, reason, token_limit=is_cut
        )

    def _may_retry(self, reply: _PendingReply) -> bool:
        max_retries = self.agents[reply.turn[0]].parameters.num_invalid_generation_retries
        return reply.overflow is None and reply.num_retries < max_retries

    def _advance_branch(self, branch: _DialogueBranch, replies: Sequence[_PendingReply]) -> None:
        bad = next((reply for reply in replies if reply.invalid_reason is not None), None)
        if bad is not None:
            times = f", {bad.num_invalid} times" if bad.overflow is None else ""
            branch.failed, branch.overflow = (bad.turn[0], f"{bad.invalid_reason}{times}"), bad.overflow
            return
        dialogue = branch.dialogue.with_round(tuple(reply.message for reply in replies if reply.message))
        step = self.handler.step_interaction_protocol(dialogue)
        if not step.done and dialogue.round >= self.handler.max_message_rounds:
            step = replace(step, done=True, terminated=True)
        branch.dialogue = dialogue.with_step(step)

    async def _settle_rewards(self, branch: _DialogueBranch, item: Any) -> None:
        """Sets the agents' rewards; if one agent gave no valid reply, the rewards of the others are unknown."""
        if branch.failed is not None:
            branch.rewards = {branch.failed[0]: self.penalty}
        else:
            branch.rewards = await self.handler.settle_rewards(branch.dialogue, item)

    def _mark_reply_values(self, output: ProtocolOutput, context: Any) -> None:
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

    def _build_output(
        self, opening: Dialogue, ended: Sequence[_DialogueBranch], messages: list[dict[str, Any]], num_invalid: int
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
            messages=messages,
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


async def _gather(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Waits for all; if one fails, cancels the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
