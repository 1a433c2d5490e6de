from nat.builder.builder import EvalBuilder
from nat.builder.evaluator import EvaluatorInfo
from nat.cli.register_workflow import register_evaluator
from nat.data_models.evaluator import EvaluatorBaseConfig
from nat.eval.evaluator.base_evaluator import BaseEvaluator
from nat.eval.evaluator.evaluator_model import EvalInputItem, EvalOutputItem

SCORES = {"Win!": 1.0, "Draw!": 0.5, "Lose!": 0.0, "Aborted!": 0.0}


class AccuracyEvaluator(BaseEvaluator):
    def __init__(self, max_concurrency: int = 4):
        super().__init__(max_concurrency, tqdm_desc="Evaluating games")

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        return EvalOutputItem(id=item.id, score=SCORES[item.output_obj], reasoning={"output": item.output_obj})


class AccuracyConfig(EvaluatorBaseConfig, name="rl_accuracy"):
    """How the game ended."""


@register_evaluator(config_type=AccuracyConfig)
async def rl_accuracy(config: AccuracyConfig, builder: EvalBuilder):
    evaluator = AccuracyEvaluator(builder.get_max_concurrency())
    yield EvaluatorInfo(config=config, evaluate_fn=evaluator.evaluate, description="How the game ended")
