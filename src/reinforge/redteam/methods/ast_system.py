"""The names of `reinforge.redteam.methods.ast` at astra-rl's address."""

from __future__ import annotations

from reinforge.redteam.methods.ast import ASTEvaluator, ASTNode, ASTProblem, ASTSampler, ASTSystem

__all__ = ["ASTEvaluator", "ASTNode", "ASTProblem", "ASTSampler", "ASTSystem"]
