"""Evaluates the agent of a configuration on its dataset, with intervals; trains nothing."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.loader import build_config, load_config
from reinforge.config.schema import FinetuneConfig, FinetuneRunConfig, GateConfig
from reinforge.errors import ConfigError, Problem, StorageError, boundary
from reinforge.evaluation.non_inferiority import NonInferiority
from reinforge.evaluation.run import DatasetEvaluation, build_output, choose_error_type
from reinforge.evaluation.splits import FIXED, SPLITS, find_clusters, split_examples, take_transfer
from reinforge.evaluation.statistics import summarize
from reinforge.files import replace_file, to_json
from reinforge.interfaces import GroupEvaluator, TrainerAdapter
from reinforge.registry import Registry, load_named
from reinforge.rollout.models.policy_llm import find_adapters
from reinforge.rollout.runner import EpisodeRunner
from reinforge.runs.checkpoints import restore_weights
from reinforge.runs.journal.episode_json import dump_episode
from reinforge.runs.progress import RunProgress, SilentProgress
from reinforge.runs.saved_model import SavedModel, find_model
from reinforge.runs.summary import format_unscored
from reinforge.trainer.setup.compatibility import find_compared_parts
from reinforge.trainer.setup.components import Attempts, ComponentBuilder
from reinforge.trainer.setup.prepare import build_llms
from reinforge.trainer.setup.run_settings import find_remote_problems
from reinforge.types.episode import EpisodeKey, EpisodeRecord
from reinforge.types.evaluation import (
    EvalInputItem,
    EvaluationReport,
    EvaluationRunConfig,
    EvaluationRunOutput,
    MetricSummary,
)

ALL = "all"


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """Options of one evaluation."""

    model: str | None = None  # a run, a folder or a hub id to evaluate in place of `finetuning.policy.model`
    split: str | None = None  # `train`, `select`, `confirm` or `all`; None: `select` if the file trains, else `all`
    limit: int | None = None
    reps: int | None = None  # episodes of each example; None: 1, or `gate.num_samples` on `confirm`
    progress: RunProgress = field(default_factory=SilentProgress)
    adapter: TrainerAdapter | None = None  # serves the policy in place of the file's trainer adapter
    output_dir: Path | None = None  # folder for the result files; None: none are written
    with_reference: bool = False  # compare with `gate.reference` too, if there is one


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of one evaluation."""

    model: str
    split: str
    report: EvaluationReport
    records: list[EpisodeRecord]  # all episodes, missing ones too
    wall_s: float
    files: list[Path]  # the result files
    pass_at: dict[str, MetricSummary] = field(default_factory=dict)
    """`solved pass@4` and so on, of each metric whose scores are 0 or 1, where examples were repeated."""
    non_inferiority: NonInferiority | None = None  # against `gate.reference`; None: not compared

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "split": self.split,
            "num_examples": self.report.num_examples,
            "metrics": {name: summary.as_dict() for name, summary in self.report.summaries.items()},
            "pass_at": {name: summary.as_dict() for name, summary in self.pass_at.items()},
            "outcomes": self.report.outcomes,
            "tokens": self.count_tokens(),
            "wall_s": round(self.wall_s, 3),
            "files": [str(path) for path in self.files],
            **({"non_inferiority": self.non_inferiority.as_dict()} if self.non_inferiority is not None else {}),
        }

    def format_lines(self) -> list[str]:
        """Returns the result as text: the model, one line per evaluator, the outcomes, the tokens."""
        outcomes = ", ".join(f"{count} {name}" for name, count in sorted(self.report.outcomes.items()))
        tokens = self.count_tokens()
        summaries = [*self.report.summaries.values(), *self.pass_at.values()]
        return [
            f"model     {self.model}",
            f"examples  {self.report.num_examples} of {self.split}",
            *(f"{summary}{format_unscored(summary, before=', ')}" for summary in summaries),
            *([f"reference {self.non_inferiority}"] if self.non_inferiority is not None else []),
            f"episodes  {outcomes}",
            f"tokens    {tokens['prompt']} prompt, {tokens['completion']} sampled, {self.wall_s:.1f} s",
            *([f"files     {', '.join(map(str, self.files))}"] if self.files else []),
        ]

    def write(self, path: Path) -> None:
        replace_file(path, "".join(to_json(dump_episode(record)) + "\n" for record in self.records))

    def count_tokens(self) -> dict[str, int]:
        return {
            "prompt": sum(record.num_prompt_tokens for record in self.records),
            "completion": sum(record.num_completion_tokens for record in self.records),
        }


