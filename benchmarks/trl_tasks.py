"""A task of reasoning-gym with TRL's `GRPOTrainer` and PEFT's LoRA: one row per reply, scored by the environment.

Prompts, scores, sampling and recipe are those of our side (`time_to_quality.py`). Products are computed in bfloat16
(`bf16=True`) where the machine multiplies it, which is TRL's fastest setting there, without gradient checkpointing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from reinforge.environments.reasoning_gym import ReasoningGym
from reinforge.types.environment import Reply
from reinforge.types.evaluation import EvalInputItem


class Judge:
    """Shows items of an environment as messages, and scores replies to them."""

    def __init__(self, source: ReasoningGym):
        self.source = source

    def show(self, item: EvalInputItem) -> list[dict[str, Any]]:
        return list(asyncio.run(self.source.create().reset(item, 0)).messages)

    def score(self, item: EvalInputItem, text: str) -> tuple[float, bool]:
        """Returns the reward of a reply, and whether it solves the item."""

        async def play() -> tuple[float, bool]:
            task = self.source.create()
            await task.reset(item, 0)
            found = await task.step(Reply(text))
            assert found.reward is not None  # the first step is the last
            return float(found.reward), bool(found.info["solved"])

        return asyncio.run(play())


def train(
    folder: str,
    judge: Judge,
    items: list[EvalInputItem],
    select: list[EvalInputItem],
    settings: dict[str, Any],
    report: Callable[[float, int, float], None],
) -> None:
    """Trains, and reports (seconds without evaluations, epochs done, share of `select` solved) at every evaluation.

    Args:
        folder: The model.
        items: Those to train on.
        select: Those of the evaluations.
        settings: `seed`, `examples` per epoch, `generations` for each, `steps` per epoch, `interval` of epochs between
            evaluations, `learning_rate`, `temperature`, `max_tokens`, `lora`, `bf16`.
        report: Receives each evaluation; it may end the process.
    """
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from transformers.utils import logging
    from trl import GRPOConfig, GRPOTrainer

    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    by_id = {item.id: item for item in items}

    def rewards(completions: list[Any], item: list[str], **_: Any) -> list[float]:
        texts = (completion[0]["content"] for completion in completions)
        return [judge.score(by_id[name], text)[0] for name, text in zip(item, texts, strict=True)]

    @torch.no_grad()
    def evaluate(model: Any) -> float:
        chats = [judge.show(item) for item in select]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        was_training = model.training
        model.eval()
        sampled = model.generate(
            **inputs,
            do_sample=True,
            temperature=settings["temperature"],
            top_k=0,
            top_p=1.0,
            max_new_tokens=settings["max_tokens"],
        )[:, inputs["input_ids"].shape[1] :]
        model.train(was_training)
        texts = tokenizer.batch_decode(sampled, skip_special_tokens=True)
        return sum(judge.score(*each)[1] for each in zip(select, texts, strict=True)) / len(select)

    class Clock(TrainerCallback):
        """Times everything except evaluations."""

        spent_s, since_s = 0.0, 0.0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            report(0.0, 0, evaluate(kwargs["model"]))
            self.since_s = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % (settings["steps"] * settings["interval"]):
                return
            self.spent_s += time.perf_counter() - self.since_s
            report(self.spent_s, state.global_step // settings["steps"], evaluate(kwargs["model"]))
            self.since_s = time.perf_counter()

    rows = settings["examples"] * settings["generations"] // settings["steps"]
    GRPOTrainer(
        model=folder,
        processing_class=tokenizer,
        reward_funcs=rewards,
        train_dataset=Dataset.from_list([{"prompt": judge.show(item), "item": item.id} for item in items]),
        callbacks=[Clock()],
        peft_config=LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", **settings["lora"]),
        args=GRPOConfig(
            output_dir="trl",
            seed=settings["seed"],
            use_cpu=True,
            bf16=settings["bf16"],
            gradient_checkpointing=False,
            beta=0.0,
            loss_type="dapo",
            epsilon=0.2,
            epsilon_high=0.28,
            num_generations=settings["generations"],
            temperature=settings["temperature"],
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=1,
            steps_per_generation=settings["steps"],
            max_completion_length=settings["max_tokens"],
            learning_rate=settings["learning_rate"],
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=2,
            adam_beta2=0.95,
            max_grad_norm=1.0,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            max_steps=100_000,
        ),
    ).train()
