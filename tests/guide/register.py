from reinforge.finetuning import (
    Builder,
    EvaluatorConfig,
    WorkflowConfig,
    register_evaluator,
    register_trainer,
    register_trainer_adapter,
    register_trajectory_builder,
    register_workflow,
)

from .my_trainer import MyTrainer, MyTrainerConfig
from .my_trainer_adapter import MyTrainerAdapter, MyTrainerAdapterConfig
from .my_trajectory_builder import MyTrajectoryBuilder, MyTrajectoryBuilderConfig


@register_trajectory_builder(config_type=MyTrajectoryBuilderConfig)
async def my_trajectory_builder(config: MyTrajectoryBuilderConfig, builder: Builder):
    """
    Register the custom trajectory builder.
    Args:
    config: The trajectory builder configuration
    builder: The workflow builder (for accessing other components)
    Yields:
    A configured trajectory builder instance
    """
    yield MyTrajectoryBuilder(trajectory_builder_config=config)


@register_trainer_adapter(config_type=MyTrainerAdapterConfig)
async def my_trainer_adapter(config: MyTrainerAdapterConfig, builder: Builder):
    """Register the custom trainer adapter."""
    yield MyTrainerAdapter(adapter_config=config)


@register_trainer(config_type=MyTrainerConfig)
async def my_trainer(config: MyTrainerConfig, builder: Builder):
    """Register the custom trainer."""
    yield MyTrainer(trainer_config=config)


class MyWorkflowConfig(WorkflowConfig, name="my_agent_workflow"):
    """The agent of the guide's complete file."""

    llm: str


@register_workflow(config_type=MyWorkflowConfig)
async def my_agent_workflow(config: MyWorkflowConfig, builder: Builder):
    async def agent(item, llm, context):
        reply = await llm.chat.completions.create(messages=[{"role": "user", "content": item.input_obj}], max_tokens=4)
        return reply.choices[0].message.content

    yield agent


class MyEvaluatorConfig(EvaluatorConfig, name="my_custom_evaluator"):
    """The reward of the guide's complete file."""


@register_evaluator(config_type=MyEvaluatorConfig)
async def my_custom_evaluator(config: MyEvaluatorConfig, builder: Builder):
    class Vowels:
        async def evaluate(self, item):
            return sum(letter in "aeiou" for letter in item.output_obj) / max(1, len(item.output_obj))

    yield Vowels()
