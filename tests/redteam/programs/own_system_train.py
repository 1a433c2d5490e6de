"""The Hugging Face trainer over a system of one's own, with dev prompts and checkpoints."""

from astra_rl import DPO, ASTSampler
from astra_rl.datasets import CONVOKIT_REDDIT_DEV, CONVOKIT_REDDIT_TRAIN
from astra_rl.ext.transformers.hf_ast_system import HFASTConfiguration, HFASTTrainer
from gpt2_system import GPT2System


def main():
    system = GPT2System("cuda")
    sampler = ASTSampler(system, CONVOKIT_REDDIT_TRAIN)
    config = HFASTConfiguration()
    config.training_steps = 2
    config.num_episodes_per_experience = 1
    trainer = HFASTTrainer(
        config,
        sampler,
        DPO(system),
        dev_prompts=CONVOKIT_REDDIT_DEV,
        eval_every=1,
        ckpt_dir="./checkpoints/gpt2",
        use_wandb=False,
        show_progress=True,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    result = main()
