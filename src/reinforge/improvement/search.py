"""Successive halving over recipes (arXiv:1502.07943): all train a little, and the better half is trained on from there.

    rung 0   n trials    each a share of the budget
    rung 1   n / 2       the better half on `select`, trained on from where it stood
    ...      1           what is left of the budget for the trials

The verdict is taken once, at the end, of the best trial against the untouched agent, on `confirm`, which no trial has
seen: choosing the best of many cannot flatter it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Protocol

from reinforge.config.schema import GateConfig
from reinforge.engine.small_models import EPOCHS_PER_ANSWERS
from reinforge.errors import ConfigError, Problem
from reinforge.evaluation.changes import MetricChange, compare_reports
from reinforge.evaluation.reference import decide_promotion
from reinforge.evaluation.statistics import Improvement, compute_paired_difference
from reinforge.improvement.outcomes import SearchOutcome, rank_recipes
from reinforge.improvement.recipes import ANSWER_EPOCHS, ANSWERS, REWARDS, Overrides, SearchRecipe
from reinforge.improvement.record import MARGIN, FirstEpoch, SearchRecord, Trial
from reinforge.runs.rows import BASELINE
from reinforge.trainer.evaluate import Evaluation
from reinforge.trainer.gate import decide

LEFT_OUT = "the budget does not allow it"
MIN_EPOCHS = 2  # a recipe is tried only if its first share of the budget allows so many epochs
MIN_EPOCHS_OF_TWO = 1  # or so many beside the first one, which has had one


class Trials(Protocol):
    """What a search does with its trials."""

    metric: str
    seed: int  # of the configuration

    async def train(self, trial: Trial) -> None:
        """Trains until the trial's share is used, measures it on `select`, and records both in the trial."""

    async def read_first_epoch(self, trial: Trial) -> FirstEpoch | None:
        """Returns what its measurement on `select` and its first epoch show; None: not known."""

    def compare(self, trial: Trial, other: Trial) -> Improvement | None:
        """Returns by how much a trial is better than another on `select`, example by example; None: not known."""

    def compare_rewards(self, trial: Trial, other: Trial) -> Improvement | None:
        """Returns by how much its training reward was higher when both were last measured; None: it is the metric."""

    async def judge(self, trial: Trial | None, *, with_reference: bool = False) -> Evaluation:
        """Evaluates the best checkpoint of a trial on `confirm`; None: the untouched agent."""

    def keep(self, trial: Trial, overrides: Overrides, *, promoted: bool) -> Path | None:
        """Writes the winner's recipe; returns the folder of its model, if it is promoted."""


