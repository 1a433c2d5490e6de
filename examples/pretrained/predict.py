"""Predicts how long `tickets.yml` takes on this machine, and its peak memory, by measuring one epoch.

    python examples/pretrained/predict.py MODEL         a folder or a hub id
    python examples/pretrained/predict.py --size 135m   random weights in the shape of SmolLM2-135M, no download
    python examples/pretrained/predict.py --size 0.6b   the same in the shape of Qwen3-0.6B

It samples replies to one epoch's e-mails and trains on them once. The replies are as long as correct tickets; a model
that writes long replies, or needs many corrections, takes up to four times as long at first.
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
from reinforge.tasks.tickets.ticket import format_ticket
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


def write_random_model(size: str, folder: Path) -> None:
    """Writes a model of the given shape with random weights, and a tokenizer trained on the e-mails."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family, shape = SIZES[size]
    texts = [row["question"] for row in TicketsDataset(TicketsDatasetConfig(num_train=512)).rows()]
    tokenizer = make_bpe_tokenizer([*texts, RECIPE.read_text()], r" ?[A-Za-z]+|\d|[^A-Za-z\d]")
    tokenizer.save_pretrained(folder)
    config = AutoConfig.for_model(family, **shape, eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def build_prompts(instructions: str, count: int) -> list[tuple[list[dict[str, str]], str]]:
    """Returns the agent's messages for each of `count` e-mails, with the correct answer."""
    rows = TicketsDataset(TicketsDatasetConfig(num_train=count, num_select=1, num_confirm=1)).rows()[:count]
    system = {"role": "system", "content": instructions}
    return [([system, {"role": "user", "content": row["question"]}], format_ticket(row["answer"])) for row in rows]


async def sample(engine, prompts, group: int, length: int) -> tuple[float, list[list]]:
    """Returns the seconds it takes to sample `group` replies to each prompt, and the replies."""
    params = SamplingParams(max_tokens=length)
    requests = [ModelRequest(messages, params) for messages, _ in prompts for _ in range(group)]
    started = time.perf_counter()
    replies = await asyncio.gather(*map(engine.policy.sample, requests))
    seconds = time.perf_counter() - started
    return seconds, [list(replies[i : i + group]) for i in range(0, len(replies), group)]


def train(engine, prompts, groups) -> float:
    """Returns the seconds of one training job on these replies; every second one gets reward 1."""
    algorithm = GRPO()
    trajectory_groups = []
    for number, ((messages, _), replies) in enumerate(zip(prompts, groups, strict=True)):
        context = [EpisodeItem(role=EpisodeItemRole(m["role"]), content=m["content"]) for m in messages]
        answers = [EpisodeItem(role="assistant", content=r.message["content"], logprobs=r.tokens) for r in replies]
        siblings = [Trajectory(episode=[*context, a], reward=float(i % 2)) for i, a in enumerate(answers)]
        trajectory_groups.append(TrajectoryGroup(group_id=str(number), trajectories=siblings))
    started = time.perf_counter()
    samples = algorithm.build_samples(trajectory_groups)
    for each, advantages in zip(samples, algorithm.credit(samples), strict=True):
        each.advantages = advantages
    engine.begin_job()
    engine.update(samples, algorithm.loss, progress_start=0.0, progress_end=0.0)
    engine.end_job()
    return time.perf_counter() - started


def peak_gib() -> float:
    """Returns the peak memory of this process; on a GPU, the peak that torch allocated there."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def predict(model: str) -> None:
    """Measures one epoch and prints the prediction for the whole configuration."""
    from reinforge.engine import Engine

    os.environ["REINFORGE_MODEL"] = model
    config = load_config(RECIPE).config
    recipe, groups = config.finetuning, config.trajectory_builders["groups"]
    dataset, num_groups, group = config.eval.general.dataset, groups.examples_per_epoch, groups.num_generations
    engine = Engine.load(recipe.policy, seed=0, device=recipe.device)
    prompts = build_prompts(config.workflow.instructions, 64)
    length = max(len(engine.tokenizer.encode(answer, add_special_tokens=False)) for _, answer in prompts[:16]) + 1
    asyncio.run(sample(engine, prompts[:2], 2, 4))  # warms up
    collect_s, replies = asyncio.run(sample(engine, prompts[:num_groups], group, length))
    train_s = train(engine, prompts[:num_groups], replies)
    episode_s = asyncio.run(sample(engine, prompts, 1, length))[0] / len(prompts)
    validations = 1 + recipe.num_epochs // recipe.run_configuration.validation_interval
    num_evaluated = validations * dataset.num_select + 2 * dataset.num_confirm * recipe.gate.num_samples
    minutes = (recipe.num_epochs * (collect_s + train_s) + num_evaluated * episode_s) / 60
    prompt_length = replies[0][0].num_prompt_tokens
    print(f"{model}: {engine.num_parameters:,} parameters, {engine.model.device.type}")
    print(f"one epoch: {num_groups} x {group} replies of {length} tokens, prompts of about {prompt_length} tokens:")
    print(f"  sampling {collect_s:.1f} s, training {train_s:.1f} s; one validation episode {episode_s:.2f} s")
    print(f"predicted: {minutes:.0f} minutes for {recipe.num_epochs} epochs and {num_evaluated} evaluation episodes")
    print(f"peak memory {peak_gib():.1f} GiB")
    engine.close()


def main() -> None:
    """Runs the prediction for the command line's model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder or hub id")
    parser.add_argument("--size", choices=SIZES, help="use random weights of this shape instead")
    args = parser.parse_args()
    if bool(args.model) == bool(args.size):
        parser.error("give either MODEL or --size")
    if args.model:
        return predict(args.model)
    with tempfile.TemporaryDirectory() as name:
        write_random_model(args.size, Path(name))
        predict(name)


if __name__ == "__main__":
    main()
