"""Attacks the bundled front desk from Python, with astra-rl's names; `reinforge redteam train` does the same.

python examples/redteam/front_desk.py [EXPERIENCES]      default 14, a few minutes on two CPU cores
"""

import sys

from reinforge.redteam import ASTEvaluator, ASTProblem, ASTSampler, Trainer, TrainingConfiguration
from reinforge.redteam.algorithms.dpo import DPO
from reinforge.tasks.front_desk.grammar import FrontDeskDataset, FrontDeskDatasetConfig

if __name__ == "__main__":
    rows = FrontDeskDataset(FrontDeskDatasetConfig(num_train=400, num_select=1, num_confirm=100)).rows()
    train, held_out = ([row["question"] for row in rows if row["split"] == name] for name in ("train", "confirm"))

    problem = ASTProblem(combined_weight=0.0, defense_toxicity_weight=1.0, ppl_weight=0.02)
    sampler = ASTSampler(problem, train, tree_width=3, tree_depth=3)
    evaluator = ASTEvaluator(ASTSampler(problem, held_out, tree_width=3, tree_depth=3), seeds=range(100))
    before = evaluator.evaluate(progress=False)["summary"]

    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 14
    config = TrainingConfiguration(lr=3e-4, training_steps=steps, run_dir=".reinforge/front_desk", eval_every=7)
    trainer = Trainer(config, sampler, DPO(problem, min_margin=0.3), evaluator=evaluator)
    trainer.train()

    after = evaluator.evaluate(progress=False)["summary"]
    for name, summary in (("before", before), ("after", after)):
        success, perplexity = summary["attack_success"], summary["perplexity"]["all"]
        interval = f"{success['mean']:.2f} [{success['ci_low']:.2f}, {success['ci_high']:.2f}]"
        print(f"{name}: the target failed in {interval} of {success['count']} held-out conversations", end="")
        print(f", perplexity {perplexity:.2f}")
    problem.close()
