"""Converts between dialogues and the rollouts of neural-interactive-proofs, which are nested arrays.

A rollout is one dialogue. For each round, the arrays hold the state of the dialogue *before* the round, and under
`next` the state after it:

    round, question, solution, y, prover_stance, padding, datapoint_id        [batch, round]
    done, terminated                                                          [batch, round]
    message_history, message_agent_id                                         [batch, round, round, channel]
    raw_message_history                                                       [batch, round, round, agent]
    agents: decision, reward, stance, absent, order                           [batch, round, agent]
    agents: retry_count, token_limit, of the messages of this round           [batch, round, agent, channel]
    messages: text, shown                                                     [batch, round, round, agent, channel]
    row: the example's columns                                                [batch, round]

`y` and stances: 1 accept, 0 reject, -1 unknown. Decisions: 0 reject, 1 accept, 2 not decided, 3 none. Without a message
the text is None and the agent id -1. Rounds after the end are padding. `done`: the verifier has decided; `terminated`:
the rounds ended without a decision. `datapoint_id` is equal for dialogues on the same example. `message_history` holds
what the other agents see, `raw_message_history` what the agent wrote. `order` is an agent's position in the delivery
order, or -1. The two histories cannot tell agents apart that speak in a channel at once; `messages`, an addition of
reinforge, can, and takes precedence when rollouts are read back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from reinforge.errors import TrajectoryError
from reinforge.multiagent.agents import PureTextWholeAgent
from reinforge.multiagent.dialogue import Decision, Dialogue, DialogueProblem, Message, Step, parse_dialogues
from reinforge.multiagent.nip.arrays import Array, NestedArrayDict, stack_nested_array_dicts
from reinforge.multiagent.protocol import ProtocolHandler
from reinforge.types.request import ChatPrompt
from reinforge.types.request import Message as ChatMessage
from reinforge.types.trajectory import EpisodeItem, EpisodeItemRole, Trajectory

logger = logging.getLogger(__name__)

STANCE_CODES: dict[Decision | None, int] = {"reject": 0, "accept": 1, None: -1, "none": -1}
"""Truths and stances as numbers."""
DECISION_CODES: dict[Decision | None, int] = {"reject": 0, "accept": 1, None: 2, "none": 3}
UNDECIDED = DECISION_CODES[None]

_STANCES: dict[int, Decision] = {0: "reject", 1: "accept"}
_DECISIONS: dict[int, Decision | None] = {code: decision for decision, code in DECISION_CODES.items()}


def build_rollouts(
    outputs: Sequence[Mapping[str, Any]],
    handler: ProtocolHandler,
    rows: Sequence[Mapping[str, Any]] | None = None,
    *,
    datapoint_ids: Sequence[int] | None = None,
) -> NestedArrayDict:
    """Returns the dialogues of episodes as arrays of batch size (dialogues, rounds).

    Dialogues in which an agent gave no valid reply are left out with a warning: what the others earned is unknown.

    Args:
        rows: The example of each episode; needed if role prompts use columns other than the question.
        datapoint_ids: The number of each episode's example; None: examples are numbered as they occur.

    Raises:
        TrajectoryError: There is no dialogue with valid replies.
    """
    examples = [None] * len(outputs) if rows is None else rows
    numbers = _number_examples(outputs, examples) if datapoint_ids is None else datapoint_ids
    dialogues, ids, failures = list[Dialogue](), list[int](), list[str]()
    for output, row, number in zip(outputs, examples, numbers, strict=True):
        for branch, dialogue in zip(output["branches"], parse_dialogues(output, row), strict=True):
            if branch.get("failed"):
                failures.append(": ".join(branch["failed"]))
            else:
                dialogues.append(dialogue)
                ids.append(number)
    if not dialogues:
        found = f"the first: {failures[0]}" if failures else "there are no episodes"
        raise TrajectoryError(f"there is no dialogue in which every agent gave valid replies; {found}")
    if failures:
        message = "%d of %d dialogues are left out, since an agent gave no valid reply; the first: %s"
        logger.warning(message, len(failures), len(failures) + len(dialogues), failures[0])
    return encode_dialogues(dialogues, handler, ids)


def _number_examples(outputs: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any] | None]) -> list[int]:
    numbers: dict[Any, int] = {}
    keys = [str((row or {}).get("id", output["question"])) for output, row in zip(outputs, rows, strict=True)]
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def encode_dialogues(
    dialogues: Sequence[Dialogue], handler: ProtocolHandler, datapoint_ids: Sequence[int] | None = None
) -> NestedArrayDict:
    """Returns dialogues as arrays of batch size (dialogues, rounds); each is its own example unless ids are given."""
    ids = range(len(dialogues)) if datapoint_ids is None else datapoint_ids
    return stack_nested_array_dicts(
        [_encode_dialogue(dialogue, handler, id_) for dialogue, id_ in zip(dialogues, ids, strict=True)]
    )


def _encode_dialogue(dialogue: Dialogue, handler: ProtocolHandler, datapoint_id: int) -> NestedArrayDict:
    steps = []
    for round_ in range(handler.max_message_rounds):
        step = _encode_state(dialogue, handler, round_)
        step["next"] = _encode_state(dialogue, handler, round_ + 1)
        step["padding"] = round_ >= dialogue.round
        step["datapoint_id"] = datapoint_id
        step["agents"] |= _describe_generation(dialogue, handler, round_)
        steps.append(NestedArrayDict(step, ()))
    return stack_nested_array_dicts(steps)


def _describe_generation(dialogue: Dialogue, handler: ProtocolHandler, round_: int) -> dict[str, Array]:
    """Returns the invalid replies before each message of a round, and whether it was cut; [agent, channel]."""
    agents, channels = handler.agent_names, handler.message_channel_names
    shape = len(agents), len(channels)
    counts, are_cut = np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
    for message in dialogue.messages:
        if message.round == round_:
            place = agents.index(message.agent), channels.index(message.channel)
            counts[place], are_cut[place] = message.num_retries, message.token_limit
    return {"retry_count": counts, "token_limit": are_cut}


def _encode_state(dialogue: Dialogue, handler: ProtocolHandler, round_: int) -> dict[str, Any]:
    agents, channels = list(handler.agent_names), list(handler.message_channel_names)
    rounds = handler.max_message_rounds
    text, shown = (np.full((rounds, len(agents), len(channels)), None, object) for _ in range(2))
    speaker = np.full((rounds, len(channels)), -1, np.int64)
    for message in dialogue.messages:
        if message.round < round_:
            index = message.round, agents.index(message.agent), channels.index(message.channel)
            text[index], shown[index] = message.text, message.shown
            speaker[message.round, index[-1]] = index[1]
    has_ended = round_ >= dialogue.round and dialogue.step.done
    decision = DECISION_CODES[dialogue.step.decision] if has_ended else UNDECIDED
    provers = [STANCE_CODES[dialogue.stances.get(name)] for name in handler.prover_names]
    return {
        "round": round_,
        "done": has_ended and not dialogue.step.terminated,
        "terminated": has_ended and dialogue.step.terminated,
        "question": dialogue.problem.question,
        "solution": _wrap_object(dialogue.problem.row.get("solution")),
        "y": STANCE_CODES[dialogue.problem.truth],
        "prover_stance": provers[0] if provers else -1,
        "message_history": _join_texts(shown, axis=1),
        "message_agent_id": speaker,
        "raw_message_history": _join_texts(text, axis=2),
        "messages": {"text": text, "shown": shown},
        "agents": {
            "decision": [decision if name in handler.verifier_names[:1] else UNDECIDED for name in agents],
            "reward": [dialogue.rewards.get(name, np.nan) if round_ == dialogue.round else 0.0 for name in agents],
            "stance": [STANCE_CODES[dialogue.stances.get(name)] for name in agents],
            "absent": [name in dialogue.absent for name in agents],
            "order": [dialogue.order.index(name) if name in dialogue.order else -1 for name in agents],
        },
        "row": {name: _wrap_object(value) for name, value in dialogue.problem.row.items()},
    }


def _wrap_object(value: Any) -> Array:
    array = np.empty((), object)
    array[()] = value
    return array


def _join_texts(texts: Array, axis: int) -> Array:
    by_axis = np.moveaxis(texts, axis, -1)
    joined = np.full(by_axis.shape[:-1], None, object)
    for index in np.ndindex(joined.shape):
        lines = [str(text) for text in by_axis[index] if text is not None]
        joined[index] = "\n".join(lines) if lines else None
    return joined


def decode_dialogues(rollouts: NestedArrayDict, handler: ProtocolHandler) -> list[Dialogue]:
    """Returns each rollout's dialogue after its last round."""
    if len(rollouts.batch_size) == 1:
        return [_decode_step(step, handler) for step in rollouts]
    return [_decode_step(_last_step(rollout), handler) for rollout in rollouts]


