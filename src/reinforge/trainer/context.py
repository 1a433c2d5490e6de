"""What `trainer/run.py` lends a trainer for the length of one run: the journal, the progress, the clock."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reinforge.config.schema import LimitsConfig
from reinforge.errors import BudgetReached
from reinforge.trainer.progress import RunProgress
from reinforge.trainer.store import RunStore
from reinforge.types.episode import EpisodeRecord


@dataclass
class RunContext:
    """One run's record and counters.

    Attributes:
        run_id: Names the run.
        store: The journal; owns the run folder.
        progress: What a person sees.
        limits: Bounds of time and tokens.
        started_s: `time.monotonic()` at the start.
        episodes: Outcome -> number of finished episodes.
        tokens: `prompt`, `completion`, `trained`.
        wall_time_s: Stage -> seconds spent in it.
        stage_name: The stage that runs now, for the watchdog.
        policy_versions: Every version of the weights so far.
        validations: Every validation so far, with the version and the checkpoint it belongs to.
    """

    run_id: str
    store: RunStore
    progress: RunProgress
    limits: LimitsConfig
    started_s: float = field(default_factory=time.monotonic)
    episodes: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    wall_time_s: dict[str, float] = field(default_factory=dict)
    stage_name: str = "START"
    stage_epoch: int | None = None
    policy_versions: list[dict[str, Any]] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)
    last_progress_s: float = field(default_factory=time.monotonic)
    _stage_since: float = field(default_factory=time.monotonic)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.store.folder

    def begin_stage(self, stage: str, epoch: int | None = None, total: int | None = None) -> None:
        """Ends the stage before and begins another; `total` is the number of episodes it will run, if any."""
        now = time.monotonic()
        self.wall_time_s[self.stage_name] = self.wall_time_s.get(self.stage_name, 0.0) + now - self._stage_since
        self.stage_name, self.stage_epoch, self._stage_since, self.last_progress_s = stage, epoch, now, now
        self.progress.stage(epoch, stage, total)

    def end_stage(self, data: dict[str, Any]) -> None:
        """Journals that the stage that runs now has done its work."""
        self.store.stage(-1 if self.stage_epoch is None else self.stage_epoch, self.stage_name, data)

    def episode_done(self, record: EpisodeRecord) -> None:
        """Journals and counts one finished episode."""
        self.store.episode(record)
        self.episodes[record.outcome.value] += 1
        completion = record.num_completion_tokens
        self.tokens["prompt"] += record.num_prompt_tokens
        self.tokens["completion"] += completion
        self.last_progress_s = time.monotonic()
        self.progress.episode(record.outcome.value, record.reward, completion)

    def version_published(
        self, version: int, fingerprint: str, num_updates: int | None, checkpoint: Path | None
    ) -> None:
        """Records a version of the weights; `num_updates` is None where the backend does not count steps."""
        relative = str(checkpoint.relative_to(self.folder)) if checkpoint is not None else None
        self.store.policy_version(version, fingerprint, num_updates, relative)
        self.policy_versions.append({"version": version, "fingerprint": fingerprint, "num_updates": num_updates})

    def refuse_over_budget(self) -> None:
        """Stops between epochs once a limit is reached.

        Raises:
            BudgetReached: The run used its minutes or its tokens.
        """
        minutes = (time.monotonic() - self.started_s) / 60
        if self.limits.max_minutes is not None and minutes >= self.limits.max_minutes:
            raise BudgetReached(f"limits.max_minutes: {minutes:.1f} of {self.limits.max_minutes:g} minutes are used")
        sampled = self.tokens["completion"]
        if self.limits.max_tokens is not None and sampled >= self.limits.max_tokens:
            raise BudgetReached(f"limits.max_tokens: {sampled} of {self.limits.max_tokens} sampled tokens are used")
