"""Hugging Face variants of the system, the trainer and its settings; `hf_ast_system.py` has them, as in astra-rl."""

from reinforge.redteam.ext.transformers.hf_ast_system import (
    HFASTConfiguration,
    HFASTSystem,
    HFASTTrainer,
    HFEvaluationSystem,
)

__all__ = ["HFASTConfiguration", "HFASTSystem", "HFASTTrainer", "HFEvaluationSystem"]
