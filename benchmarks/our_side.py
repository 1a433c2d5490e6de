"""Our side of a GRPO comparison: `reinforge finetune` as a user runs it, one epoch a step.

Everything that a run does in an epoch is in the time: episodes through the agent's handle, capture, the journal, the
reward, selection, the job, publishing and the canary. Only checkpoints are left out, as saving is on the other side.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.sides import Turns
from benchmarks.words import TOKENIZER, Shape, reward_of
from reinforge.config.loader import build_config
from reinforge.runs.progress import SilentProgress
from reinforge.trainer.run import RunOptions, run_config

STEPS = 10_000
"""Epochs that the run is told it has; the process ends when no more steps are asked for."""


class Paced(SilentProgress):
    """Lets each epoch begin when its turn comes, and knows what its stages took."""

    def __init__(self, turns: Turns):
        self.turns = turns
        self._epoch = -1
        self._stage: str | None = None
        self._since_s = 0.0
        self._spent: dict[str, float] = {}

    def stage(self, epoch: int | None, stage: str, total: int | None) -> None:
        """Ends the stage before; where an epoch begins, ends the one before and waits."""
        if self._stage is not None:
            seconds = time.perf_counter() - self._since_s
            self._spent[self._stage] = self._spent.get(self._stage, 0.0) + seconds
        if stage == "COLLECT" and epoch is not None and epoch != self._epoch:
            if self._epoch >= 0:
                sampling = self._spent["COLLECT"]
                self.turns.end(sampling=sampling, training=sum(self._spent.values()) - sampling, **self._spent)
            self._epoch, self._spent = epoch, {}
            self.turns.begin()
        self._stage, self._since_s = (None if self._epoch < 0 else stage), time.perf_counter()


def run(turns: Turns, folder: Path, shape: Shape) -> None:
    """Makes GRPO steps on a model folder, one for each turn."""
    run_config(build_config(_config(folder, shape)), RunOptions(run_name="benchmark", progress=Paced(turns)))
    sys.exit("the run ended before it was told to")


def _config(folder: Path, shape: Shape) -> dict[str, Any]:
    async def agent(item: Any, llm: Any, context: Any) -> str:
        messages = [{"role": "user", "content": item.input_obj}]
        for turn in range(shape.turns):
            if turn:
                words = shape.feedback(item.full_dataset_entry["number"], turn)
                messages.append({"role": "user", "content": words})
            reply = await llm.chat.completions.create(messages=messages, max_tokens=shape.reply)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        return str(messages[-1]["content"])

    async def reward(item: Any) -> float:
        return reward_of(item.output_obj)

    rows = [
        {"id": f"{split}-{i}", "split": split, "question": shape.question(i), "answer": "", "number": i}
        for split, count in (("train", shape.groups), ("select", 8), ("confirm", 8))
        for i in (
            range(count) if split == "train" else range(10_000 + len(split), 10_000 + len(split) + count * 20, 20)
        )
    ]
    return {
        "llms": {"agent": {"_type": "policy"}},
        "workflow": {"_type": "python", "function": agent, "llm": "agent"},
        "eval": {
            "general": {"max_concurrency": 4096, "dataset": {"_type": "rows", "rows": rows}},
            "evaluators": {"reward": {"_type": "python", "function": reward}},
        },
        "trajectory_builders": {"builder": {"_type": "group", "num_generations": shape.group}},
        "trainer_adapters": {"adapter": {"_type": "local"}},
        "trainers": {"trainer": {"_type": "epoch", "save_every": STEPS}},
        "finetuning": {
            "enabled": True,
            "trainer": "trainer",
            "trajectory_builder": "builder",
            "trainer_adapter": "adapter",
            "reward_function": {"name": "reward"},
            "num_epochs": STEPS,
            "device": "cpu",
            "splits": {"key": "split"},
            "curriculum_learning": {"min_reward_diff": 0.0},
            "algorithm": {"_type": "grpo"},
            "policy": {
                "model": str(folder),
                "tokenizer": str(folder / TOKENIZER),
                "optimizer": {"learning_rate": 1e-5},
                "schedule": {"warmup_steps": 0},
                "batch": {"steps_per_job": 1},
            },
            "run_configuration": {"validation_interval": STEPS},
        },
    }
