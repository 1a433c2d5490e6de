"""An evaluation alone: the agent of a configuration on its dataset, with intervals; nothing is trained or written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.schema import FinetuneConfig
from reinforge.errors import ConfigError, Problem
from reinforge.evaluation.run import DatasetEvaluation, error_of
from reinforge.evaluation.splits import SPLITS, split_examples
from reinforge.files import replace_file, to_json
from reinforge.interfaces import EvaluationReport, TrainerAdapter
from reinforge.registry import REGISTRY, Registry
from reinforge.rollout.llms import adapters_of
from reinforge.rollout.runner import EpisodeRunner
from reinforge.runs.episode_json import episode_json
from reinforge.runs.progress import RunProgress, SilentProgress
from reinforge.runs.saved_model import SavedModel, find_model
from reinforge.trainer.setup.components import Builder
from reinforge.trainer.setup.prepare import Attempts
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from reinforge.types.evaluation import EvalInputItem

ALL = "all"


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """What one evaluation runs on.

    Attributes:
        model: A run, a folder or a hub id that replaces `finetuning.policy.model`.
        split: `train`, `select`, `confirm` or `all`; None: `select` of a file that trains, else all.
        limit: The first so many examples.
        progress: What a person sees meanwhile.
    """

    model: str | None = None
    split: str | None = None
    limit: int | None = None
    progress: RunProgress = field(default_factory=SilentProgress)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What one evaluation gave.

    Attributes:
        model: What was evaluated.
        split: The examples it ran on.
        report: The figures.
        records: Every episode, missing ones too.
        wall_s: Seconds.
    """

    model: str
    split: str
    report: EvaluationReport
    records: list[EpisodeRecord]
    wall_s: float

    def as_dict(self) -> dict[str, Any]:
        """Returns the figures, ready for JSON."""
        return {
            "model": self.model,
            "split": self.split,
            "num_examples": self.report.num_examples,
            "metrics": {name: summary.as_dict() for name, summary in self.report.summaries.items()},
            "outcomes": self.report.outcomes,
            "tokens": self._tokens(),
            "wall_s": round(self.wall_s, 3),
        }

    def lines(self) -> list[str]:
        """Returns the figures for a person: the model, one line an evaluator, how the episodes ended."""
        unscored = {name: f", {s.num_unscored} unscored" for name, s in self.report.summaries.items() if s.num_unscored}
        outcomes = ", ".join(f"{count} {name}" for name, count in sorted(self.report.outcomes.items()))
        tokens = self._tokens()
        return [
            f"model     {self.model}",
            f"examples  {self.report.num_examples} of {self.split}",
            *(f"{summary}{unscored.get(name, '')}" for name, summary in self.report.summaries.items()),
            f"episodes  {outcomes}",
            f"tokens    {tokens['prompt']} read, {tokens['completion']} sampled, {self.wall_s:.1f} s",
        ]

    def write(self, path: Path) -> None:
        """Writes every episode as a line of JSON, as the journal of a run holds it."""
        replace_file(path, "".join(to_json(episode_json(record)) + "\n" for record in self.records))

    def _tokens(self) -> dict[str, int]:
        return {
            "prompt": sum(record.num_prompt_tokens for record in self.records),
            "completion": sum(record.num_completion_tokens for record in self.records),
        }


async def evaluate(loaded: LoadedConfig, options: EvaluationOptions, registry: Registry = REGISTRY) -> Evaluation:
    """Runs the agent over examples and scores what it did.

    Raises:
        ConfigError: Everything that is wrong and can be seen before any work starts.
        EvaluationError: Nothing could be scored.
        BackendUnavailable: Nothing could be scored, since a model did not answer.
    """
    config: FinetuneConfig = loaded.config.finetuning
    started = time.monotonic()
    async with Builder(loaded, registry) as builder:
        model = _replace_model(builder, options.model)
        split = options.split or ("select" if config.enabled else ALL)
        evaluation, adapter = await prepare_evaluation(builder, split, options.progress, limit=options.limit)
        if adapter is not None:
            options.progress.stage(None, "LOAD", None)
            await adapter.initialize(config)
            if model is not None and model.adapters and not await adapter.restore(Path(model.path), 0):
                message = f"{type(adapter).__name__} cannot load the adapters of {model.path}"
                raise ConfigError(Problem("--model", message, "use the trainer adapter `_type: local`"))
        draws = config.gate.draws if split == "confirm" else 1
        ids = evaluation.example_ids(split)
        options.progress.stage(None, "EVALUATE", len(ids) * draws)
        # the phase of the verdict would repeat its very draws; this one has draws of its own in the same worlds
        records = await evaluation.collect([EpisodeKey("eval", 0, id_, draw) for id_ in ids for draw in range(draws)])
        report = evaluation.report(split, 0, records)
    _refuse_unscored(report)
    return Evaluation(str(model or "as configured"), split, report, records, time.monotonic() - started)


