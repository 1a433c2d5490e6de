"""Builds trajectories and intermediate steps from a finished episode."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any, Literal

from reinforge.rollout.handle.completion import build_completion, build_logprobs
from reinforge.rollout.history import begins_with
from reinforge.types.episode import EpisodeRecord, Mark, ModelCall
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.request import ChatPrompt, Message
from reinforge.types.steps import (
    IntermediateStep,
    IntermediateStepPayload,
    IntermediateStepType,
    InvocationNode,
    StreamEventData,
    TokenUsageBaseModel,
    UsageInfo,
)
from reinforge.types.trajectory import OTHER_CHOICES, EpisodeItem, EpisodeItemRole, Trajectory

WORKFLOW = "<workflow>"  # the function scope of calls made outside any named function


_ROLES = {**{role.value: role for role in EpisodeItemRole}, "developer": EpisodeItemRole.SYSTEM}


def extract_text(content: Any) -> str:
    """Returns the text of a message's content, which may be a string, None, or a list of blocks."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(block.get("text", "") if isinstance(block, dict) else str(block) for block in content)
    return "" if content is None else str(content)


def build_episode_item(message: Message, **fields: Any) -> EpisodeItem:
    extra = {key: value for key, value in message.items() if key not in ("role", "content") and value is not None}
    content = message.get("content")
    if not isinstance(content, str) and content is not None:
        extra["content"] = content
    role = _ROLES.get(str(message.get("role")), EpisodeItemRole.OTHER)
    return EpisodeItem.build(role, extract_text(content), metadata=extra or None, **fields)


def build_turn(call: ModelCall, *, trained: bool) -> EpisodeItem:
    """Returns the reply of a call as a turn, which carries its tokens, or its prompt, if it is trained."""
    known = call.training_source if trained else None
    item = build_episode_item(call.reply.message, logprobs=known, trained=None if trained else False)
    if trained and (known is None or call.reply.logprobs is not None):  # whatever the endpoint returned
        item.logprobs = build_logprobs(call.reply)
        item.attach(call.prompt)
    return item


def is_trained_call(
    call: ModelCall, target_model: str | None, target_functions: Sequence[str], policies: Collection[str]
) -> bool:
    if call.llm not in policies:
        return False
    if target_model is not None and target_model not in (call.llm, call.model):
        return False
    return WORKFLOW in target_functions or any(name in target_functions for name in call.functions)


def build_episode_items(record: EpisodeRecord, targets: Iterable[bool]) -> list[EpisodeItem]:
    """Returns the episode's messages in order, each once.

    A call whose prompt starts with the previous call's conversation adds only its new messages; any other prompt is
    added in full. Messages that repeat within a conversation are kept, since whole conversations are compared.
    """
    items: list[EpisodeItem] = []
    previous: list[Message] = []
    for call, trained in zip(record.calls, targets, strict=True):
        messages = call.request.messages
        new = messages[len(previous) :] if previous and begins_with(messages, previous) else messages
        items += [*(build_episode_item(message) for message in new), build_turn(call, trained=trained)]
        previous = [*messages, call.reply.message]
    return items


def attach_sources(
    trajectories: Iterable[Trajectory],
    find_call: Callable[[str], ModelCall | None] = lambda call_id: None,
    *,
    trains_on: Literal["tokens", "messages"] = "tokens",
    is_remote: bool = False,
) -> None:
    """Gives the turns of a user's builder what training needs of them, where the builder has not kept it.

    A turn that names its model call gets the call's tokens, or its prompt if the policy reports no tokens. For a
    backend that trains on messages, a turn marked `trained=True` gets a prompt, the preceding messages.

    Args:
        find_call: Returns the recorded call of an id.
        is_remote: True for a backend that serves no policy. It also trains any other turn that names its call or has
            log-probs, and every assistant turn if the builder says nothing of that kind about any of them.
    """
    trajectories = list(trajectories)
    for item, before in _list_unrecorded(trajectories):
        call = find_call(item.call_id) if item.call_id is not None else None
        if call is not None and call.training_source is not None:
            item.attach(call.training_source)
        elif item.trained is False:
            continue
        elif call is not None and is_remote:
            item.attach(call.prompt)
        elif (item.trained and trains_on == "messages") or (is_remote and (item.trained or item.logprobs is not None)):
            item.attach(_build_prompt(before))
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    if is_remote and not any(turn.is_recorded or turn.trained is False for turn in turns):
        for item, before in _list_unrecorded(trajectories):
            item.attach(_build_prompt(before))


