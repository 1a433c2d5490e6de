"""Base classes of adversarial training, one a file; nothing here imports torch at module level.

Of these, a user has to write only the system.
"""

from reinforge.redteam.core.algorithm import Algorithm as Algorithm
from reinforge.redteam.core.common import ActionT as ActionT
from reinforge.redteam.core.common import StateT as StateT
from reinforge.redteam.core.evaluator import Evaluator as Evaluator
from reinforge.redteam.core.evaluator import GraphMetrics as GraphMetrics
from reinforge.redteam.core.evaluator import JSONLike as JSONLike
from reinforge.redteam.core.sampler import Graph as Graph
from reinforge.redteam.core.sampler import Node as Node
from reinforge.redteam.core.sampler import Sampler as Sampler
from reinforge.redteam.core.scorer import Scorer as Scorer
from reinforge.redteam.core.system import System as System
from reinforge.redteam.core.system import ValueFunctionSystem as ValueFunctionSystem
