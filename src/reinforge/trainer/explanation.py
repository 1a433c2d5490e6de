"""Why a run was not promoted and what to change: the first reasons that its own records support, at most three.

    a guard metric held it back   the improvement itself is shown
    replies were cut off          they never reach the answer, and earn less
    no signal                     most groups have equal rewards, so nothing is learned from them
    rewarded otherwise            the reward rose, the metric of the verdict did not
    too few / too small steps     the model hardly moved, or was still rising at the end
    over-fitted                   training rose and select did not, or select fell after an early peak
    better on select only         the best of several noisy validations
    too few confirm examples      the effect is there, but the interval is too wide to show it

A cause stands before what follows from it: without signal there are few steps, and few steps move little.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from reinforge.config.schema import FinetuneConfig
from reinforge.evaluation.statistics import MAX_P_VALUE, count_needed_pairs
from reinforge.runs.predictions import SIGNAL
from reinforge.runs.rows import BASELINE, EpochMetrics, Explanation, ValidationRow
from reinforge.runs.summary import RunSummary, describe_resume
from reinforge.trainer.guards import LEARNING_RATE, History, advise_no_signal, measure_train_select_gap
from reinforge.trainer.preflight.recommendation import MAX_CUT, SOME_SIGNAL
from reinforge.types.trajectory import Outcome

MAX_REASONS = 3
"""Whoever changes more than this at once does not learn which change helped."""
FEW_STEPS = 20
"""Twice the default warmup of 10 steps: with fewer, most steps had a reduced learning rate."""
SMALL_GAIN = 0.05
"""Nats a token by which all jobs together moved log-probs with the advantages (`direction`): 5 % in probability. In
runs of the bundled models that improved it was 0.5 or more."""
MIN_VALIDATIONS = 3
"""With fewer, that the last is the best says nothing about a trend."""
MAX_MORE_EXAMPLES = 10
"""An effect that needs more than this many times the confirm examples cannot be told from none."""
IMPROVE = "`reinforge improve FILE` tries several learning rates, adapters and group sizes"
TOO_LONG = (Outcome.OVERLONG.value, Outcome.CONTEXT_OVERFLOW.value)


@dataclass(frozen=True)
class _Records:
    summary: RunSummary
    epochs: Sequence[EpochMetrics]
    validations: Sequence[ValidationRow]  # with a score of the gate's metric, the baseline first
    config: FinetuneConfig
    is_relative: bool  # the reward compares siblings, so its mean says nothing

    @property
    def reward(self) -> str:
        return self.config.reward_function.name if self.config.reward_function is not None else "reward"

    @property
    def metric(self) -> str:
        return self.config.gate.metric or self.reward

    def score(self, row: ValidationRow) -> float:
        value = row.metrics.get(self.metric)
        return value if value is not None else row.avg_reward or 0.0

    @property
    def best(self) -> ValidationRow | None:
        return max(self.validations, key=lambda row: (self.score(row), -row.epoch), default=None)

    @property
    def is_rising(self) -> bool:
        return len(self.validations) >= MIN_VALIDATIONS and self.best is self.validations[-1]


def explain(
    summary: RunSummary,
    epochs: Sequence[EpochMetrics],
    validations: Sequence[ValidationRow],
    config: FinetuneConfig,
    *,
    is_relative: bool = False,
) -> list[Explanation]:
    """Returns why the run was not promoted, the most likely reason first; empty: it was, or it has no verdict yet."""
    if summary.promoted or summary.smoke or (summary.promoted is None and summary.is_incomplete):
        return []
    metric = config.gate.metric
    scored = [row for row in validations if (row.metrics.get(metric) if metric else row.avg_reward) is not None]
    records = _Records(summary, epochs, scored, config, is_relative)
    if (held_back := _find_guard_metric(records)) is not None:
        return [held_back]
    rules = (
        _find_cut_replies,
        _find_no_signal,
        _find_other_goal,
        _find_short_way,
        _find_overfit,
        _find_luck,
        _find_few,
    )
    found = [explanation for rule in rules if (explanation := rule(records)) is not None]
    nothing = Explanation("no single cause", "nothing that this run recorded points to one", IMPROVE)
    return found[:MAX_REASONS] or [nothing]


def _find_guard_metric(records: _Records) -> Explanation | None:
    change, gate = records.summary.improvement, records.config.gate
    is_shown = change is not None and change.ci_low is not None and change.ci_low > gate.margin
    if not is_shown or change is None or change.p_value > MAX_P_VALUE or not gate.guard_metrics:
        return None
    fix = (
        f"make {' and '.join(gate.guard_metrics)} part of the reward (`_type: weighted`), add confirm examples if the "
        "interval is only too wide, or allow a larger loss in finetuning.gate.guard_metrics"
    )
    return Explanation("a guard metric held it back", records.summary.reason, fix)


def _find_cut_replies(records: _Records) -> Explanation | None:
    known = [row for row in records.epochs if row.clipped_share]
    share = _mean([row.clipped_share for row in records.epochs])
    total = sum(records.summary.episodes.values())
    too_long = sum(records.summary.episodes.get(name, 0) for name in TOO_LONG) / total if total else 0.0
    earned = _mean([row.clipped_avg_reward for row in known])
    usual = _mean([row.avg_reward for row in known])
    fix = "raise max_tokens in the agent (finetuning.policy.max_model_len if the context is full), or ask for less"
    if share is not None and share > MAX_CUT and earned is not None and usual is not None and earned < usual:
        evidence = f"{share:.0%} of the training episodes reach max_tokens; they earn {earned:.2f}, all {usual:.2f}"
        return Explanation("replies were cut off", evidence, fix)
    if too_long > MAX_CUT:
        return Explanation("replies were cut off", f"{too_long:.0%} of the episodes were too long for their limit", fix)
    return None


def _find_no_signal(records: _Records) -> Explanation | None:
    share = _mean([row.share_without_signal for row in records.epochs])
    if share is None or share <= 1 - SOME_SIGNAL:
        return None
    expected = next((each.value for each in records.summary.predictions if each.name == SIGNAL), None)
    before = "" if expected is None else f"; preflight expected {1 - expected:.0%}"
    evidence = f"{share:.0%} of the groups have equal rewards, so nothing is learned from them{before}"
    return Explanation(
        "no signal", evidence, advise_no_signal(_mean([row.avg_reward for row in records.epochs]) or 0.0)
    )


def _find_other_goal(records: _Records) -> Explanation | None:
    if records.metric == records.reward or records.is_relative or len(records.validations) < 2:
        return None
    base, last = records.validations[0], records.validations[-1]
    if base.avg_reward is None or last.avg_reward is None or (last.ci_low or last.avg_reward) <= base.avg_reward:
        return None
    summary, before, after = last.summaries.get(records.metric), records.score(base), records.score(last)
    if (summary.ci_low if summary is not None and summary.ci_low is not None else after) > before:
        return None
    evidence = (
        f"on select the reward {records.reward} went from {base.avg_reward:.3f} to {last.avg_reward:.3f}, but "
        f"{records.metric} from {before:.3f} to {after:.3f}"
    )
    fix = (
        f"read the best episodes in report.html, and correct the reward or make {records.metric} a part of it "
        "(`_type: weighted`)"
    )
    return Explanation("rewarded otherwise", evidence, fix)


def _find_short_way(records: _Records) -> Explanation | None:
    steps, done = records.summary.num_updates, len(records.epochs)
    gains = [row.job.get("direction") for row in records.epochs]
    gain = sum(known) if (known := [each for each in gains if isinstance(each, int | float)]) else None
    is_small = gain is not None and len(known) == done and gain < SMALL_GAIN
    is_few = steps is not None and steps < FEW_STEPS
    if not (is_few or is_small or records.is_rising):
        return None
    parts = [] if steps is None else [f"{steps} optimizer steps in {done} epochs"]
    if gain is not None:
        parts.append(f"together they moved log-probs by {gain:+.2g} nats a token in the direction of the reward")
    if records.is_rising:
        parts.append(f"the last validation is the best ({records.score(records.validations[-1]):.3f})")
    rate = max((row.job.get("lr") or 0.0 for row in records.epochs), default=0.0)
    if is_small and not records.is_rising:
        fix = f"raise {LEARNING_RATE} three to ten times{f' (it was {rate:.2g})' if rate else ''}; {IMPROVE}"
        return Explanation("too small steps", "; ".join(parts), fix)
    more = max(done, math.ceil(done * (FEW_STEPS / steps - 1))) if steps else max(1, done)
    more = 0 if records.config.num_epochs > done else more  # the epochs that a limit left are the first to train
    return Explanation("too few steps", "; ".join(parts), f"train on: {describe_resume(records.summary.folder, more)}")


def _find_overfit(records: _Records) -> Explanation | None:
    fix = f"more training examples, fewer epochs, a lower {LEARNING_RATE}, or the algorithm's kl_coef"
    limit, rows = records.config.guards.train_select_gap.limit, records.validations
    if records.epochs and limit is not None:
        history = History(records.epochs, rows, is_relative=records.is_relative)
        measured, first, last = measure_train_select_gap(history, limit), records.epochs[0], records.epochs[-1]
        if measured is not None and measured.is_beyond:
            evidence = (
                f"the training reward went from {first.avg_reward:.3f} to {last.avg_reward:.3f}, that on select from "
                f"{rows[0].avg_reward:.3f} to {rows[-1].avg_reward:.3f}"
            )
            return Explanation("over-fitted", evidence, fix)
    best = records.best
    if best is None or best.epoch == BASELINE or 2 * (best.epoch + 1) > len(records.epochs):
        return None
    summary, peak, end = best.summaries.get(records.metric), records.score(best), records.score(rows[-1])
    low = summary.ci_low if summary is not None else best.ci_low
    if low is None or end >= low:
        return None
    evidence = f"{records.metric} on select peaked at {peak:.3f} after epoch {best.epoch}, and ended at {end:.3f}"
    return Explanation("over-fitted", evidence, fix)


def _find_luck(records: _Records) -> Explanation | None:
    change, best = records.summary.improvement, records.best
    if change is None or change.ci_high is None or best is None or best.epoch == BASELINE:
        return None
    gain, count = records.score(best) - records.score(records.validations[0]), len(records.validations) - 1
    if gain <= change.ci_high:
        return None
    evidence = (
        f"on select the best of {count} validations is {gain:+.3f} above the base model, but on confirm the change is "
        f"{change}"
    )
    fix = "more select examples (finetuning.splits.select), so that noise chooses less, or fewer validations"
    return Explanation("better on select only", evidence, fix)


def _find_few(records: _Records) -> Explanation | None:
    change, margin = records.summary.improvement, records.config.gate.margin
    needed = None if change is None else count_needed_pairs(change, margin)
    if change is None or needed is None or not 1 < needed / change.num_pairs <= MAX_MORE_EXAMPLES:
        return None
    evidence = (
        f"the improvement is {change} on {change.num_pairs:,} confirm examples; to show one of this size in 9 of 10 "
        f"runs takes about {needed:,}"
    )
    fix = f"a new run with more rows and finetuning.splits.confirm: {needed}, or a larger finetuning.gate.num_samples"
    return Explanation("too few confirm examples", evidence, fix)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