def _list_unrecorded(trajectories: Iterable[Trajectory]) -> list[tuple[EpisodeItem, list[EpisodeItem]]]:
    """Returns the assistant turns that have neither tokens nor a prompt, each with what precedes it."""
    episodes = ([item for item in each.episode if isinstance(item, EpisodeItem)] for each in trajectories)
    return [
        (item, episode[:place])
        for episode in episodes
        for place, item in enumerate(episode)
        if item.role is EpisodeItemRole.ASSISTANT and not item.is_recorded
    ]


def _build_prompt(items: Iterable[EpisodeItem]) -> ChatPrompt:
    return ChatPrompt(tuple(build_message(item) for item in items), None, -1)


_CHAT_ROLES = {"environment": "user", "other": "user"}  # chat roles for the episode roles that a chat does not have
_MESSAGE_FIELDS = ("tool_calls", "refusal", "tool_call_id", "name")


def build_message(item: EpisodeItem) -> Message:
    """Returns an episode item as a message in OpenAI's format; the inverse of `build_episode_item`."""
    metadata = item.metadata or {}
    role = _CHAT_ROLES.get(item.role.value, item.role.value)
    fields = {key: metadata[key] for key in _MESSAGE_FIELDS if metadata.get(key) is not None}
    content = metadata.get("content", item.content)
    return {"role": role, "content": None if content == "" and fields.get("tool_calls") else content, **fields}


def sum_step_rewards(record: EpisodeRecord) -> list[float] | None:
    """Returns the sum of the marked rewards of each call (default 0); None if the agent marked no reward at all."""
    rewards = [0.0] * len(record.calls)
    numbers = {call.call_id: number for number, call in enumerate(record.calls, 1)}
    found = False
    for mark in record.marks:
        number = mark.after_call if mark.call_id is None else numbers.get(mark.call_id, 0)
        if mark.step_reward is not None and 0 < number <= len(rewards):
            rewards[number - 1] += mark.step_reward
            found = True
    return rewards if found else None


def build_trajectory(
    record: EpisodeRecord,
    reward: float,
    targets: Sequence[bool],
    *,
    chosen: Sequence[bool] | None = None,
    group_id: str | None = None,
    agent: str | None = None,
    model_group: str | None = None,
) -> Trajectory:
    """Returns one trained policy's view of a finished episode.

    Args:
        chosen: For each call, whether it is part of the view; None: all are.
        group_id: The group in which rewards are compared; None: the example's id.
        model_group: The adapter that is trained on it; None: the only policy.
    """
    if chosen is not None:
        record, targets = select_calls(record, chosen), list(compress(targets, chosen))
    key, calls = record.key, zip(record.calls, targets, strict=True)
    metadata = {"generation": key.generation, "attempt": record.attempt, "reason": record.reason}
    others = [reply.num_completion_tokens for call, trained in calls if trained for reply in call.others]
    if others:
        metadata[OTHER_CHOICES] = sum(others)
    return Trajectory.model_construct(
        episode=build_episode_items(record, targets),
        reward=reward,
        shaped_rewards=sum_step_rewards(record),
        metadata=metadata,
        group_id=key.example_id if group_id is None else group_id,
        episode_id=str(key),
        agent=agent,
        model_group=model_group,
        outcome=record.outcome,
    )


def select_calls(record: EpisodeRecord, chosen: Sequence[bool]) -> EpisodeRecord:
    """Returns a copy of the episode with only the chosen calls and their marks, and the marks before the first call.

    Example: calls A, B, A with a mark after each, both A chosen -> calls A, A and the first and the third mark.
    """
    numbers = {call.call_id: number for number, call in enumerate(record.calls, 1)}
    new_numbers = [sum(chosen[:count]) for count in range(len(record.calls) + 1)]
    marks = []
    for mark in record.marks:
        number = mark.after_call if mark.call_id is None else numbers.get(mark.call_id, 0)
        if number == 0 or chosen[number - 1]:
            marks.append(replace(mark, after_call=new_numbers[mark.after_call]))
    return replace(record, calls=list(compress(record.calls, chosen)), marks=marks)


