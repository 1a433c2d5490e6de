"""The states of a fine-tuning job, and which may follow which.

validating_files -> queued -> running -> succeeded | failed
                      ^         |
                      +---------+   the server restarted; also after a pause: paused -> queued
cancelled may follow every state that is not final
"""

from __future__ import annotations

import enum


class JobState(enum.StrEnum):
    """A state of a job, by OpenAI's name; `paused` is what `pause` leads to."""

    VALIDATING = "validating_files"
    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """True if no other state follows."""
        return not TRANSITIONS[self]


TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.VALIDATING: frozenset({JobState.QUEUED, JobState.PAUSED, JobState.FAILED, JobState.CANCELLED}),
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.PAUSED, JobState.FAILED, JobState.CANCELLED}),
    JobState.RUNNING: frozenset(
        {JobState.QUEUED, JobState.PAUSED, JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}
    ),
    JobState.PAUSED: frozenset({JobState.QUEUED, JobState.VALIDATING, JobState.CANCELLED}),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}
