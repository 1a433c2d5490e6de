"""Scorers decide what counts as a failure: texts in, scores out.

texts.py        keywords, patterns, schemas, rules, a judge: any evaluator as a scorer; forbidden tools, sums, caches
classifier.py   a text classifier from a Hugging Face folder
detoxify.py     the classifiers of the package detoxify
llamaguard.py   a guard model that answers safe or unsafe
wildguard.py    a guard model with three answers: harmful request, refusal, harmful response
"""

from reinforge.redteam.scorers.classifier import ClassifierScorer
from reinforge.redteam.scorers.detoxify import DetoxifyScorer
from reinforge.redteam.scorers.llamaguard import LlamaGuardScorer
from reinforge.redteam.scorers.texts import (
    CachedScorer,
    EvaluatorScorer,
    ForbiddenToolScorer,
    JudgeScorer,
    KeywordScorer,
    PolicyScorer,
    RegexScorer,
    SchemaScorer,
    WeightedScorer,
)
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
