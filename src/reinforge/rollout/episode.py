"""From one finished episode to a trajectory and to its step view."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

from reinforge.rollout.chat import completion_of
from reinforge.types.episode import EpisodeRecord, Mark, ModelCall
from reinforge.types.request import ChatPrompt, Message, TokenLogprobs
from reinforge.types.steps import (
    IntermediateStep,
    IntermediateStepPayload,
    IntermediateStepType,
    InvocationNode,
    StreamEventData,
    UsageInfo,
)
from reinforge.types.trajectory import OTHER_CHOICES, EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryCollection

WORKFLOW = "<workflow>"
"""The function scope of calls made outside any named function."""


_ROLES = {**{role.value: role for role in EpisodeItemRole}, "developer": EpisodeItemRole.SYSTEM}


def text_of(content: Any) -> str:
    """Returns the text of a message's content, which may be a string, None, or a list of blocks."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(block.get("text", "") if isinstance(block, dict) else str(block) for block in content)
    return "" if content is None else str(content)


def item_of(message: Message, **fields: Any) -> EpisodeItem:
    """Returns a message as an episode item; what is more than text stays whole in the metadata."""
    extra = {key: value for key, value in message.items() if key not in ("role", "content") and value is not None}
    content = message.get("content")
    if not isinstance(content, str) and content is not None:
        extra["content"] = content
    role = _ROLES.get(message.get("role", "other"), EpisodeItemRole.OTHER)
    values = {"logprobs": None, "trained": None, **fields}
    return EpisodeItem.model_construct(role=role, content=text_of(content), metadata=extra or None, **values)


def is_target(
    call: ModelCall, target_model: str | None, target_functions: Sequence[str], policies: Collection[str]
) -> bool:
    """Returns True if a call's tokens are trained.

    Args:
        call: The call.
        target_model: Entry of `llms` or name of a model; None: every policy.
        target_functions: Function names; `<workflow>` stands for everything.
        policies: Entries of `llms` that are trained policies.
    """
    if call.llm not in policies:
        return False
    if target_model is not None and target_model not in (call.llm, call.model):
        return False
    return WORKFLOW in target_functions or any(name in target_functions for name in call.functions)


def episode_items(record: EpisodeRecord, targets: Iterable[bool]) -> list[EpisodeItem]:
    """Returns the episode's messages in order, each once.

    A call whose history begins with all that was said before adds only what is new; a call with another history
    (a fresh prompt) adds its whole history. Repeated messages stay, since histories are compared, not messages.

    Args:
        record: The episode.
        targets: For each call, whether its reply is trained.
    """
    items: list[EpisodeItem] = []
    said: list[Message] = []
    for call, trained in zip(record.calls, targets, strict=True):
        messages = call.request.messages
        new = messages[len(said) :] if said and messages[: len(said)] == said else messages
        items += [item_of(message) for message in new]
        known = call.known if trained else None
        items.append(item_of(call.reply.message, logprobs=known, trained=None if trained else False))
        said = [*messages, call.reply.message]
    return items


def find_tokens(collection: TrajectoryCollection, captured: Callable[[str], ModelCall | None]) -> None:
    """Gives turns without exact tokens those of the model call that they name, or its prompt where it tells none.

    A user's builder may keep the log-probs in a form of its own, or none; what was sampled is in the capture.

    Args:
        collection: What a builder returned.
        captured: The model call of a call id; None where there was none.
    """
    turns = (turn for siblings in collection.trajectories for trajectory in siblings for turn in trajectory.turns)
    for turn in turns:
        call = captured(turn.call_id) if not turn.is_known and turn.call_id is not None else None
        match call.known if call is not None else None:
            case TokenLogprobs() as tokens:
                turn.bind_tokens(tokens)
            case ChatPrompt() as prompt:
                turn.bind_prompt(prompt)


