"""Scorers decide what counts as a failure: texts in, scores out.

texts.py        keywords, patterns, schemas, rules: any evaluator as a scorer
tools.py        calls to forbidden tools
judge.py        a judge model with a rubric
classifier.py   a text classifier from a Hugging Face folder
detoxify.py     the classifiers of the package detoxify
llamaguard.py   a guard model that answers safe or unsafe
wildguard.py    a guard model with three answers: harmful request, refusal, harmful response
combine.py      weighted sums, caches
"""

from __future__ import annotations

from reinforge.redteam.scorers.classifier import ClassifierScorer
from reinforge.redteam.scorers.combine import CachedScorer, WeightedScorer
from reinforge.redteam.scorers.detoxify import DetoxifyScorer
from reinforge.redteam.scorers.judge import JudgeScorer
from reinforge.redteam.scorers.llamaguard import LlamaGuardScorer
from reinforge.redteam.scorers.texts import EvaluatorScorer, KeywordScorer, PolicyScorer, RegexScorer, SchemaScorer
from reinforge.redteam.scorers.tools import ForbiddenToolScorer
from reinforge.redteam.scorers.wildguard import WildguardScorer

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
    "WildguardScorer",
]
