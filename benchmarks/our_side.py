"""reinforge's side of a GRPO comparison: `reinforge finetune` as a user runs it, one epoch per step.

A step is timed with everything that a run does in an epoch: agent episodes, capture, journal, reward, selection, job,
publishing and canary. Checkpoints are excluded, as TRL does not save either.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.sides import Turns
from benchmarks.workload import Shape
from reinforge.config.loader import build_config
from reinforge.runs.progress import SilentProgress
from reinforge.trainer.options import RunOptions
from reinforge.trainer.run import run_config

STEPS = 10_000
"""Configured number of epochs; the process ends when no more steps are requested."""


class Paced(SilentProgress):
    """Starts each epoch on its turn and times its stages."""

    def __init__(self, turns: Turns):
        self.turns = turns
        self._epoch = -1
        self._stage: str | None = None
        self._since_s = 0.0
        self._spent: dict[str, float] = {}

    def stage(self, epoch: int | None, stage: str, total: int | None) -> None:
        """Ends the previous stage; at the start of an epoch, ends the previous epoch and waits for the next turn."""
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


def run(turns: Turns, folder: Path, shape: Shape, policy: dict[str, Any] | None = None, device: str = "cpu") -> None:
    """Runs GRPO steps on a model folder, one per turn; `policy` has further settings of `finetuning.policy`."""
    config = _config(folder, shape)
    config["finetuning"]["device"] = device
    config["finetuning"]["policy"] |= policy or {}
    run_config(build_config(config), RunOptions(run_name="benchmark", progress=Paced(turns)))
    sys.exit("the run ended too early")


def _config(folder: Path, shape: Shape) -> dict[str, Any]:
    async def agent(item: Any, llm: Any, context: Any) -> str:
        messages = [{"role": "user", "content": item.input_obj}]
        for turn in range(shape.turns):
            if turn:
                feedback = shape.feedback(item.full_dataset_entry["number"], turn)
                messages.append({"role": "user", "content": feedback})
            reply = await llm.chat.completions.create(messages=messages, max_tokens=shape.reply)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        return str(messages[-1]["content"])

    async def reward(item: Any) -> float:
        return shape.reward(item.output_obj)

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
            "splits": {"key": "split"},
            "curriculum_learning": {"min_reward_diff": 0.0},
            "algorithm": {"_type": "grpo"},
            "policy": {
                "model": str(folder),
                "tokenizer": str(shape.find_tokenizer(folder)),
                "optimizer": {"learning_rate": 1e-5},
                "schedule": {"warmup_steps": 0},
                "batch": {"steps_per_job": 1},
            },
            "run_configuration": {"validation_interval": STEPS},
        },
    }
