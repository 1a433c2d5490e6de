"""PPO with a value head of one's own over the tester's last hidden states."""

import torch
from astra_rl import PPO, ASTSampler, Harness, ValueFunctionSystem
from gpt2_system import GPT2System
from torch import nn


class PPOSystem(GPT2System, ValueFunctionSystem):
    def __init__(self, device="cpu"):
        super().__init__(device)
        width = self.tester.config.n_embd
        self.vf = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)).to(device)

    def value(self, context, continuation):
        before, after = (self.tokenizer(texts).input_ids for texts in (context, continuation))
        width = max(len(a) + len(b) for a, b in zip(before, after))  # noqa: B905
        ids, is_valued = [], []
        for a, b in zip(before, after):  # noqa: B905
            padding = width - len(a) - len(b)
            ids.append(a + b + [self.tokenizer.eos_token_id] * padding)
            is_valued.append([False] * len(a) + [True] * len(b) + [False] * padding)
        output = self.tester(input_ids=torch.tensor(ids).to(self.device), output_hidden_states=True)
        values = self.vf(output.hidden_states[-1])
        return values.masked_fill(~torch.tensor(is_valued).to(self.device).unsqueeze(-1), 0.0)[:, :-1]


def main():
    system = PPOSystem("cuda")
    sampler = ASTSampler(system, ["My day was", "They said that"])
    optimizer = torch.optim.AdamW([*system.parameters(), *system.vf.parameters()], lr=1e-4)
    harness = Harness(
        sampler, PPO(system), num_episodes_per_experience=2, use_wandb=False, dataloader_kwargs={"batch_size": 4}
    )
    logs = []
    for step in range(2):
        for batch in harness.experience():
            loss, step_logs = harness.step(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step_logs["step"] = step
            harness.log_current_step(step_logs)
            logs.append(step_logs)
    return system, logs


if __name__ == "__main__":
    result = main()