def _last_step(rollout: NestedArrayDict) -> NestedArrayDict:
    padding = rollout.get("padding")
    if padding is None:
        return rollout[len(rollout) - 1]
    steps = np.flatnonzero(~np.asarray(padding, np.bool_))
    if not len(steps):
        raise TrajectoryError("a rollout consists of padding only")
    return rollout[int(steps[-1])]


def _decode_step(step: NestedArrayDict, handler: ProtocolHandler) -> Dialogue:
    """Returns the dialogue after a step; without `next`, the step itself holds the state after it."""
    after = step.get("next", step)
    missing = [name for name in ("message_history", "message_agent_id") if name not in after]
    if missing or "question" not in step:
        names = ", ".join(missing or ["question"])
        raise TrajectoryError(f"a rollout has no {names}, so there is nothing to train on")
    messages = tuple(_decode_messages(after, handler))
    rewards = _decode_rewards(after, handler.agent_names)
    return Dialogue(
        DialogueProblem(str(step["question"]), _STANCES.get(int(step.get("y", -1))), _decode_row(step)),
        _decode_stances(step, handler),
        messages,
        1 + max((message.round for message in messages), default=-1),
        Step(True, _decode_decision(after, handler), bool(after.get("terminated", False)), rewards),
        rewards,
        *_decode_absent_and_order(step, handler.agent_names),
    )


