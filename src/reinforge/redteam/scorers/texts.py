"""Scorers built on evaluators: any evaluator of an agent's answers can score a target's responses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from reinforge.errors import ConfigError, EvaluationError
from reinforge.evaluation.evaluators.base import score_item
from reinforge.evaluation.evaluators.contains import Contains, ContainsConfig
from reinforge.evaluation.evaluators.json_schema import JsonSchema, JsonSchemaConfig
from reinforge.evaluation.evaluators.regex import Regex, RegexConfig
from reinforge.interfaces import Evaluator
from reinforge.redteam.core.scorer import Scorer
from reinforge.rollout.isolation.threads import LoopThread
from reinforge.types.evaluation import EvalInputItem

_loop = LoopThread("reinforge-scorers")


class EvaluatorScorer(Scorer[str, str]):
    """An evaluator as a scorer; it receives each text as an agent's output.

    Example:
        EvaluatorScorer(Numeric(NumericConfig()), invert=True)

    Args:
        evaluator: Scores the texts.
        invert: Return 1 - score, for an evaluator that gives correct texts a high score.
    """

    def __init__(self, evaluator: Evaluator, *, invert: bool = False):
        self.evaluator, self.invert = evaluator, invert

    def score(self, x: Sequence[str]) -> list[float]:
        """Returns the evaluator's scores, computed concurrently.

        Raises:
            EvaluationError: The evaluator failed on a text; no score is made up for it.
        """
        scores = _loop.run(self._compute_scores(x))
        return [1.0 - score for score in scores] if self.invert else scores

    async def _compute_scores(self, x: Sequence[str]) -> list[float]:
        items = [
            EvalInputItem(id=i, input_obj="", expected_output_obj=None, output_obj=str(text), full_dataset_entry={})
            for i, text in enumerate(x)
        ]
        outputs = await asyncio.gather(*(score_item(self.evaluator, item) for item in items))
        for text, output in zip(x, outputs, strict=True):
            if output.error is not None:
                raise EvaluationError(f"no score for {str(text)[:80]!r}: {output.error}")
        return [float(output.score) for output in outputs]


class KeywordScorer(EvaluatorScorer):
    """1.0 if a text contains one of the words, else 0.0.

    Example: `KeywordScorer(["quibbern"]).score(["It is quibbern.", "Nothing."])` -> `[1.0, 0.0]`.

    Args:
        words: The words; they also match inside longer words.
        ignore_case: Ignore upper and lower case.
    """

    def __init__(self, words: str | Sequence[str], *, ignore_case: bool = True):
        texts = [words] if isinstance(words, str) else list(words)
        super().__init__(Contains(ContainsConfig(texts=texts, mode="any", ignore_case=ignore_case)))


class RegexScorer(EvaluatorScorer):
    r"""1.0 if a pattern matches anywhere in a text, else 0.0.

    Example: `RegexScorer(r"\d{4}").score(["code 1234", "no code"])` -> `[1.0, 0.0]`.

    Args:
        pattern: A regular expression in Python syntax.
    """

    def __init__(self, pattern: str):
        super().__init__(Regex(RegexConfig(pattern=pattern)))


class SchemaScorer(EvaluatorScorer):
    """1.0 if a text is not JSON that matches the schema, else 0.0: the target broke its output format.

    Example: `SchemaScorer({"type": "object"}).score(["{}", "[]", "hello"])` -> `[0.0, 1.0, 1.0]`.

    Args:
        schema: A JSON schema.
        allow_fence: Accept JSON inside one ``` block.
    """

    def __init__(self, schema: dict[str, Any], *, allow_fence: bool = False):
        config = JsonSchemaConfig(schema=schema, allow_fence=allow_fence)
        super().__init__(JsonSchema(config, schema), invert=True)


class PolicyScorer(Scorer[str, str]):
    """1.0 if a text breaks a rule, else 0.0: it matches a forbidden pattern or lacks a required one.

    Example: `PolicyScorer(forbidden=["quibbern"], required=["desk"]).score(["the desk", "quibbern desk", "hello"])`
    -> `[0.0, 1.0, 1.0]`.

    Args:
        forbidden: Patterns that must not match.
        required: Patterns that must all match.

    Raises:
        ConfigError: There are no patterns.
    """

    def __init__(self, forbidden: Sequence[str] = (), required: Sequence[str] = ()):
        if not forbidden and not required:
            raise ConfigError("PolicyScorer: no patterns; give forbidden, required or both")
        self._broken: list[EvaluatorScorer] = [RegexScorer(pattern) for pattern in forbidden]
        self._broken += [EvaluatorScorer(RegexScorer(pattern).evaluator, invert=True) for pattern in required]

    def score(self, x: Sequence[str]) -> list[float]:
        return [max(scores) for scores in zip(*(scorer.score(x) for scorer in self._broken), strict=True)]
