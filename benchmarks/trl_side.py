"""TRL's side of a GRPO comparison: `GRPOTrainer.train()` with its fastest settings on a CPU.

float32, without gradient checkpointing (TRL's default, which is slower), reference model (beta 0), logging, saving and
workers. A step is timed from `on_step_begin` to `on_step_end`: generation, reward, loss, backward, clipping, AdamW.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.sides import Turns
from benchmarks.workload import NEVER, Shape


def run(turns: Turns, folder: Path, shape: Shape, options: dict[str, Any]) -> None:
    """Runs GRPO steps on a model folder, one per turn.

    Args:
        turns: Called around each step.
        folder: The model.
        shape: Prompts and replies.
        options: `micro_batch` rows to train at once (None: all), `row_per_turn`, `lora` (settings of `LoraConfig`), and
            settings of `GRPOConfig`.
    """
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from transformers.utils import logging
    from trl import GRPOConfig, GRPOTrainer

    logging.set_verbosity_error()
    options = dict(options)
    rows_per_episode = shape.turns if options.pop("row_per_turn", False) else 1
    num_rows = shape.episodes * rows_per_episode
    micro_batch = min(options.pop("micro_batch", None) or num_rows, num_rows)
    sampling_s = [0.0]

    class Paced(TrainerCallback):
        """Waits for its turn before each step."""

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            turns.begin()
            sampling_s[0] = 0.0

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            turns.end(sampling=sampling_s[0], training=turns.seconds - sampling_s[0])

    class Timed(GRPOTrainer):
        """Times generation."""

        def _generate(self, prompts: Any) -> Any:
            started = time.perf_counter()
            try:
                return super()._generate(prompts)
            finally:
                sampling_s[0] += time.perf_counter() - started

    def rewards(completions: list[Any], **kwargs: Any) -> list[float]:
        return kwargs.get("score") or [shape.reward(completion[0]["content"]) for completion in completions]

    tokenizer = AutoTokenizer.from_pretrained(shape.find_tokenizer(folder))
    if tokenizer.pad_token == NEVER:
        tokenizer.pad_token = "w4"  # used in masked positions only, but needs an embedding
    lora = options.pop("lora", None)
    config = GRPOConfig(
        output_dir="trl",
        beta=0.0,
        loss_type="grpo",
        num_generations=shape.group * rows_per_episode,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=num_rows // micro_batch,
        steps_per_generation=num_rows // micro_batch,
        max_completion_length=shape.reply,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_grad_norm=1.0,
        shuffle_dataset=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        max_steps=10_000,
        **{"use_cpu": True, "bf16": False, "gradient_checkpointing": False, **options},
    )
    prompts = [[{"role": "user", "content": shape.question(i)}] for i in range(shape.groups)]
    trainer = Timed(
        model=str(folder),
        processing_class=tokenizer,
        reward_funcs=rewards,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        callbacks=[Paced()],
        peft_config=None if lora is None else LoraConfig(task_type="CAUSAL_LM", **lora),
        rollout_func=_make_rollout(shape, rows_per_episode) if shape.turns > 1 else None,
    )
    if not lora and trainer.model.dtype != torch.float32:
        raise SystemExit(f"TRL loaded the model as {trainer.model.dtype}, but this benchmark compares float32")
    trainer.train()
    sys.exit("TRL's training ended too early")


def _make_rollout(shape: Shape, rows_per_episode: int) -> Any:
    """Returns a `rollout_func` that samples each turn with `generate`, over the whole history so far.

    An episode becomes one row with masked context (`env_mask`), or one row per turn.
    """
    import torch

    def play(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        tokenizer, model = trainer.processing_class, trainer.model
        numbers = {shape.question(i): i for i in range(shape.groups)}
        chats = [list(prompt) for prompt in prompts[::rows_per_episode]]
        rows: list[list[tuple[list[int], list[int]]]] = [[] for _ in chats]
        for turn in range(shape.turns):
            if turn:
                for chat in chats:
                    feedback = shape.feedback(numbers[chat[0]["content"]], turn)
                    chat.append({"role": "user", "content": feedback})
            ids = tokenizer.apply_chat_template(chats, add_generation_prompt=True)["input_ids"]
            inputs = torch.tensor(ids)
            with torch.no_grad():
                sampled = model.generate(
                    input_ids=inputs,
                    attention_mask=torch.ones_like(inputs),
                    generation_config=trainer.generation_config,
                )[:, inputs.shape[1] :].tolist()
            for chat, row, prompt, reply, text in zip(
                chats, rows, ids, sampled, tokenizer.batch_decode(sampled), strict=True
            ):
                row.append((prompt, reply))
                chat.append({"role": "assistant", "content": text})
        scores = [shape.reward(chat[-1]["content"]) for chat in chats]
        if rows_per_episode > 1:
            parts = [part for row in rows for part in row]
            return {
                "prompt_ids": [prompt for prompt, _ in parts],
                "completion_ids": [reply for _, reply in parts],
                "logprobs": None,
                "score": [score for score in scores for _ in range(rows_per_episode)],
            }
        merged = [_merge_turns(row) for row in rows]
        return {
            "prompt_ids": [row[0][0] for row in rows],
            "completion_ids": [ids for ids, _ in merged],
            "env_mask": [mask for _, mask in merged],
            "logprobs": None,
            "score": scores,
        }

    return play


def _merge_turns(turns: list[tuple[list[int], list[int]]]) -> tuple[list[int], list[int]]:
    """Returns all tokens after the first prompt, and a mask with 1 at sampled tokens.

    Example: [1, 2] -> [4], then [1, 2, 4, 8] -> [5]: [4, 8, 5] and [1, 0, 1].
    """
    known = list(turns[0][0])
    mask: list[int] = []
    for prompt, reply in turns:
        if prompt[: len(known)] != known:
            raise SystemExit("a prompt does not extend the turns before it, so the turns cannot be merged")
        mask += [0] * (len(prompt) - len(known)) + [1] * len(reply)
        known = [*prompt, *reply]
    return known[len(turns[0][0]) :], mask
