"""A training loop over the harness, with a system of one's own."""

from astra_rl import DPO, ASTSampler, Harness
from gpt2_system import GPT2System
from torch.optim import AdamW


def main():
    system = GPT2System("cuda")
    sampler = ASTSampler(system, ["My day was", "On Tuesday they said that"])
    solver = DPO(system)
    optimizer = AdamW(system.parameters(), lr=1e-3)
    harness = Harness(
        sampler, solver, num_episodes_per_experience=2, use_wandb=False, dataloader_kwargs={"batch_size": 4}
    )
    margins = []
    for step in range(2):
        for batch in harness.experience():
            loss, logs = harness.step(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            logs["step"] = step
            margins.append(logs["reward/reward_margin"])
            harness.log_current_step(logs)
    return margins


if __name__ == "__main__":
    result = main()
