"""Why a run was not promoted and what to change: the first reasons that its own records support, at most three.

A cause stands before what follows from it: replies that are cut off cost signal, without signal there are few steps,
few steps move little, and a small effect takes many examples to show.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from reinforge.config.schema import FinetuneConfig
from reinforge.evaluation.statistics import MAX_P_VALUE, count_needed_pairs
from reinforge.runs.predictions import SIGNAL
from reinforge.runs.rows import BASELINE, EpochMetrics, ValidationRow, choose_best_validation
from reinforge.runs.summary import Explanation, RunSummary, describe_resume
from reinforge.trainer.guards import (
    LEARNING_RATE,
    MAX_CUT,
    SOLVED,
    SOME_SIGNAL,
    History,
    advise_no_signal,
    measure_train_select_gap,
)

MAX_REASONS = 3  # if more is changed at once, nothing shows which change helped
FEW_STEPS = 20  # twice the default warmup of 10 steps: with fewer, most steps had a reduced learning rate
SMALL_GAIN = 0.05
"""Nats a token by which all jobs together moved log-probs with the advantages (`direction`): 5 % in probability. In
runs of the bundled models that improved it was 0.5 or more."""
LAST_EPOCHS, MAX_SPENT = 2, 0.9
"""No signal is left if more than this share of the groups had equal rewards in each of the last so many epochs."""
MIN_VALIDATIONS = 3  # with fewer, that the last is the best says nothing about a trend
MAX_MORE_EXAMPLES = 10  # an effect that needs more than this many times the confirm examples cannot be told from none
IMPROVE = "`reinforge improve FILE` tries the expected answers, several learning rates, adapters, group sizes"


@dataclass(frozen=True)
class RunFigures:
    """What a run recorded."""

    summary: RunSummary
    epochs: Sequence[EpochMetrics]
    validations: Sequence[ValidationRow]  # the baseline first
    config: FinetuneConfig
    is_relative: bool = False  # the reward compares siblings, so its mean says nothing

    @property
    def scored(self) -> list[ValidationRow]:
        """The validations with a score of the gate's metric."""
        return [row for row in self.validations if row.metrics.get(self.metric, row.avg_reward) is not None]

    @property
    def metric(self) -> str:
        return self.config.gate.metric or ""

    @property
    def best(self) -> ValidationRow | None:
        return choose_best_validation(self.scored, self.config.gate.metric)

    def score(self, row: ValidationRow) -> float:
        return row.metrics.get(self.metric, row.avg_reward) or 0.0

    def low(self, row: ValidationRow) -> float:
        """Returns the lower end of the score's interval; the score if it is unknown."""
        low = getattr(row.summaries.get(self.metric, row), "ci_low", None)
        return self.score(row) if low is None else low


def explain(run: RunFigures) -> list[Explanation]:
    """Returns why the run was not promoted, the most likely reason first; empty: it was, or it has no verdict yet."""
    summary, gate, change = run.summary, run.config.gate, run.summary.improvement
    if summary.promoted or summary.smoke or (summary.promoted is None and summary.is_incomplete):
        return []
    against = summary.non_inferiority if summary.confirm_tuned is not None else None  # else of the base
    if against is not None and against.num_more is not None:
        fix = f"start a run with finetuning.splits.confirm: {against.num_pairs + against.num_more} and more rows"
        return [Explanation("too few confirm examples", str(against), fix)]
    is_shown = change is not None and change.p_value <= MAX_P_VALUE and (change.ci_low or 0.0) > gate.smallest_gain
    if is_shown and gate.regression is not None and gate.regression.name in summary.reason:
        fix = f"train on more like {gate.regression.name}, or add examples to it: few leave a wide interval"
        return [Explanation("worse on the regression set", summary.reason, fix)]
    if is_shown and gate.guard_metrics:
        fix = f"make {' and '.join(gate.guard_metrics)} part of the reward (`_type: weighted`), or add confirm examples"
        return [Explanation("a guard metric held it back", summary.reason, fix)]
    rules = (_find_cut, _find_no_signal, _find_other_goal, _find_short_way, _find_overfit, _find_unconfirmed)
    found = [explanation for rule in rules if (explanation := rule(run)) is not None]
    nothing = Explanation("no single cause", "nothing that this run recorded points to one", IMPROVE)
    return found[:MAX_REASONS] or [nothing]


