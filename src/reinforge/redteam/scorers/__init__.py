"""Scorers decide what counts as a failure: texts in, scores out.

texts.py        keywords, patterns, schemas, rules, a judge: any evaluator as a scorer; forbidden tools, sums, caches
classifier.py   a text classifier from a Hugging Face folder
detoxify.py     the classifiers of the package detoxify
llamaguard.py   a guard model that answers safe or unsafe
wildguard.py    a guard model with three answers: harmful request, refusal, harmful response
"""

from reinforge.redteam.scorers.classifier import ClassifierScorer as ClassifierScorer
from reinforge.redteam.scorers.detoxify import DetoxifyScorer as DetoxifyScorer
from reinforge.redteam.scorers.llamaguard import LlamaGuardScorer as LlamaGuardScorer
from reinforge.redteam.scorers.texts import CachedScorer as CachedScorer
from reinforge.redteam.scorers.texts import EvaluatorScorer as EvaluatorScorer
from reinforge.redteam.scorers.texts import ForbiddenToolScorer as ForbiddenToolScorer
from reinforge.redteam.scorers.texts import JudgeScorer as JudgeScorer
from reinforge.redteam.scorers.texts import KeywordScorer as KeywordScorer
from reinforge.redteam.scorers.texts import PolicyScorer as PolicyScorer
from reinforge.redteam.scorers.texts import RegexScorer as RegexScorer
from reinforge.redteam.scorers.texts import SchemaScorer as SchemaScorer
from reinforge.redteam.scorers.texts import WeightedScorer as WeightedScorer
from reinforge.redteam.scorers.wildguard import WildguardScorer as WildguardScorer
