"""The context of one run that a trainer is given: the journal, the progress display, counters and limits."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from reinforge.config.finetuning_blocks import LimitsConfig, TranscriptsConfig
from reinforge.errors import BudgetReached, RunPaused, show
from reinforge.evaluation.reasons import ReasonCounts, describe_failure, shorten_line
from reinforge.interfaces import PolicyServer
from reinforge.runs.checkpoints import Checkpoints
from reinforge.runs.journal.episode_json import parse_episode
from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.journal.packing import unpack_episode
from reinforge.runs.journal.reader import JournalReader
from reinforge.runs.progress import RunProgress, SilentProgress
from reinforge.runs.rows import BASELINE, PHASES, EpochSnapshot, PolicyVersion, ValidationRow
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.trajectory import Outcome

if TYPE_CHECKING:
    from reinforge.algorithms.curriculum import Levels
    from reinforge.trainer.guards import GuardWatch


CLOCK_SLACK_S = 0.1  # how much earlier than the run's clock the event loop's may end a wait

END = "END"  # the stage after the work, in which the files are written; the progress display does not show it

RESERVED = 1.25  # how many times the measured time and tokens of a verdict are kept for it

TALLIED = {"BASELINE", "COLLECT", "VALIDATE", "CONFIRM_BASE", "CONFIRM_TUNED", "CONFIRM_REFERENCE"}
"""Stages that run episodes; the refills of an epoch belong to its first collection."""


NUM_PROBED = 64  # episodes of a phase that are checked for a dialogue between agents: the first ones may have failed
STAGES_OF_BASE = {"BASELINE", "CONFIRM_BASE"}  # stages that run the base model on held-out examples
MIN_EPISODES = 4  # with fewer episodes, equal rewards say nothing about the evaluator
MAX_SHOWN_CHARACTERS = 160


@dataclass
class EpisodeTally:
    """Counts the episodes of one stage as they finish."""

    num_scored: int = 0  # episodes with a reward
    num_finished: int = 0  # episodes whose agent returned
    num_none: int = 0  # those of them that returned None
    missing: ReasonCounts = field(default_factory=ReasonCounts)
    failures: ReasonCounts = field(default_factory=ReasonCounts)
    rewards: list[float] = field(default_factory=list)
    num_completion_tokens: int = 0
    clipped_rewards: list[float] = field(default_factory=list)  # those with a reply that `max_tokens` cut off
    scores: dict[str, list[float]] = field(default_factory=dict)
    _first: EpisodeRecord | None = None

    def add(self, record: EpisodeRecord) -> None:
        if record.outcome.is_missing:
            self.missing.add(describe_failure(record))
        elif record.reward is not None:
            self.num_scored += 1
            self._measure(record, record.reward)
            if record.outcome.is_policy_failure:
                self.failures.add(describe_failure(record))
            elif self._first is None:
                self._first = record
        if record.outcome in (Outcome.OK, Outcome.JUDGE_ERROR, Outcome.REWARD_ERROR):
            self.num_finished += 1
            self.num_none += record.item.output_obj is None

    def _measure(self, record: EpisodeRecord, reward: float) -> None:
        self.rewards.append(reward)
        self.num_completion_tokens += record.num_completion_tokens
        if any(reply.finish_reason == "length" for call in record.calls for reply in call.choices):
            self.clipped_rewards.append(reward)
        for name, item in record.scores.items():
            score = item.as_reward()
            if score is not None:
                self.scores.setdefault(name, []).append(score)

    def summarize(self) -> dict[str, Any]:
        """Returns the fields of `EpochMetrics` that follow from the episodes; empty: none is scored.

        Example: rewards 0, 1 with 10 and 30 sampled tokens -> reward_std 0.5, completion_tokens 20. The sums do not
        depend on the order in which the episodes finished.
        """
        if not self.rewards:
            return {}
        count = len(self.rewards)
        mean, clipped = math.fsum(self.rewards) / count, self.clipped_rewards
        return {
            "reward_std": math.sqrt(math.fsum((reward - mean) ** 2 for reward in self.rewards) / count),
            "completion_tokens": self.num_completion_tokens / count,
            "clipped_share": len(clipped) / count,
            "clipped_avg_reward": math.fsum(clipped) / len(clipped) if clipped else None,
            "scores": {name: math.fsum(values) / len(values) for name, values in sorted(self.scores.items())},
        }

    def describe_none_outputs(self, agent: str) -> str | None:
        if self.num_finished < MIN_EPISODES or self.num_none < self.num_finished:
            return None
        return f"{agent} returned None in all {self.num_finished:,} episodes: is a `return` missing?"

    def describe_constant_reward(self, metric: str, agent: str) -> str | None:
        """Returns that all episodes have the same reward, with one of them; None: the rewards differ."""
        if self.num_scored < MIN_EPISODES or len(set(self.rewards)) != 1:
            return None
        reward = self.rewards[0]
        if self._first is None:
            reason = self.failures.find_commonest()
            return f"all {self.num_scored:,} episodes failed because of the policy (reward {reward:g}): {reason}"
        head = f"all {self.num_scored:,} episodes have the reward {reward:g}"
        if (nothing := self.describe_none_outputs(agent)) is not None:
            return f"{head}; {nothing}"
        return f"{head}; {_describe_episode(self._first)}. {_suggest(reward, metric, self._first.item)}"


def _describe_episode(record: EpisodeRecord) -> str:
    item = record.item
    parts = [f"question {_quote(item.input_obj)}", f"answer {_quote(item.output_obj)}"]
    if item.expected_output_obj is not None:
        parts.append(f"expected {_quote(item.expected_output_obj)}")
    return f"example {shorten_line(item.id, 40)}: {', '.join(parts)}"


def _suggest(reward: float, metric: str, item: EvalInputItem) -> str:
    output, expected = item.output_obj, item.expected_output_obj
    is_same = type(output) is type(expected) and show(output) == show(expected)
    if reward == 0 and expected is not None and not is_same and show(output).strip() == show(expected).strip():
        return "They differ in type or in spaces: compare str(output).strip() with str(expected).strip()"
    if reward == 1:
        return (
            f"If such answers are right, the model solves every example already: use harder ones; if not, the "
            f"evaluator {metric} accepts too much"
        )
    test = "`reinforge check FILE --sample 3` scores the expected answers"
    if reward == 0:
        return (
            f"If that answer should earn something, correct the evaluator {metric} or the form of the answer ({test}); "
            "if not, the task is too hard for this model: imitate the expected answers first, unless this run does "
            "(trajectory builder `_type: answers`), or use easier examples or a reward that counts partial success"
        )
    return f"The evaluator {metric} does not distinguish the answers ({test})"


def _quote(value: object) -> str:
    if isinstance(value, list) and value and isinstance(value[-1], dict):  # a conversation
        value = value[-1].get("content", value)
    if isinstance(value, bool | int | float):
        return f"{value} ({type(value).__name__})"
    return f'"{shorten_line(value, MAX_SHOWN_CHARACTERS)}"'


@dataclass
class _NoJournal:
    """The journal of a trainer outside a run: it ignores everything."""

    folder: Path

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


@dataclass
class RunContext:
    """The journal, the progress display and the counters of one run.

    A trainer that is used outside a run has one, too, which keeps nothing: see `stand_in`.
    """

    run_id: str
    journal: RunJournal
    progress: RunProgress
    limits: LimitsConfig
    started_s: float = field(default_factory=time.monotonic)
    episodes: Counter[str] = field(default_factory=Counter)  # outcome -> number of finished episodes
    missing: ReasonCounts = field(default_factory=ReasonCounts)  # reasons of all episodes that the environment failed
    tally: EpisodeTally = field(default_factory=EpisodeTally)
    """The episodes of the current stage, or of the last one that ran some."""
    tokens: Counter[str] = field(default_factory=Counter)  # `prompt`, `completion`, `trained`
    wall_time_s: dict[str, float] = field(default_factory=dict)
    stage_name: str = "START"
    stage_epoch: int | None = None
    policy_versions: list[PolicyVersion] = field(default_factory=list)
    validations: list[ValidationRow] = field(default_factory=list)
    """All validations so far, each with its version and checkpoint."""
    resumed: EpochSnapshot | None = None  # the snapshot that the run resumes from; None: a new run
    policy: PolicyServer | None = None  # the policy that the agent calls, once loaded; None: the backend serves none
    pending: Callable[[], Awaitable[Any]] | None = None
    """Makes the last epoch durable if the run stops between two checkpoints."""
    reward_metric: str = "reward"
    is_relative: bool = False  # True if the reward compares answers, so that the base model's own reward is constant
    levels: Levels | None = None  # of the curriculum; None: all levels are trained from the start
    agent: str = "the agent"  # the agent's function with its file and line
    transcripts: TranscriptsConfig = field(default_factory=TranscriptsConfig)
    is_run: bool = True
    recalls: set[str] = field(default_factory=set)  # phases whose episodes are reused from the journal
    baseline_from: Path | None = None  # of `RunOptions`
    guards: GuardWatch | None = None
    find_pause: Callable[[RunContext, int], str | None] = lambda context, num_epochs: None
    """Asked between two epochs, with the number of those that are done; a reason pauses the run."""
    last_progress_s: float = field(default_factory=time.monotonic)
    _share_done: float = 0.0  # of the job that is followed
    verdict_size: float = 0.0
    """The episodes of the last validation and the verdict, as a multiple of those of a validation; the limits keep
    time and tokens for them once a job has ended. 0: they keep nothing."""
    validation_s: float = 0.0  # of the longest validation so far
    validation_tokens: int = 0  # of the one with the most
    row_s: float = 0.0  # of the last job for each of its rows, with the publication of its weights; 0: none has ended
    job_rows: int = 1  # of the next job: as many as the last one had, 0 where a stage begins whose size is not known
    _stage_since: float = field(default_factory=time.monotonic)
    _known: dict[tuple[str, int], dict[str, bytes]] = field(default_factory=dict)
    _early: dict[int, list[EpisodeRecord]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.checkpoints = Checkpoints(self.journal.folder)
        self._tokens_before = self._num_early_tokens = self._tokens_at_start = 0
        self._job_s = 0.0
        self._clocks: set[asyncio.Timeout] = set()
        self._has_told_constant = False
        self._tallied: tuple[str, int | None] | None = None

    @classmethod
    def stand_in(cls, folder: Path) -> Self:
        """Returns the context of a trainer outside a run: nothing limits it, and it records nothing."""
        journal = cast(RunJournal, _NoJournal(folder))
        context = cls("", journal, SilentProgress(), LimitsConfig(), is_run=False)
        context.transcripts = TranscriptsConfig(save=False)
        return context

    @property
    def folder(self) -> Path:
        return self.journal.folder

    def begin_stage(self, stage: str, epoch: int | None = None, total: int | None = None) -> None:
        """Ends the current stage and begins another; `total` is the number of episodes it will run, if any."""
        now = time.monotonic()
        self._measure_stage(now - self._stage_since)
        self.stage_name, self.stage_epoch, self._stage_since, self.last_progress_s = stage, epoch, now, now
        self._tokens_at_start = self.tokens["completion"]
        if stage in TALLIED and self._tallied != (stage, epoch):
            self._tallied, self.tally = (stage, epoch), EpisodeTally()
        if stage != END:
            self.progress.stage(epoch, stage, total)
        if stage == "COLLECT" and epoch is not None:
            for record in self._early.pop(epoch, ()):
                self._num_early_tokens -= record.num_completion_tokens
                self._count(record)

    def _measure_stage(self, seconds: float) -> None:
        name = self.stage_name
        self.wall_time_s[name] = self.wall_time_s.get(name, 0.0) + seconds
        if name in ("BASELINE", "VALIDATE"):
            self.validation_s = max(self.validation_s, seconds)
            num_tokens = self.tokens["completion"] - self._tokens_at_start
            self.validation_tokens = max(self.validation_tokens, num_tokens)
        elif name in ("SUBMIT", "AWAIT", "ADOPT"):
            self._job_s = seconds + (self._job_s if name != "SUBMIT" else 0.0)
            self.row_s = self._job_s / max(1, self.job_rows)

    def expect_early(self, epoch: int) -> None:
        """Counts the episodes of an epoch when its own collection begins as a stage: they run before its turn.

        A snapshot of an earlier epoch then does not count them, and a run that resumes from it does.
        """
        self._early.setdefault(epoch, [])

    def end_stage(self, data: dict[str, Any]) -> None:
        self.journal.record_stage(-1 if self.stage_epoch is None else self.stage_epoch, self.stage_name, data)
        phase = PHASES.get(self.stage_name)
        if self.transcripts.save and phase and JournalReader(self.folder).has_dialogues(phase, None, NUM_PROBED):
            from reinforge.runs.transcripts import write_transcripts  # of several agents alone

            write_transcripts(self.folder, self.stage_name, self.stage_epoch, self.transcripts)

    def record_episode(self, record: EpisodeRecord) -> None:
        self.journal.record_episode(record)
        self._count(record)

    def recall(self, key: EpisodeKey, item: EvalInputItem) -> EpisodeRecord | None:
        """Returns an episode that the journal recorded before a stop, and counts it; None: it must be run.

        Episodes that the environment failed run again, and so do those sampled by other weights than the current ones.
        """
        is_of_other = self.baseline_from is not None and (key.phase, key.epoch) == ("validate", BASELINE)
        if key.phase not in self.recalls and not is_of_other:
            return None
        data = self._load_known(key.phase, key.epoch).get(str(key))
        record = parse_episode(unpack_episode(data), item) if data is not None else None
        if record is None or record.outcome.is_missing or not self._has_current_weights(record):
            return None
        if is_of_other:
            self.journal.record_episode(record)
        self._tokens_before += record.num_completion_tokens  # sampled by an earlier call
        self._count(record)
        return record

    def report_constant_reward(self, where: str) -> str | None:
        """Returns that all episodes of the stage have the same reward, with one of them; None: they differ.

        The first time this also becomes a line of the progress display.
        """
        if self.is_relative and self._tallied is not None and self._tallied[0] in STAGES_OF_BASE:
            return None
        found = self.tally.describe_constant_reward(self.reward_metric, self.agent)
        if found is not None and not self._has_told_constant:
            self._has_told_constant = True
            self.progress.note(f"{where}: {found}")
        return found

    def load_episodes(
        self, epoch: int, items: Mapping[str, EvalInputItem], phase: str = "collect"
    ) -> list[EpisodeRecord]:
        packed = sorted(self.journal.packed_episodes(phase, epoch).items())
        found = [unpack_episode(data) for _, data in packed]
        return [parse_episode(data, items[data["example_id"]]) for data in found if data["example_id"] in items]

    def _load_known(self, phase: str, epoch: int) -> dict[str, bytes]:
        if (phase, epoch) not in self._known:
            while len(self._known) > self.limits.max_staleness:  # one per collection that runs at the same time
                del self._known[next(iter(self._known))]
            other = self.baseline_from if (phase, epoch) == ("validate", BASELINE) else None
            reader = self.journal if other is None else JournalReader(other)
            self._known[phase, epoch] = reader.packed_episodes(phase, epoch)
        return self._known[phase, epoch]

    def _has_current_weights(self, record: EpisodeRecord) -> bool:
        """Returns True if the weights that sampled an episode may be those that sample it now."""
        if self.policy is None:
            return True
        replies = [reply for call in record.calls for reply in call.choices]
        versions = {version for reply in replies for version in (reply.version, reply.newest_version)} - {None}
        newest = oldest = self.policy.version
        if record.key.phase == "collect" and self.limits.max_staleness and self.stage_epoch is not None:
            oldest += record.key.epoch - self.stage_epoch - self.limits.max_staleness
            if self.resumed is not None and self.resumed.version is not None:
                newest = min(newest, self.resumed.version)  # the weights of later versions died with their process
        return all(version is not None and oldest <= version <= newest for version in versions)

    def advance(self, share: float) -> None:
        """Notes how much of the stage is done."""
        if share != self._share_done:
            self._share_done, self.last_progress_s = share, time.monotonic()
        self.progress.advance(share)

    def _count(self, record: EpisodeRecord) -> None:
        if record.key.phase == "collect" and record.key.epoch in self._early:
            self._early[record.key.epoch].append(record)
            self._num_early_tokens += record.num_completion_tokens
            self.last_progress_s = time.monotonic()
            self._end_at_token_limit()
            return
        self.episodes[record.outcome.value] += 1
        self.tally.add(record)
        if record.outcome.is_missing:
            self.missing.add(describe_failure(record))
        completion = record.num_completion_tokens
        self.tokens["prompt"] += record.num_prompt_tokens
        self.tokens["completion"] += completion
        self._end_at_token_limit()
        self.last_progress_s = time.monotonic()
        self.progress.episode(record.outcome.value, record.reward, completion)

    def _end_at_token_limit(self) -> None:
        if self._has_reached_tokens(self._compute_reserve()[1]):
            for clock in self._clocks:
                if not clock.expired():
                    clock.reschedule(0.0)

    def record_version(self, version: int, fingerprint: str, num_updates: int | None, checkpoint: str | None) -> None:
        """Records a version of the weights; `num_updates` is None if the backend does not report optimizer steps."""
        self.journal.record_policy_version(version, fingerprint, num_updates, checkpoint)
        self.policy_versions.append(PolicyVersion(version, fingerprint, num_updates, checkpoint))

    def counters(self) -> dict[str, Any]:
        return {
            "episodes": dict(self.episodes),
            "missing": self.missing.as_dict(),
            "tokens": dict(self.tokens),
            "wall_time_s": dict(self.wall_time_s),
            "validation": [self.validation_s, self.validation_tokens],
        }

    def restore_counters(self, counters: dict[str, Any]) -> None:
        self.episodes, self.tokens = Counter(counters["episodes"]), Counter(counters["tokens"])
        self.missing = ReasonCounts(counters["missing"])
        self.validation_s, self.validation_tokens = counters["validation"]
        self._tokens_before = self.tokens["completion"]

    def add_earlier_time(self, *known: Mapping[str, float]) -> None:
        """Adds the seconds that earlier sessions spent in each stage: the most that is known."""
        for name in {name for each in known for name in each}:
            self.wall_time_s[name] = self.wall_time_s.get(name, 0.0) + max(each.get(name, 0.0) for each in known)

    @asynccontextmanager
    async def limit_episodes(self) -> AsyncIterator[None]:
        """Stops the episodes that run in the block as soon as a limit is reached; finished ones are in the journal."""
        minutes, reserved_s = self.limits.max_minutes, self._compute_reserve()[0]
        left_s = None if minutes is None else self.started_s + 60 * minutes - reserved_s - time.monotonic()
        clock = asyncio.timeout(left_s)
        try:
            async with clock:
                self._clocks.add(clock)
                yield
        except TimeoutError:
            if clock.expired():
                self._check_budget(CLOCK_SLACK_S, self._compute_reserve())
            raise
        finally:
            self._clocks.discard(clock)

    def pause_if_due(self, num_epochs: int) -> None:
        if (why := self.find_pause(self, num_epochs)) is not None:
            raise RunPaused(why)

    def check_budget(self) -> None:
        """Stops before an epoch that the limits leave no room for; they hold for one call, not for a resumed run."""
        self._check_budget(0.0, self._compute_reserve(before_epoch=True))

    def check_job(self, num_rows: int) -> None:
        """Stops before a job that `limits.max_minutes` leaves no room for."""
        self.job_rows = num_rows
        self._check_minutes(self._compute_reserve()[0])

    def _check_budget(self, slack_s: float, reserve: tuple[float, int]) -> None:
        reserved_s, reserved_tokens = reserve
        if self._has_reached_tokens(reserved_tokens):
            limit = self.limits.max_tokens
            used = f"limits.max_tokens reached: {self._count_sampled_tokens()} of {limit} sampled tokens"
            raise BudgetReached(used + (f", with {reserved_tokens} for the verdict" if reserved_tokens else ""))
        self._check_minutes(reserved_s, slack_s)

    def _check_minutes(self, reserved_s: float, slack_s: float = 0.0) -> None:
        limit, minutes = self.limits.max_minutes, (time.monotonic() - self.started_s) / 60
        if limit is not None and minutes + (slack_s + reserved_s) / 60 >= limit:
            used = f"limits.max_minutes reached: {minutes:.1f} of {limit:g} minutes"
            raise BudgetReached(
                used + (f", with {reserved_s / 60:.1f} for a job and the verdict" if reserved_s else "")
            )

    def _compute_reserve(self, *, before_epoch: bool = False) -> tuple[float, int]:
        """Returns the seconds and the tokens that the run keeps for its verdict, and in seconds for the job before.

        Nothing is kept before a job has ended, since there is nothing to judge, and in what leads to the verdict.
        """
        is_closing = not before_epoch and self.stage_name in TALLIED - {"COLLECT"}
        if not self.row_s or not self.verdict_size or is_closing:
            return 0.0, 0
        seconds = RESERVED * (self.verdict_size * self.validation_s + self.row_s * self.job_rows)
        return seconds, math.ceil(RESERVED * self.verdict_size * self.validation_tokens)

    def _has_reached_tokens(self, reserved: int) -> bool:
        limit = self.limits.max_tokens
        return limit is not None and self._count_sampled_tokens() + reserved >= limit

    def _count_sampled_tokens(self) -> int:
        return self.tokens["completion"] + self._num_early_tokens - self._tokens_before