def _find_cut(run: RunFigures) -> Explanation | None:
    cut = [row for row in run.epochs if row.clipped_share]
    share, earned = _mean(row.clipped_share for row in run.epochs), _mean(row.clipped_avg_reward for row in cut)
    usual, ends = _mean(row.avg_reward for row in cut), run.summary.episodes
    too_long = (ends.get("overlong", 0) + ends.get("context_overflow", 0)) / max(1, sum(ends.values()))
    if share > MAX_CUT and earned < usual:
        evidence = f"{share:.0%} of the training episodes reach max_tokens; they earn {earned:.2f}, all {usual:.2f}"
    elif too_long > MAX_CUT:
        evidence = f"{too_long:.0%} of the episodes were too long for their limit"
    else:
        return None
    fix = "raise max_tokens in the agent (finetuning.policy.max_model_len if the context is full), or ask for less"
    return Explanation("replies were cut off", evidence, fix)


def _find_no_signal(run: RunFigures) -> Explanation | None:
    share = _mean(row.share_without_signal for row in run.epochs)
    if not share > 1 - SOME_SIGNAL:
        return _find_spent_signal(run)
    expected = next((each.value for each in run.summary.predictions if each.name == SIGNAL), None)
    before = "" if expected is None else f"; preflight expected {1 - expected:.0%}"
    evidence = f"{share:.0%} of the groups have equal rewards, so nothing is learned from them{before}"
    return Explanation("no signal", evidence, advise_no_signal(_mean(row.avg_reward for row in run.epochs)))


def _find_spent_signal(run: RunFigures) -> Explanation | None:
    """Returns that the signal ran out: siblings, which differed at first, now answer alike."""
    last = run.epochs[-LAST_EPOCHS:]
    if len(run.epochs) <= LAST_EPOCHS or not all((row.share_without_signal or 0.0) > MAX_SPENT for row in last):
        return None
    shares = [_mean(row.share_without_signal for row in rows) for rows in (run.epochs[:1], last)]
    told = "{:.0%} of the groups had equal rewards in the first epoch, {:.0%} in the last two".format(*shares)
    reward, rate = _mean(row.avg_reward for row in last), max(row.job.get("lr") or 0.0 for row in run.epochs)
    was = f" (it was {rate:.2g})" if rate else ""
    fix = f"lower {LEARNING_RATE}{was}, or set the algorithm's entropy_coef; {IMPROVE}"
    return Explanation("signal ran out", told, advise_no_signal(reward) if reward >= SOLVED else fix)


def _find_other_goal(run: RunFigures) -> Explanation | None:
    metric, function = run.config.gate.metric, run.config.reward_function
    reward = function.name if function is not None else "reward"
    if metric in (None, reward) or run.is_relative or not run.scored:
        return None
    base, last = run.scored[0], run.scored[-1]
    before, after = run.score(base), run.score(last)
    has_risen = base.avg_reward is not None and last.ci_low is not None and last.ci_low > base.avg_reward
    if not has_risen or run.low(last) > before:
        return None
    rise = f"on select the reward {reward} went from {base.avg_reward:.3f} to {last.avg_reward:.3f}"
    evidence = f"{rise}, but {metric} from {before:.3f} to {after:.3f}"
    fix = f"read the best episodes in report.html; correct the reward, or make {metric} a part (`_type: weighted`)"
    return Explanation("rewarded otherwise", evidence, fix)


