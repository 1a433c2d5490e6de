"""What `trainer/run.py` lends a trainer for the length of one run: the journal, the progress, the clock."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reinforge.config.schema import LimitsConfig, TranscriptsConfig
from reinforge.errors import BudgetReached
from reinforge.interfaces import PolicyServer
from reinforge.runs.checkpoints import Checkpoints
from reinforge.runs.episode_json import episode_of
from reinforge.runs.journal import RunStore, Snapshot
from reinforge.runs.progress import RunProgress
from reinforge.runs.transcripts import STAGES, write_transcripts
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from reinforge.types.evaluation import EvalInputItem

END = "END"
"""The stage of what happens after the work: files are written; nobody needs to be told."""


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
        resumed: Where a run that was begun before goes on; None: it begins.
        policy: What the agent calls, once it is loaded; None: the backend serves no policy.
        pending: Makes the epoch before durable, where the run is stopped between two checkpoints.
        transcripts: What is written of dialogues for a person to read.
        recalls: Phases whose episodes are taken from the journal where it holds them already.
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
    resumed: Snapshot | None = None
    policy: PolicyServer | None = None
    pending: Callable[[], Awaitable[Any]] | None = None
    transcripts: TranscriptsConfig = field(default_factory=TranscriptsConfig)
    recalls: set[str] = field(default_factory=set)
    last_progress_s: float = field(default_factory=time.monotonic)
    _stage_since: float = field(default_factory=time.monotonic)
    _known: dict[str, str] = field(default_factory=dict)
    _known_phase: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        self.checkpoints = Checkpoints(self.store.folder)
        self._tokens_before = 0

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.store.folder

    def begin_stage(self, stage: str, epoch: int | None = None, total: int | None = None) -> None:
        """Ends the stage before and begins another; `total` is the number of episodes it will run, if any."""
        now = time.monotonic()
        self.wall_time_s[self.stage_name] = self.wall_time_s.get(self.stage_name, 0.0) + now - self._stage_since
        self.stage_name, self.stage_epoch, self._stage_since, self.last_progress_s = stage, epoch, now, now
        if stage != END:
            self.progress.stage(epoch, stage, total)

    def end_stage(self, data: dict[str, Any]) -> None:
        """Journals that the stage that runs now has done its work."""
        self.store.stage(-1 if self.stage_epoch is None else self.stage_epoch, self.stage_name, data)
        if self.transcripts.save and self.stage_name in STAGES:
            write_transcripts(self.folder, self.stage_name, self.stage_epoch, self.transcripts)

    def episode_done(self, record: EpisodeRecord) -> None:
        """Journals and counts one finished episode."""
        self.store.episode(record)
        self._count(record)

    def recall(self, key: EpisodeKey, item: EvalInputItem) -> EpisodeRecord | None:
        """Returns an episode that the journal holds from before a stop, and counts it; None: it must be run.

        What the world failed is tried again, and so is what other weights than those that are served now have said.
        """
        if key.phase not in self.recalls:
            return None
        if self._known_phase != (key.phase, key.epoch):
            self._known_phase = (key.phase, key.epoch)
            self._known = self.store.recorded_episodes(key.phase, key.epoch)
        data = self._known.get(str(key))
        record = episode_of(json.loads(data), item) if data is not None else None
        if record is None or record.outcome.is_missing or not self._is_of_served_weights(record):
            return None
        self._count(record)
        return record

    def recorded(self, epoch: int, items: Mapping[str, EvalInputItem]) -> list[EpisodeRecord]:
        """Returns the collected episodes of an epoch that is over, in the order of their keys.

        Args:
            epoch: From 0.
            items: Every example by its id.
        """
        found = [json.loads(data) for _, data in sorted(self.store.recorded_episodes("collect", epoch).items())]
        return [episode_of(data, items[data["example_id"]]) for data in found if data["example_id"] in items]

    def _is_of_served_weights(self, record: EpisodeRecord) -> bool:
        versions = {reply.version for call in record.calls for reply in call.choices} - {None}
        return self.policy is None or versions <= {self.policy.version}

    def _count(self, record: EpisodeRecord) -> None:
        self.episodes[record.outcome.value] += 1
        completion = record.num_completion_tokens
        self.tokens["prompt"] += record.num_prompt_tokens
        self.tokens["completion"] += completion
        self.last_progress_s = time.monotonic()
        self.progress.episode(record.outcome.value, record.reward, completion)

    def version_published(
        self, version: int, fingerprint: str, num_updates: int | None, checkpoint: str | None
    ) -> None:
        """Records a version of the weights; `num_updates` is None where the backend does not count steps."""
        self.store.policy_version(version, fingerprint, num_updates, checkpoint)
        self.policy_versions.append({"version": version, "fingerprint": fingerprint, "num_updates": num_updates})

    def counters(self) -> dict[str, Any]:
        """Returns what was counted so far, as `restore_counters` takes it."""
        return {"episodes": dict(self.episodes), "tokens": dict(self.tokens), "wall_time_s": dict(self.wall_time_s)}

    def restore_counters(self, counters: dict[str, Any]) -> None:
        """Goes on counting where `counters` left off."""
        self.episodes, self.tokens = Counter(counters["episodes"]), Counter(counters["tokens"])
        self.wall_time_s = dict(counters["wall_time_s"])
        self._tokens_before = self.tokens["completion"]

    def refuse_over_budget(self) -> None:
        """Stops between epochs once a limit is reached; the limits are those of one call, resumed or not.

        Raises:
            BudgetReached: The run used its minutes or its tokens.
        """
        minutes = (time.monotonic() - self.started_s) / 60
        if self.limits.max_minutes is not None and minutes >= self.limits.max_minutes:
            raise BudgetReached(f"limits.max_minutes: {minutes:.1f} of {self.limits.max_minutes:g} minutes are used")
        sampled = self.tokens["completion"] - self._tokens_before
        if self.limits.max_tokens is not None and sampled >= self.limits.max_tokens:
            raise BudgetReached(f"limits.max_tokens: {sampled} of {self.limits.max_tokens} sampled tokens are used")