async def evaluate(loaded: LoadedConfig, options: EvaluationOptions, registry: Registry | None = None) -> Evaluation:
    """Runs the agent over examples and scores the outcomes.

    Raises:
        ConfigError: The configuration or the data is wrong; lists every problem, and nothing was started.
        EvaluationError: No example could be scored.
        BackendUnavailable: No example could be scored because a model did not answer.
    """
    config: FinetuneConfig = loaded.config.finetuning
    folder = options.output_dir
    if folder is not None:
        _make_folder(folder)  # before the work
    options.progress.stage(None, "PREPARE", None)
    async with ComponentBuilder(loaded, registry, progress=options.progress) as builder:
        if options.adapter is not None:
            builder.use_trainer_adapter(options.adapter)
        model = _replace_model(builder, options.model)
        split = options.split or ("select" if config.enabled else ALL)
        evaluation, adapter = await prepare_evaluation(builder, split, options.progress, limit=options.limit)
        _refuse_base_reference(builder, evaluation)
        if adapter is not None:
            options.progress.stage(None, "LOAD", None)
            await adapter.initialize(config)
            if model is not None and model.adapters and not await restore_weights(adapter, Path(model.path), 0):
                message = f"{type(adapter).__name__} cannot load the adapters of {model.path}"
                raise ConfigError(Problem("--model", message, "use the trainer adapter `_type: local`"))
        num_samples = options.reps or (config.gate.num_samples if split == "confirm" else 1)
        ids = evaluation.example_ids(split)
        options.progress.stage(None, "EVALUATE", len(ids) * num_samples)
        started = time.monotonic()
        # the verdict's phase would repeat its samples; this one has its own, with the same environment seeds
        records = await evaluation.collect(
            [EpisodeKey("eval", 0, id_, number) for id_ in ids for number in range(num_samples)]
        )
        report, found = evaluation.report(split, 0, records), None
        if options.with_reference and config.gate.reference is not None and adapter is not None:
            found = await _compare_with_reference(evaluation, config.gate, report)
        evaluation.runner.note_unused_prompts(options.progress.note)
    _require_scores(report)
    files = [] if folder is None else _write_files(build_output(records, report.summaries), folder)
    passed = summarize_passes(records, report.clusters)
    name, wall_s = str(model or "as configured"), time.monotonic() - started
    return Evaluation(name, split, report, records, wall_s, files, passed, found)


async def _compare_with_reference(
    evaluation: DatasetEvaluation, gate: GateConfig, report: EvaluationReport
) -> NonInferiority | None:
    from reinforge.evaluation.reference import compare_with_reference, evaluate_reference  # where there is one

    metric, split = gate.metric or evaluation.reward_metric, report.split
    reference = await evaluate_reference(evaluation, str(gate.reference), split, "eval_reference")
    if len(report.scores[metric].keys() & reference.scores[metric].keys()) < 2:
        return None
    return compare_with_reference(gate, metric, reference, report, evaluation.examples(split))


def summarize_passes(
    records: Sequence[EpisodeRecord], clusters: Mapping[str, str] | None = None
) -> dict[str, MetricSummary]:
    """Returns pass@k, the share of examples of which at least one of k episodes succeeds, for k = 1, 2, 4, ...

    The estimate of an example with n scored episodes, c of them successful, is `1 - C(n - c, k) / C(n, k)`, which is
    unbiased (Chen et al. 2021, arXiv:2107.03374, equation 1); the interval is over examples.

    Example: 4 episodes, 1 successful -> pass@1 0.25, pass@2 0.5, pass@4 1.0.
    """
    found, examples = dict[str, MetricSummary](), {record.key.example_id for record in records}
    for metric in dict.fromkeys(name for record in records for name in record.scores):
        scores = defaultdict[str, list[float]](list)
        for record in records:
            if (score := record.scores.get(metric)) is not None and (value := score.as_reward()) is not None:
                scores[record.key.example_id].append(value)
        most = max(map(len, scores.values()), default=0)
        if most < 2 or any(value not in (0.0, 1.0) for values in scores.values() for value in values):
            continue
        for k in (2**power for power in range(most.bit_length())):
            enough = {id_: values for id_, values in scores.items() if len(values) >= k}
            passed = {
                id_: 1 - math.comb(values.count(0.0), k) / math.comb(len(values), k) for id_, values in enough.items()
            }
            name = f"{metric} pass@{k}"
            found[name] = summarize(name, passed, len(examples), f"fewer than {k} scored episodes", clusters)
    return found