def bind_prompts(trajectory: Trajectory, tools: Sequence[dict[str, Any]] | None = None) -> None:
    """Gives turns that are said to be trained (`trained=True`), and of which nothing is known, what stands above them.

    For backends that train on messages; whoever builds episodes message by message need not know of any call.

    Args:
        trajectory: One policy's view of an episode.
        tools: What the policy was offered.
    """
    offered = tuple(tools) if tools else None
    above: list[Message] = []
    for item in trajectory.episode:
        if not isinstance(item, EpisodeItem):
            return
        if item.role is EpisodeItemRole.ASSISTANT and item.trained and not item.is_known:
            item.bind_prompt(ChatPrompt(tuple(above), offered, -1))
        above.append(message_of(item))


_SPOKEN_AS = {"environment": "user", "other": "user"}
"""Roles that no chat has."""
_OF_A_MESSAGE = ("tool_calls", "refusal", "tool_call_id", "name")


def message_of(item: EpisodeItem) -> Message:
    """Returns an episode item as a message in OpenAI's shape; what `item_of` kept in the metadata is back in place."""
    kept = item.metadata or {}
    role = _SPOKEN_AS.get(item.role.value, item.role.value)
    further = {key: kept[key] for key in _OF_A_MESSAGE if kept.get(key) is not None}
    content = kept.get("content", item.content)
    return {"role": role, "content": None if content == "" and further.get("tool_calls") else content, **further}


def step_rewards(record: EpisodeRecord) -> list[float] | None:
    """Returns the marked reward of each call, 0 where none was marked; None where the agent marked no reward."""
    rewards = [0.0] * len(record.calls)
    numbers = {call.call_id: number for number, call in enumerate(record.calls, 1)}
    found = False
    for mark in record.marks:
        number = mark.after_call if mark.call_id is None else numbers.get(mark.call_id, 0)
        if mark.step_reward is not None and 0 < number <= len(rewards):
            rewards[number - 1] += mark.step_reward
            found = True
    return rewards if found else None


def trajectory_of(
    record: EpisodeRecord,
    reward: float,
    targets: Sequence[bool],
    *,
    chosen: Sequence[bool] | None = None,
    group_id: str | None = None,
    agent: str | None = None,
    model_group: str | None = None,
) -> Trajectory:
    """Returns one trained policy's view of one finished episode.

    Args:
        record: The episode.
        reward: Its reward.
        targets: For each call, whether its reply is trained.
        chosen: For each call, whether it is seen at all; None: every one.
        group_id: Group whose rewards may be compared; None: the example.
        agent: The agent whose view this is.
        model_group: Who is trained on it; None: the one policy.
    """
    if chosen is not None:
        record, targets = part_of(record, chosen), list(compress(targets, chosen))
    key, calls = record.key, zip(record.calls, targets, strict=True)
    metadata = {"generation": key.generation, "attempt": record.attempt, "reason": record.reason}
    others = [reply.num_completion_tokens for call, trained in calls if trained for reply in call.others]
    if others:
        metadata[OTHER_CHOICES] = sum(others)
    return Trajectory.model_construct(
        episode=episode_items(record, targets),
        reward=reward,
        shaped_rewards=step_rewards(record),
        metadata=metadata,
        group_id=key.example_id if group_id is None else group_id,
        episode_id=str(key),
        agent=agent,
        model_group=model_group,
        outcome=record.outcome,
    )


def part_of(record: EpisodeRecord, chosen: Sequence[bool]) -> EpisodeRecord:
    """Returns an episode with some of its calls alone, and the marks about them; those ahead of any call stay.

    Example: calls A, B, A with marks after each, A's chosen -> calls A, A; the marks after the first and the third.

    Args:
        record: The episode, which stays as it is.
        chosen: For each call, whether it stays.
    """
    numbers = {call.call_id: number for number, call in enumerate(record.calls, 1)}
    seen = [sum(chosen[:count]) for count in range(len(record.calls) + 1)]
    marks = []
    for mark in record.marks:
        about = mark.after_call if mark.call_id is None else numbers.get(mark.call_id, 0)
        if about == 0 or chosen[about - 1]:
            marks.append(replace(mark, after_call=seen[mark.after_call]))
    return replace(record, calls=list(compress(record.calls, chosen)), marks=marks)