def _find_short_way(run: RunFigures) -> Explanation | None:
    if _find_spent_signal(run) is not None:
        return None  # further epochs would train nothing
    steps, done, rows = run.summary.num_updates, len(run.epochs), run.scored
    gains = [gain for row in run.epochs if isinstance(gain := row.job.get("direction"), float)]
    is_small = 0 < done == len(gains) and sum(gains) * max(1.0, FEW_STEPS / (steps or FEW_STEPS)) < SMALL_GAIN
    is_rising = len(rows) >= MIN_VALIDATIONS and run.best is rows[-1]
    if not (is_small or is_rising or (steps is not None and steps < FEW_STEPS)):
        return None
    parts = [] if steps is None else [f"{steps} optimizer step{'s' * (steps != 1)} in {done} epoch{'s' * (done != 1)}"]
    parts += [f"together they moved log-probs by {sum(gains):+.2g} nats a token toward the reward"] if gains else []
    parts += [f"the last validation is the best ({run.score(rows[-1]):.3f})"] if is_rising else []
    if is_small and not is_rising:
        rate = max(row.job.get("lr") or 0.0 for row in run.epochs)
        fix = f"raise {LEARNING_RATE} three to ten times{f' (it was {rate:.2g})' if rate else ''}; {IMPROVE}"
        return Explanation("too small steps", "; ".join(parts), fix)
    more = max(1, done, math.ceil(done * (FEW_STEPS / steps - 1)) if steps else 0)
    more = 0 if run.config.num_epochs > done else more  # the epochs that a limit left are the first to train
    stages = [run.config.num_epochs, *(each.num_epochs for each in run.config.pipeline.values())]
    resume = describe_resume(run.summary.folder, more, stages[-1])  # the last stage gets them
    return Explanation("too few steps", "; ".join(parts), f"train on: {resume}")


def _find_overfit(run: RunFigures) -> Explanation | None:
    limit, rows, best = run.config.guards.train_select_gap.limit, run.scored, run.best
    if run.epochs and limit is not None:
        measured = measure_train_select_gap(History(run.epochs, rows, is_relative=run.is_relative), limit)
        if measured is not None and measured.is_beyond:
            evidence, _, fix = measured.text.partition(": ")
            return Explanation("over-fitted", evidence, fix)
    is_early = best is not None and BASELINE < best.epoch < len(run.epochs) / 2
    if best is None or not is_early or run.score(rows[-1]) >= run.low(best):
        return None
    peak, end = run.score(best), run.score(rows[-1])
    evidence = f"the score on select peaked at {peak:.3f} after epoch {best.epoch}, and ended at {end:.3f}"
    fix = f"use more training examples or fewer epochs, lower {LEARNING_RATE}, or set the algorithm's kl_coef"
    return Explanation("over-fitted", evidence, fix)


def _find_unconfirmed(run: RunFigures) -> Explanation | None:
    change, rows, best = run.summary.improvement, run.scored, run.best
    if change is None or change.ci_high is None or best is None:
        return None
    if (gain := run.score(best) - run.score(rows[0])) > max(0.0, change.ci_high):
        told = f"the best of {len(rows) - 1} validations is {gain:+.3f} above the base model"
        fix = "use more select examples (finetuning.splits.select), so that noise chooses less, or fewer validations"
        return Explanation("better on select only", f"{told}, but on confirm it is {change}", fix)
    needed = count_needed_pairs(change, run.config.gate.smallest_gain)
    if needed is None or not 1 < needed / change.num_pairs <= MAX_MORE_EXAMPLES:
        return None
    told = f"the improvement is {change} on {change.num_pairs:,} confirm examples"
    fix = f"start a run with finetuning.splits.confirm: {needed} and more rows, or a larger finetuning.gate.num_samples"
    evidence = f"{told}; to show one of this size in 9 of 10 runs takes about {needed:,}"
    return Explanation("too few confirm examples", evidence, fix)


def _mean(values: Iterable[float | None]) -> float:
    """Returns the mean of the known values; NaN, which no limit is exceeded by, if there are none."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else math.nan
