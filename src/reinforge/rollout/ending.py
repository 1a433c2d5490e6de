"""Decides how an episode ended: its output, or whose failure it is, even if it cannot be recorded.

a reply of a policy              -> policy_error      the agent's output, requests and marks   -> tool_error
a reply of any other model       -> backend_error     an episode that had failed before        keeps its outcome

An output is the policy's failure, too, if the policy wrote what cannot be recorded and the agent only parsed it: JSON
that is nested too deeply, or has too many digits. Otherwise a policy could keep bad answers out of the verdict.

What cannot be recorded is removed: a call together with all later ones, since none may be trained without its context.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable

from reinforge.errors import (
    BackendError,
    ContextOverflow,
    EngineError,
    MessagesRejected,
    describe_error,
    is_interrupt,
    show,
)
from reinforge.files import find_unwritable
from reinforge.limits import get_limits
from reinforge.rollout.capture import Capture
from reinforge.rollout.isolation.containment import Blocked
from reinforge.rollout.workflow import PolicyFailure, refuse_coroutine
from reinforge.types.episode import EpisodeRecord, ModelCall
from reinforge.types.trajectory import Outcome
from reinforge.types.workflow import BoundWorkflow


def record_ending(
    record: EpisodeRecord, capture: Capture, get_output: Callable[[], object], workflow: BoundWorkflow, timeout_s: float
) -> None:
    """Records the output, or why there is none; an agent's output and its exceptions may themselves raise anything."""
    try:
        _record_ending(record, capture, get_output, workflow, timeout_s)
    except BaseException as error:  # fails only this episode
        if is_interrupt(error):
            raise
        record.outcome, cause = _find_cause(capture)
        described = describe_error(error)
        record.reason = described if cause is None else f"{cause}; the agent then failed: {described}"


def _record_ending(
    record: EpisodeRecord, capture: Capture, get_output: Callable[[], object], workflow: BoundWorkflow, timeout_s: float
) -> None:
    item = record.item
    try:
        output = refuse_coroutine(get_output(), workflow)
        capture.match_output(output)
        record.item = item.copy_with_updates(output_obj=output)
        if capture.refused_call is not None:  # the agent continued without the model's answer
            record.outcome, record.reason = Outcome.TOOL_ERROR, f"a model call was refused: {capture.refused_call}"
    except TimeoutError as error:
        record.outcome, record.reason = _classify_timeout(capture, timeout_s)
        if isinstance(error, Blocked):
            record.outcome, record.reason = Outcome.TIMEOUT, str(error)
    except PolicyFailure as failure:
        capture.match_output(failure.output)
        is_cut = bool(capture.calls) and capture.calls[-1].reply.finish_reason == "length"
        record.outcome = Outcome.OVERLONG if is_cut else Outcome.POLICY_ERROR
        record.reason = show(failure)
        record.item = item.copy_with_updates(output_obj=failure.output)
    except ContextOverflow as overflow:
        record.outcome, record.reason = Outcome.CONTEXT_OVERFLOW, show(overflow)
    except (BackendError, EngineError, ConnectionError) as error:
        is_own = isinstance(error, MessagesRejected)  # the agent's doing
        record.outcome = Outcome.TOOL_ERROR if is_own else Outcome.BACKEND_ERROR
        record.reason = f"{type(error).__name__}: {show(error)}"
    except asyncio.CancelledError:
        record.outcome, record.reason = Outcome.CANCELLED, "the agent raised CancelledError"


def _classify_timeout(capture: Capture, limit_s: float) -> tuple[Outcome, str]:
    """Returns the outcome and reason of a timeout: the policy's fault if finished replies took most of the time."""
    replies = len(capture.calls)
    replying_s = sum(call.ended_s - call.started_s for call in capture.calls)
    if replying_s > limit_s / 2:
        return Outcome.POLICY_TIMEOUT, f"{replies} replies took {replying_s:.1f} s of the time limit of {limit_s:g} s"
    waiting = f", {capture.pending} model call(s) unanswered" if capture.pending else ""
    reason = f"not finished after {limit_s:g} s ({replies} replies{waiting})"
    return Outcome.TIMEOUT, reason if capture.waiting is None else f"{reason}; {capture.waiting}"


def _find_cause(capture: Capture) -> tuple[Outcome, str | None]:
    """Returns the outcome of an episode whose agent raised an error, and what it raised it about, if that is known."""
    if capture.overflow:
        return Outcome.CONTEXT_OVERFLOW, capture.overflow
    if capture.lost_call is not None:
        return Outcome.BACKEND_ERROR, capture.lost_call
    return (Outcome.TOOL_ERROR if capture.bad_call is None else Outcome.POLICY_ERROR), capture.bad_call


_DIGITS = re.compile(r"\d++")


def drop_unrecordable(record: EpisodeRecord, is_policy: Callable[[str], bool]) -> None:
    """Removes what cannot be recorded from an episode that has just ended, which then has failed."""
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
    seen = set[int]()  # a conversation holds its messages once, and they are checked once
    for index, call in enumerate(record.calls):
        problem = _find_problem(call, seen, is_policy=is_policy(call.llm))
        if problem is not None:
            record.calls = record.calls[:index]
            record.marks = [mark for mark in record.marks if mark.after_call <= index]
            return problem
    return None


def _find_problem(call: ModelCall, seen: set[int], *, is_policy: bool) -> tuple[Outcome, str] | None:
    """Returns the outcome and the reason if a call cannot be recorded: its request first, which came first."""
    request = call.request
    settings = request.template_kwargs, request.sampling.stop, request.sampling.logit_bias, request.prompt
    parts = [part for part in (*request.messages, request.tools) if id(part) not in seen]
    seen.update(map(id, parts))
    asked = next((why for part in parts if (why := _find_unwritable(part)) is not None), None)
    if asked is None and any(settings):
        asked = find_unwritable(settings)
    if asked is not None:
        return Outcome.TOOL_ERROR, f"a request of the agent to {call.llm} cannot be recorded: {asked}"
    replied = next((why for reply in call.choices if (why := _find_unwritable(reply.message)) is not None), None)
    seen.update(id(reply.message) for reply in call.choices)
    if replied is not None:
        outcome = Outcome.POLICY_ERROR if is_policy else Outcome.BACKEND_ERROR
        return outcome, f"a reply of {call.llm} cannot be recorded: {replied}"
    return None


def _find_unwritable(value: object) -> str | None:
    if type(value) is dict and all(type(each) is str for entry in value.items() for each in entry):
        return None  # nearly every message
    return find_unwritable(value)


def _drop_output(record: EpisodeRecord, is_policy: Callable[[str], bool]) -> tuple[Outcome, str] | None:
    why = find_unwritable(record.item.output_obj, max_chars=get_limits().output_chars)
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
    return text.count("[") + text.count("{") > get_limits().value_depth or longest > sys.get_int_max_str_digits() > 0


def _drop_marks(record: EpisodeRecord) -> tuple[Outcome, str] | None:
    problem = None
    for mark in record.marks:
        why = find_unwritable(mark.data, max_chars=get_limits().output_chars)
        why = why or find_unwritable(mark.step_reward) or find_unwritable(mark.call_id)
        if why is not None:
            mark.data = mark.step_reward = mark.call_id = None
            problem = problem or (Outcome.TOOL_ERROR, f"a mark of the agent cannot be recorded: {why}")
    return problem
