"""Which names the modules of the NeMo Agent Toolkit have here, and which of reinforge's objects each of them is."""

from __future__ import annotations

HARNESS = "reinforge.finetuning"

_SAME_NAME = {
    "finetuning": "Trainer TrainerAdapter TrajectoryBuilder",
    "finetuning.interfaces.finetuning_runner": "Trainer",
    "finetuning.interfaces.trainer_adapter": "TrainerAdapter",
    "finetuning.interfaces.trajectory_builder": "TrajectoryBuilder",
    "finetuning.utils.parsers.base_parser": "parse_to_openai_messages",
    "builder.builder": "Builder",
    "builder.context": "Context",
    "builder.evaluator": "EvaluatorInfo",
    "builder.framework_enum": "LLMFrameworkEnum",
    "builder.function_info": "FunctionInfo",
    "builder.intermediate_step_manager": "IntermediateStepManager",
    "cli.register_workflow": "register_trainer register_trainer_adapter register_trajectory_builder register_function "
    "register_evaluator",
    "data_models.component_ref": "FunctionRef LLMRef",
    "data_models.evaluate_runtime": "EvaluationRunConfig EvaluationRunOutput",
    "data_models.evaluator": "EvalInput EvalInputItem EvalOutput EvalOutputItem",
    "data_models.finetuning": "CurriculumLearningConfig DPOItem EpisodeItem EpisodeItemRole FinetuneConfig "
    "FinetuneRunConfig OpenAIMessage RewardFunctionConfig TrainerAdapterConfig TrainerConfig TrainingJobRef "
    "TrainingJobStatus TrainingStatusEnum Trajectory TrajectoryBuilderConfig TrajectoryCollection",
    "data_models.intermediate_step": "IntermediateStep IntermediateStepCategory IntermediateStepPayload "
    "IntermediateStepState IntermediateStepType StreamEventData TTCEventData TraceMetadata UsageInfo",
    "data_models.invocation_node": "InvocationNode",
    "eval.config": "EvaluationRunConfig EvaluationRunOutput",
    "eval.evaluate": "EvaluationRun EvaluationRunConfig",
    "eval.evaluator.base_evaluator": "BaseEvaluator",
    "eval.evaluator.evaluator_model": "EvalInput EvalInputItem EvalOutput EvalOutputItem",
    "plugins.eval.data_models.evaluator_io": "EvalOutput EvalOutputItem",
    "plugins.eval.evaluator.base_evaluator": "BaseEvaluator",
    "plugins.eval.evaluator.evaluator_model": "EvalInput EvalInputItem EvalOutput EvalOutputItem",
    "plugins.eval.profiler.callbacks.token_usage_base_model": "TokenUsageBaseModel",
    "plugins.eval.runtime.evaluate": "EvaluationRun",
    "plugins.openpipe.config": "ARTBackendConfig ARTTrainerAdapterConfig ARTTrainerConfig ARTTrajectoryBuilderConfig",
    "plugins.openpipe.trainer": "ARTTrainer MATPLOTLIB_AVAILABLE logger",
    "plugins.openpipe.trajectory_builder": "ARTTrajectoryBuilder",
    "plugin_api": "Builder EvaluatorInfo FunctionInfo FunctionRef LLMFrameworkEnum LLMRef TrainerAdapterConfig "
    "TrainerConfig TrajectoryBuilderConfig register_evaluator register_function register_trainer "
    "register_trainer_adapter register_trajectory_builder",
}
"""Module below `nat.` -> names that `reinforge.finetuning` has under the same name."""

_OTHER_NAME = {
    "builder.builder": {"EvalBuilder": "Builder"},
    "plugin_api": {
        "EvalBuilder": "Builder",
        "EvaluatorBaseConfig": "EvaluatorConfig",
        "FunctionBaseConfig": "WorkflowConfig",
        "LLMBaseConfig": "LLMConfig",
    },
    "data_models.evaluator": {"EvaluatorBaseConfig": "EvaluatorConfig"},
    "data_models.function": {"FunctionBaseConfig": "WorkflowConfig"},
    "data_models.llm": {"LLMBaseConfig": "LLMConfig"},
}
"""Module below `nat.` -> name there -> name in `reinforge.finetuning`."""


_ELSEWHERE = {
    "plugins.openpipe.trainer_adapter": {"reinforge.protocols.art.adapter": "ARTTrainerAdapter"},
    "plugins.customizer.dpo.config": {
        "reinforge.trainer.builders.preference_pairs": "DPOTrajectoryBuilderConfig",
        "reinforge.protocols.nemo_customizer.trainer": "NeMoCustomizerTrainerConfig",
        "reinforge.protocols.nemo_customizer.config": "DPOSpecificHyperparameters NIMDeploymentConfig "
        "NeMoCustomizerHyperparameters NeMoCustomizerTrainerAdapterConfig",
    },
    "plugins.customizer.dpo.trainer": {"reinforge.protocols.nemo_customizer.trainer": "NeMoCustomizerTrainer"},
    "plugins.customizer.dpo.trainer_adapter": {
        "reinforge.protocols.nemo_customizer.adapter": "NeMoCustomizerTrainerAdapter"
    },
    "plugins.customizer.dpo.trajectory_builder": {
        "reinforge.trainer.builders.preference_pairs": "CandidateStep DPOTrajectoryBuilder PreferencePair"
    },
}
"""Module below `nat.` -> module here -> names."""


def _build_table() -> dict[str, dict[str, str]]:
    table: dict[str, dict[str, str]] = {}
    for module, names in _SAME_NAME.items():
        table[f"nat.{module}"] = {name: f"{HARNESS}:{name}" for name in names.split()}
    for module, others in _OTHER_NAME.items():
        table.setdefault(f"nat.{module}", {}).update({name: f"{HARNESS}:{own}" for name, own in others.items()})
    for module, places in _ELSEWHERE.items():
        own = {name: f"{place}:{name}" for place, names in places.items() for name in names.split()}
        table.setdefault(f"nat.{module}", {}).update(own)
    return table


MODULES = _build_table()
"""Module -> name -> `module:name` of the object that it is."""
