"""Evaluators that score a whole evaluation, as the NeMo Agent Toolkit writes them."""

import pytest

from reinforge.errors import EvaluationError
from reinforge.evaluation.evaluators.base import score_item
from reinforge.finetuning import BaseEvaluator, EvalInput, EvalInputItem, EvalOutput, EvalOutputItem, EvaluatorInfo


def item(id_, output):
    return EvalInputItem(id=id_, input_obj="q", expected_output_obj="a", output_obj=output, full_dataset_entry={})


class Length(BaseEvaluator):
    def __init__(self):
        super().__init__(max_concurrency=2, tqdm_desc="Measuring")

    async def evaluate_item(self, item):
        return EvalOutputItem(id=item.id, score=len(item.output_obj), reasoning="length")


async def test_a_whole_evaluation_and_one_item():
    output = await Length().evaluate(EvalInput(eval_input_items=[item("1", "abc"), item("2", None), item("3", "a")]))
    assert [each.score for each in output.eval_output_items] == [3, None, 1]
    assert output.average_score == 2, "the mean of 3 and 1; the second has no score"
    assert "NoneType" in output.eval_output_items[1].error
    assert (await Length().evaluate(item("1", "ab"))).score == 2


async def test_a_run_scores_with_it_item_by_item():
    info = EvaluatorInfo(config=None, evaluate_fn=Length().evaluate, description="Length")
    scored = await score_item(info, item("7", "abcd"))
    assert (scored.id, scored.score, scored.reasoning) == ("7", 4.0, "length")
    assert (await score_item(info, item("7", None))).score is None


async def test_a_function_without_a_score_is_an_error():
    async def nothing(evaluation):
        return EvalOutput(average_score=None, eval_output_items=[])

    info = EvaluatorInfo(config=None, evaluate_fn=nothing, description="")
    with pytest.raises(EvaluationError, match="the evaluator returned 0 scores for an evaluation of one example"):
        await info.evaluate(item("1", "a"))
