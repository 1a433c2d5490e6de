"""Methods of finding failures: adaptive stress testing."""

from reinforge.redteam.methods.ast import ASTEvaluator, ASTNode, ASTProblem, ASTSampler, ASTSystem

__all__ = ["ASTEvaluator", "ASTNode", "ASTProblem", "ASTSampler", "ASTSystem"]
