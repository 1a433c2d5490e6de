"""The quick start: models by id, the trainer with its settings."""

from astra_rl import DPO, ASTSampler, DetoxifyScorer
from astra_rl.datasets import CONVOKIT_REDDIT_DEV, CONVOKIT_REDDIT_TRAIN
from astra_rl.ext.transformers.hf_ast_system import HFASTConfiguration, HFASTSystem, HFASTTrainer


def main():
    system = HFASTSystem(
        "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B", DetoxifyScorer(), "cuda"
    )
    prompts = [prompt[:500] for prompt in CONVOKIT_REDDIT_TRAIN]
    sampler = ASTSampler(system, prompts, tree_depth=2)
    config = HFASTConfiguration()
    config.training_steps = 1
    trainer = HFASTTrainer(
        config,
        sampler,
        DPO(system),
        dev_prompts=CONVOKIT_REDDIT_DEV,
        eval_every=1,
        ckpt_dir="./checkpoints/huggingface",
    )
    trainer.train()
    assert system.tester_tokenizer.get_vocab() == system.target_tokenizer.get_vocab()
    return system


if __name__ == "__main__":
    result = main()