def _replace_model(builder: Builder, named: str | None) -> SavedModel | None:
    """Puts the model that is asked for in the place of the configured one; returns the one that is evaluated."""
    config = builder.config.finetuning
    has_policy = any(llm.static_type == "policy" for llm in builder.config.llms.values())
    if named is None:
        return SavedModel(config.policy.model) if has_policy and config.policy.model else None
    if not has_policy:
        message = "it replaces the policy, and no entry of llms is `_type: policy`"
        raise ConfigError(Problem("--model", message, "leave it out, or make the agent's llm the policy"))
    model = SavedModel(named) if named.startswith("bundled:") else find_model(named, Path(config.output_dir))
    if model.adapters:
        model = _for_adapters(model, list(dict.fromkeys(adapters_of(builder.config.llms).values())))
    config.policy.model, config.policy.init = model.base if model.adapters else model.path, "pretrained"
    builder.loaded.marks["finetuning", "policy", "model"] = "--model"
    return model


def _for_adapters(model: SavedModel, names: Sequence[str]) -> SavedModel:
    """Returns what a file that names these adapters takes of several that were saved together.

    Raises:
        ConfigError: Not all of them were, or the file names none.
    """
    held = ", ".join(model.adapters)
    if not names:
        message = f"{model.path} holds the adapters {held}, and no entry of llms says which one answers"
        fix = (
            f"add `adapter: {model.adapters[0]}` to the entries, or name one: --model {model.path}/{model.adapters[0]}"
        )
        raise ConfigError(Problem("--model", message, fix))
    if missing := [name for name in names if name not in model.adapters]:
        message = f"{model.path} holds the adapters {held}, and not {', '.join(missing)}, which llms names"
        raise ConfigError(Problem("--model", message, "name adapters that the run trained"))
    if len(names) == 1:
        return SavedModel(f"{model.path}/{names[0]}", model.what)
    return replace(model, adapters=tuple(names))


async def prepare_evaluation(
    builder: Builder, split: str, progress: RunProgress, *, limit: int | None = None, served_as: str | None = None
) -> tuple[DatasetEvaluation, TrainerAdapter | None]:
    """Returns what evaluates, and the adapter if a policy is called; refuses everything that can be refused.

    Args:
        builder: Makes the components.
        split: `train`, `select`, `confirm` or `all`.
        progress: Told of every episode.
        limit: The first so many examples.
        served_as: The split's name in the evaluation; None: its own.
    """
    attempt, config = Attempts(builder.placed), builder.config.finetuning
    if builder.config.workflow is None:
        attempt.add([Problem("workflow", "there is none to run", "add the agent")])
    if not builder.config.eval.evaluators:
        attempt.add([Problem("eval.evaluators", "there is none to score with", "add one")])
    workflow: Any = await attempt(builder.get_workflow) if builder.config.workflow is not None else None
    items = await attempt(partial(_examples, builder, split, limit))
    if workflow is not None and items:
        attempt.add(workflow.example_problems(items))
    evaluators = {}
    for name in builder.config.eval.evaluators:
        evaluators[name] = await attempt(partial(builder.get_evaluator, name))
    llms = {}
    for name in builder.config.llms:
        llms[name] = await attempt(partial(builder.get_llm, name))
    has_policy = any(llm is not None and llm.is_policy for llm in llms.values())
    adapter = await attempt(partial(_adapter, builder)) if has_policy else None
    attempt.raise_if_any()
    evaluation = DatasetEvaluation(
        EpisodeRunner.configured(builder.config, workflow, llms),
        {served_as or split: items},
        evaluators,
        reward_metric=config.reward_function.name if config.reward_function is not None else next(iter(evaluators)),
        outcomes=config.outcomes,
        listener=lambda record: progress.episode(record.outcome.value, record.reward, record.num_completion_tokens),
    )
    return evaluation, adapter


async def _examples(builder: Builder, split: str, limit: int | None) -> list[EvalInputItem]:
    dataset, config = builder.config.eval.general.dataset, builder.config.finetuning
    if dataset is None:
        raise ConfigError(builder.placed(Problem("eval.general.dataset", "there is none", "add one with a `_type`")))
    items = (await builder.get_dataset()).load()
    if split in SPLITS:
        items = split_examples(items, config.splits, config.seed, id_key=getattr(dataset, "id_key", "id"))[split]
    return items[:limit]


async def _adapter(builder: Builder) -> TrainerAdapter:
    """Returns the adapter that serves the policy, looked at but not yet initialised."""
    config = builder.config.finetuning
    if config.trainer_adapter is None:
        message = "none is named, so nothing serves the entry of llms that is `_type: policy`"
        fix = "name an entry of trainer_adapters, such as one with `_type: local`"
        raise ConfigError(builder.placed(Problem("finetuning.trainer_adapter", message, fix)))
    adapter = await builder.get_trainer_adapter(config.trainer_adapter)
    if problems := adapter.preflight(config):
        raise ConfigError([builder.placed(problem) for problem in problems])
    return adapter


def _refuse_unscored(report: EvaluationReport) -> None:
    if report.error is None:
        return
    raise error_of(report.outcomes)(f"nothing could be scored: {report.error}")