def _decode_absent_and_order(step: NestedArrayDict, agents: Sequence[str]) -> tuple[frozenset[str], tuple[str, ...]]:
    absent, order = step.get(("agents", "absent")), step.get(("agents", "order"))
    ranks = {} if order is None else {name: rank for name, rank in zip(agents, order, strict=True) if rank >= 0}
    missing = () if absent is None else (name for name, is_absent in zip(agents, absent, strict=True) if is_absent)
    return frozenset(missing), tuple(sorted(ranks, key=ranks.__getitem__))


def _decode_row(step: NestedArrayDict) -> dict[str, Any]:
    row: dict[str, Any] = {"question": str(step["question"])}
    if step.get("solution") is not None and step["solution"].item() is not None:
        row["solution"] = str(step["solution"])
    columns = step.get("row")
    return row if columns is None else row | {name: value.item() for name, value in columns.items()}


def _decode_messages(state: NestedArrayDict, handler: ProtocolHandler) -> Iterator[Message]:
    agents, channels = list(handler.agent_names), list(handler.message_channel_names)
    if state["message_history"].shape[-1] != len(channels):
        found = f"{state['message_history'].shape[-1]} channels, but the protocol {handler.config.static_type} has"
        raise TrajectoryError(f"message_history has {found} {len(channels)}: {', '.join(channels)}")
    text, shown = _decode_texts(state, len(agents))
    for round_ in range(len(text)):
        turns = handler.turns_in_round(round_)
        spoken = [(agents[a], channels[c]) for a, c in np.argwhere(text[round_] != np.array(None)).tolist()]
        for turn in sorted(spoken, key=lambda turn: turns.index(turn) if turn in turns else len(turns)):
            index = round_, agents.index(turn[0]), channels.index(turn[1])
            yield Message(round_, *turn, str(text[index]), str(shown[index]))


def _decode_texts(state: NestedArrayDict, num_agents: int) -> tuple[Array, Array]:
    """Returns what agents wrote and what the others see of it, both `[round, agent, channel]`."""
    if ("messages", "text") in state:
        return state["messages", "text"], state["messages", "shown"]
    history, speakers, raw = state["message_history"], state["message_agent_id"], state.get("raw_message_history")
    text, shown = (np.full((len(history), num_agents, history.shape[-1]), None, object) for _ in range(2))
    for round_, channel in np.argwhere(speakers >= 0).tolist():
        agent = int(speakers[round_, channel])
        shown[round_, agent, channel] = history[round_, channel]
        is_only_message = (speakers[round_] == agent).sum() == 1
        has_raw = raw is not None and raw[round_, agent] is not None and is_only_message
        text[round_, agent, channel] = raw[round_, agent] if has_raw else history[round_, channel]
    return text, shown


def _decode_stances(step: NestedArrayDict, handler: ProtocolHandler) -> dict[str, Decision]:
    stances = step.get(("agents", "stance"))
    if stances is None:
        codes = {name: int(step.get("prover_stance", -1)) for name in handler.prover_names[:1]}
    else:
        codes = dict(zip(handler.agent_names, np.asarray(stances).tolist(), strict=True))
    return {name: _STANCES[code] for name, code in codes.items() if code in _STANCES}


