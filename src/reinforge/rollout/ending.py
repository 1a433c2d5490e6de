"""Decides how an episode ended: its output, or whose failure it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from reinforge.errors import BackendError, ContextOverflow, EngineError, MessagesRejected, describe_error
from reinforge.rollout.capture import Capture
from reinforge.rollout.isolation.containment import Blocked
from reinforge.rollout.workflow import PolicyFailure, refuse_coroutine
from reinforge.types.episode import EpisodeRecord
from reinforge.types.trajectory import Outcome
from reinforge.types.workflow import BoundWorkflow


def record_ending(
    record: EpisodeRecord,
    capture: Capture,
    get_output: Callable[[], object],
    workflow: BoundWorkflow,
    timeout_s: float,
) -> None:
    """Sets the output of an episode, or its outcome and the reason."""
    item = record.item
    try:
        output = refuse_coroutine(get_output(), workflow)
        capture.match_output(output)
        record.item = item.copy_with_updates(output_obj=output)
    except TimeoutError as error:
        record.outcome, record.reason = _classify_timeout(capture, timeout_s)
        if isinstance(error, Blocked):
            record.outcome, record.reason = Outcome.TIMEOUT, str(error)
    except PolicyFailure as failure:
        capture.match_output(failure.output)
        is_cut = bool(capture.calls) and capture.calls[-1].reply.finish_reason == "length"
        record.outcome = Outcome.OVERLONG if is_cut else Outcome.POLICY_ERROR
        record.reason = str(failure)
        record.item = item.copy_with_updates(output_obj=failure.output)
    except ContextOverflow as overflow:
        record.outcome, record.reason = Outcome.CONTEXT_OVERFLOW, str(overflow)
    except (BackendError, EngineError, ConnectionError) as error:
        is_own = isinstance(error, MessagesRejected)  # the agent's doing
        record.outcome = Outcome.TOOL_ERROR if is_own else Outcome.BACKEND_ERROR
        record.reason = f"{type(error).__name__}: {error}"
    except asyncio.CancelledError:
        record.outcome, record.reason = Outcome.CANCELLED, "the agent raised CancelledError"
    except (Exception, SystemExit) as error:  # noqa: BLE001  a user's agent may raise anything; it fails only this episode
        record.outcome, cause = _find_cause(capture)
        described = describe_error(error)
        record.reason = described if cause is None else f"{cause}; the agent then failed: {described}"


def _classify_timeout(capture: Capture, limit_s: float) -> tuple[Outcome, str]:
    """Returns the outcome and reason of a timeout: the policy's fault if finished replies took most of the time."""
    replies = len(capture.calls)
    replying_s = sum(call.ended_s - call.started_s for call in capture.calls)
    if replying_s > limit_s / 2:
        return Outcome.POLICY_TIMEOUT, f"{replies} replies took {replying_s:.1f} s of the time limit of {limit_s:g} s"
    waiting = f", {capture.pending} model call(s) unanswered" if capture.pending else ""
    return Outcome.TIMEOUT, f"not finished after {limit_s:g} s ({replies} replies{waiting})"


def _find_cause(capture: Capture) -> tuple[Outcome, str | None]:
    """Returns the outcome of an episode whose agent raised an error, and what it raised it about, if that is known."""
    if capture.overflow:
        return Outcome.CONTEXT_OVERFLOW, capture.overflow
    if capture.lost_call is not None:
        return Outcome.BACKEND_ERROR, capture.lost_call
    return (Outcome.TOOL_ERROR if capture.bad_call is None else Outcome.POLICY_ERROR), capture.bad_call
