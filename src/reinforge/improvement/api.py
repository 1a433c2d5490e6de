"""`reinforge.improve(...)`, and what the command line calls: a search in a folder of its own."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.loader import build_config
from reinforge.config.pipeline import find_optional_answers, leave_out_answers
from reinforge.config.problems import suggest_arguments
from reinforge.errors import ConfigError, Problem, ReinforgeError, did_you_mean
from reinforge.evaluation.changes import MetricChange
from reinforge.evaluation.statistics import Improvement
from reinforge.files import home, replace_file
from reinforge.improvement.outcomes import OUTCOMES, read_outcomes
from reinforge.improvement.page import write_page
from reinforge.improvement.recipes import NUM_EPOCHS, PIPELINE, Overrides, propose
from reinforge.improvement.record import RECIPE, SEARCH, SearchBudget, SearchRecord, describe_recipe
from reinforge.improvement.search import Search
from reinforge.improvement.trials import Load, RunTrials, Say
from reinforge.registry import Registry
from reinforge.runs.journal.journal import LOCK
from reinforge.runs.run_folder import check_run_name
from reinforge.trainer.api import Rows, build_run_data
from reinforge.trainer.options import LiveRun, RunOptions
from reinforge.trainer.shutdown import run_interruptible

MIN_MINUTES = 1.0
REPORT = "report.md"


@dataclass(frozen=True, slots=True)
class Improvements:
    """What a search found."""

    folder: Path
    record: SearchRecord

    @property
    def result(self) -> dict[str, Any]:
        return self.record.result or {}

    @property
    def promoted(self) -> bool:
        return bool(self.result.get("promoted"))

    @property
    def model(self) -> Path | None:
        """The folder of the better model; None: nothing helped."""
        return Path(self.result["model"]) if self.result.get("model") else None

    def format_lines(self) -> list[str]:
        return [f"{name:<12} {text}" for name, text in self.facts()]

    def facts(self) -> list[tuple[str, str]]:
        record, found, budget = self.record, self.result, self.record.budget
        facts = [("search", f"{self.folder.name}: {budget.format(record.used)} of {budget.format(budget.total)}")]
        for trial in record.trials:
            if trial.rung >= 0:
                scores = " -> ".join("?" if each is None else f"{each:.3f}" for each in (trial.baseline, trial.score))
                facts.append(("trial", f"{trial.name}: {scores} on select, {trial.epochs} epochs"))
        if change := found.get("improvement"):
            gain = found["gain_on_select"]
            on_select = "unknown" if gain is None else f"{gain:+.3f}"
            count = sum(trial.score is not None for trial in record.trials)
            facts += [
                ("winner", f"{found['winner']} after {found['epoch'] + 1} epochs"),
                ("reward", f"{found['before']['mean']:.3f} -> {found['after']['mean']:.3f} on confirm"),
                (
                    "improvement",
                    f"{Improvement(**change)} (on select it was {on_select}, chosen as the best of {count} trials)",
                ),
                *(("pass@k", str(MetricChange.from_dict(each))) for each in found["pass_at"]),
            ]
        if seeds := found.get("seeds"):
            for row in seeds["trainings"]:
                known, why = row["improvement"], row["stopped"] or "too few examples have a score"
                facts.append((f"seed {row['seed']}", str(Improvement(**known)) if known else f"unknown: {why}"))
            mean, spread = ("unknown" if seeds[name] is None else f"{seeds[name]:+.3f}" for name in ("mean", "std"))
            facts.append(("seeds", f"mean {mean}, standard deviation {spread.lstrip('+')}"))
        facts.append(
            ("promoted", f"{'yes' if self.promoted else 'no'}: {found.get('reason', 'the search is not over')}")
        )
        if self.model is not None:
            facts.append(("model", str(self.model)))
        if found.get("winner"):
            facts.append(("recipe", describe_recipe(self.folder / RECIPE)))
        return facts

    def format_report(self) -> str:
        """Returns the search as Markdown: how it ended, its trials, its decisions."""
        rows = ["| trial | why | epochs | select, untouched | select, best | ended |", "|---|---|---|---|---|---|"]
        for trial in self.record.trials:
            scores = ["" if each is None else f"{each:.3f}" for each in (trial.baseline, trial.score)]
            ended = (trial.stopped or "trained to the end of the budget").splitlines()[0]
            rows.append(f"| {trial.name} | {trial.recipe.why} | {trial.epochs} | {' | '.join(scores)} | {ended} |")
        decisions = [f"{number}. {text}" for number, text in enumerate(self.record.decisions, 1)]
        head = ["```", *self.format_lines(), "```"]
        return "\n".join([f"# {self.folder.name}", "", *head, "", *rows, "", "## Decisions", "", *decisions, ""])


@suggest_arguments
def improve(
    workflow: Callable[..., Any] | None = None,
    dataset: str | Path | Rows | None = None,
    reward: str | Callable[..., Any] | None = None,
    model: str | Path | None = None,
    minutes: float = 30.0,
    *,
    environment: str | Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
    reflect: str | None = None,
    seeds: int = 1,
    outcomes: bool = True,
    settings: Mapping[str, Any] | None = None,
    run_name: str | None = None,
    output_dir: str | Path | None = None,
    resume: str | Path | None = None,
    registry: Registry | None = None,
) -> Improvements:
    """Searches, within a budget, for what makes an agent better, and judges the best of it once.

    Example:
        found = reinforge.improve(agent, "questions.jsonl", "exact_match", "path/to/model", minutes=30)
        print(found.promoted, found.model)

    Args:
        minutes: What the search may take, with its verdict.
        max_tokens: SearchBudget in sampled tokens in place of minutes; equal searches then make equal decisions.
        reflect: Entry of `llms` whose model rewrites the agent's texts (`context.text`); needs the extra `prompt`.
        seeds: Trainings of the winner, each with another `finetuning.seed` and all judged; they show how far its gain
            depends on chance.
        outcomes: Try first what helped on similar tasks, and remember what helped on this one; never with `max_tokens`.
        settings: Further keys of the `finetuning` section.
        resume: Name or folder of a search to resume.

    The other arguments are those of `reinforge.finetune`.

    Raises:
        ConfigError: The configuration or the data is wrong, or the budget is too small.
        Interrupted: Ctrl-C or a signal stopped the search, which can be resumed.
    """
    own = {} if output_dir is None else {"output_dir": str(output_dir)}
    builder = {"num_generations": 8, "examples_per_epoch": 16}
    data = build_run_data(
        workflow,
        dataset,
        reward,
        model,
        caller="improve",
        environment=environment,
        builder=builder,
        settings=own,
        further=settings,
    )
    budget = choose_budget(minutes, max_tokens)

    def load(overrides: Any) -> LoadedConfig:
        return build_config(data, registry=registry, changes=overrides)

    return run_search(
        load,
        budget,
        run_name=run_name,
        resume=resume,
        registry=registry,
        reflect=reflect,
        seeds=seeds,
        outcomes=outcomes,
    )


def choose_budget(minutes: float, max_tokens: int | None) -> SearchBudget:
    if max_tokens is not None:
        return SearchBudget(float(max_tokens), "tokens")
    if minutes < MIN_MINUTES:
        message = f"{minutes:g} minutes are too few for a search"
        raise ConfigError(Problem("minutes", message, f"give {MIN_MINUTES:g} or more; 30 is a good start"))
    return SearchBudget(60 * minutes)


def load_without_answers(load: Load) -> Load:
    """Returns `load` without an optional first stage of answers: with them is one of the search's own recipes."""
    config = load(()).config
    if find_optional_answers(config) is None:
        return load
    leave_out_answers(config.finetuning)
    whole, epochs = (PIPELINE, "{}"), (NUM_EPOCHS, str(config.finetuning.num_epochs))

    def load_single(changes: Overrides) -> LoadedConfig:
        adds_stages = any(path.startswith(f"{PIPELINE}.") for path, _ in changes)  # which have the epochs
        return load((whole, *(() if adds_stages else (epochs,)), *changes))

    return load_single


