"""An evaluation of a trained tester by its checkpoint."""

import torch
from astra_rl import ASTSampler, DetoxifyScorer
from astra_rl.core.evaluator import Evaluator
from astra_rl.datasets import CONVOKIT_REDDIT_TEST
from astra_rl.ext.transformers.hf_ast_system import HFEvaluationSystem
from astra_rl.methods.ast import ASTEvaluator


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    system = HFEvaluationSystem(
        tester_checkpoint="./checkpoints/huggingface/best",
        tester_base_model_id=None,
        target_model_id="meta-llama/Llama-3.2-1B",
        device=device,
        scorer=DetoxifyScorer(),
    )
    sampler = ASTSampler(system, CONVOKIT_REDDIT_TEST, 1, 3)
    metrics = ASTEvaluator(sampler, seeds=CONVOKIT_REDDIT_TEST).evaluate(n_rollouts=2, progress=True)
    Evaluator.write_json(metrics, "metrics.json")
    return system, metrics


if __name__ == "__main__":
    result = main()
