"""A trainer of one's own: settings with attributes of their own, a loop with evaluation and saving."""

import os

import torch
from astra_rl import DPO, ASTSampler, Trainer, TrainingConfiguration
from astra_rl.utils.logging import logger
from gpt2_system import GPT2System


class MyConfig(TrainingConfiguration):
    def __init__(self):
        super().__init__(
            lr=1e-3,
            batch_size=4,
            optimizer="adamw",
            gradient_accumulation_steps=1,
            training_steps=2,
            num_episodes_per_experience=1,
        )
        self.eval_every = 1
        self.ckpt_dir = "checkpoints"


class MyTrainer(Trainer):
    def __init__(self, config, sampler, algorithm, dev_prompts=None):
        super().__init__(config, sampler, algorithm)
        self.sampler, self.dev_prompts, self.scores = sampler, dev_prompts or [], []
        os.makedirs(self.config.ckpt_dir, exist_ok=True)

    def _save_hf(self, step):
        folder = os.path.join(self.config.ckpt_dir, f"step-{step}")
        self.sampler.system.tester.save_pretrained(folder)
        self.sampler.system.tokenizer.save_pretrained(folder)

    @torch.no_grad()
    def _eval_dev(self, step):
        rewards = [self.sampler.final_reward(self.sampler.eval_rollout(prompt)) for prompt in self.dev_prompts]
        self.scores.append(sum(rewards) / len(rewards))
        logger.info("step %d: %.3f", step, self.scores[-1])

    def train(self):
        for step in range(1, self.config.training_steps + 1):
            for batch in self.harness.experience():
                loss, logs = self.harness.step(batch)
                (loss / self.config.gradient_accumulation_steps).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self._global_step_counter += 1
                self.harness.log_current_step({**logs, "step": step})
            if step % self.config.eval_every == 0:
                self._eval_dev(step)
                self._save_hf(step)


def main():
    system = GPT2System("cuda")
    trainer = MyTrainer(MyConfig(), ASTSampler(system, ["My day was"], 2, 2), DPO(system), dev_prompts=["On Monday"])
    trainer.train()
    return trainer


if __name__ == "__main__":
    result = main()