def build_adapter_trajectories(
    record: EpisodeRecord, reward: float, targets: Sequence[bool], policies: Mapping[str, str | None]
) -> list[Trajectory]:
    """Returns the view of each adapter that the episode called, or one view if the policy has no named adapters.

    planner (adapter a): plan; worker (adapter b): part 1, part 2  =>  a: plan;  b: part 1, part 2

    An adapter's view has its own calls only; other agents' messages appear in it as part of its prompts. Views of the
    same adapter are siblings: their `group_id` is EXAMPLE/ADAPTER.

    Args:
        policies: The adapter of each trained entry of `llms`; None: it has no name.
    """
    names = [name for name in dict.fromkeys(policies.values()) if name is not None]
    if not names:
        return [build_trajectory(record, reward, targets)]
    called = [policies.get(call.llm) for call in record.calls]
    return [
        build_trajectory(
            record,
            reward,
            targets,
            chosen=[each == name for each in called],
            group_id=f"{record.key.example_id}/{name}",
            model_group=name,
        )
        for name in [name for name in names if name in called] or names[:1]  # no call at all: one empty view
    ]


def build_steps(record: EpisodeRecord) -> list[IntermediateStep]:
    """Returns an episode's intermediate steps: model calls and marks in the order they happened."""
    steps: list[IntermediateStep] = []
    marks = sorted(record.marks, key=lambda mark: mark.after_call)
    for index, call in enumerate(record.calls):
        steps += [_build_mark_step(mark) for mark in marks if mark.after_call == index]
        steps += _build_call_steps(call)
    return steps + [_build_mark_step(mark) for mark in marks if mark.after_call >= len(record.calls)]


def with_steps(record: EpisodeRecord) -> EvalInputItem:
    """Returns an episode's example with the answer and the steps that led to it."""
    return record.item.copy_with_updates(trajectory=build_steps(record))


def build_invocation_node(functions: tuple[str, ...]) -> InvocationNode:
    name = functions[-1] if functions else WORKFLOW
    parent = functions[-2] if len(functions) > 1 else (WORKFLOW if functions else None)
    return InvocationNode(function_id="/".join(functions) or WORKFLOW, function_name=name, parent_name=parent)


def _build_call_steps(call: ModelCall) -> list[IntermediateStep]:
    reply = build_completion(call)
    counts = TokenUsageBaseModel(
        prompt_tokens=reply.usage.prompt_tokens, completion_tokens=reply.usage.completion_tokens
    )
    usage = UsageInfo(token_usage=counts, num_llm_calls=1)
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
        span_event_timestamp=call.started_s,
        name=call.llm,
        data=StreamEventData(input=messages, output=extract_text(call.reply.message.get("content")), payload=reply),
        usage_info=usage,
        metadata={"choice": call.choice} if call.others else None,
        UUID=call.call_id,
    )
    node = build_invocation_node(call.functions)
    return [IntermediateStep(parent_id="root", function_ancestry=node, payload=payload) for payload in (started, ended)]


def _build_mark_step(mark: Mark) -> IntermediateStep:
    node = build_invocation_node(mark.functions)
    if isinstance(mark.data, IntermediateStepPayload):
        return IntermediateStep(parent_id="root", function_ancestry=node, payload=mark.data)
    is_event = isinstance(mark.data, StreamEventData)
    payload = IntermediateStepPayload(
        event_type=IntermediateStepType.TTC_END if is_event else IntermediateStepType.CUSTOM_END,
        event_timestamp=mark.at_s,
        name="mark",
        metadata=None if mark.step_reward is None else {"step_reward": mark.step_reward},
        data=mark.data if is_event else StreamEventData(payload=mark.data),
    )
    return IntermediateStep(parent_id="root", function_ancestry=node, payload=payload)
