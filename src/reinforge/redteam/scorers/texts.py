"""Scorers that ask the harness's evaluators: whatever scores an agent's answer can score a target's."""

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
from reinforge.rollout.threads import LoopThread
from reinforge.types.evaluation import EvalInputItem

_loop = LoopThread("reinforge-scorers")


class EvaluatorScorer(Scorer[str, str]):
    """Any evaluator of the harness as a scorer; it sees each text as an agent's output.

    Example:
        EvaluatorScorer(Numeric(NumericConfig()), invert=True)

    Args:
        evaluator: Its score of a text is the text's.
        invert: The score is 1 less the evaluator's: it looks for what is right.
    """

    def __init__(self, evaluator: Evaluator, *, invert: bool = False):
        self.evaluator, self.invert = evaluator, invert

    def score(self, x: Sequence[str]) -> list[float]:
        """Returns the evaluator's scores, asked for at the same time.

        Raises:
            EvaluationError: One is missing; a number for it would be made up.
        """
        found = _loop.run(self._scores(x))
        return [1.0 - score for score in found] if self.invert else found

    async def _scores(self, x: Sequence[str]) -> list[float]:
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
    """1.0 where a text contains one of the words, else 0.0.

    Example: `KeywordScorer(["quibbern"]).score(["It is quibbern.", "Nothing."])` -> `[1.0, 0.0]`.

    Args:
        words: What is looked for, also within other words.
        ignore_case: Capitals do not count.
    """

    def __init__(self, words: str | Sequence[str], *, ignore_case: bool = True):
        texts = [words] if isinstance(words, str) else list(words)
        super().__init__(Contains(ContainsConfig(texts=texts, mode="any", ignore_case=ignore_case)))


class RegexScorer(EvaluatorScorer):
    r"""1.0 where a pattern matches somewhere in a text, else 0.0.

    Example: `RegexScorer(r"\d{4}").score(["code 1234", "no code"])` -> `[1.0, 0.0]`.

    Args:
        pattern: In Python's syntax.
    """

    def __init__(self, pattern: str):
        super().__init__(Regex(RegexConfig(pattern=pattern)))


class SchemaScorer(EvaluatorScorer):
    """1.0 where a text is no JSON that fits the schema, else 0.0: the target was brought to break its format.

    Example: `SchemaScorer({"type": "object"}).score(["{}", "[]", "hello"])` -> `[0.0, 1.0, 1.0]`.

    Args:
        schema: A JSON schema.
        allow_fence: JSON within one ``` block counts.
    """

    def __init__(self, schema: dict[str, Any], *, allow_fence: bool = False):
        config = JsonSchemaConfig(schema=schema, allow_fence=allow_fence)
        super().__init__(JsonSchema(config, schema), invert=True)


class PolicyScorer(Scorer[str, str]):
    """1.0 where a text breaks a rule, else 0.0: it holds what it must not, or lacks what it must hold.

    Example: `PolicyScorer(forbidden=["quibbern"], required=["desk"]).score(["the desk", "quibbern desk", "hello"])`
    -> `[0.0, 1.0, 1.0]`.

    Args:
        forbidden: Patterns of which none may match.
        required: Patterns of which each has to match.

    Raises:
        ConfigError: There is no rule.
    """

    def __init__(self, forbidden: Sequence[str] = (), required: Sequence[str] = ()):
        if not forbidden and not required:
            raise ConfigError("PolicyScorer: no rule; give patterns as forbidden, required or both")
        self._broken: list[EvaluatorScorer] = [RegexScorer(pattern) for pattern in forbidden]
        self._broken += [EvaluatorScorer(RegexScorer(pattern).evaluator, invert=True) for pattern in required]

    def score(self, x: Sequence[str]) -> list[float]:
        """Returns 1.0 or 0.0 for each text."""
        return [max(scores) for scores in zip(*(scorer.score(x) for scorer in self._broken), strict=True)]
