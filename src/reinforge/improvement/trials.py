"""Trials as ordinary runs, which are paused between two epochs and resumed from there, and the verdict on one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from reinforge.config.dump import dump_config
from reinforge.config.loaded_config import LoadedConfig
from reinforge.engine.learning_rate import count_parameters
from reinforge.errors import (
    BudgetReached,
    ConfigError,
    EvaluationError,
    GuardHalted,
    JobFailed,
    OutOfMemory,
    Problem,
    RunPaused,
)
from reinforge.evaluation.statistics import Improvement, compute_paired_difference, format_interval
from reinforge.files import find_json, remove_folder, replace_file
from reinforge.improvement.outcomes import TaskFeatures
from reinforge.improvement.prompts import ROWS, search_demonstrations, search_with_gepa
from reinforge.improvement.recipes import GEPA, Overrides
from reinforge.improvement.record import (
    MAX_EPOCHS,
    RECIPE,
    FirstEpoch,
    SearchRecord,
    Trial,
    list_passed,
    read_validations,
)
from reinforge.registry import Registry
from reinforge.runs.checkpoints import Checkpoints, copy_model
from reinforge.runs.comparison import Arm
from reinforge.runs.journal.reader import JOURNAL, JournalReader
from reinforge.runs.progress import SilentProgress
from reinforge.runs.rows import BASELINE, EpochMetrics, ValidationRow, choose_best_validation
from reinforge.trainer.context import RunContext
from reinforge.trainer.evaluate import Evaluation, EvaluationOptions, evaluate, load_examples
from reinforge.trainer.gate import MODEL
from reinforge.trainer.options import RunOptions
from reinforge.trainer.preflight.recommendation import TOP
from reinforge.trainer.run import run_async
from reinforge.trainer.setup.components import ComponentBuilder

EPISODES = 120  # episodes that a search for prompts may run
NEEDS_MODULE = """# These functions were passed in Python: {names}
# To run this file, put them into a module beside it, and write `module:name` in place of each <python ...>.
"""

Load = Callable[[Overrides], LoadedConfig]
Say = Callable[[str], None]


class RunTrials:
    """The trials of a search as runs in the folder `trials`, of its winner again in `seeds`; see `Trials`."""

    def __init__(
        self,
        record: SearchRecord,
        load: Load,
        say: Say,
        registry: Registry | None = None,
        reflect: str | None = None,
    ):
        self.record, self.load, self.say, self.registry, self.reflect = record, load, say, registry, reflect
        config = load(()).config.finetuning
        self.reward = config.reward_function.name if config.reward_function is not None else ""
        self.metric, self.seed = config.gate.metric or self.reward, config.seed

    async def train(self, trial: Trial) -> None:
        if trial.recipe.prompts is not None and trial.prompts is None:
            await self._find_prompts(trial)
        if trial.stopped is None:
            await self._train(trial)

    async def _find_prompts(self, trial: Trial) -> None:
        """Searches for better texts of the agent, on training examples; a trial without any is stopped.

        Trials that search in the same way share what was found.
        """
        kind = trial.recipe.prompts
        started, folder = time.monotonic(), self.record.folder / "prompts" / str(kind)
        is_known = any(other.recipe.prompts == kind and other.prompts is not None for other in self.record.trials)
        loaded, registry = self.load(()), self.registry
        try:
            if kind == GEPA:
                search = search_with_gepa(loaded, folder, budget=EPISODES, reflect=self.reflect, registry=registry)
            else:
                search = search_demonstrations(loaded, folder, budget=EPISODES, registry=registry)
            found = await search
        except (EvaluationError, ConfigError) as error:
            trial.stopped = f"no prompt was found: {error}"
            return
        num_tokens = 0 if is_known else found.num_tokens
        spent = num_tokens if self.record.budget.unit == "tokens" else time.monotonic() - started
        trial.prompts, trial.prompt_cost = found.prompts, spent
        if trial.recipe.into_weights:
            trial.prompts, trial.rows = {}, str((folder / ROWS).resolve())
        trial.used += spent
        means = f"{found.default_mean:.3f} -> {found.mean:.3f} on {found.num_examples} training examples"
        self.say(f"{trial.name}: {found.num_candidates} prompts tried, {means}")
        if found.mean <= found.default_mean:
            trial.stopped = f"none of {found.num_candidates} prompts was better than the agent's own"
        self.record.write()

    async def _train(self, trial: Trial) -> None:
        folder, in_tokens = self.record.locate(trial), self.record.budget.unit == "tokens"
        options = RunOptions(run_name=trial.name, progress=_TrialProgress(trial, self.metric, self.say))
        if (folder / JOURNAL).is_file():
            options.run_name, options.resume = None, folder
        else:
            if folder.exists():  # of a process that died before it wrote the journal
                remove_folder(folder)
            if trial is not self.record.trials[0] and not (in_tokens or trial.prompts or trial.seed is not None):
                options.baseline_from = self.record.locate(self.record.trials[0])
        async with ComponentBuilder(self.load(()), self.registry) as builder:
            await builder.get_model_path()  # a bundled model is made once, so that no trial pays for it
        started, before = time.monotonic(), trial.used

        def find_pause(context: RunContext, num_epochs: int) -> str | None:
            sampled, spent = trial.prompt_cost + context.tokens["completion"], before + time.monotonic() - started
            trial.used, trial.epochs = float(sampled) if in_tokens else spent, num_epochs
            if num_epochs == 0:
                trial.start_cost = trial.used
            if options.baseline_from is not None:
                trial.select_cost, trial.has_baseline = self.record.trials[0].select_cost, True
            elif not trial.select_cost:  # in seconds it is known once the next stage has begun
                trial.select_cost = trial.start_cost - trial.prompt_cost if in_tokens else context.validation_s
            trial.growth = _measure_growth(context.journal.metrics(before=num_epochs))
            if trial.number == 1 and context.verdict_size and trial.select_cost and not self.record.arm_cost:
                episodes = (context.verdict_size - 1) / 2  # of an arm of the verdict, for one of a validation
                self.record.arm_cost = trial.start_cost + (episodes - 1) * trial.select_cost
            self.record.write()
            if num_epochs >= trial.most_epochs:
                return "all epochs are done"
            return "its share of the budget is used" if trial.has_used_share() else None

        options.find_pause = find_pause
        seeds: Overrides = ()
        if trial.seed is not None:  # with the examples of the search, or training would see some of `confirm`
            splits = self.load(()).config.finetuning.splits.seed
            kept = self.seed if splits is None else splits
            seeds = (("finetuning.seed", str(trial.seed)), ("finetuning.splits.seed", str(kept)))
        overrides = (
            *trial.overrides,
            *seeds,
            ("finetuning.output_dir", str(folder.parent)),
            trial.recipe.set_epochs(MAX_EPOCHS),
        )
        try:
            await run_async(self.load(overrides), options, self.registry)
        except RunPaused:
            pass
        except (BudgetReached, JobFailed, EvaluationError, OutOfMemory, ConfigError) as error:
            if isinstance(error, ConfigError) and (trial.number == 1 or options.resume is not None):
                raise  # the configuration is wrong, or has changed since the search started
            if error.is_exhausted and trial.epochs:
                why = "it has nothing left to learn"
            else:
                why = "a guard stopped it" if isinstance(error, GuardHalted) else "it cannot be trained on"
            trial.stopped = f"{why}: {error}"
        tokens = (find_json(folder / "summary.json") or {}).get("tokens", {}).get("completion")
        if not in_tokens:
            trial.used = before + time.monotonic() - started
        elif tokens is not None:
            trial.used = trial.prompt_cost + tokens
        if rows := read_validations(self.record, trial):
            best = choose_best_validation(rows, self.metric)
            trial.baseline = rows[0].metrics.get(self.metric)
            if best is not None:
                trial.score, trial.best_epoch = best.metrics.get(self.metric), best.epoch

    async def read_first_epoch(self, trial: Trial) -> FirstEpoch | None:
        if trial.baseline is None:
            return None
        folder = self.record.locate(trial)
        reader = JournalReader(folder)
        select, epoch = reader.episode_heads("validate", BASELINE), reader.episode_heads("collect", 0)
        rewards = [head.reward for head in (*select, *epoch) if head.reward is not None]
        of_select, of_epoch = (
            [score for head in heads if (score := head.scores.get(self.metric)) is not None]
            for heads in (select, epoch)
        )
        [row, *_] = find_json(folder / "reward_history.json") or [{"epoch": 0}]
        metrics = EpochMetrics.from_dict(row)
        num_groups = metrics.num_groups or 0
        async with ComponentBuilder(self.load(()), self.registry) as builder:
            rows = await load_examples(builder, "train", None)
        return FirstEpoch(
            num_episodes=len(rewards),
            lowest=min(rewards, default=0.0),
            highest=max(rewards, default=0.0),
            num_groups=num_groups,
            num_with_signal=round(num_groups * (1 - (metrics.share_without_signal or 0.0))),
            is_solved=set(of_select) == {1.0} and max(of_epoch, default=1.0) <= 1 and fmean(of_epoch or [1.0]) >= TOP,
            samples_per_episode=metrics.job.get("samples_per_episode") or 1.0,
            has_answers=any(item.expected_output_obj is not None for item in rows),
            features=self._measure_features(trial, metrics, len(rows)),
        )

    def _measure_features(self, trial: Trial, first: EpochMetrics, rows: int) -> TaskFeatures:
        folder = self.record.locate(trial)
        summary, [untouched, *_] = find_json(folder / "summary.json") or {}, read_validations(self.record, trial)
        num_episodes = sum(summary.get("episodes", {}).values())
        without = first.share_without_signal
        model = self.load(()).config.finetuning.policy.model
        if untouched.checkpoint:  # it also stands for a bundled model
            model = str(Checkpoints(folder).verify(untouched.checkpoint))
        return TaskFeatures(
            signal=None if without is None else 1 - without,
            base=trial.baseline,
            reply_tokens=first.completion_tokens,
            prompt_tokens=summary["tokens"]["prompt"] / num_episodes if num_episodes else None,
            parameters=count_parameters(model),
            rows=rows,
        )

    def compare(self, trial: Trial, other: Trial) -> Improvement | None:
        scores = (self._read_scores(each, self.metric, each.best_epoch) for each in (other, trial))
        return _compare(*scores)

    def compare_rewards(self, trial: Trial, other: Trial) -> Improvement | None:
        if self.reward == self.metric:
            return None
        rows = ((each, read_validations(self.record, each)) for each in (other, trial))
        last = ((each, found[-1].epoch if found else None) for each, found in rows)
        return _compare(*(self._read_scores(each, self.reward, epoch) for each, epoch in last))

    def _read_scores(self, trial: Trial, metric: str, epoch: int | None) -> dict[str, float]:
        if epoch is None:
            return {}
        reader = JournalReader(self.record.locate(trial))
        return Arm(reader, reader.episode_heads("validate", epoch)).read_scores(metric)

    async def judge(self, trial: Trial | None, *, with_reference: bool = False) -> Evaluation:
        options = EvaluationOptions(split="confirm", with_reference=with_reference)
        overrides = trial.overrides if trial is not None else ()
        if trial is not None:
            options = replace(options, model=str(self._find_checkpoint(trial)))
        return await evaluate(self.load(overrides), options, self.registry)

    def _find_checkpoint(self, trial: Trial) -> Path:
        row = choose_best_validation(read_validations(self.record, trial), self.metric)
        if row is None or not row.checkpoint:
            fix = "use the trainer adapter `_type: local`"
            raise ConfigError(Problem("", f"{self.record.locate(trial)} has no checkpoint to judge", fix))
        return Checkpoints(self.record.locate(trial)).verify(row.checkpoint)

    def keep(self, trial: Trial, overrides: Overrides, *, promoted: bool) -> Path | None:
        text = dump_config(self.load(overrides))
        if passed := list_passed(text):
            text = NEEDS_MODULE.format(names=", ".join(passed)) + text
        replace_file(self.record.folder / RECIPE, text)
        model = self.record.folder / MODEL
        if not promoted:
            return None
        if model.exists():  # of a process that died before the result was written
            remove_folder(model)
        copy_model(self._find_checkpoint(trial), model)
        return model


def _compare(before: dict[str, float], after: dict[str, float]) -> Improvement | None:
    return compute_paired_difference(before, after) if len(before.keys() & after.keys()) > 1 else None


def _measure_growth(epochs: Sequence[EpochMetrics]) -> float:
    """Returns the mean length of the last epoch's replies, relative to the first: 20, 25, 30 tokens -> 1.5."""
    lengths = [each.completion_tokens for each in epochs if each.completion_tokens]
    return lengths[-1] / lengths[0] if lengths else 1.0


class _TrialProgress(SilentProgress):
    """Prints what a trial reaches on `select`."""

    def __init__(self, trial: Trial, metric: str, say: Say):
        self.trial, self.metric, self.say = trial, metric, say

    def validation(self, row: ValidationRow) -> None:
        if (found := row.summaries.get(self.metric)) is not None:
            when = "untouched" if row.epoch == BASELINE else f"after epoch {row.epoch}"
            self.say(f"{self.trial.name}: {when}: {format_interval(found.mean, found.ci_low, found.ci_high)} on select")

    def note(self, text: str) -> None:
        self.say(f"{self.trial.name}: {text}")
