"""Methods of finding failures: adaptive stress testing."""

from __future__ import annotations

from reinforge.redteam.methods.ast import ASTEvaluator, ASTNode, ASTProblem, ASTSampler, ASTSystem

__all__ = ["ASTEvaluator", "ASTNode", "ASTProblem", "ASTSampler", "ASTSystem"]
