"""The truth in place of a verifier's decision, in a share of the episodes that it learns from.

truth accept, the verifier said "reject":  ... how sure are you? / reject  ->  ... how sure are you? / accept

The dialogue up to there stays what it was; the episode is then worth what a right decision earns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from reinforge.errors import ConfigError, EvaluationError, Problem
from reinforge.interfaces import ContextOverflow, PolicyServer
from reinforge.multiagent.dialogue import Decision
from reinforge.multiagent.nip.rollouts import dialogues_of_output
from reinforge.multiagent.protocol import ProtocolHandler
from reinforge.types.episode import EpisodeRecord, ModelCall
from reinforge.types.request import ChatPrompt, ModelRequest, TokenLogprobs
from reinforge.types.seeding import stable_seed
from reinforge.types.trajectory import EpisodeItem, Trajectory


async def replace_guesses(
    groups: Sequence[Sequence[Trajectory]],
    records: Sequence[EpisodeRecord],
    handler: ProtocolHandler,
    *,
    share: float,
    seed: int,
    policy: PolicyServer | None,
) -> int:
    """Replaces the verifier's decision by the truth in a share of its trajectories; returns in how many.

    Which ones depends on the run's seed and on the episodes' names alone. Episodes without a decision or a known truth
    do not count, and one whose prompt and decision do not fit the context stays as it is.

    Args:
        groups: Views of flat dialogues; those of the verifier are changed.
        records: Their episodes.
        handler: The protocol.
        share: In [0, 1], of the verifier's trajectories.
        seed: The run's.
        policy: Writes the decision as tokens, or as messages where it tells none.

    Raises:
        ConfigError: The backend serves no policy.
        EvaluationError: The protocol does not read its own decisions back.
    """
    if policy is None:
        why = "the backend serves no policy, so nobody can write the truth as tokens"
        raise ConfigError(Problem("verifier_guess_replacement_proportion", why, "use `_type: local`, or leave it out"))
    found = {str(record.key): record for record in records}
    decided = [
        (trajectory, call, found[str(trajectory.episode_id)])
        for siblings in groups
        for trajectory in siblings
        if trajectory.agent in handler.verifier_names[:1]
        and (call := _decision_call(found[str(trajectory.episode_id)], handler)) is not None
    ]
    decided.sort(key=lambda each: stable_seed(seed, "guess", str(each[0].episode_id)))
    chosen = decided[: round(share * len(decided))]
    return sum([await _replace(*each, handler, policy) for each in chosen])


def _decision_call(record: EpisodeRecord, handler: ProtocolHandler) -> ModelCall | None:
    """Returns the call whose reply was the verifier's decision; None: there is not one, or the truth is not known."""
    output = record.item.output_obj
    if output["truth"] is None or len(output["branches"]) > 1 or output["branches"][0]["decision"] is None:
        return None
    last = output["messages"][-1]["round"]
    said = [m for m in output["messages"] if m["agent"] == handler.verifier_names[0] and m["round"] == last]
    ids = [message["call_id"] for message in said if handler.decision_of(message["text"]) is not None]
    return next((call for call in record.calls if [call.call_id] == ids), None)


async def _replace(
    trajectory: Trajectory, call: ModelCall, record: EpisodeRecord, handler: ProtocolHandler, policy: PolicyServer
) -> bool:
    output, drawn = record.item.output_obj, call.known
    turn = next((turn for turn in trajectory.turns if _holds(turn, drawn)), None)
    if turn is None:
        return False
    truth: Decision = output["truth"]
    text = handler.decision_text(truth)
    if handler.decision_of(text) != truth:
        name = type(handler).__name__
        raise EvaluationError(f"{name}.decision_of does not read {text!r} as {truth}: override {name}.decision_text")
    request = ModelRequest(call.request.messages, tools=call.request.tools)
    try:
        written = await policy.encode(request, {"role": "assistant", "content": text})
    except ContextOverflow:
        return False
    if isinstance(written, TokenLogprobs) and isinstance(drawn, TokenLogprobs):
        written = replace(written, prompt_token_ids=drawn.prompt_token_ids)
    turn.content, turn.logprobs = text, written
    trajectory.reward = handler.rewards(dialogues_of_output(output)[0], truth)[str(trajectory.agent)]
    trajectory.metadata = {**(trajectory.metadata or {}), "guess_replaced": True}
    return True


def _holds(turn: EpisodeItem, drawn: TokenLogprobs | ChatPrompt | None) -> bool:
    """Returns True if a turn is the reply of which this is known."""
    if isinstance(drawn, TokenLogprobs):
        return turn.logprobs is drawn
    return drawn is not None and turn.logprobs == drawn