def _replace_model(builder: ComponentBuilder, name: str | None) -> SavedModel | None:
    """Replaces the configured model by the requested one; returns the model to evaluate."""
    config = builder.config.finetuning
    has_policy = any(llm.static_type == "policy" for llm in builder.config.llms.values())
    if name is None:
        return SavedModel(config.policy.model) if has_policy and config.policy.model else None
    if not has_policy:
        message = "this option replaces the policy, but no entry of llms is `_type: policy`"
        raise ConfigError(Problem("--model", message, "leave it out, or set `_type: policy` for the llm of the agent"))
    model = find_model(name, Path(config.output_dir))
    if model.adapters:
        model = _select_adapters(model, list(dict.fromkeys(find_adapters(builder.config.llms).values())))
    source = model.base if model.adapters else model.path
    if source != config.policy.model:
        config.policy.revision = None  # of the configured model; an adapter names that of its own base
    if not model.adapters:
        config.policy.quantization = None  # a saved model has its adapters in it, and only a bare base gets 4 bits
    config.policy.model, config.policy.init = source, "pretrained"
    builder.loaded.marks["finetuning", "policy", "model"] = "--model"
    return model


def _select_adapters(model: SavedModel, names: Sequence[str]) -> SavedModel:
    held = ", ".join(model.adapters)
    if not names:
        message = f"{model.path} holds the adapters {held}, but no entry of llms says which one to use"
        fix = (
            f"add `adapter: {model.adapters[0]}` to the entries, or name one: --model {model.path}/{model.adapters[0]}"
        )
        raise ConfigError(Problem("--model", message, fix))
    if missing := [name for name in names if name not in model.adapters]:
        message = f"{model.path} holds the adapters {held}, but llms names {', '.join(missing)}"
        raise ConfigError(Problem("--model", message, "name adapters that the run trained"))
    if len(names) == 1:
        return SavedModel(f"{model.path}/{names[0]}", model.description)
    return replace(model, adapters=tuple(names))


async def prepare_evaluation(
    builder: ComponentBuilder,
    split: str,
    progress: RunProgress,
    *,
    limit: int | None = None,
    served_as: str | None = None,
) -> tuple[DatasetEvaluation, TrainerAdapter | None]:
    """Validates the configuration; returns the evaluation, and the trainer adapter if the agent calls the policy."""
    attempt, config = Attempts(builder.locate), builder.config.finetuning
    attempt.add(builder.loaded.problems)
    attempt.add(find_remote_problems(config.run_configuration or FinetuneRunConfig(), builder.config.workflow))
    if builder.config.workflow is None:
        attempt.add([Problem("workflow", "no agent is configured", "add one with a `_type`")])
    if not builder.config.eval.evaluators:
        attempt.add([Problem("eval.evaluators", "no evaluator is configured", "add one")])
    workflow: Any = await attempt(builder.get_workflow) if builder.config.workflow is not None else None
    items = await attempt(partial(load_examples, builder, split, limit))
    if workflow is not None and items:
        attempt.add(workflow.example_problems(items))
    evaluators = {}
    for name in builder.config.eval.evaluators:
        evaluators[name] = await attempt(partial(builder.get_evaluator, name))
    llms = await build_llms(builder, workflow, attempt)
    has_policy = any(llm is not None and llm.is_policy for llm in llms.values())
    adapter = await attempt(partial(_get_adapter, builder)) if has_policy else None
    attempt.raise_if_any()
    evaluation = DatasetEvaluation(
        EpisodeRunner.from_config(builder.config, workflow, llms),
        {served_as or split: items},
        evaluators,
        reward_metric=config.reward_function.name if config.reward_function is not None else next(iter(evaluators)),
        outcomes=config.outcomes,
        clusters=find_clusters(items, config.splits),
        listener=lambda record: progress.episode(record.outcome.value, record.reward, record.num_completion_tokens),
        note=progress.note,
    )
    return evaluation, adapter


def _refuse_base_reference(builder: ComponentBuilder, evaluation: DatasetEvaluation) -> None:
    """Refuses a reward that compares with the base model's answers: there are none outside a run."""
    for name in find_compared_parts(evaluation.reward_metric, evaluation.evaluators):
        evaluator = evaluation.evaluators[name]
        if isinstance(evaluator, GroupEvaluator) and evaluator.reference == "base":
            message = "compares with the base model's answers, which only a run of `finetune` has"
            fix = "set it to expected, or choose another metric: -o finetuning.reward_function.name NAME"
            raise ConfigError(builder.locate(Problem(f"eval.evaluators.{name}.reference", message, fix)))


