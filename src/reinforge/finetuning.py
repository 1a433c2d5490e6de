"""Everything for writing trajectory builders, adapters, trainers, evaluators and datasets, in one place.

    from reinforge.finetuning import TrajectoryBuilder, TrajectoryBuilderConfig, register_trajectory_builder

The names are those of the NeMo Agent Toolkit; they refer to the classes that reinforge itself uses. Does not import
torch.
"""

from reinforge.config.schema import AlgorithmConfig as AlgorithmConfig
from reinforge.config.schema import Config as Config
from reinforge.config.schema import CurriculumLearningConfig as CurriculumLearningConfig
from reinforge.config.schema import DatasetConfig as DatasetConfig
from reinforge.config.schema import EvaluatorConfig as EvaluatorConfig
from reinforge.config.schema import FinetuneConfig as FinetuneConfig
from reinforge.config.schema import FinetuneRunConfig as FinetuneRunConfig
from reinforge.config.schema import LLMConfig as LLMConfig
from reinforge.config.schema import RewardFunctionConfig as RewardFunctionConfig
from reinforge.config.schema import TrainerAdapterConfig as TrainerAdapterConfig
from reinforge.config.schema import TrainerConfig as TrainerConfig
from reinforge.config.schema import TrajectoryBuilderConfig as TrajectoryBuilderConfig
from reinforge.config.schema import WorkflowConfig as WorkflowConfig
from reinforge.evaluation.evaluators.base import BaseEvaluator as BaseEvaluator
from reinforge.evaluation.evaluators.base import EvaluatorInfo as EvaluatorInfo
from reinforge.interfaces import Algorithm as Algorithm
from reinforge.interfaces import Builder as Builder
from reinforge.interfaces import DatasetLoader as DatasetLoader
from reinforge.interfaces import EvaluationRunner as EvaluationRunner
from reinforge.interfaces import Evaluator as Evaluator
from reinforge.interfaces import Journal as Journal
from reinforge.interfaces import PolicyServer as PolicyServer
from reinforge.interfaces import Trainer as Trainer
from reinforge.interfaces import TrainerAdapter as TrainerAdapter
from reinforge.interfaces import TrajectoryBuilder as TrajectoryBuilder
from reinforge.interfaces import Workflow as Workflow
from reinforge.protocols.art.adapter import ARTBackendConfig as ARTBackendConfig
from reinforge.protocols.art.adapter import ARTTrainerAdapterConfig as ARTTrainerAdapterConfig
from reinforge.protocols.art.trainer import MATPLOTLIB_AVAILABLE as MATPLOTLIB_AVAILABLE
from reinforge.protocols.art.trainer import ARTTrainer as ARTTrainer
from reinforge.protocols.art.trainer import ARTTrainerConfig as ARTTrainerConfig
from reinforge.protocols.art.trainer import ARTTrajectoryBuilder as ARTTrajectoryBuilder
from reinforge.protocols.art.trainer import ARTTrajectoryBuilderConfig as ARTTrajectoryBuilderConfig
from reinforge.protocols.art.trainer import logger as logger
from reinforge.registry import register_algorithm as register_algorithm
from reinforge.registry import register_dataset as register_dataset
from reinforge.registry import register_evaluator as register_evaluator
from reinforge.registry import register_llm as register_llm
from reinforge.registry import register_model as register_model
from reinforge.registry import register_trainer as register_trainer
from reinforge.registry import register_trainer_adapter as register_trainer_adapter
from reinforge.registry import register_trajectory_builder as register_trajectory_builder
from reinforge.registry import register_workflow as register_workflow
from reinforge.rollout.functions import Context as Context
from reinforge.rollout.functions import FunctionInfo as FunctionInfo
from reinforge.rollout.functions import FunctionRef as FunctionRef
from reinforge.rollout.functions import IntermediateStepManager as IntermediateStepManager
from reinforge.rollout.functions import LLMRef as LLMRef
from reinforge.rollout.functions import register_function as register_function
from reinforge.rollout.step_messages import parse_to_openai_messages as parse_to_openai_messages
from reinforge.rollout.workflow import PolicyFailure as PolicyFailure
from reinforge.trainer.evaluate import EvaluationRun as EvaluationRun
from reinforge.trainer.loop import EpochTrainer as EpochTrainer
from reinforge.trainer.loop import EpochTrainerConfig as EpochTrainerConfig
from reinforge.types.evaluation import EvalInput as EvalInput
from reinforge.types.evaluation import EvalInputItem as EvalInputItem
from reinforge.types.evaluation import EvalOutput as EvalOutput
from reinforge.types.evaluation import EvalOutputItem as EvalOutputItem
from reinforge.types.evaluation import EvaluationReport as EvaluationReport
from reinforge.types.evaluation import EvaluationRunConfig as EvaluationRunConfig
from reinforge.types.evaluation import EvaluationRunOutput as EvaluationRunOutput
from reinforge.types.job import TrainingJobRef as TrainingJobRef
from reinforge.types.job import TrainingJobStatus as TrainingJobStatus
from reinforge.types.job import TrainingStatusEnum as TrainingStatusEnum
from reinforge.types.request import TokenLogprobs as TokenLogprobs
from reinforge.types.sample import LossSpec as LossSpec
from reinforge.types.sample import Needs as Needs
from reinforge.types.sample import TrainingSample as TrainingSample
from reinforge.types.steps import IntermediateStep as IntermediateStep
from reinforge.types.steps import IntermediateStepCategory as IntermediateStepCategory
from reinforge.types.steps import IntermediateStepPayload as IntermediateStepPayload
from reinforge.types.steps import IntermediateStepState as IntermediateStepState
from reinforge.types.steps import IntermediateStepType as IntermediateStepType
from reinforge.types.steps import InvocationNode as InvocationNode
from reinforge.types.steps import LLMFrameworkEnum as LLMFrameworkEnum
from reinforge.types.steps import StreamEventData as StreamEventData
from reinforge.types.steps import TokenUsageBaseModel as TokenUsageBaseModel
from reinforge.types.steps import TraceMetadata as TraceMetadata
from reinforge.types.steps import TTCEventData as TTCEventData
from reinforge.types.steps import UsageInfo as UsageInfo
from reinforge.types.trajectory import DPOItem as DPOItem
from reinforge.types.trajectory import EpisodeItem as EpisodeItem
from reinforge.types.trajectory import EpisodeItemRole as EpisodeItemRole
from reinforge.types.trajectory import OpenAIMessage as OpenAIMessage
from reinforge.types.trajectory import Outcome as Outcome
from reinforge.types.trajectory import Trajectory as Trajectory
from reinforge.types.trajectory import TrajectoryCollection as TrajectoryCollection
from reinforge.types.trajectory import TrajectoryGroup as TrajectoryGroup

__all__ = [name for name in dir() if not name.startswith("_")]
