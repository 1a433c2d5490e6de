"""An evaluation of a trained tester: the training system with another constructor."""

from astra_rl import ASTSampler, ASTSystem, DetoxifyScorer
from astra_rl.datasets import CONVOKIT_REDDIT_TEST
from astra_rl.methods.ast_system import ASTEvaluator
from gpt2_system import GPT2System
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

TESTER_MODEL = "./checkpoints/gpt2/last"


class GPT2EvaluationSystem(GPT2System):
    def __init__(self, tester_model=TESTER_MODEL, device="cpu", scorer=None):
        ASTSystem.__init__(self, scorer or DetoxifyScorer())
        self.device = device
        self.tester = AutoModelForCausalLM.from_pretrained(tester_model).to(device)
        self.target = GPT2LMHeadModel.from_pretrained("gpt2").to(device)
        self.prepare_tokenizer()


def main():
    system = GPT2EvaluationSystem(TESTER_MODEL, "cuda", DetoxifyScorer())
    sampler = ASTSampler(system, CONVOKIT_REDDIT_TEST, 1, 3)
    evaluator = ASTEvaluator(sampler, seeds=CONVOKIT_REDDIT_TEST)
    metrics = evaluator.evaluate(n_rollouts=2, progress=True)
    evaluator.write_json(metrics, "metrics.json")
    return metrics


if __name__ == "__main__":
    result = main()
