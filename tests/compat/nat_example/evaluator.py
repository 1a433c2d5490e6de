import numpy as np
from nat.data_models.intermediate_step import IntermediateStepType
from nat.eval.evaluator.base_evaluator import BaseEvaluator
from nat.eval.evaluator.evaluator_model import EvalInputItem, EvalOutputItem
from typing_extensions import override

OUTCOMES = {"Win!": 1.0, "Draw!": 0.5}


class GameEvaluator(BaseEvaluator):
    def __init__(self, max_concurrency: int = 4, use_steps: bool = False):
        super().__init__(max_concurrency, tqdm_desc="Evaluating games")
        self.use_steps = use_steps

    @staticmethod
    def sum_up(values: list[float], decay: float = 0.8, bonus_decay: float = 0.95) -> float:
        """A weighted mean of what is open, and the best win, less the later it came; without a move it raises."""
        assert values
        left = np.arange(len(values))[::-1]
        weights, found = decay**left, np.asarray(values)
        mean = float(np.dot(weights / weights.sum(), np.minimum(found, 1.0)))
        return mean + float(np.max(np.maximum(found - 1.0, 0.0) * bonus_decay**left))

    @override
    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        score = OUTCOMES.get(str(item.output_obj), 0.0)
        if self.use_steps:
            payloads = [step.payload for step in item.trajectory if step.event_type == IntermediateStepType.CUSTOM_END]
            score = self.sum_up([float(each.metadata["value"]) for each in payloads if "value" in each.metadata])
        reasoning = {"question": item.input_obj, "expected": item.expected_output_obj, "output": item.output_obj}
        return EvalOutputItem(id=item.id, score=score, reasoning=reasoning)
