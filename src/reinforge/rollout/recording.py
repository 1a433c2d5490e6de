"""Finds what of an episode cannot be recorded, and decides whose failure that is.

a reply of a policy              -> policy_error      the agent's output, requests and marks   -> tool_error
a reply of any other model       -> backend_error     an episode that had failed before        keeps its outcome

An output is the policy's failure, too, if the policy wrote what cannot be recorded and the agent only parsed it: JSON
that is nested too deeply, or has too many digits. Else a policy could keep bad answers out of the verdict.

What cannot be recorded is removed: a call together with all later ones, since none may be trained without its context.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

from reinforge.files import MAX_DEPTH, find_unwritable
from reinforge.types.episode import EpisodeRecord, ModelCall
from reinforge.types.trajectory import Outcome

_DIGITS = re.compile(r"\d++")


def drop_unrecordable(record: EpisodeRecord, is_policy: Callable[[str], bool]) -> None:
    """Removes what cannot be recorded from an episode that has just ended, which then has failed.

    Args:
        is_policy: Whether an entry of `llms` is a trained policy.
    """
    found = [_cut_calls(record, is_policy), _drop_output(record, is_policy), _drop_marks(record)]
    problem = next((each for each in found if each is not None), None)
    if problem is not None:
        _fail(record, *problem)


def fail_unrecordable(record: EpisodeRecord, reason: str) -> None:
    """Removes everything but scores from an episode that could not be recorded although its parts could."""
    record.calls, record.marks = [], []
    record.item = record.item.copy_with_updates(output_obj=None)
    record.scores = {name: score.model_copy(update={"reasoning": None}) for name, score in record.scores.items()}
    _fail(record, Outcome.TOOL_ERROR, f"the episode cannot be recorded: {reason}")
    if record.outcome.is_missing:
        record.reward = None


def _fail(record: EpisodeRecord, outcome: Outcome, reason: str) -> None:
    if record.outcome is Outcome.OK:
        record.outcome, record.reason = outcome, reason
    else:
        record.reason = f"{record.reason}; {reason}"


def _cut_calls(record: EpisodeRecord, is_policy: Callable[[str], bool]) -> tuple[Outcome, str] | None:
    for index, call in enumerate(record.calls):
        problem = _find_problem(call, is_policy=is_policy(call.llm))
        if problem is not None:
            record.calls = record.calls[:index]
            record.marks = [mark for mark in record.marks if mark.after_call <= index]
            return problem
    return None


def _find_problem(call: ModelCall, *, is_policy: bool) -> tuple[Outcome, str] | None:
    """Returns the outcome and the reason if a call cannot be recorded: its request first, which came first."""
    request = call.request
    settings = request.template_kwargs, request.sampling.stop, request.sampling.logit_bias, request.prompt
    asked = find_unwritable(request.messages) or find_unwritable(request.tools)
    if asked is None and any(settings):
        asked = find_unwritable(settings)
    if asked is not None:
        return Outcome.TOOL_ERROR, f"a request of the agent to {call.llm} cannot be recorded: {asked}"
    replied = next((why for reply in call.choices if (why := find_unwritable(reply.message)) is not None), None)
    if replied is not None:
        outcome = Outcome.POLICY_ERROR if is_policy else Outcome.BACKEND_ERROR
        return outcome, f"a reply of {call.llm} cannot be recorded: {replied}"
    return None


def _drop_output(record: EpisodeRecord, is_policy: Callable[[str], bool]) -> tuple[Outcome, str] | None:
    why = find_unwritable(record.item.output_obj)
    if why is None:
        return None
    record.item = record.item.copy_with_updates(output_obj=None)
    replies = [reply for call in record.calls if is_policy(call.llm) for reply in call.choices]
    if any(_holds_extreme_json(str(reply.message.get("content") or "")) for reply in replies):
        return Outcome.POLICY_ERROR, f"the agent's output, parsed from the policy's reply, cannot be recorded: {why}"
    return Outcome.TOOL_ERROR, f"the agent's output cannot be recorded: {why}"


def _holds_extreme_json(text: str) -> bool:
    """True if parsing a text can give a value that is too deep, or an integer that is too long, to be recorded."""
    longest = max((found.end() - found.start() for found in _DIGITS.finditer(text)), default=0)
    return text.count("[") + text.count("{") > MAX_DEPTH or longest > sys.get_int_max_str_digits() > 0


def _drop_marks(record: EpisodeRecord) -> tuple[Outcome, str] | None:
    problem = None
    for mark in record.marks:
        why = find_unwritable(mark.data) or find_unwritable(mark.step_reward) or find_unwritable(mark.call_id)
        if why is not None:
            mark.data = mark.step_reward = mark.call_id = None
            problem = problem or (Outcome.TOOL_ERROR, f"a mark of the agent cannot be recorded: {why}")
    return problem
