"""The Hugging Face system without the trainer: a loop with an optimizer of one's own."""

import torch
from astra_rl import DPO, ASTSampler, DetoxifyScorer, Harness
from astra_rl.ext.transformers import HFASTSystem


def main():
    system = HFASTSystem(
        "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B", DetoxifyScorer(), "cuda"
    )
    harness = Harness(
        ASTSampler(system, ["My day was", "They said that"], tree_width=3, tree_depth=2),
        DPO(system),
        num_episodes_per_experience=2,
        dataloader_kwargs={"batch_size": 8},
    )
    optimizer = torch.optim.AdamW(system.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        for batch in harness.experience():
            loss, logs = harness.step(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(logs["training/loss"])
    return system, harness, losses


if __name__ == "__main__":
    result = main()
