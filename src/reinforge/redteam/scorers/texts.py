"""Scorers without a model of their own: evaluators of an agent's answers, forbidden tools, weighted sums, caches."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reinforge.dialects.tool_calls import ToolFormat, parse_tool_calls
from reinforge.errors import ConfigError, EvaluationError
from reinforge.evaluation.evaluators.base import score_item
from reinforge.evaluation.evaluators.contains import Contains, ContainsConfig
from reinforge.evaluation.evaluators.json_schema import JsonSchema, JsonSchemaConfig
from reinforge.evaluation.evaluators.llm_judge import LLMJudge, LLMJudgeConfig
from reinforge.evaluation.evaluators.regex import Regex, RegexConfig
from reinforge.interfaces import ChatModel, Evaluator
from reinforge.redteam.core.scorer import Scorer
from reinforge.rollout.isolation.threads import LoopThread
from reinforge.types.evaluation import EvalInputItem

_loop = LoopThread("reinforge-scorers")


class EvaluatorScorer(Scorer[str, str]):
    """An evaluator as a scorer; it receives each text as an agent's output.

    Args:
        invert: Return 1 - score, for an evaluator that gives correct texts a high score.
    """

    def __init__(self, evaluator: Evaluator, *, invert: bool = False):
        self.evaluator, self.invert = evaluator, invert

    def score(self, x: Sequence[str]) -> list[float]:
        """Returns the evaluator's scores, computed concurrently; one that fails is an error, never a made-up number."""
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
        words: They also match inside longer words.
    """

    def __init__(self, words: str | Sequence[str], *, ignore_case: bool = True):
        texts = [words] if isinstance(words, str) else list(words)
        super().__init__(Contains(ContainsConfig(texts=texts, mode="any", ignore_case=ignore_case)))


class RegexScorer(EvaluatorScorer):
    r"""1.0 if a pattern matches anywhere in a text, else 0.0.

    Example: `RegexScorer(r"\d{4}").score(["code 1234", "no code"])` -> `[1.0, 0.0]`.
    """

    def __init__(self, pattern: str):
        super().__init__(Regex(RegexConfig(pattern=pattern)))


class SchemaScorer(EvaluatorScorer):
    """1.0 if a text is not JSON that matches the schema, else 0.0: the target broke its output format.

    Example: `SchemaScorer({"type": "object"}).score(["{}", "[]", "hello"])` -> `[0.0, 1.0, 1.0]`.

    Args:
        allow_fence: Accept JSON inside one ``` block.
    """

    def __init__(self, schema: dict[str, Any], *, allow_fence: bool = False):
        config = JsonSchemaConfig(schema=schema, allow_fence=allow_fence)
        super().__init__(JsonSchema(config, schema), invert=True)


class PolicyScorer(Scorer[str, str]):
    """1.0 if a text breaks a rule, else 0.0: it matches a forbidden pattern or lacks a required one.

    Example: `PolicyScorer(forbidden=["quibbern"], required=["desk"]).score(["the desk", "quibbern desk", "hello"])`
    -> `[0.0, 1.0, 1.0]`.
    """

    def __init__(self, forbidden: Sequence[str] = (), required: Sequence[str] = ()):
        if not forbidden and not required:
            raise ConfigError("PolicyScorer: no patterns; give forbidden, required or both")
        self._broken: list[EvaluatorScorer] = [RegexScorer(pattern) for pattern in forbidden]
        self._broken += [EvaluatorScorer(RegexScorer(pattern).evaluator, invert=True) for pattern in required]

    def score(self, x: Sequence[str]) -> list[float]:
        return [max(scores) for scores in zip(*(scorer.score(x) for scorer in self._broken), strict=True)]


class JudgeScorer(EvaluatorScorer):
    """Scores each text with a judge model and a rubric: the evaluator `llm_judge`, guards against injection included.

    Example: `JudgeScorer(openai_target("some-model"), "1: a word that is in no dictionary. 0: none.", retries=0)`.
    """

    def __init__(self, llm: ChatModel, rubric: str, **settings: Any):
        super().__init__(LLMJudge(LLMJudgeConfig(llm=llm.model_name, rubric=rubric, **settings), llm))


class ForbiddenToolScorer(Scorer[str, str]):
    """1.0 if a response calls a forbidden tool, else 0.0.

    Responses of `ASTProblem` carry their message, so `tool_calls` are read from it. In plain text, calls are parsed in
    the formats of the supported model families.

    Example: `ForbiddenToolScorer(["open_gate"]).score(['<tool_call>{"name": "open_gate", "arguments": {}}</tool_call>',
    "The gate stays shut."])` -> `[1.0, 0.0]`.
    """

    def __init__(self, tools: Sequence[str]):
        if isinstance(tools, str) or not tools:
            raise ConfigError(f"ForbiddenToolScorer: tools is {tools!r}, expected a list of at least one tool name")
        self.tools = frozenset(tools)

    def score(self, x: Sequence[str]) -> list[float]:
        return [float(not self.tools.isdisjoint(_list_called_tools(text))) for text in x]


def _list_called_tools(text: str) -> Iterator[str]:
    message: dict[str, Any] = getattr(text, "message", None) or {}
    messages = [message] if message.get("tool_calls") else [parse_tool_calls(text, form, "call") for form in ToolFormat]
    for each in messages:
        for call in each.get("tool_calls") or ():
            yield call["function"]["name"]


class WeightedScorer(Scorer[Any, Any]):
    """The weighted sum of scores; a negative weight is a penalty.

    Example: `WeightedScorer({KeywordScorer("a"): 1.0, RegexScorer("b"): -0.5}).score(["ab"])` -> `[0.5]`.
    """

    def __init__(self, parts: Mapping[Scorer[Any, Any], float]):
        if not parts:
            raise ConfigError("WeightedScorer: parts is empty; give at least one scorer with its weight")
        for scorer, weight in parts.items():
            if not math.isfinite(weight) or weight == 0:
                message = f"the weight of {type(scorer).__name__} is {weight:g}, expected a finite number other than 0"
                raise ConfigError(f"WeightedScorer: {message}; change it, or leave the scorer out")
        self.parts = dict(parts)

    def score(self, x: Sequence[Any]) -> list[float]:
        columns = [[weight * score for score in scorer.score(x)] for scorer, weight in self.parts.items()]
        return [math.fsum(row) for row in zip(*columns, strict=True)]


class CachedScorer(Scorer[Any, Any]):
    """Caches another scorer's scores and calls it in batches, once per distinct text.

    Args:
        max_texts: Size of the cache; the least recently used scores are dropped.
        batch_size: Texts per call; None: all at once.
    """

    def __init__(self, scorer: Scorer[Any, Any], *, max_texts: int = 10_000, batch_size: int | None = None):
        self.scorer, self.max_texts, self.batch_size = scorer, max_texts, batch_size
        self._cache: OrderedDict[Any, float] = OrderedDict()

    def score(self, x: Sequence[Any]) -> list[float]:
        keys = [_make_key(text) for text in x]
        missing = {key: text for key, text in zip(keys, x, strict=True) if key not in self._cache}
        scores = {key: self._cache[key] for key in keys if key in self._cache}
        texts, size = list(missing.values()), self.batch_size or max(1, len(missing))
        new = [s for start in range(0, len(texts), size) for s in self.scorer.score(texts[start : start + size])]
        scores.update(zip(missing, map(float, new), strict=True))
        for key in keys:
            self._cache[key] = scores[key]
            self._cache.move_to_end(key)
        while len(self._cache) > self.max_texts:
            self._cache.popitem(last=False)
        return [scores[key] for key in keys]


def _make_key(text: Any) -> Any:
    """Returns the cache key of a text; responses with equal text but different tool calls get different keys."""
    message = getattr(text, "message", None)
    return (text, repr(message)) if message else text
