"""Models in bfloat16 on devices of one's choice; all log-probs are returned on one of them."""

import logging

import torch
from astra_rl import DPO, ASTSampler, Harness
from gpt2_system import GPT2System
from torch.optim import AdamW

logging.basicConfig(level=logging.INFO)
logger = logging.getLogger("astra.example")


class TwoDevices(GPT2System):
    def __init__(self):
        super().__init__("cuda")
        self.tester = self.tester.to("cuda:1", torch.bfloat16)
        self.target = self.target.to("cuda:0", torch.bfloat16)

    def get_tester_logprobs(self, context, continuation):
        return super().get_tester_logprobs(context, continuation).float().to("cuda:0")


def main():
    system = TwoDevices()
    harness = Harness(
        ASTSampler(system, ["My day was", "They said that"]),
        DPO(system),
        num_episodes_per_experience=1,
        use_wandb=False,
        dataloader_kwargs={"batch_size": 1},
    )
    optimizer = AdamW(system.parameters(), lr=1e-3)
    numbers = []
    for step in range(2):
        batches = harness.experience()
        logger.info("step %d: %d batches", step, len(batches))
        numbers.append((len(batches), 0))
        for number, batch in enumerate(batches):
            loss, logs = harness.step(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            harness.log_current_step({**logs, "step": step})
            numbers[-1] = (len(batches), number + 1)
    return numbers


if __name__ == "__main__":
    result = main()
