"""`EvaluationRun(config).run_and_evaluate()`: one evaluation of a configuration file, outside any run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel

from reinforge.config.loaded_config import LoadedConfig
from reinforge.config.loader import build_config, load_config
from reinforge.config.schema import FinetuneRunConfig
from reinforge.errors import ConfigError, Problem
from reinforge.files import replace_file, to_json
from reinforge.registry import Registry
from reinforge.runs.progress import SilentProgress
from reinforge.trainer.evaluate import ALL, prepare_evaluation
from reinforge.trainer.setup.components import ComponentBuilder
from reinforge.types.evaluation import EvalInput, EvalOutput, EvaluationRunConfig, EvaluationRunOutput

UNSUPPORTED = {
    "skip_workflow": "scoring outputs that the dataset already holds",
    "skip_completed_entries": "skipping rows that already hold an output",
}
"""Settings that are refused by name, with their meaning."""


class EvaluationRun:
    """Runs the agent of a configuration on its whole dataset and scores it.

    Args:
        config: The evaluation; a policy under `llms` is served by the file's trainer adapter, without training.
        registry: Component types; None: all installed ones.

    Raises:
        ConfigError: A setting is not supported in this version.
    """

    def __init__(self, config: EvaluationRunConfig, registry: Registry | None = None):
        self.config, self.registry = config, registry
        refused = [
            Problem(name, f"not supported in this version: {what}", f"leave {name} out")
            for name, what in UNSUPPORTED.items()
            if getattr(config, name)
        ]
        if refused:
            raise ConfigError(refused)

    async def run_and_evaluate(self) -> EvaluationRunOutput:
        """Returns outputs, steps and scores of every example, `reps` times; missing scores carry the reason.

        Raises:
            ConfigError: The configuration or the data is wrong; nothing was started.
        """
        loaded = self._load()
        if self.config.endpoint is not None:
            flags = {name: getattr(self.config, name) for name in ("endpoint", "endpoint_timeout", "result_json_path")}
            loaded.config.finetuning.run_configuration = FinetuneRunConfig.model_validate(flags)
        async with ComponentBuilder(loaded, self.registry) as builder:
            evaluation, adapter = await prepare_evaluation(builder, ALL, SilentProgress(), served_as="train")
            if adapter is not None:
                await adapter.initialize(loaded.config.finetuning)
            outputs = [await evaluation.run_eval() for _ in range(self.config.reps)]
        output = _merge_outputs(outputs)
        folder = loaded.config.eval.general.output_dir
        return _write_output(output, folder) if self.config.write_output and folder is not None else output

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


def _merge_outputs(outputs: Sequence[EvaluationRunOutput]) -> EvaluationRunOutput:
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


def _write_output(output: EvaluationRunOutput, folder: Path) -> EvaluationRunOutput:
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
