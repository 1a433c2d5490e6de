"""What `tickets.yml` will cost with a model on this machine: minutes and memory, from one epoch's work done for real.

    python examples/pretrained/predict.py MODEL         a folder or a hub id
    python examples/pretrained/predict.py --size 135m   random weights in the shape of SmolLM2-135M, nothing fetched
    python examples/pretrained/predict.py --size 0.6b   the same in the shape of Qwen3-0.6B

Samples as many e-mails as an epoch asks for, trains on them once and reads the clock. Replies are as long as right
tickets. A model that answers at length, or is corrected often, takes up to four times as long at first.
"""

import argparse
import asyncio
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

from reinforge.algorithms.grpo import GRPO
from reinforge.config.loader import load_config
from reinforge.tasks.starters import make_bpe_tokenizer
from reinforge.tasks.tickets.dataset import TicketsDataset, TicketsDatasetConfig
from reinforge.tasks.tickets.ticket import write_ticket
from reinforge.types.request import ModelRequest, SamplingParams
from reinforge.types.trajectory import EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryGroup

RECIPE = Path(__file__).parent / "tickets.yml"

SMOLLM2_135M = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
QWEN3_06B = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
SIZES = {"135m": ("llama", SMOLLM2_135M), "0.6b": ("qwen3", QWEN3_06B)}


def draw_model(size: str, folder: Path) -> None:
    """Writes a model of that shape with random weights, and a tokenizer trained on the e-mails."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family, shape = SIZES[size]
    texts = [row["question"] for row in TicketsDataset(TicketsDatasetConfig(num_train=512)).rows()]
    tokenizer = make_bpe_tokenizer([*texts, RECIPE.read_text()], r" ?[A-Za-z]+|\d|[^A-Za-z\d]")
    tokenizer.save_pretrained(folder)
    config = AutoConfig.for_model(family, **shape, eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def conversations(instructions: str, count: int) -> list[tuple[list[dict[str, str]], str]]:
    """Returns what the agent asks about each of `count` e-mails, and the right answer."""
    rows = TicketsDataset(TicketsDatasetConfig(num_train=count, num_select=1, num_confirm=1)).rows()[:count]
    system = {"role": "system", "content": instructions}
    return [([system, {"role": "user", "content": row["question"]}], write_ticket(row["answer"])) for row in rows]


async def sample(engine, asked, group: int, length: int) -> tuple[float, list[list]]:
    """Returns the seconds it takes to draw `group` replies to each prompt, and the replies."""
    params = SamplingParams(max_tokens=length)
    requests = [ModelRequest(messages, params) for messages, _ in asked for _ in range(group)]
    started = time.perf_counter()
    replies = await asyncio.gather(*map(engine.policy.sample, requests))
    seconds = time.perf_counter() - started
    return seconds, [list(replies[i : i + group]) for i in range(0, len(replies), group)]


def train(engine, asked, groups) -> float:
    """Returns the seconds of one job on these replies, of which every second one is rewarded."""
    algorithm = GRPO()
    collected = []
    for number, ((messages, _), replies) in enumerate(zip(asked, groups, strict=True)):
        context = [EpisodeItem(role=EpisodeItemRole(m["role"]), content=m["content"]) for m in messages]
        answers = [EpisodeItem(role="assistant", content=r.message["content"], logprobs=r.tokens) for r in replies]
        siblings = [Trajectory(episode=[*context, a], reward=float(i % 2)) for i, a in enumerate(answers)]
        collected.append(TrajectoryGroup(group_id=str(number), trajectories=siblings))
    started = time.perf_counter()
    samples = algorithm.build_samples(collected)
    for one, advantages in zip(samples, algorithm.credit(samples), strict=True):
        one.advantages = advantages
    engine.begin_job()
    engine.update(samples, algorithm.loss, progress_start=0.0, progress_end=0.0)
    engine.end_job()
    return time.perf_counter() - started


def peak_gib() -> float:
    """Returns the most memory that this process has held; on a GPU, what torch held there."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def predict(model: str) -> None:
    """Measures one epoch and prints what the whole recipe will take."""
    from reinforge.engine import Engine

    os.environ["REINFORGE_MODEL"] = model
    config = load_config(RECIPE).config
    recipe, groups = config.finetuning, config.trajectory_builders["groups"]
    dataset, num_groups, group = config.eval.general.dataset, groups.examples_per_epoch, groups.num_generations
    engine = Engine.load(recipe.policy, seed=0, device=recipe.device)
    asked = conversations(config.workflow.instructions, 64)
    length = max(len(engine.tokenizer.encode(answer, add_special_tokens=False)) for _, answer in asked[:16]) + 1
    asyncio.run(sample(engine, asked[:2], 2, 4))  # warms up
    collect_s, replies = asyncio.run(sample(engine, asked[:num_groups], group, length))
    train_s = train(engine, asked[:num_groups], replies)
    alone_s = asyncio.run(sample(engine, asked, 1, length))[0] / len(asked)
    validations = 1 + recipe.num_epochs // recipe.run_configuration.validation_interval
    judged = validations * dataset.num_select + 2 * dataset.num_confirm * recipe.gate.draws
    minutes = (recipe.num_epochs * (collect_s + train_s) + judged * alone_s) / 60
    prompt = replies[0][0].num_prompt_tokens
    print(f"{model}: {engine.num_parameters:,} parameters, {engine.model.device.type}")
    print(f"an epoch of {num_groups} x {group} replies of {length} tokens to prompts of about {prompt}:")
    print(f"  sampling {collect_s:.1f} s, training {train_s:.1f} s; an episode of a validation {alone_s:.2f} s")
    print(f"predicted: {minutes:.0f} minutes for {recipe.num_epochs} epochs and {judged} judged episodes")
    print(f"peak memory {peak_gib():.1f} GiB")
    engine.close()


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder or hub id")
    parser.add_argument("--size", choices=SIZES, help="random weights in a known shape instead")
    args = parser.parse_args()
    if bool(args.model) == bool(args.size):
        parser.error("give either a model or --size")
    if args.model:
        return predict(args.model)
    with tempfile.TemporaryDirectory() as name:
        draw_model(args.size, Path(name))
        predict(name)


if __name__ == "__main__":
    main()