class Search:
    """A search in the state that a record holds.

    Args:
        recipes: What to try; the first is the configuration as it is.
        say: Prints a line.
        outcomes: Of earlier searches, which order the recipes.
    """

    def __init__(
        self,
        record: SearchRecord,
        trials: Trials,
        recipes: Sequence[SearchRecipe],
        gate: GateConfig,
        say: Callable[[str], None],
        outcomes: Sequence[SearchOutcome] = (),
    ):
        self.record, self.trials, self.gate, self.say, self.outcomes = record, trials, gate, say, outcomes
        if not record.trials:
            record.trials = [Trial(number, recipe) for number, recipe in enumerate(recipes, 1)]

    async def run(self) -> dict[str, Any]:
        """Searches until the budget is used, and returns the result with the verdict, which the record keeps."""
        if self.record.result is None:
            self.record.result = await self._search()
            self.record.write()
        await self._repeat(self.record.result)
        return self.record.result

    async def _search(self) -> dict[str, Any]:
        record = self.record
        if not record.sizes:
            await self._train(record.trials[0])  # one epoch shows what a trial costs, and what others can learn
            record.first_epoch = await self.trials.read_first_epoch(record.trials[0])
            if (why := self._prune()) is not None:
                return self._end(why)
            self._order()
            self._plan()
        while record.rung < len(record.sizes) or await self._extend():
            if record.sizes[record.rung] == 1:
                await self._measure_untouched()
            for trial in record.open_trials:
                if trial.finished < record.rung:
                    await self._train(trial, self._compute_share(record.open_trials))
                    trial.finished = record.rung
                    trial.rung_best.append(trial.best_epoch)
                    if record.rung == 0 and trial.score is not None and trial.baseline is not None:
                        trial.gain_rate = (trial.score - trial.baseline) / trial.used
                    record.write()
            record.rung += 1
            self._halve()
            record.write()
        return await self._judge()

    def _end(self, why: str) -> dict[str, Any]:
        """Ends the search before any further trial."""
        for trial in self.record.open_trials:
            trial.stopped = why
        self._decide(f"the search ends: {why}")
        return {"promoted": False, "reason": why, "winner": None}

    def _compute_share(self, trials: Sequence[Trial]) -> float:
        """Returns what each of these may use in this rung, given what all have used and the leader will use again."""
        record, repeats = self.record, self.record.num_seeds - 1
        used = {each.number: each.rung_from if each.rung == record.rung else each.used for each in record.trials}
        most = max((used[trial.number] for trial in trials), default=0.0)
        left = max(0.0, record.for_trials - sum(used.values()) - repeats * most)
        return compute_share(left, record.sizes[record.rung :] or [1], repeats)

    def _prune(self) -> str | None:
        """Drops the recipes that have nothing to learn from; returns why none is worth a trial, None: some are."""
        record, found, others = self.record, self.record.first_epoch, self.record.trials[1:]
        if found is None:
            return None
        if found.is_solved:
            return "nothing to do: the untouched agent has the score 1 on every select example"
        missing = found.find_missing()
        if REWARDS in missing and all(trial.recipe.needs in missing for trial in others):
            return f"the reward never differs: {found}; test it with `reinforge reward test FILE` (docs/rewards.md)"
        for need in missing:
            dropped = [trial for trial in others if trial.recipe.needs == need]
            for trial in dropped:
                trial.stopped = f"it needs {need}"
            if dropped:
                names = ", ".join(trial.name for trial in dropped)
                who = "the examples have" if need == ANSWERS else "untouched the agent has"
                why = "" if need == ANSWERS else f" ({found})"
                self._decide(f"not tried, as {who} no {need}{why}: {names}")
        first = record.trials[0]
        if first.recipe.needs in missing and len(record.open_trials) > 1:
            first.stopped = f"it needs {first.recipe.needs}"
            self._decide(f"{first.name} is stopped: {first.stopped}")
        record.trials[1:] = sorted(others, key=lambda trial: trial.stopped is not None)
        return None

    def _order(self) -> None:
        """Puts first what helped on the nearest tasks."""
        record = self.record
        names = [trial.recipe.name for trial in record.trials[1:] if trial.stopped is None]
        ranked = rank_recipes(names, record.first_epoch.features, self.outcomes) if record.first_epoch else None
        if ranked is not None:
            self._decide(ranked[1])
            last = len(names)
            places = {name: place for place, name in enumerate(ranked[0])}
            record.trials[1:] = sorted(record.trials[1:], key=lambda trial: places.get(trial.recipe.name, last))

    def _plan(self) -> None:
        record, first, open_trials = self.record, self.record.trials[0], self.record.open_trials
        count, shown = len(open_trials), record.budget.format
        if first.epochs:
            epoch, needed = first.epoch_cost, first.start_cost + MIN_EPOCHS * first.epoch_cost
            self._refuse_small(needed)
            while count > 1 and not self._fits(count):
                count -= 1
            self._decide(
                f"{count} of {len(open_trials)} recipes fit the budget: a trial costs {shown(first.start_cost)} to "
                f"start and {shown(epoch)} an epoch"
            )
        for trial in open_trials[count:]:
            trial.stopped = LEFT_OUT
        record.sizes = plan_sizes(count)
        if first.epochs:
            num_epochs = self._count_epochs(first)
            for trial in open_trials[1:count]:
                if trial.recipe.needs == ANSWERS and trial.recipe.epochs_before == ANSWER_EPOCHS:
                    trial.recipe = trial.recipe.shorten_first(math.ceil(num_epochs / EPOCHS_PER_ANSWERS))
        record.write()

    def _fits(self, count: int) -> bool:
        """Returns whether so many trials can have enough epochs; in seconds, all share what the first one measured."""
        first, in_tokens = self.record.trials[0], self.record.budget.unit == "tokens"
        num_epochs = MIN_EPOCHS if count > 2 else MIN_EPOCHS_OF_TWO
        begin = first.start_cost if in_tokens else first.resume_cost
        return self._share_first(count) >= begin + num_epochs * first.epoch_cost

    def _share_first(self, count: int) -> float:
        """Returns what each of so many trials may use in the first rung."""
        return compute_share(self.record.for_trials, plan_sizes(count), self.record.num_seeds - 1)

    def _count_epochs(self, trial: Trial) -> float:
        """Returns how many epochs like those of a trial the winner will have in all rungs."""
        record = self.record
        rung = self._share_first(record.sizes[0]) * record.sizes[0]
        return (sum(rung / size for size in record.sizes) - trial.start_cost) / trial.epoch_cost

    def _refuse_small(self, needed: float) -> None:
        """Raises a `ConfigError` if what the budget has for trials does not even allow a short one."""
        record, shown = self.record, self.record.budget.format
        needed *= record.num_seeds
        if needed > record.for_trials:
            least = max(needed / (1 - record.verdict_share), needed + record.verdict_cost)
            times = "a trial" if record.num_seeds == 1 else f"{record.num_seeds} trainings"
            what = f"{times} of {MIN_EPOCHS} epochs ({shown(needed)}) and the verdict ({shown(least - needed)})"
            option = "--budget_tokens" if record.budget.unit == "tokens" else "--minutes"
            message = f"{shown(record.budget.total)} are too few for {what}"
            raise ConfigError(Problem(option, message, f"allow {shown(math.ceil(least))} or more"))

    async def _train(self, trial: Trial, share: float | None = None) -> None:
        """Trains a trial for its share of the rung; one that was interrupted keeps the share that it had.

        Args:
            share: None: one epoch.
        """
        record = self.record
        if trial.rung != record.rung:
            trial.rung, trial.rung_from, trial.rung_epochs, trial.rung_end = record.rung, trial.used, trial.epochs, 0.0
        if not trial.rung_end and share is not None:
            trial.rung_end, trial.judge_cost = trial.rung_from + share, self._find_judge_cost()
            if trial.has_used_share(is_running=False):
                return
            how = f"{trial.epochs} epochs so far" if trial.epochs else trial.recipe.why
            verdict = "" if trial.judge_cost is None else ", with its verdict"
            self.say(f"{trial.name}: {how} ({record.budget.format(share)}{verdict})")
            record.write()
        await self.trials.train(trial)
        if trial.stopped is not None:
            self._decide(f"{trial.name} is stopped: {trial.stopped.splitlines()[0]}")
        record.write()

    def _halve(self) -> None:
        record = self.record
        if record.rung >= len(record.sizes):
            return
        ranked = self._rank()
        for trial in ranked[record.sizes[record.rung] :]:
            leader = ranked[0]
            trial.stopped, trial.is_behind = f"{leader.name} is ahead on select", True
            change = self.trials.compare(trial, leader)
            is_worse = self._is_worse(trial, leader)
            why = "it is worse" if is_worse else "no difference is known, but the budget allows only the best"
            self._decide(
                f"{trial.name} is stopped after {trial.epochs} epochs: {_format(trial.score)} on select, {leader.name} "
                f"{_format(leader.score)}, difference {change or 'unknown'}: {why}"
            )
        for trial in record.open_trials:
            self._decide(f"{trial.name} continues: {_format(trial.baseline)} -> {_format(trial.score)} on select")

    def _rank(self) -> list[Trial]:
        """Returns the open trials, the best first, by the metric; the reward decides where it is known to.

        Where the metric is seldom earned, the reward shows earlier what is being learned.
        """
        ranked = sorted(self.record.open_trials, key=_get_rank)
        for place in range(len(ranked) - 1, 0, -1):
            before, trial = ranked[place - 1 : place + 1]
            reward = self.trials.compare_rewards(trial, before)
            if self._is_worse(trial, before) or reward is None or reward.ci_low is None or reward.ci_low <= 0:
                continue
            ranked[place - 1], ranked[place] = trial, before
            change = self.trials.compare(trial, before)
            self._decide(
                f"{trial.name} is put before {before.name}: no difference is known on select ({change or 'unknown'}), "
                f"and its reward is higher ({reward})"
            )
        return ranked

    def _is_worse(self, trial: Trial, other: Trial | None) -> bool:
        """Returns True if a trial is known to be worse than another on `select`."""
        change = None if other is None else self.trials.compare(trial, other)
        return change is not None and change.ci_high is not None and change.ci_high < 0

    async def _extend(self) -> bool:
        """Adds a rung if the budget allows one more epoch of the last trial, or of the best that may still win.

        If none is left, it is for a recipe that did not fit before.
        """
        record = self.record
        await self._measure_untouched()
        best = self._find_best()
        behind = [each for each in record.trials if each.is_behind and not self._is_worse(each, best)]
        behind.sort(key=_get_rank)
        trial = next(iter((*record.open_trials, *behind, *self._list_left_out(best))), None)
        if trial is None:
            return False
        trial.judge_cost, share = self._find_judge_cost(), self._compute_share([trial])
        if (trial.resume_cost + trial.ahead if trial.epochs else self._predict_first(trial)) > share:
            return False
        trial.stopped, trial.is_behind = None, False
        trial.rung_best += [trial.best_epoch] * (record.rung - len(trial.rung_best))
        record.sizes.append(1)
        what = "trained on" if trial.epochs else "tried after all"
        self._decide(f"{trial.name} is {what}: {record.budget.format(share)} are left, with its verdict")
        record.write()
        return True

    def _list_left_out(self, best: Trial | None) -> list[Trial]:
        """Returns the trials that did not fit the budget; first those that learn from what the best one does.

        A search for prompts is not among them: what it takes is not known.
        """
        needs = best.recipe.needs if best is not None else None
        left_out = [each for each in self.record.trials if each.stopped == LEFT_OUT and each.recipe.prompts is None]
        return sorted(left_out, key=lambda each: each.recipe.needs != needs)

    def _predict_first(self, trial: Trial) -> float:
        """Returns what a trial takes for its first epochs and the end of its rung, at the cost of the first trial's."""
        first, in_tokens = self.record.trials[0], self.record.budget.unit == "tokens"
        begin = first.start_cost if in_tokens else first.resume_cost
        measured = first.select_cost + MARGIN * (trial.judge_cost or 0.0)
        return begin + MIN_EPOCHS * first.epoch_cost + measured

    def _find_judge_cost(self) -> float | None:
        return self.record.arm_cost if self.record.before is not None else None

    async def _measure_untouched(self) -> None:
        """Measures the untouched agent on `confirm` once a trial has beaten it: the winner will take about as long."""
        record, best = self.record, self._find_best()
        if record.before is not None or best is None:
            return
        if best.best_epoch in (None, BASELINE) and not best.prompts:  # neither training nor a prompt has helped
            return
        self.say("the untouched agent on confirm, to know what the verdict takes")
        found = await self._measure(None)
        record.before, record.arm_cost = replace(found, records=[], wall_s=0.0, files=[]), record.judged
        record.write()

    def _find_best(self) -> Trial | None:
        return min((trial for trial in self.record.trials if trial.score is not None), key=_get_rank, default=None)

    async def _judge(self) -> dict[str, Any]:
        """Compares the best trial with the untouched agent on `confirm`, once."""
        best, before = self._find_best(), self.record.before
        if best is None or before is None:
            why = "no trial beat the untouched agent on the select examples" if best else "no trial could be measured"
            found = None
            if best is not None and self.gate.reference is not None:
                self.say(f"verdict: the untouched agent against {self.gate.reference}, on confirm")
                found = (await self._measure(None, with_reference=True)).non_inferiority
                why += "" if found is None else f"; the untouched agent: {found}"
            result = {"promoted": False, "reason": f"nothing helped: {why}", "winner": None}
            return result if found is None else {**result, "non_inferiority": found.as_dict()}
        epoch = BASELINE if best.best_epoch is None else best.best_epoch
        what = f"after epoch {epoch}" if epoch != BASELINE else "with its prompt, untrained,"
        self.say(f"verdict: {best.name} {what} against the untouched agent, on confirm")
        after = await self._measure(best, with_reference=True)
        verdict, found = decide(self.gate, self.trials.metric, before.report, after.report), after.non_inferiority
        if found is not None:
            promoted, reason = decide_promotion(found, verdict.guards)
            verdict = replace(verdict, promoted=promoted, reason=reason)
        elif self.gate.reference is not None:
            why = f"{self.gate.reference} and the winner have too few examples with both scores to be compared"
            verdict = replace(verdict, promoted=None, reason=why)
        overrides = tuple(dict((*best.overrides, best.recipe.set_epochs(epoch + 1))).items())
        model = self.trials.keep(best, overrides, promoted=bool(verdict.promoted))
        improvement, untouched = verdict.improvement, self.record.trials[0].baseline
        return {
            "winner": best.name,
            "epoch": epoch,
            "overrides": [list(each) for each in best.overrides],
            "promoted": verdict.promoted,
            "reason": verdict.reason,
            "before": verdict.confirm_base.as_dict() if verdict.confirm_base else None,
            "after": verdict.confirm_tuned.as_dict() if verdict.confirm_tuned else None,
            "improvement": improvement.as_dict() if improvement else None,
            **({"non_inferiority": found.as_dict()} if found is not None else {}),
            "gain_on_select": None if untouched is None else _get_score(best) - untouched,
            "gain_on_confirm": improvement.mean_difference if improvement else None,
            "metrics": [change.as_dict() for change in compare_reports(before.report, after.report, {})],
            "pass_at": [change.as_dict() for change in compare_passes(self.trials.metric, before, after)],
            "model": None if model is None else str(model),
        }

    async def _repeat(self, result: dict[str, Any]) -> None:
        """Trains the winner with further seeds, for as many epochs, and compares each with the untouched agent."""
        record, own = self.record, self.trials.seed
        winner = next((trial for trial in record.trials if trial.name == result["winner"]), None)
        if "seeds" in result or record.num_seeds == 1 or winner is None or result["epoch"] == BASELINE:
            return
        if not record.repeats:
            again = {"prompts": winner.prompts, "rows": winner.rows, "most_epochs": result["epoch"] + 1}
            seeds = range(own + 1, own + record.num_seeds)
            record.repeats = [Trial(winner.number, winner.recipe, seed=seed, **again) for seed in seeds]
        for trial in record.repeats:
            if trial.finished < 0:
                self.say(f"{trial.name}: {winner.name} again, for {trial.most_epochs} epochs")
                await self.trials.train(trial)
                if trial.score is not None:
                    trial.improvement = self._compare(await self._measure(trial))
                trial.finished = 0
                record.write()
        rows = [{"seed": own, "improvement": result["improvement"], "stopped": None}]
        rows += [{name: getattr(trial, name) for name in rows[0]} for trial in record.repeats]
        gains = [row["improvement"]["mean_difference"] for row in rows if row["improvement"] is not None]
        spread = stdev(gains) if len(gains) > 1 else None
        result["seeds"] = {"trainings": rows, "mean": fmean(gains) if gains else None, "std": spread}
        record.write()

    def _compare(self, after: Evaluation) -> dict[str, Any] | None:
        assert self.record.before is not None
        before, scores = (each.report.scores.get(self.trials.metric, {}) for each in (self.record.before, after))
        if len(before.keys() & scores.keys()) < 2:
            return None
        return compute_paired_difference(
            before, scores, self.gate.smallest_gain, clusters=after.report.clusters
        ).as_dict()

    async def _measure(self, trial: Trial | None, *, with_reference: bool = False) -> Evaluation:
        found = await self.trials.judge(trial, with_reference=with_reference)
        in_tokens = self.record.budget.unit == "tokens"
        self.record.judged += found.count_tokens()["completion"] if in_tokens else found.wall_s
        return found

    def _decide(self, text: str) -> None:
        self.record.decisions.append(text)
        self.say(text)


