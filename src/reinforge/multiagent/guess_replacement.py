"""Replaces the verifier's decision by the right one in a share of the episodes that it is trained on.

truth accept, the verifier wrote "reject":  ... how sure are you? / reject  ->  ... how sure are you? / accept

The messages before the decision do not change; the verifier's reward becomes that of a right decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from reinforge.errors import ConfigError, ContextOverflow, EvaluationError, Problem
from reinforge.interfaces import PolicyServer
from reinforge.multiagent.dialogue import Decision, parse_dialogues
from reinforge.multiagent.protocol import ProtocolHandler
from reinforge.types.episode import EpisodeRecord, ModelCall
from reinforge.types.request import ChatPrompt, ModelRequest, TokenLogprobs
from reinforge.types.seeding import stable_seed
from reinforge.types.trajectory import EpisodeItem, Trajectory


async def replace_verifier_guesses(
    groups: Sequence[Sequence[Trajectory]],
    records: Sequence[EpisodeRecord],
    handler: ProtocolHandler,
    *,
    share: float,
    seed: int,
    policy: PolicyServer | None,
) -> int:
    """Replaces the verifier's decision by the truth in a share of its trajectories and returns their number.

    The choice depends only on the run's seed and the episodes' names. Episodes without a decision or a known truth are
    not counted; an episode whose prompt and new decision do not fit the context is left unchanged.

    Args:
        groups: Views of dialogues that are not trees; those of the verifier are changed in place.
        policy: Encodes the decision as tokens, or as a chat prompt if the backend returns no tokens.

    Raises:
        ConfigError: The backend serves no policy.
        EvaluationError: `parse_decision` does not read back what `format_decision` writes.
    """
    if policy is None:
        reason, fix = "the backend serves no policy to encode the decision", "use `_type: local`, or remove this key"
        raise ConfigError(Problem("verifier_guess_replacement_proportion", reason, fix))
    episodes = {str(record.key): record for record in records}
    decided = [
        (trajectory, call, episodes[str(trajectory.episode_id)])
        for siblings in groups
        for trajectory in siblings
        if trajectory.agent in handler.verifier_names[:1]
        and (call := _find_decision_call(episodes[str(trajectory.episode_id)], handler)) is not None
    ]
    decided.sort(key=lambda each: stable_seed(seed, "guess", str(each[0].episode_id)))
    chosen = decided[: round(share * len(decided))]
    return sum([await _replace_guess(*each, handler, policy) for each in chosen])


def _find_decision_call(record: EpisodeRecord, handler: ProtocolHandler) -> ModelCall | None:
    """Returns the call that sampled the verifier's decision; None without exactly one, or if the truth is unknown."""
    output = record.item.output_obj
    if output["truth"] is None or len(output["branches"]) > 1 or output["branches"][0]["decision"] is None:
        return None
    own = [message for message in output["messages"] if message["agent"] == handler.verifier_names[0]]
    last = [message for message in own if message["round"] == own[-1]["round"]]
    ids = [message["call_id"] for message in last if handler.parse_decision(message["text"]) is not None]
    return next((call for call in record.calls if [call.call_id] == ids), None)


async def _replace_guess(
    trajectory: Trajectory, call: ModelCall, record: EpisodeRecord, handler: ProtocolHandler, policy: PolicyServer
) -> bool:
    output, sampled = record.item.output_obj, call.training_source
    turn = next((turn for turn in trajectory.turns if _is_sampled_turn(turn, sampled)), None)
    if turn is None:
        return False
    truth: Decision = output["truth"]
    text = handler.format_decision(truth)
    if handler.parse_decision(text) != truth:
        name = type(handler).__name__
        raise EvaluationError(
            f"{name}.parse_decision does not read {text!r} as {truth}: override {name}.format_decision"
        )
    request = ModelRequest(call.request.messages, tools=call.request.tools)
    try:
        encoded = await policy.encode(request, {"role": "assistant", "content": text})
    except ContextOverflow:
        return False
    if isinstance(encoded, TokenLogprobs) and isinstance(sampled, TokenLogprobs):
        encoded = replace(encoded, prompt_token_ids=sampled.prompt_token_ids)
    turn.content, turn.logprobs = text, encoded
    dialogue = parse_dialogues(output)[0]
    messages = tuple(replace(m, text=text) if m.call_id == call.call_id else m for m in dialogue.messages)
    trajectory.reward = handler.rewards(replace(dialogue, messages=messages), truth)[str(trajectory.agent)]
    trajectory.metadata = {**(trajectory.metadata or {}), "guess_replaced": True}
    return True


def _is_sampled_turn(turn: EpisodeItem, sampled: TokenLogprobs | ChatPrompt | None) -> bool:
    if isinstance(sampled, TokenLogprobs):
        return turn.logprobs is sampled
    return sampled is not None and turn.logprobs == sampled