def run_search(
    load: Load,
    budget: SearchBudget | None,
    *,
    run_name: str | None = None,
    resume: str | Path | None = None,
    say: Say = print,
    registry: Registry | None = None,
    reflect: str | None = None,
    seeds: int = 1,
    outcomes: bool = False,
) -> Improvements:
    """Runs or resumes a search; one process works on it at a time.

    Args:
        budget: What it may use; None: what it started with, when it resumes.
        reflect: Entry of `llms` that rewrites prompts; None: none does.
        seeds: Trainings of the winner; a search that resumes has those that it started with.
        outcomes: Order the recipes by the outcomes of earlier searches, and add its own; never with a budget in tokens.
    """
    load = load_without_answers(load)
    base = load(())
    config, llms = base.config.finetuning, base.config.llms
    if reflect is not None and reflect not in llms:
        message = f'llms has no entry "{reflect}"{did_you_mean(reflect, llms)}'
        raise ConfigError(Problem("reflect", message, f"name one of: {', '.join(llms)}"))
    if seeds < 1:
        raise ConfigError(Problem("seeds", f"{seeds} trainings of the winner are none", "give 1 or more"))
    output_dir = Path(config.output_dir).expanduser()
    if resume is not None:
        folder = next((each for each in (Path(resume), output_dir / resume) if (each / SEARCH).is_file()), Path(resume))
        record = SearchRecord.read(folder)
    else:
        if run_name is not None:
            check_run_name(run_name)
        folder = output_dir / (run_name or f"improve-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}")
        if folder.exists():
            message = f"the folder {folder} already exists"
            raise ConfigError(Problem("run_name", message, "resume it with --resume, or choose another name"))
        assert budget is not None
        folder.mkdir(parents=True)
        record = SearchRecord(folder, budget, num_seeds=seeds)
        record.write()
    lock = filelock.FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise ConfigError(Problem("", f"another process works on {folder}", "wait for it, or stop it")) from None
    try:
        say(f"search {folder.name} in {folder}, {record.budget.format(record.budget.total)}")
        live = LiveRun(blocked_s=config.limits.episode_timeout_s)
        trials = RunTrials(record, load, say, registry, reflect)
        file = home() / OUTCOMES if outcomes and record.budget.unit == "s" and record.result is None else None
        known = [] if file is None else read_outcomes(file)
        search = Search(record, trials, propose(base.config, reflect), config.gate, say, known)
        run_interruptible(search.run(), RunOptions(live=live))
        if file is not None and (outcome := record.read_outcome()) is not None:
            outcome.write(file)
    except ReinforgeError as error:
        if not isinstance(error, ConfigError):
            error.add_note(f"saved in {folder}; resume it with the same file and options, and --resume {folder.name}")
        raise
    finally:
        lock.release()
    found = Improvements(folder, record)
    replace_file(folder / REPORT, found.format_report())
    write_page(record, found.facts(), trials.metric)
    return found
