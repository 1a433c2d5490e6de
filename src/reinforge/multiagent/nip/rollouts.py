"""Rollouts of the reference, as arrays, and ours, as what a protocol's episodes left: each from the other.

One rollout is one dialogue. Along its rounds the arrays show the dialogue as it stands *before* a round, and below
`next` as it stands after it:

    round, question, solution, y, prover_stance, padding                      [batch, round]
    message_history, message_agent_id                                         [batch, round, round, channel]
    raw_message_history                                                       [batch, round, round, agent]
    agents: decision, reward, stance, absent, order                           [batch, round, agent]
    said: text, shown                                                         [batch, round, round, agent, channel]
    row: the example's columns                                                [batch, round]

`y` and stances are 1 accept, 0 reject, -1 not known; decisions are 0 reject, 1 accept, 2 not yet, 3 none. Where nothing
is said there is None, and -1 for whose message it is. Rounds after the end are padding. `message_history` holds what
others are shown, `raw_message_history` what the agent wrote. `order` is the place of an agent among those who are told
in an order of their own, else -1. Where several agents speak in a channel at once these two
cannot tell them apart; `said`, which is ours, can, and is what is read where it is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from reinforge.errors import TrajectoryError
from reinforge.multiagent.agents import PureTextWholeAgent
from reinforge.multiagent.dialogue import Decision, Dialogue, Message, Problem, Step
from reinforge.multiagent.nip.arrays import Array, NestedArrayDict, stack_nested_array_dicts
from reinforge.multiagent.protocol import ProtocolHandler
from reinforge.types.request import ChatPrompt
from reinforge.types.request import Message as ChatMessage
from reinforge.types.trajectory import EpisodeItem, EpisodeItemRole, Trajectory

SIDES: dict[Decision | None, int] = {"reject": 0, "accept": 1, None: -1, "none": -1}
"""Truths and stances as numbers."""
DECIDED: dict[Decision | None, int] = {"reject": 0, "accept": 1, None: 2, "none": 3}
NOT_YET = DECIDED[None]

_WORDS: dict[int, Decision] = {0: "reject", 1: "accept"}
_DECISIONS: dict[int, Decision | None] = {number: word for word, number in DECIDED.items()}


def dialogues_of_output(output: Mapping[str, Any], row: Mapping[str, Any] | None = None) -> list[Dialogue]:
    """Returns the dialogues of one episode: one, or each of its tree.

    Args:
        output: What the episode left (`ProtocolOutput`).
        row: The example's columns.
    """
    problem = Problem(output["question"], output["truth"], {"question": output["question"], **(row or {})})
    return [_dialogue_of_branch(output, problem, branch) for branch in output["branches"]]


def _dialogue_of_branch(output: Mapping[str, Any], problem: Problem, branch: Mapping[str, Any]) -> Dialogue:
    said = [
        each
        for each in output["messages"]
        if branch["path"][: len(each["path"])] == each["path"] and not each.get("refused")
    ]
    names = ("round", "agent", "channel", "text", "shown", "call_id", "num_retries")
    messages = [Message(**{name: each[name] for name in names}) for each in said]
    rewards = dict(branch["rewards"])
    return Dialogue(
        problem,
        dict(output["stances"]),
        tuple(sorted(messages, key=lambda message: message.round)),
        1 + max((message.round for message in messages), default=-1),
        Step(True, branch["decision"], branch["terminated"], rewards),
        rewards,
        frozenset(output.get("absent", ())),
        tuple(output.get("order", ())),
    )


def rollouts_of(
    outputs: Sequence[Mapping[str, Any]],
    handler: ProtocolHandler,
    rows: Sequence[Mapping[str, Any]] | None = None,
) -> NestedArrayDict:
    """Returns episodes of one protocol as arrays of batch size (dialogues, rounds).

    Args:
        outputs: What the episodes left (`ProtocolOutput`).
        handler: The protocol.
        rows: The example of each, where role prompts ask for more of its columns than the question.
    """
    of_rows = [None] * len(outputs) if rows is None else rows
    dialogues = [each for pair in zip(outputs, of_rows, strict=True) for each in dialogues_of_output(*pair)]
    return rollouts_of_dialogues(dialogues, handler)


def rollouts_of_dialogues(dialogues: Sequence[Dialogue], handler: ProtocolHandler) -> NestedArrayDict:
    """Returns dialogues as arrays of batch size (dialogues, rounds)."""
    return stack_nested_array_dicts([_rollout_of(dialogue, handler) for dialogue in dialogues])


def _rollout_of(dialogue: Dialogue, handler: ProtocolHandler) -> NestedArrayDict:
    steps = []
    for round_ in range(handler.max_message_rounds):
        step = _state_of(dialogue, handler, round_)
        step["next"] = _state_of(dialogue, handler, round_ + 1)
        step["padding"] = round_ >= dialogue.round
        step["done"] = round_ + 1 >= dialogue.round
        steps.append(NestedArrayDict(step, ()))
    return stack_nested_array_dicts(steps)


def _state_of(dialogue: Dialogue, handler: ProtocolHandler, round_: int) -> dict[str, Any]:
    """Returns a dialogue as it stands before a round."""
    agents, channels = list(handler.agent_names), list(handler.message_channel_names)
    rounds = handler.max_message_rounds
    text, shown = (np.full((rounds, len(agents), len(channels)), None, object) for _ in range(2))
    speaker = np.full((rounds, len(channels)), -1, np.int64)
    for message in dialogue.messages:
        if message.round < round_:
            place = message.round, agents.index(message.agent), channels.index(message.channel)
            text[place], shown[place] = message.text, message.shown
            speaker[message.round, place[-1]] = place[1]
    ended = round_ >= dialogue.round
    decided = DECIDED[dialogue.step.decision] if ended else NOT_YET
    provers = [SIDES[dialogue.stances.get(name)] for name in handler.prover_names]
    return {
        "round": round_,
        "question": dialogue.problem.question,
        "solution": _cell(dialogue.problem.row.get("solution")),
        "y": SIDES[dialogue.problem.truth],
        "prover_stance": provers[0] if provers else -1,
        "message_history": _one_of(shown, axis=1),
        "message_agent_id": speaker,
        "raw_message_history": _one_of(text, axis=2),
        "said": {"text": text, "shown": shown},
        "agents": {
            "decision": [decided if name in handler.verifier_names[:1] else NOT_YET for name in agents],
            "reward": [dialogue.rewards.get(name, np.nan) if round_ == dialogue.round else 0.0 for name in agents],
            "stance": [SIDES[dialogue.stances.get(name)] for name in agents],
            "absent": [name in dialogue.absent for name in agents],
            "order": [dialogue.order.index(name) if name in dialogue.order else -1 for name in agents],
        },
        "row": {name: _cell(value) for name, value in dialogue.problem.row.items()},
    }


def _cell(value: Any) -> Array:
    """Returns any object as an array without dimensions."""
    cell = np.empty((), object)
    cell[()] = value
    return cell


def _one_of(texts: Array, axis: int) -> Array:
    """Returns what is said along an axis as one text each: None where nothing is, one line each where several speak."""
    moved = np.moveaxis(texts, axis, -1)
    joined = np.full(moved.shape[:-1], None, object)
    for place in np.ndindex(joined.shape):
        said = [str(text) for text in moved[place] if text is not None]
        joined[place] = "\n".join(said) if said else None
    return joined


def dialogues_of(rollouts: NestedArrayDict, handler: ProtocolHandler) -> list[Dialogue]:
    """Returns each rollout's whole dialogue, as it stands after its last round.

    Args:
        rollouts: Batch size (batch, round); or (timestep,), where each is the dialogue up to that step's message.
        handler: The protocol.

    Raises:
        TrajectoryError: Names are missing that a dialogue cannot do without.
    """
    if len(rollouts.batch_size) == 1:
        return [_dialogue_at(step, handler) for step in rollouts]
    return [_dialogue_at(_last(rollout), handler) for rollout in rollouts]


def _last(rollout: NestedArrayDict) -> NestedArrayDict:
    """Returns the last step of a rollout that is no padding."""
    padding = rollout.get("padding")
    if padding is None:
        return rollout[len(rollout) - 1]
    places = np.flatnonzero(~np.asarray(padding, np.bool_))
    if not len(places):
        raise TrajectoryError("a rollout is nothing but padding")
    return rollout[int(places[-1])]


def _dialogue_at(step: NestedArrayDict, handler: ProtocolHandler) -> Dialogue:
    """Returns the dialogue after a step; where there is no `next`, the step itself says what stands then."""
    after = step.get("next", step)
    missing = [name for name in ("message_history", "message_agent_id") if name not in after]
    if missing or "question" not in step:
        names = ", ".join(missing or ["question"])
        raise TrajectoryError(f"a rollout without {names} says nothing that could be trained on")
    messages = tuple(_messages_of(after, handler))
    rewards = _rewards_of(after, handler.agent_names)
    return Dialogue(
        Problem(str(step["question"]), _WORDS.get(int(step.get("y", -1))), _row_of(step)),
        _stances_of(step, handler),
        messages,
        1 + max((message.round for message in messages), default=-1),
        Step(True, _decision_of(after, handler), rewards=rewards),
        rewards,
        *_told_of(step, handler.agent_names),
    )


def _told_of(step: NestedArrayDict, agents: Sequence[str]) -> tuple[frozenset[str], tuple[str, ...]]:
    """Returns who is absent, and in which order those are told who speak at once."""
    absent, order = step.get(("agents", "absent")), step.get(("agents", "order"))
    places = {} if order is None else {name: place for name, place in zip(agents, order, strict=True) if place >= 0}
    gone = () if absent is None else (name for name, is_absent in zip(agents, absent, strict=True) if is_absent)
    return frozenset(gone), tuple(sorted(places, key=places.__getitem__))


def _row_of(step: NestedArrayDict) -> dict[str, Any]:
    row: dict[str, Any] = {"question": str(step["question"])}
    if step.get("solution") is not None and step["solution"].item() is not None:
        row["solution"] = str(step["solution"])
    given = step.get("row")
    return row if given is None else row | {name: value.item() for name, value in given.items()}


def _messages_of(state: NestedArrayDict, handler: ProtocolHandler) -> Iterator[Message]:
    """Yields what was said, in the order of rounds, and within one of speakers."""
    agents, channels = list(handler.agent_names), list(handler.message_channel_names)
    if state["message_history"].shape[-1] != len(channels):
        told = f"{state['message_history'].shape[-1]} channels, and the protocol {handler.config.static_type} has"
        raise TrajectoryError(f"message_history has {told} {len(channels)}: {', '.join(channels)}")
    text, shown = _said_of(state, len(agents))
    for round_ in range(len(text)):
        turns = handler.speakers(round_)
        spoken = [(agents[a], channels[c]) for a, c in np.argwhere(text[round_] != np.array(None)).tolist()]
        for turn in sorted(spoken, key=lambda turn: turns.index(turn) if turn in turns else len(turns)):
            place = round_, agents.index(turn[0]), channels.index(turn[1])
            yield Message(round_, *turn, str(text[place]), str(shown[place]))


def _said_of(state: NestedArrayDict, num_agents: int) -> tuple[Array, Array]:
    """Returns what was written and what was shown, both `[round, agent, channel]`."""
    if ("said", "text") in state:
        return state["said", "text"], state["said", "shown"]
    history, speakers, raw = state["message_history"], state["message_agent_id"], state.get("raw_message_history")
    text, shown = (np.full((len(history), num_agents, history.shape[-1]), None, object) for _ in range(2))
    for round_, channel in np.argwhere(speakers >= 0).tolist():
        agent = int(speakers[round_, channel])
        shown[round_, agent, channel] = history[round_, channel]
        is_all = raw is not None and raw[round_, agent] is not None and (speakers[round_] == agent).sum() == 1
        text[round_, agent, channel] = raw[round_, agent] if is_all else history[round_, channel]
    return text, shown


def _stances_of(step: NestedArrayDict, handler: ProtocolHandler) -> dict[str, Decision]:
    given = step.get(("agents", "stance"))
    if given is None:
        found = {name: int(step.get("prover_stance", -1)) for name in handler.prover_names[:1]}
    else:
        found = dict(zip(handler.agent_names, np.asarray(given).tolist(), strict=True))
    return {name: _WORDS[side] for name, side in found.items() if side in _WORDS}


def _decision_of(state: NestedArrayDict, handler: ProtocolHandler) -> Decision | None:
    given = state.get(("agents", "decision"))
    if given is None or not handler.verifier_names:
        return None
    return _DECISIONS[int(given[list(handler.agent_names).index(handler.verifier_names[0])])]


def _rewards_of(state: NestedArrayDict, agents: Sequence[str]) -> dict[str, float]:
    given = state.get(("agents", "reward"))
    if given is None:
        return {}
    return {name: float(value) for name, value in zip(agents, given, strict=True) if np.isfinite(value)}


def with_true_guess(dialogue: Dialogue, handler: ProtocolHandler) -> Dialogue | None:
    """Returns a dialogue whose last verifier message decides as the truth is; None where that is not known."""
    own = [place for place, m in enumerate(dialogue.messages) if m.agent in handler.verifier_names[:1]]
    truth = dialogue.problem.truth
    if truth is None or not own:
        return None
    text, messages = handler.decision_text(truth), list(dialogue.messages)
    messages[own[-1]] = replace(messages[own[-1]], text=text, shown=text, call_id="")
    return replace(dialogue, messages=tuple(messages), step=replace(dialogue.step, decision=truth))


@dataclass(frozen=True, slots=True)
class Views:
    """One agent's views of dialogues, as trajectories whose turns say what they answered; tokens are not known yet.

    Args:
        agent: The agent.
        handler: Its protocol.
        model_group: Who is trained on them.
        agent_weight: What they count beside those of the group's other agents.
    """

    agent: PureTextWholeAgent
    handler: ProtocolHandler
    model_group: str
    agent_weight: float = 1.0

    def whole(self, dialogue: Dialogue, name: str) -> Trajectory | None:
        """Returns all that the agent said, every reply to be learned; None if it said nothing.

        Args:
            dialogue: What was said.
            name: Names the episode.
        """
        episode: list[EpisodeItem] = []
        said: list[ChatMessage] = []
        for message in self._own(dialogue):
            asked = self._asked(dialogue, message)
            new = asked[len(said) :] if said and asked[: len(said)] == said else asked
            episode += [*map(_context, new), _reply(message, asked)]
            said = [*asked, {"role": "assistant", "content": message.text}]
        reward = dialogue.rewards.get(self.agent.name, 1.0)  # given to be imitated: right, as rows of a dataset are
        return self._trajectory(episode, reward, name) if episode else None

    def last(self, dialogue: Dialogue, reward: float, name: str) -> Trajectory:
        """Returns what the agent said last, to be learned by itself; everything before it is context.

        Raises:
            TrajectoryError: It said nothing.
        """
        own = self._own(dialogue)
        if not own:
            raise TrajectoryError(f"{name}: {self.agent.name} said nothing there")
        asked = self._asked(dialogue, own[-1])
        return self._trajectory([*map(_context, asked), _reply(own[-1], asked)], reward, name)

    def _own(self, dialogue: Dialogue) -> list[Message]:
        return [message for message in dialogue.messages if message.agent == self.agent.name]

    def _asked(self, dialogue: Dialogue, message: Message) -> list[ChatMessage]:
        """Returns what the agent was asked with when it said a message."""
        return self.agent.messages(dialogue.before(message.round), self.handler, message.channel)

    def _trajectory(self, episode: list[EpisodeItem], reward: float, name: str) -> Trajectory:
        return Trajectory(
            episode=episode,
            reward=reward,
            group_id=name,
            episode_id=name,
            agent=self.agent.name,
            agent_weight=self.agent_weight,
            model_group=self.model_group,
        )


def _context(message: ChatMessage) -> EpisodeItem:
    return EpisodeItem(role=EpisodeItemRole(message["role"]), content=str(message["content"]), trained=False)


def _reply(message: Message, asked: Sequence[ChatMessage]) -> EpisodeItem:
    prompt = ChatPrompt(tuple(asked), policy_version=-1)
    return EpisodeItem(role=EpisodeItemRole.ASSISTANT, content=message.text, logprobs=prompt)
