"""An algorithm of one's own: REINFORCE with the mean reward of a batch as its baseline, and a penalty on drift."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

import torch
from astra_rl import ASTSampler, Graph, Trainer, TrainingConfiguration
from astra_rl.core import ActionT, StateT
from astra_rl.core.algorithm import Algorithm
from gpt2_system import GPT2System


@dataclass
class MyStep(Generic[StateT, ActionT]):
    context: StateT
    action: ActionT
    reward: float


@dataclass
class MyBatch(Generic[StateT, ActionT]):
    contexts: Sequence[StateT]
    actions: Sequence[ActionT]
    rewards: torch.Tensor


class Reinforce(Algorithm[StateT, ActionT, MyStep[StateT, ActionT], MyBatch[StateT, ActionT]]):
    def flatten(self, graph: Graph[StateT, ActionT]) -> Sequence[MyStep[StateT, ActionT]]:
        steps, front = [], list(graph.children)
        while front:
            node = front.pop(0)
            steps.append(MyStep(node.context, node.probe, node.reward))
            front.extend(node.children)
        return steps

    @staticmethod
    def collate_fn(x):
        return MyBatch([i.context for i in x], [i.action for i in x], torch.tensor([i.reward for i in x]))

    def step(self, batch):
        system = self.system
        logprobs = system._get_tester_logprobs_and_validate(batch.contexts, batch.actions).sum(dim=-1)
        baseline = system._get_baseline_logprobs_and_validate(batch.contexts, batch.actions).sum(dim=-1)
        advantages = (batch.rewards - batch.rewards.mean()).to(logprobs.device)
        loss = (-advantages * logprobs + 1e-3 * (logprobs - baseline) ** 2).mean()
        return loss, {"training/loss": loss.item(), "reward/mean_reward": batch.rewards.mean().item()}


def main():
    system = GPT2System("cuda")
    config = TrainingConfiguration(lr=1e-3, batch_size=4, training_steps=2, num_episodes_per_experience=1)
    trainer = Trainer(config=config, sampler=ASTSampler(system, ["My day was"], 2, 2), algorithm=Reinforce(system))
    before = next(system.parameters()).detach().clone()
    trainer.train()
    return trainer, not torch.equal(before, next(system.parameters()))


if __name__ == "__main__":
    result = main()
