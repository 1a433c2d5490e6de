"""Trees sampled level by level against `generate` node by node; and optimizer steps with and without shared prefixes.

python benchmarks/tree_rollouts.py      width 3, depth 3, 16 trees, tester and target of 1.7 M each, 16 tokens per turn

A node is one probe, one response and the probe's perplexity. The baseline makes one tree of the same shape, one node at
a time; its nodes/s do not depend on the number of trees.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.machine import describe, refuse_if_busy
from benchmarks.sampler import SIZES, random_model, show
from reinforge.algorithms.grpo import GRPO
from reinforge.redteam import ASTProblem, ASTSampler, KeywordScorer
from reinforge.types.sample import TrainingSample
from reinforge.types.trajectory import EpisodeItem, Trajectory, TrajectoryGroup

OPENINGS = [f"It is day number {number} at the desk, and many people wait." for number in range(64)]


def grow_node_by_node(problem: ASTProblem, width: int, depth: int, tokens: int) -> int:
    """Grows one tree with a separate call for every reply and perplexity, and returns the number of nodes."""
    module, tokenizer = problem.engine.model.module, problem.engine.tokenizer

    @torch.no_grad()
    def reply(prompt: torch.Tensor) -> torch.Tensor:
        mask = torch.ones_like(prompt)
        settings = {"do_sample": True, "top_k": 0, "max_new_tokens": tokens, "min_new_tokens": tokens}
        return module.generate(prompt, attention_mask=mask, **settings)

    @torch.no_grad()
    def grow(prompt: torch.Tensor, left: int) -> int:
        count = 0
        for _ in range(width if left else 0):
            probed = reply(prompt)
            module(probed).logits[:, -tokens:].log_softmax(-1)
            count += 1 + grow(reply(probed), left - 1)
        return count

    opening = tokenizer(OPENINGS[0], return_tensors="pt").input_ids
    return problem.engine.policy.sampler.call(lambda: grow(opening, depth))


def build_samples(graphs: list[Any]) -> list[TrainingSample]:
    """Returns the probes of trees as samples for GRPO; a probe's reward is its position among its siblings."""
    groups = []
    for graph in graphs:
        for siblings in graph.sibling_groups():
            turns = [EpisodeItem(role="assistant", content=str(n.probe), logprobs=n.probe.tokens) for n in siblings]
            trajectories = [Trajectory(episode=[turn], reward=float(i)) for i, turn in enumerate(turns)]
            groups.append(TrajectoryGroup(group_id=str(len(groups)), trajectories=trajectories))
    algorithm = GRPO()
    samples = algorithm.build_samples(groups)
    for sample, advantages in zip(samples, algorithm.credit(samples), strict=True):
        sample.advantages = advantages
    return samples


def time_step(problem: ASTProblem, samples: list[TrainingSample], *, share: bool) -> float:
    """Returns the seconds of one optimizer step, with or without shared prefixes."""
    engine = problem.engine
    masks, engine.learner.masks = engine.learner.masks, engine.learner.masks if share else None
    engine.begin_job()
    started = time.perf_counter()
    engine.update(samples, GRPO().loss, progress_start=0.0, progress_end=0.0)
    seconds = time.perf_counter() - started
    engine.rollback()
    engine.learner.masks = masks
    return seconds


def compare(problem: ASTProblem, args: argparse.Namespace) -> None:
    sampler = ASTSampler(problem, OPENINGS, tree_width=args.width, tree_depth=args.depth)
    sampler.rollouts(range(2))
    ours, theirs, nodes_ratio, shared_s, unshared_s = [], [], [], [], []
    for number in range(args.pairs):
        started = time.perf_counter()
        graphs = sampler.rollouts(range(number * args.trees, (number + 1) * args.trees))
        count = sum(1 for graph in graphs for group in graph.sibling_groups() for _ in group)
        ours.append(count / (time.perf_counter() - started))
        started = time.perf_counter()
        theirs.append(grow_node_by_node(problem, args.width, args.depth, args.tokens) / (time.perf_counter() - started))
        nodes_ratio.append(ours[-1] / theirs[-1])
        samples = build_samples(graphs)
        shared_s.append(time_step(problem, samples, share=True))
        unshared_s.append(time_step(problem, samples, share=False))
    print(
        f"width {args.width}, depth {args.depth}, {args.trees} trees of {count // args.trees} nodes, {args.pairs} pairs"
    )
    show("nodes/s", ours)
    show("nodes/s node by node", theirs)
    show("ratio", nodes_ratio)
    shared, unshared = statistics.median(shared_s), statistics.median(unshared_s)
    print(f"one step on {len(samples)} probes: shared prefixes {shared:.2f} s, without {unshared:.2f} s")
    show("without / shared", [a / b for a, b in zip(unshared_s, shared_s, strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=3)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--trees", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16, help="tokens per probe and per response")
    parser.add_argument("--pairs", type=int, default=5, help="repetitions")
    parser.add_argument("--force", action="store_true", help="run even if the machine is busy")
    args = parser.parse_args()
    refuse_if_busy()
    print(describe())
    with random_model(SIZES["1.7m"]) as folder:
        policy = {"max_num_seqs": 128, "batch": {"batch_size": 10**6, "micro_batch_tokens": 8192}}  # one step for all
        limits = {"max_tokens": args.tokens, "target_max_tokens": args.tokens}
        with ASTProblem(folder, folder, KeywordScorer("x"), policy=policy, device="cpu", **limits) as problem:
            compare(problem, args)


if __name__ == "__main__":
    main()
