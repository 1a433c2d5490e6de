from nat.builder.builder import EvalBuilder
from nat.builder.evaluator import EvaluatorInfo
from nat.cli.register_workflow import register_evaluator
from nat.data_models.evaluator import EvaluatorBaseConfig

from . import workflow  # noqa: F401


class GameEvaluatorConfig(EvaluatorBaseConfig, name="percent_games_won"):
    """How the games ended."""


@register_evaluator(config_type=GameEvaluatorConfig)
async def percent_games_won(config: GameEvaluatorConfig, builder: EvalBuilder):
    from .evaluator import GameEvaluator

    evaluator = GameEvaluator(builder.get_max_concurrency())
    yield EvaluatorInfo(config=config, evaluate_fn=evaluator.evaluate, description="How the games ended")


class GameEvaluatorConfig(EvaluatorBaseConfig, name="step_value_computation"):
    """What the moves were worth."""


@register_evaluator(config_type=GameEvaluatorConfig)
async def step_value_computation(config: GameEvaluatorConfig, builder: EvalBuilder):
    from .evaluator import GameEvaluator

    evaluator = GameEvaluator(builder.get_max_concurrency(), use_steps=True)
    yield EvaluatorInfo(config=config, evaluate_fn=evaluator.evaluate, description="What the moves were worth")
