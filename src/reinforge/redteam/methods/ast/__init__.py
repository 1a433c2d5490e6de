"""Adaptive stress testing: train a tester whose natural probes make a target fail (arXiv:2407.09447).

texts.py       strings that carry their tokens
system.py      systems on text, and the reward
problem.py     the system on the engine
targets.py     targets: a local model, a model behind a URL, a function, a workflow
sampler.py     trees, sampled level by level
evaluator.py   metrics over every branch
weight_changes.py  notices weights that a training loop of your own changed
"""

from __future__ import annotations

from reinforge.redteam.methods.ast.evaluator import ASTEvaluator
from reinforge.redteam.methods.ast.problem import ASTProblem
from reinforge.redteam.methods.ast.sampler import ASTNode, ASTSampler
from reinforge.redteam.methods.ast.system import ASTSystem
from reinforge.redteam.methods.ast.targets import WorkflowTarget, openai_target
from reinforge.redteam.methods.ast.texts import Conversation, GeneratedText

__all__ = [
    "ASTEvaluator",
    "ASTNode",
    "ASTProblem",
    "ASTSampler",
    "ASTSystem",
    "Conversation",
    "GeneratedText",
    "WorkflowTarget",
    "openai_target",
]
