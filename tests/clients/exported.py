"""Exported GGUF files in llama.cpp: `python -m tests.clients.exported` in an environment with llama-cpp-python.

tiny models of each family   the same prompt tokens, the same greedy replies, equal log-probs
a writer that forgets the permutation of Llama's heads   other log-probs: the check notices it
a run's export               judged by llama.cpp: parity, and the agent's figure on `confirm`
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
import tempfile
from pathlib import Path

import torch

import reinforge
from reinforge.config.finetuning_blocks import SamplingConfig
from reinforge.exports.generate_policy import GeneratePolicy
from reinforge.exports.gguf import file as gguf_file
from reinforge.exports.judge import Parity, compare, make_greedy
from reinforge.exports.llama_cpp_policy import LlamaCppPolicy
from reinforge.types.request import ModelRequest, SamplingParams
from tests.exports.gguf_files import LLAMA3_ROPE
from tests.models import make_tiny_model

FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
}
LLAMA_3 = {**LLAMA3_ROPE, "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
TEXTS = ("what is the capital of France?", "It's 12 o'clock,\n\n  said the quick\tfox: 3 + 44 = é漢!", "a" * 40)
MAX_NATS = 5e-4
"""With keys and values in float32; both programs sum in float32, in different orders."""


async def compare_programs(folder: Path, family: str, **config: object) -> Parity:
    """Returns how llama.cpp's replies to a few prompts compare with those of transformers."""
    model = make_tiny_model(folder / "model", family, **{"vocab_size": 400, **config})
    generate = GeneratePolicy(model, device="cpu", history="template", seed=0)
    file = folder / "model.gguf"
    settings = gguf_file.GgufSettings("f32", "tiny", SamplingConfig())
    gguf_file.write_gguf(file, generate.module, generate.tokenizer, settings)
    served = LlamaCppPolicy(file, max_model_len=256, seed=0, exact=True)
    sampling = SamplingParams(max_tokens=16)
    requests = [ModelRequest([{"role": "user", "content": text}], sampling) for text in TEXTS]
    try:
        expected = [await generate.sample(make_greedy(request)) for request in requests]
        rows = [(*reply.tokens.prompt_token_ids, *reply.tokens.token_ids) for reply in expected if reply.tokens]
        return await compare(expected, await generate.score(rows), served, requests)
    finally:
        served.close()
        generate.close()


def check_families(folder: Path) -> None:
    """Checks each family, and that a wrong file is noticed."""
    cases = {
        **FAMILIES,
        "llama, rope of Llama 3": {"rope_parameters": LLAMA_3},
        "llama, tied": {"tie_word_embeddings": True},
    }
    for name, config in cases.items():
        parity = asyncio.run(compare_programs(folder / name, name.partition(",")[0], **config))
        assert parity.is_equal, f"{name}: {parity}"
        assert parity.max_difference is not None
        assert parity.max_difference < MAX_NATS, f"{name}: {parity}"
        sys.__stdout__.write(f"  ok: {name}: {parity}\n")
    kept, gguf_file.PERMUTED = gguf_file.PERMUTED, set()
    try:
        parity = asyncio.run(compare_programs(folder / "wrong", "llama"))
    finally:
        gguf_file.PERMUTED = kept
    assert parity.max_difference is not None
    assert parity.max_difference > 100 * MAX_NATS, f"a missing permutation is not noticed: {parity}"
    sys.__stdout__.write(f"  ok: without the permutation log-probs differ by {parity.max_difference:.2f} nats\n")


async def agent(item, llm, context):  # type: ignore[no-untyped-def]
    reply = await llm.chat.completions.create(messages=[{"role": "user", "content": item.input_obj}], max_tokens=4)
    return reply.choices[0].message.content


def count_vowels(output, expected):  # type: ignore[no-untyped-def]
    return sum(letter in "aeiou" for letter in output) / max(1, len(output))


def check_run(folder: Path) -> None:
    """Trains a run of LoRA, exports it, and checks its judgement by llama.cpp."""
    rows = [{"id": str(i), "question": f"say {i}", "answer": "a"} for i in range(40)]
    policy = {"lora": {"r": 8}, "optimizer": {"learning_rate": 0.02}, "batch": {"steps_per_job": 4}}
    summary = reinforge.finetune(
        agent,
        rows,
        count_vowels,
        make_tiny_model(folder / "base"),
        2,
        settings={"policy": policy, "gate": {"margin": -1}, "device": "cpu"},
        output_dir=folder / "runs",
        run_name="r",
    )
    for quantize in ("f32", "q8_0"):
        done = reinforge.export(
            summary.folder,
            "gguf",
            quantize=quantize,
            output=folder / quantize,
            judge_with="llama.cpp",
            workflow=agent,
            dataset=rows,
            reward=count_vowels,
        )
        judged = done.judgement
        assert judged is not None
        assert judged.parity is not None
        assert judged.figure is not None, judged.note
        assert judged.difference is not None
        assert judged.program.startswith("llama-cpp-python ")
        if quantize == "f32":
            assert judged.parity.num_equal_prompts == judged.parity.num_prompts, str(judged.parity)
            assert judged.parity.max_difference is not None
            assert judged.parity.max_difference < 0.05, "keys of float16, which is llama.cpp's default"
        assert judged.difference.num_pairs == summary.confirm_tuned.num_examples  # type: ignore[union-attr]
        sys.__stdout__.write(
            f"  ok: {quantize} of a run: {judged.parity}; {judged.figure}; difference {judged.difference}\n"
        )


def main() -> None:
    """Runs all checks."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        check_families(Path(folder))
        check_run(Path(folder))


if __name__ == "__main__":
    main()
