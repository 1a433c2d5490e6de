"""Scores the answer with a grader in the form of OpenAI's fine-tuning API.

eval:
  evaluators:
    same: {_type: grader, grader: {type: string_check, name: same, operation: eq,
                                   input: "{{sample.output_text}}", reference: "{{item.answer}}"}}

`item` is the row of the dataset, `sample` the agent's answer. A `score_model` names its model by its entry of `llms`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

from pydantic import Field

from reinforge.config.schema import EvaluatorConfig
from reinforge.errors import ConfigError, Problem
from reinforge.evaluation.answers import UnusableOutputError
from reinforge.evaluation.evaluators.base import missing_score
from reinforge.evaluation.evaluators.judging import format_output, get_judge
from reinforge.interfaces import Builder, ChatModel, Evaluator
from reinforge.protocols.openai.graders.grading import Grading
from reinforge.protocols.openai.graders.python_grader import PythonGraders, open_python_graders
from reinforge.protocols.openai.graders.schema import PythonGrader, list_graders, list_models, parse_grader
from reinforge.protocols.openai.graders.templates import GradedSample
from reinforge.registry import register_evaluator
from reinforge.types.evaluation import EvalInputItem, EvalOutputItem


class GraderConfig(EvaluatorConfig, name="grader"):
    """Scores the answer with a grader as OpenAI's fine-tuning API describes it."""

    grader: dict[str, Any] = Field(
        description="The grader: `type` is string_check, text_similarity, score_model, label_model, python or multi."
    )
    models: dict[str, str] = Field(
        default_factory=dict,
        description="Name of a model in the grader -> entry of llms; one that is not listed is an entry itself.",
    )
    item_key: str | None = Field(
        default=None, description="Column with the object that `item` stands for; null: the whole row."
    )
    allow_python: bool = Field(
        default=False,
        description="Let graders in Python run, in processes with few rights; not a security boundary.",
    )


class GraderEvaluator(Evaluator):
    """Grades one answer; `item_key` is the column that `item` stands for, None the whole row."""

    def __init__(self, grading: Grading, item_key: str | None = None):
        self.grading, self.item_key = grading, item_key

    async def evaluate(self, item: EvalInputItem) -> EvalOutputItem:
        """Returns the grade; missing where the grader failed, 0 where the answer cannot be graded at all."""
        row = item.full_dataset_entry
        if self.item_key is not None and isinstance(row, Mapping):
            row = row.get(self.item_key)
        row = row if isinstance(row, Mapping) else {}
        try:
            sample = GradedSample(format_output(item.output_obj))
        except UnusableOutputError as error:
            return EvalOutputItem(id=item.id, score=0.0, reasoning=str(error))
        grade = await self.grading.grade(row, sample)
        reasoning: Any = {"sub_rewards": grade.sub_rewards, "errors": grade.errors}
        if grade.reward is None:
            return missing_score(item, grade.error or "the grader gave no score", reasoning)
        return EvalOutputItem(id=item.id, score=grade.reward, reasoning=reasoning)


@register_evaluator(config_type=GraderConfig)
async def grader(config: GraderConfig, builder: Builder) -> AsyncIterator[GraderEvaluator]:
    """Yields the evaluator; the models that grade are entries of `llms`."""
    parsed = parse_grader(config.grader, allow_python=config.allow_python)
    judges: dict[str, ChatModel] = {}
    for name in list_models(parsed):
        try:
            judges[name] = await get_judge(config.models.get(name, name), builder)
        except ConfigError as error:
            raise ConfigError([Problem(f"models.{name}", each.message, each.fix) for each in error.problems]) from None

    async def find_model(name: str) -> ChatModel:
        return judges[name]

    async with AsyncExitStack() as stack:
        python: PythonGraders | None = None
        if any(isinstance(each, PythonGrader) for _, each in list_graders(parsed)):
            python = await stack.enter_async_context(open_python_graders())
        yield GraderEvaluator(Grading(parsed, find_model, python), config.item_key)
