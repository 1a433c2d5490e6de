"""`EvaluationRun(config).run_and_evaluate()`: one evaluation of a configuration file, outside any run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel

from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.loader import build_config, load_config
from reinforge.errors import ConfigError, Problem
from reinforge.files import replace_file, to_json
from reinforge.registry import REGISTRY, Registry
from reinforge.runs.progress import SilentProgress
from reinforge.trainer.evaluate import ALL, prepare_evaluation
from reinforge.trainer.setup.components import Builder
from reinforge.types.evaluation import EvalInput, EvalOutput, EvaluationRunConfig, EvaluationRunOutput

NOT_YET = {
    "endpoint": "remote workflows",
    "skip_workflow": "scoring outputs that the dataset holds",
    "skip_completed_entries": "leaving out rows that hold an output",
}
"""Settings that are refused by name, with what they would do."""


class EvaluationRun:
    """Runs the agent of a configuration on its whole dataset and scores it.

    Args:
        config: What to run; a policy under `llms` is loaded by the file's trainer adapter and is not trained.
        registry: Where component types are looked up.

    Raises:
        ConfigError: A setting is not supported in this version.
    """

    def __init__(self, config: EvaluationRunConfig, registry: Registry = REGISTRY):
        self.config, self.registry = config, registry
        refused = [
            Problem(name, f"{what} is not supported in this version", f"leave {name} out")
            for name, what in NOT_YET.items()
            if getattr(config, name)
        ]
        if refused:
            raise ConfigError(refused)

    async def run_and_evaluate(self) -> EvaluationRunOutput:
        """Returns outputs, steps and scores of every example, `reps` times; missing scores say why.

        Raises:
            ConfigError: Something is wrong that can be seen before any work starts.
        """
        loaded = self._load()
        async with Builder(loaded, self.registry) as builder:
            evaluation, adapter = await prepare_evaluation(builder, ALL, SilentProgress(), served_as="train")
            if adapter is not None:
                await adapter.initialize(loaded.config.finetuning)
            outputs = [await evaluation.run_eval() for _ in range(self.config.reps)]
        output = _joined(outputs)
        folder = loaded.config.eval.general.output_dir
        return _written(output, folder) if self.config.write_output and folder is not None else output

    def _load(self) -> LoadedConfig:
        source = self.config.config_file
        overrides = list(self.config.override)
        if self.config.dataset is not None:
            overrides.append(("eval.general.dataset.file_path", json.dumps(str(self.config.dataset))))
        if not isinstance(source, BaseModel):
            return load_config(source, overrides=overrides, registry=self.registry)
        if overrides:
            raise ConfigError("override and dataset change a file; a configuration from Python can be changed itself")
        return build_config({name: getattr(source, name) for name in source.model_fields_set}, registry=self.registry)


def _joined(outputs: Sequence[EvaluationRunOutput]) -> EvaluationRunOutput:
    """Returns several runs of the same examples as one output; an average is over all of them."""
    first = outputs[0]
    if len(outputs) == 1:
        return first
    items = [item for output in outputs for item in output.eval_input.eval_input_items]
    results = []
    for index, (name, _) in enumerate(first.evaluation_results):
        scored = [item for output in outputs for item in output.evaluation_results[index][1].eval_output_items]
        known = [float(item.score) for item in scored if item.error is None]
        average = sum(known) / len(known) if known else None
        results.append((name, EvalOutput(average_score=average, eval_output_items=scored)))
    usage = {key: sum(output.usage_stats[key] for output in outputs) for key in first.usage_stats}
    update = {"eval_input": EvalInput(eval_input_items=items), "evaluation_results": results, "usage_stats": usage}
    return first.model_copy(update=update)


def _written(output: EvaluationRunOutput, folder: Path) -> EvaluationRunOutput:
    """Writes `workflow_output.json` and `<evaluator>_output.json`, and returns the output with their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"id": item.id, "input": item.input_obj, "expected": item.expected_output_obj, "output": item.output_obj}
        for item in output.eval_input.eval_input_items
    ]
    workflow = folder / "workflow_output.json"
    replace_file(workflow, to_json(rows) + "\n")
    scores = []
    for name, result in output.evaluation_results:
        scores.append(folder / f"{name}_output.json")
        replace_file(scores[-1], to_json(result.model_dump(mode="json")) + "\n")
    return output.model_copy(update={"workflow_output_file": workflow, "evaluator_output_files": scores})
