"""What an adversarial training is made of; no torch is imported here.

system.py      models and rewards: the one thing a user has to write
sampler.py     conversations as trees
scorer.py      texts to numbers
algorithm.py   trees to losses
evaluator.py   trees to figures
"""

from __future__ import annotations

from reinforge.redteam.core.algorithm import Algorithm
from reinforge.redteam.core.evaluator import Evaluator, GraphMetrics
from reinforge.redteam.core.sampler import Graph, Node, Sampler
from reinforge.redteam.core.scorer import Scorer
from reinforge.redteam.core.system import System, ValueFunctionSystem

__all__ = [
    "Algorithm",
    "Evaluator",
    "Graph",
    "GraphMetrics",
    "Node",
    "Sampler",
    "Scorer",
    "System",
    "ValueFunctionSystem",
]
