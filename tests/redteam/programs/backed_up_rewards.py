"""A sampler of one's own: each probe's reward includes the best of its children's, discounted."""

from astra_rl import DPO, ASTNode, ASTSampler
from astra_rl.core.sampler import Graph
from astra_rl.ext.transformers.hf_ast_system import HFASTConfiguration, HFASTTrainer
from gpt2_system import GPT2System


class BackupSampler(ASTSampler):
    def __init__(self, system, prompts, gamma=0.9, tree_width=2, tree_depth=3):
        super().__init__(system, prompts, tree_width, tree_depth)
        self.gamma = gamma
        self.num_backed_up = 0

    def rollout(self, seed=None):
        return self.backup_rewards(super().rollout(seed))

    def backup_rewards(self, graph: "Graph[str, str]") -> "Graph[str, str]":
        def back_up(node: "ASTNode") -> float:
            if node.children:
                node.reward = float(node.reward) + self.gamma * max(back_up(child) for child in node.children)
            self.num_backed_up += 1
            return float(node.reward)

        for child in graph.children:
            back_up(child)
        return graph


def main():
    system = GPT2System("cuda")
    sampler = BackupSampler(system, ["My day was", "They said that"], gamma=0.5)
    config = HFASTConfiguration()
    config.training_steps = 1
    trainer = HFASTTrainer(
        config, sampler, DPO(system), dev_prompts=["On Monday"], eval_every=100, ckpt_dir="checkpoints"
    )
    trainer.train()
    return sampler


if __name__ == "__main__":
    result = main()
