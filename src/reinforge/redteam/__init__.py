"""Stress testing: train an attacker against a target to find the target's likely, natural failures.

    problem = ASTProblem()
    sampler = ASTSampler(problem, ["It is a rainy Monday at the desk in Wick, with two visitors."])
    Trainer(TrainingConfiguration(training_steps=20), sampler, DPO(problem)).train()

attack.py     the workflow of `reinforge redteam` and its evaluators; command.py, report.py
core/         base classes to subclass: System, Sampler, Scorer, Algorithm, Evaluator
methods/      adaptive stress testing of text models (ASTPrompter)
algorithms/   DPO, IPO, PPO and GRPO on trees of conversations
scorers/      what counts as a failure
training/     the training loop
ext/          the same classes for Hugging Face model ids and folders
datasets.py   the prompts that astra-rl brings along, read from its files

Names are imported on first use; torch is imported only by those that need it.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "core": "Algorithm Evaluator Graph GraphMetrics JSONLike Node Sampler Scorer System ValueFunctionSystem",
    "methods.ast": "ASTEvaluator ASTNode ASTProblem ASTSampler ASTSystem Conversation GeneratedText WorkflowTarget "
    "openai_target",
    "algorithms.dpo": "DPO IPO DPOBatch DPOStep",
    "algorithms.ppo": "PPO PPOBatch PPOStep",
    "algorithms.grpo": "GRPO GRPOBatch GRPOStep",
    "training.harness": "Harness",
    "training.trainer": "Trainer TrainingConfiguration",
    "scorers": "CachedScorer ClassifierScorer DetoxifyScorer EvaluatorScorer ForbiddenToolScorer JudgeScorer "
    "KeywordScorer LlamaGuardScorer PolicyScorer RegexScorer SchemaScorer WeightedScorer WildguardScorer",
    "utils.logging": "logger",
    "ext.transformers.hf_ast_system": "HFASTConfiguration HFASTSystem HFASTTrainer HFEvaluationSystem",
}
_SUBMODULES = ("datasets", "utils")
_MODULES = {name: f"{__name__}.{module}" for module, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
