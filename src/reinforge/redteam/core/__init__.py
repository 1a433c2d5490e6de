"""Base classes of adversarial training, one a file; nothing here imports torch at module level.

Of these, a user has to write only the system.
"""

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
