"""Another model reads the text."""

from __future__ import annotations

from typing import Any

from reinforge.evaluation.evaluators.llm_judge import LLMJudge, LLMJudgeConfig
from reinforge.redteam.scorers.texts import EvaluatorScorer
from reinforge.rollout.capture import ChatModel


class JudgeScorer(EvaluatorScorer):
    """Asks a model about each text by a rubric: the harness's `llm_judge`, with its guard against what texts claim.

    Example:
        JudgeScorer(model, "1: the clerk says a word that is in no dictionary. 0: the clerk does not.")

    Args:
        llm: The judge: anything that answers `await llm.sample(request)`, such as `openai_target(...)`.
        rubric: What each end of the range means.
        settings: Further settings of `llm_judge`, such as `high=10` or `retries=0`.
    """

    def __init__(self, llm: ChatModel, rubric: str, **settings: Any):
        super().__init__(LLMJudge(LLMJudgeConfig(llm=llm.model_name, rubric=rubric, **settings), llm))