async def load_examples(builder: ComponentBuilder, split: str, limit: int | None) -> list[EvalInputItem]:
    dataset, config = builder.config.eval.general.dataset, builder.config.finetuning
    if dataset is None:
        raise ConfigError(
            builder.locate(Problem("eval.general.dataset", "no dataset is configured", "add one with a `_type`"))
        )
    items = (await builder.get_dataset()).load()
    items, transfer = take_transfer(items)
    if split == ALL:
        items += transfer
    if split in SPLITS:
        divide = load_named(FIXED) if config.splits.fixed else split_examples
        items = divide(items, config.splits, config.seed, id_key=getattr(dataset, "id_key", "id"))[split]
    return items[:limit]


async def _get_adapter(builder: ComponentBuilder) -> TrainerAdapter:
    config = builder.config.finetuning
    if builder.replaced_adapter is not None:
        return builder.replaced_adapter
    if config.trainer_adapter is None:
        message = "is not set, so nothing serves the entry of llms that is `_type: policy`"
        fix = "name an entry of trainer_adapters, such as one with `_type: local`"
        raise ConfigError(builder.locate(Problem("finetuning.trainer_adapter", message, fix)))
    adapter = await builder.get_trainer_adapter(config.trainer_adapter)
    if problems := adapter.validate(config):
        raise ConfigError([builder.locate(problem) for problem in problems])
    return adapter


def _require_scores(report: EvaluationReport) -> None:
    if report.error is None:
        return
    raise choose_error_type(report.outcomes)(f"no example could be scored: {report.error}")


UNSUPPORTED = {
    "skip_workflow": "scoring outputs that the dataset already holds",
    "skip_completed_entries": "skipping rows that already hold an output",
}
"""Settings that are refused by name, with their meaning."""


class EvaluationRun:
    """Runs the agent of a configuration on its whole dataset and scores it.

    Args:
        config: The evaluation; a policy under `llms` is served by the file's trainer adapter, without training.
    """

    def __init__(self, config: EvaluationRunConfig, registry: Registry | None = None):
        self.config, self.registry = config, registry
        refused = [
            Problem(name, f"not supported: {what}", f"leave {name} out")
            for name, what in UNSUPPORTED.items()
            if getattr(config, name)
        ]
        if refused:
            raise ConfigError(refused)

    async def run_and_evaluate(self) -> EvaluationRunOutput:
        """Returns outputs, steps and scores of every example, `reps` times; missing scores carry the reason."""
        loaded = self._load()
        if self.config.endpoint is not None:
            flags = {name: getattr(self.config, name) for name in ("endpoint", "endpoint_timeout", "result_json_path")}
            loaded.config.finetuning.run_configuration = FinetuneRunConfig.model_validate(flags)
        async with ComponentBuilder(loaded, self.registry) as builder:
            evaluation, adapter = await prepare_evaluation(builder, ALL, SilentProgress(), served_as="train")
            if adapter is not None:
                await adapter.initialize(loaded.config.finetuning)
            ids, reps = evaluation.example_ids("train"), range(self.config.reps)
            records = await evaluation.collect(
                [EpisodeKey("collect", 0, id_, number) for number in reps for id_ in ids]
            )
        output, folder = build_output(records, evaluation.evaluators), loaded.config.eval.general.output_dir
        if not self.config.write_output or folder is None:
            return output
        _make_folder(folder)
        workflow, *scores = _write_files(output, folder)
        return output.model_copy(update={"workflow_output_file": workflow, "evaluator_output_files": scores})

    def _load(self) -> LoadedConfig:
        source = self.config.config_file
        overrides = list(self.config.override)
        if self.config.dataset is not None:
            overrides.append(("eval.general.dataset.file_path", json.dumps(str(self.config.dataset))))
        if not isinstance(source, BaseModel):
            return load_config(source, overrides=overrides, registry=self.registry)
        if overrides:
            raise ConfigError(
                "override and dataset need a configuration file; to change a configuration object, edit it in Python"
            )
        return build_config({name: getattr(source, name) for name in source.model_fields_set}, registry=self.registry)


def _make_folder(folder: Path) -> None:
    with boundary(StorageError, f"cannot write to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)


def _write_files(output: EvaluationRunOutput, folder: Path) -> list[Path]:
    """Writes the agent's answers, then the scores of each evaluator; returns the paths."""
    rows = [
        {"id": item.id, "input": item.input_obj, "expected": item.expected_output_obj, "output": item.output_obj}
        for item in output.eval_input.eval_input_items
    ]
    contents: dict[str, Any] = {"workflow_output.json": rows}
    contents |= {f"{name}_output.json": result.model_dump(mode="json") for name, result in output.evaluation_results}
    for name, content in contents.items():
        replace_file(folder / name, to_json(content) + "\n")
    return [folder / name for name in contents]
