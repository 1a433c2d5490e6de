"""Base classes of adversarial training; nothing here imports torch at module level.

system.py      the models and the reward: the one class that a user has to write
sampler.py     conversations as trees
scorer.py      texts to scores
algorithm.py   trees to losses
evaluator.py   trees to metrics
"""

from __future__ import annotations

from reinforge.redteam.core.algorithm import Algorithm
from reinforge.redteam.core.common import ActionT, StateT
from reinforge.redteam.core.evaluator import Evaluator, GraphMetrics, JSONLike
from reinforge.redteam.core.sampler import Graph, Node, Sampler
from reinforge.redteam.core.scorer import Scorer
from reinforge.redteam.core.system import System, ValueFunctionSystem

__all__ = [
    "ActionT",
    "Algorithm",
    "Evaluator",
    "Graph",
    "GraphMetrics",
    "JSONLike",
    "Node",
    "Sampler",
    "Scorer",
    "StateT",
    "System",
    "ValueFunctionSystem",
]
