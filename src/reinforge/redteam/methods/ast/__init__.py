"""Adaptive stress testing: a tester is trained to say likely things that make a target fail (arXiv:2407.09447).

texts.py       text that keeps its tokens
system.py      text in, text out; the reward
problem.py     the system that rides on the engine
targets.py     what can be attacked: a model here, one behind a URL, a function, a workflow
sampler.py     trees, level by level
evaluator.py   every branch looked at
"""

from __future__ import annotations

from reinforge.redteam.methods.ast.evaluator import ASTEvaluator
from reinforge.redteam.methods.ast.problem import ASTProblem
from reinforge.redteam.methods.ast.sampler import ASTNode, ASTSampler
from reinforge.redteam.methods.ast.system import ASTSystem
from reinforge.redteam.methods.ast.targets import WorkflowTarget, openai_target
from reinforge.redteam.methods.ast.texts import Dialogue, Said

__all__ = [
    "ASTEvaluator",
    "ASTNode",
    "ASTProblem",
    "ASTSampler",
    "ASTSystem",
    "Dialogue",
    "Said",
    "WorkflowTarget",
    "openai_target",
]