def compare_passes(metric: str, before: Evaluation, after: Evaluation) -> list[MetricChange]:
    """Returns pass@1 and pass@k, for the largest k, of a metric of 0 and 1, or else of `solved`; [] without repeats."""
    for shown in dict.fromkeys((metric, "solved")):
        known = [name for name in before.pass_at if name.startswith(f"{shown} pass@") and name in after.pass_at]
        if len(known) > 1:
            names = (known[0], known[-1])
            return [MetricChange(name, "confirm", before.pass_at[name], after.pass_at[name]) for name in names]
    return []


def plan_sizes(count: int) -> list[int]:
    """Returns the number of trials of each rung: 6 -> [6, 3, 2, 1]."""
    sizes = [count]
    while sizes[-1] > 1:
        sizes.append(math.ceil(sizes[-1] / 2))
    return sizes


def compute_share(left: float, sizes: Sequence[int], repeats: int) -> float:
    """Returns what a trial of the first rung may use, if all rungs get the same and the winner is trained again.

    Example: 60 for rungs of 2 and 1 trials -> 30 a rung, 15 a trial. With one repeat each rung gets x; the winner has
    x / 2 + x, and so has the repeat: 2 x + 1.5 x = 60.
    """
    return left / (len(sizes) + repeats * sum(1 / size for size in sizes)) / sizes[0]


def _get_score(trial: Trial) -> float:
    return -math.inf if trial.score is None else trial.score


def _get_rank(trial: Trial) -> tuple[float, int]:
    return -_get_score(trial), trial.number


def _format(score: float | None) -> str:
    return "unknown" if score is None else f"{score:.3f}"
