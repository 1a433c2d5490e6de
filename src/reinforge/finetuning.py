"""Everything for writing trajectory builders, adapters, trainers, evaluators and datasets, in one place.

    from reinforge.finetuning import TrajectoryBuilder, TrajectoryBuilderConfig, register_trajectory_builder

The names are those of the NeMo Agent Toolkit; they refer to the classes that reinforge itself uses. Does not import
torch.
"""

from __future__ import annotations

from reinforge.adapters.openpipe_art import ARTBackendConfig, ARTTrainerAdapterConfig
from reinforge.config.schema import (
    AlgorithmConfig,
    Config,
    CurriculumLearningConfig,
    DatasetConfig,
    EvaluatorConfig,
    FinetuneConfig,
    FinetuneRunConfig,
    LLMConfig,
    RewardFunctionConfig,
    TrainerAdapterConfig,
    TrainerConfig,
    TrajectoryBuilderConfig,
    WorkflowConfig,
)
from reinforge.interfaces import (
    Algorithm,
    Builder,
    DatasetLoader,
    EvaluationRunner,
    Evaluator,
    Journal,
    PolicyServer,
    Trainer,
    TrainerAdapter,
    TrajectoryBuilder,
    Workflow,
)
from reinforge.registry import (
    register_algorithm,
    register_dataset,
    register_evaluator,
    register_function,
    register_llm,
    register_model,
    register_trainer,
    register_trainer_adapter,
    register_trajectory_builder,
    register_workflow,
)
from reinforge.rollout.workflow import PolicyFailure
from reinforge.trainer.evaluation_run import EvaluationRun
from reinforge.trainer.loop import EpochTrainer, EpochTrainerConfig
from reinforge.trainer.openpipe_art import (
    MATPLOTLIB_AVAILABLE,
    ARTTrainer,
    ARTTrainerConfig,
    ARTTrajectoryBuilder,
    ARTTrajectoryBuilderConfig,
    logger,
)
from reinforge.types.evaluation import (
    EvalInput,
    EvalInputItem,
    EvalOutput,
    EvalOutputItem,
    EvaluationReport,
    EvaluationRunConfig,
    EvaluationRunOutput,
)
from reinforge.types.job import TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from reinforge.types.request import TokenLogprobs
from reinforge.types.sample import LossSpec, Needs, TrainingSample
from reinforge.types.steps import (
    IntermediateStep,
    IntermediateStepPayload,
    IntermediateStepState,
    IntermediateStepType,
    InvocationNode,
    StreamEventData,
    TTCEventData,
    UsageInfo,
)
from reinforge.types.trajectory import (
    DPOItem,
    EpisodeItem,
    EpisodeItemRole,
    OpenAIMessage,
    Outcome,
    Trajectory,
    TrajectoryCollection,
    TrajectoryGroup,
)

__all__ = [
    "MATPLOTLIB_AVAILABLE",
    "ARTBackendConfig",
    "ARTTrainer",
    "ARTTrainerAdapterConfig",
    "ARTTrainerConfig",
    "ARTTrajectoryBuilder",
    "ARTTrajectoryBuilderConfig",
    "Algorithm",
    "AlgorithmConfig",
    "Builder",
    "Config",
    "CurriculumLearningConfig",
    "DPOItem",
    "DatasetConfig",
    "DatasetLoader",
    "EpisodeItem",
    "EpisodeItemRole",
    "EpochTrainer",
    "EpochTrainerConfig",
    "EvalInput",
    "EvalInputItem",
    "EvalOutput",
    "EvalOutputItem",
    "EvaluationReport",
    "EvaluationRun",
    "EvaluationRunConfig",
    "EvaluationRunOutput",
    "EvaluationRunner",
    "Evaluator",
    "EvaluatorConfig",
    "FinetuneConfig",
    "FinetuneRunConfig",
    "IntermediateStep",
    "IntermediateStepPayload",
    "IntermediateStepState",
    "IntermediateStepType",
    "InvocationNode",
    "Journal",
    "LLMConfig",
    "LossSpec",
    "Needs",
    "OpenAIMessage",
    "Outcome",
    "PolicyFailure",
    "PolicyServer",
    "RewardFunctionConfig",
    "StreamEventData",
    "TTCEventData",
    "TokenLogprobs",
    "Trainer",
    "TrainerAdapter",
    "TrainerAdapterConfig",
    "TrainerConfig",
    "TrainingJobRef",
    "TrainingJobStatus",
    "TrainingSample",
    "TrainingStatusEnum",
    "Trajectory",
    "TrajectoryBuilder",
    "TrajectoryBuilderConfig",
    "TrajectoryCollection",
    "TrajectoryGroup",
    "UsageInfo",
    "Workflow",
    "WorkflowConfig",
    "logger",
    "register_algorithm",
    "register_dataset",
    "register_evaluator",
    "register_function",
    "register_llm",
    "register_model",
    "register_trainer",
    "register_trainer_adapter",
    "register_trajectory_builder",
    "register_workflow",
]