def trajectories_of(
    record: EpisodeRecord, reward: float, targets: Sequence[bool], policies: Mapping[str, str | None]
) -> list[Trajectory]:
    """Returns the view of each adapter that one finished episode called; of the one policy, where none has a name.

    planner (adapter a): plan; worker (adapter b): part 1, part 2  =>  a: plan;  b: part 1, part 2

    What an adapter did not say itself is no part of its view but as the messages that it was asked with. Siblings are
    the views of one adapter: their `group_id` is EXAMPLE/ADAPTER.

    Args:
        record: The episode.
        reward: Its reward, which is that of every adapter.
        targets: For each call, whether its reply is trained.
        policies: The adapter of each entry of `llms` that is trained; None: it has no name.
    """
    names = [name for name in dict.fromkeys(policies.values()) if name is not None]
    if not names:
        return [trajectory_of(record, reward, targets)]
    called = [policies.get(call.llm) for call in record.calls]
    return [
        trajectory_of(
            record,
            reward,
            targets,
            chosen=[each == name for each in called],
            group_id=f"{record.key.example_id}/{name}",
            model_group=name,
        )
        for name in [name for name in names if name in called] or names[:1]  # nobody called: that is one view too
    ]


def steps_of(record: EpisodeRecord) -> list[IntermediateStep]:
    """Returns the step view of one episode: model calls and marks in the order they happened."""
    steps: list[IntermediateStep] = []
    marks = sorted(record.marks, key=lambda mark: mark.after_call)
    for index, call in enumerate(record.calls):
        steps += [_mark_step(mark) for mark in marks if mark.after_call == index]
        steps += _call_steps(call)
    return steps + [_mark_step(mark) for mark in marks if mark.after_call >= len(record.calls)]


def _node(functions: tuple[str, ...]) -> InvocationNode:
    name = functions[-1] if functions else WORKFLOW
    parent = functions[-2] if len(functions) > 1 else (WORKFLOW if functions else None)
    return InvocationNode(function_id="/".join(functions) or WORKFLOW, function_name=name, parent_name=parent)


def _call_steps(call: ModelCall) -> list[IntermediateStep]:
    reply = completion_of(call)
    usage = UsageInfo(prompt_tokens=reply.usage.prompt_tokens, completion_tokens=reply.usage.completion_tokens)
    messages = call.request.messages
    started = IntermediateStepPayload(
        event_type=IntermediateStepType.LLM_START,
        event_timestamp=call.started_s,
        name=call.llm,
        data=StreamEventData(input=messages, payload=call.request),
        UUID=call.call_id,
    )
    ended = IntermediateStepPayload(
        event_type=IntermediateStepType.LLM_END,
        event_timestamp=call.ended_s,
        name=call.llm,
        data=StreamEventData(input=messages, output=text_of(call.reply.message.get("content")), payload=reply),
        usage_info=usage,
        metadata={"choice": call.choice} if call.others else None,
        UUID=call.call_id,
    )
    node = _node(call.functions)
    return [IntermediateStep(parent_id="root", function_ancestry=node, payload=payload) for payload in (started, ended)]


def _mark_step(mark: Mark) -> IntermediateStep:
    candidate = isinstance(mark.data, StreamEventData)
    payload = IntermediateStepPayload(
        event_type=IntermediateStepType.TTC_END if candidate else IntermediateStepType.CUSTOM_END,
        event_timestamp=mark.at_s,
        name="mark",
        metadata=None if mark.step_reward is None else {"step_reward": mark.step_reward},
        data=mark.data if candidate else StreamEventData(payload=mark.data),
    )
    return IntermediateStep(parent_id="root", function_ancestry=_node(mark.functions), payload=payload)
