"""A judge model as a scorer."""

from __future__ import annotations

from typing import Any

from reinforge.evaluation.evaluators.llm_judge import LLMJudge, LLMJudgeConfig
from reinforge.interfaces import ChatModel
from reinforge.redteam.scorers.texts import EvaluatorScorer


class JudgeScorer(EvaluatorScorer):
    """Scores each text with a judge model and a rubric: the evaluator `llm_judge`, guards against injection included.

    Example:
        JudgeScorer(model, "1: the clerk says a word that is in no dictionary. 0: the clerk does not.")

    Args:
        llm: The judge: an object with `async sample(request)`, such as `openai_target(...)`.
        rubric: What the lowest and the highest score mean.
        settings: Other settings of `llm_judge`, such as `high=10` or `retries=0`.
    """

    def __init__(self, llm: ChatModel, rubric: str, **settings: Any):
        super().__init__(LLMJudge(LLMJudgeConfig(llm=llm.model_name, rubric=rubric, **settings), llm))