def _decode_decision(state: NestedArrayDict, handler: ProtocolHandler) -> Decision | None:
    decisions = state.get(("agents", "decision"))
    if decisions is None or not handler.verifier_names:
        return None
    return _DECISIONS[int(decisions[list(handler.agent_names).index(handler.verifier_names[0])])]


def _decode_rewards(state: NestedArrayDict, agents: Sequence[str]) -> dict[str, float]:
    rewards = state.get(("agents", "reward"))
    if rewards is None:
        return {}
    return {name: float(value) for name, value in zip(agents, rewards, strict=True) if np.isfinite(value)}


def replace_guess_with_truth(dialogue: Dialogue, handler: ProtocolHandler) -> Dialogue | None:
    """Returns the dialogue with the right decision as the verifier's last message; None if the truth is unknown."""
    own = [index for index, m in enumerate(dialogue.messages) if m.agent in handler.verifier_names[:1]]
    truth = dialogue.problem.truth
    if truth is None or not own:
        return None
    text, messages = handler.format_decision(truth), list(dialogue.messages)
    messages[own[-1]] = replace(messages[own[-1]], text=text, shown=text, call_id="")
    return replace(dialogue, messages=tuple(messages), step=replace(dialogue.step, decision=truth))


@dataclass(frozen=True, slots=True)
class ViewBuilder:
    """Builds one agent's views of dialogues: trajectories whose turns hold their prompts, but no tokens yet."""

    agent: PureTextWholeAgent
    handler: ProtocolHandler
    model_group: str
    agent_weight: float = 1.0

    def build_view(self, dialogue: Dialogue, episode_id: str) -> Trajectory | None:
        """Returns a trajectory that trains all of the agent's replies; None if it has none."""
        episode: list[EpisodeItem] = []
        history: list[ChatMessage] = []
        for message in self._own_messages(dialogue):
            prompt = self._build_prompt(dialogue, message)
            new = prompt[len(history) :] if history and prompt[: len(history)] == history else prompt
            episode += [*map(_context_item, new), _reply_item(message, prompt)]
            history = [*prompt, _assistant_message(message)]
        reward = dialogue.rewards.get(self.agent.name, 1.0)  # without a reward: data to imitate, like a dataset's rows
        return self._build_trajectory(episode, reward, episode_id) if episode else None

    def build_conversation(self, dialogue: Dialogue, ends_with_reply: bool = True) -> list[ChatMessage]:
        """Returns the agent's conversation up to its last reply, empty without one; or up to the prompt of the next."""
        if not ends_with_reply:
            turns = [t for t in self.handler.turns_in_round(dialogue.round) if t[0] == self.agent.name]
            return self.agent.build_messages(dialogue, self.handler, turns[0][1]) if turns else []
        own = self._own_messages(dialogue)
        return [*self._build_prompt(dialogue, own[-1]), _assistant_message(own[-1])] if own else []

    def build_last_reply(self, dialogue: Dialogue, reward: float, episode_id: str) -> Trajectory:
        """Returns a trajectory that trains only the agent's last reply; everything before it is context."""
        own = self._own_messages(dialogue)
        if not own:
            raise TrajectoryError(f"{episode_id}: {self.agent.name} has no message there")
        prompt = self._build_prompt(dialogue, own[-1])
        return self._build_trajectory([*map(_context_item, prompt), _reply_item(own[-1], prompt)], reward, episode_id)

    def _own_messages(self, dialogue: Dialogue) -> list[Message]:
        return [message for message in dialogue.messages if message.agent == self.agent.name]

    def _build_prompt(self, dialogue: Dialogue, message: Message) -> list[ChatMessage]:
        return self.agent.build_messages(dialogue.before_round(message.round), self.handler, message.channel)

    def _build_trajectory(self, episode: list[EpisodeItem], reward: float, episode_id: str) -> Trajectory:
        return Trajectory(
            episode=episode,
            reward=reward,
            group_id=episode_id,
            episode_id=episode_id,
            agent=self.agent.name,
            agent_weight=self.agent_weight,
            model_group=self.model_group,
        )


def _assistant_message(message: Message) -> ChatMessage:
    return {"role": "assistant", "content": message.text}


def _context_item(message: ChatMessage) -> EpisodeItem:
    return EpisodeItem(role=EpisodeItemRole(message["role"]), content=str(message["content"]), trained=False)


def _reply_item(message: Message, messages: Sequence[ChatMessage]) -> EpisodeItem:
    prompt = ChatPrompt(tuple(messages), policy_version=-1)
    return EpisodeItem(role=EpisodeItemRole.ASSISTANT, content=message.text, logprobs=prompt)
