"""TRL's side of a GRPO comparison: `GRPOTrainer.train()` at its fastest settings on a CPU, one training step a step.

fp32, no gradient checkpointing (TRL's default, which is slower), no reference (beta 0), no logging, no saving, no
workers. A step is timed from `on_step_begin` to `on_step_end`: generation, reward, loss, backward, clipping, AdamW.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.sides import Turns
from benchmarks.words import TOKENIZER, Shape, reward_of


def run(turns: Turns, folder: Path, shape: Shape, options: dict[str, Any]) -> None:
    """Makes GRPO steps on a model folder, one for each turn.

    Args:
        turns: Called around each step.
        folder: The model.
        shape: Prompts and replies.
        options: `micro_batch` rows that are trained at once (None: all), `row_per_turn`, and settings of `GRPOConfig`.
    """
    import torch
    from datasets import Dataset
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
        """Knows how long it generated."""

        def _generate(self, prompts: Any) -> Any:
            started = time.perf_counter()
            try:
                return super()._generate(prompts)
            finally:
                sampling_s[0] += time.perf_counter() - started

    def rewards(completions: list[Any], **kwargs: Any) -> list[float]:
        return kwargs.get("score") or [reward_of(completion[0]["content"]) for completion in completions]

    tokenizer = AutoTokenizer.from_pretrained(folder / TOKENIZER)
    tokenizer.pad_token = "w4"  # stands in masked places only, and has to have an embedding
    config = GRPOConfig(
        output_dir="trl",
        use_cpu=True,
        bf16=False,
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
        **{"gradient_checkpointing": False, **options},
    )
    prompts = [[{"role": "user", "content": shape.question(i)}] for i in range(shape.groups)]
    trainer = Timed(
        model=str(folder),
        processing_class=tokenizer,
        reward_funcs=rewards,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        callbacks=[Paced()],
        rollout_func=_rollout(shape, rows_per_episode) if shape.turns > 1 else None,
    )
    if trainer.model.dtype != torch.float32:
        raise SystemExit(f"TRL loaded the model as {trainer.model.dtype}, and float32 is compared")
    trainer.train()
    sys.exit("TRL's training ended before it was told to")


def _rollout(shape: Shape, rows_per_episode: int) -> Any:
    """Returns a `rollout_func` that plays turns by `generate`, each over the whole history so far.

    An episode becomes one row whose context is masked (`env_mask`), or a row for each of its turns.
    """
    import torch

    def play(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        tokenizer, model = trainer.processing_class, trainer.model
        numbers = {shape.question(i): i for i in range(shape.groups)}
        asked = prompts[::rows_per_episode]
        chats = [list(prompt) for prompt in asked]
        rows: list[list[tuple[list[int], list[int]]]] = [[] for _ in asked]
        for turn in range(shape.turns):
            if turn:
                for chat in chats:
                    words = shape.feedback(numbers[chat[0]["content"]], turn)
                    chat.append({"role": "user", "content": words})
            ids = tokenizer.apply_chat_template(chats, add_generation_prompt=True)["input_ids"]
            inputs = torch.tensor(ids)
            with torch.no_grad():
                drawn = model.generate(
                    input_ids=inputs,
                    attention_mask=torch.ones_like(inputs),
                    generation_config=trainer.generation_config,
                )[:, inputs.shape[1] :].tolist()
            for chat, row, prompt, reply, text in zip(
                chats, rows, ids, drawn, tokenizer.batch_decode(drawn), strict=True
            ):
                row.append((prompt, reply))
                chat.append({"role": "assistant", "content": text})
        scores = [reward_of(chat[-1]["content"]) for chat in chats]
        if rows_per_episode > 1:
            parts = [part for row in rows for part in row]
            return {
                "prompt_ids": [prompt for prompt, _ in parts],
                "completion_ids": [reply for _, reply in parts],
                "logprobs": None,
                "score": [score for score in scores for _ in range(rows_per_episode)],
            }
        merged = [_merged(row) for row in rows]
        return {
            "prompt_ids": [row[0][0] for row in rows],
            "completion_ids": [ids for ids, _ in merged],
            "env_mask": [mask for _, mask in merged],
            "logprobs": None,
            "score": scores,
        }

    return play


def _merged(turns: list[tuple[list[int], list[int]]]) -> tuple[list[int], list[int]]:
    """Returns everything after the first prompt, and 1 where it was drawn.

    Example: [1, 2] -> [4], then [1, 2, 4, 8] -> [5]: [4, 8, 5] and [1, 0, 1].
    """
    known = list(turns[0][0])
    mask: list[int] = []
    for prompt, reply in turns:
        if prompt[: len(known)] != known:
            raise SystemExit("a prompt does not go on from the turns before it, so the turns cannot be merged")
        mask += [0] * (len(prompt) - len(known)) + [1] * len(reply)
        known = [*prompt, *reply]
    return known[len(turns[0][0]) :], mask
