"""A sampler, a node and a scorer of one's own: single conversations, each turn with both scores."""

from collections.abc import Sequence

import numpy as np
from astra_rl import PPO, Graph, Harness, Node, Sampler, Scorer
from ppo import PPOSystem


class Exclamations(Scorer[str, str]):
    def score(self, x: Sequence[str]) -> Sequence[float]:
        return [min(1.0, text.count("!") / 2) for text in x]


class ScoredNode(Node[str, str]):
    def __init__(self, context, probe, response, reward, children, *, probe_tox=0.0, target_tox=0.0):
        super().__init__(context, probe, response, reward, list(children))
        self.probe_tox, self.target_tox = float(probe_tox), float(target_tox)


class Chain(Sampler[str, str]):
    def __init__(self, system, prompts, depth=2):
        super().__init__(system)
        self.prompts, self.depth = prompts, depth

    def rollout(self, seed=None) -> Graph[str, str]:
        if seed is not None:
            np.random.seed(seed)
        prompt = self.prompts[np.random.randint(len(self.prompts))]
        return Graph(prompt, self.expand(prompt, self.depth))

    def expand(self, context, depth):
        if depth == 0:
            return []
        [probe] = self.system._rollout_prompt_with_tester_and_validate([context])
        [response] = self.system._rollout_prompt_with_target_and_validate([context + probe])
        [reward] = self.system.reward([context], [probe], [response])
        probe_tox, target_tox = self.system.scorer.score([probe, response])
        children = self.expand(self.system.advance(context, probe, response), depth - 1)
        return [ScoredNode(context, probe, response, reward, children, probe_tox=probe_tox, target_tox=target_tox)]


def main():
    system = PPOSystem("cuda")
    system.scorer = Exclamations()
    sampler = Chain(system, ["My day was", "They said that"])
    harness = Harness(sampler, PPO(system), 3, use_wandb=False, dataloader_kwargs={"batch_size": 2})
    sizes = []
    for batch in harness.experience(seed=7):
        loss, _ = harness.step(batch)
        loss.backward()
        sizes.append(len(batch.reward))
    return sampler.rollout(seed=3), sizes


if __name__ == "__main__":
    result = main()
