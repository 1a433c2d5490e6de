"""What counts as a failure: texts in, numbers out.

texts.py        words, patterns, schemas, rules: the harness's own evaluators
tools.py        calls of tools that are forbidden
judge.py        another model reads the text
classifier.py   a text classifier from a Hugging Face folder; Detoxify
llamaguard.py   a guard model that answers safe or unsafe
combine.py      sums and caches of the others
"""

from __future__ import annotations

from reinforge.redteam.scorers.classifier import ClassifierScorer, DetoxifyScorer
from reinforge.redteam.scorers.combine import CachedScorer, WeightedScorer
from reinforge.redteam.scorers.judge import JudgeScorer
from reinforge.redteam.scorers.llamaguard import LlamaGuardScorer
from reinforge.redteam.scorers.texts import EvaluatorScorer, KeywordScorer, PolicyScorer, RegexScorer, SchemaScorer
from reinforge.redteam.scorers.tools import ForbiddenToolScorer

__all__ = [
    "CachedScorer",
    "ClassifierScorer",
    "DetoxifyScorer",
    "EvaluatorScorer",
    "ForbiddenToolScorer",
    "JudgeScorer",
    "KeywordScorer",
    "LlamaGuardScorer",
    "PolicyScorer",
    "RegexScorer",
    "SchemaScorer",
    "WeightedScorer",
]
