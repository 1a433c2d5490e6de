"""Our losses against TRL's own: the same model folder, tokens, advantages and log-probs, equal settings.

    python benchmarks/parity_trl.py

reinforge runs a whole `Engine.update` (samples with shared prompts, prefix sharing, the learner's weights); TRL runs
its trainer's `compute_loss` and `backward` on padded rows. The script prints the relative differences of loss and
gradient, on policy (old or reference log-probs are the model's own) and off policy (with added noise, so that clipping
is active). It exits with 1 if one is above 1e-4.

The same settings have different names: a mean over sequences is TRL's `grpo`, over tokens `bnpo` and `dapo`, a sum
divided by a constant `dr_grpo`; `dual_clip` is `delta`. CISPO's `epsilon_high` is the limit itself, ours is added to 1.
TRL's IPO averages over tokens (`length_normalised`); its factor on the KL (`use_bias_correction_kl`) is off. TRL's RLOO
clips the ratio of sequences, ours that of tokens divided by `constant_length`; the two are equal on policy up to that
factor, so they are compared there.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from datasets import Dataset, disable_progress_bars
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from benchmarks.workload import TOKENIZER, Shape, make_model
from reinforge.algorithms import cispo, dapo, dpo, dr_grpo, gspo, ipo, rloo, sft
from reinforge.algorithms import grpo as grpo_
from reinforge.algorithms.samples import fill_trained_tokens
from reinforge.config.schema import BatchConfig, PolicyConfig
from reinforge.engine import Engine
from reinforge.interfaces import Algorithm
from reinforge.types.request import TokenLogprobs
from reinforge.types.sample import TrainingSample
from reinforge.types.trajectory import EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryGroup

TOLERANCE = 1e-4
GROUPS, SIBLINGS, LONGEST = 4, 4, 9
"""Prompts, replies per prompt, and tokens of the longest reply."""
NOISE = 0.3
"""Noise on the old log-probs of an off-policy batch, in nats."""

COMMON = {
    "output_dir": "trl",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "logging_strategy": "no",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One loss on both sides.

    Attributes:
        name: Name to print.
        ours: Our algorithm.
        kind: TRL's trainer: `group`, `rloo`, `pair` or `sft`.
        theirs: TRL's settings.
        scale: Factor on our loss and gradient.
        policies: Compare `on` policy, `off` policy, or both.
        compares_loss: False: compare the gradient only.
    """

    name: str
    ours: Algorithm
    kind: str
    theirs: dict[str, Any] = field(default_factory=dict)
    scale: float = 1.0
    policies: tuple[str, ...] = ("on", "off")
    compares_loss: bool = True


def list_cases() -> list[Case]:
    """Returns all comparisons."""
    grpo = grpo_.GRPOConfig
    wide = {"clip_low": 0.2, "clip_high": 0.28}
    return [
        Case("GRPO", grpo_.GRPO(), "group", {"loss_type": "grpo"}),
        Case("GRPO, token mean", grpo_.GRPO(grpo(loss_aggregation="token")), "group", {"loss_type": "bnpo"}),
        Case(
            "GRPO, KL k3 0.05",
            grpo_.GRPO(grpo(kl_coef=0.05)),
            "group",
            {"loss_type": "grpo", "beta": 0.05, "use_bias_correction_kl": False},
        ),
        Case(
            "GRPO, dual clip 1.5",
            grpo_.GRPO(grpo(dual_clip=1.5)),
            "group",
            {"loss_type": "grpo", "delta": 1.5},
        ),
        Case(
            "GRPO, token mean, entropy 0.03",
            grpo_.GRPO(grpo(loss_aggregation="token", entropy_coef=0.03)),
            "group",
            {"loss_type": "bnpo", "entropy_coef": 0.03},
        ),
        Case("DAPO", dapo.DAPO(dapo.DAPOConfig(**wide)), "group", {"loss_type": "dapo", "epsilon_high": 0.28}),
        Case(
            "Dr. GRPO",
            dr_grpo.DrGRPO(dr_grpo.DrGRPOConfig(constant_length=LONGEST)),
            "group",
            {"loss_type": "dr_grpo"},
        ),
        Case(
            "CISPO",
            cispo.CISPO(cispo.CISPOConfig(clip_high=0.2)),
            "group",
            {"loss_type": "cispo", "epsilon_high": 1.2},
        ),
        Case(
            "GSPO",
            gspo.GSPO(gspo.GSPOConfig(clip_low=0.02, clip_high=0.03)),
            "group",
            {
                "loss_type": "grpo",
                "importance_sampling_level": "sequence",
                "epsilon": 0.02,
                "epsilon_high": 0.03,
            },
        ),
        Case(
            "RLOO (gradient)",
            rloo.RLOO(rloo.RLOOConfig(constant_length=LONGEST)),
            "rloo",
            scale=LONGEST,
            policies=("on",),
            compares_loss=False,
        ),
        Case("DPO", dpo.DPO(dpo.DPOConfig(beta=0.1)), "pair", {"loss_type": ["sigmoid"], "beta": 0.1}),
        Case(
            "DPO, length-normalised",
            dpo.DPO(dpo.DPOConfig(beta=2.0, length_normalised=True)),
            "pair",
            {"loss_type": ["sigmoid_norm"], "beta": 2.0},
        ),
        Case(
            "IPO, length-normalised",
            ipo.IPO(ipo.IPOConfig(beta=0.1, length_normalised=True)),
            "pair",
            {"loss_type": ["ipo"], "beta": 0.1},
        ),
        Case("SFT", sft.SFT(), "sft", policies=("on",)),
    ]


def make_groups() -> list[TrajectoryGroup]:
    """Returns groups of replies of 3 to 9 tokens to prompts of 5 to 8 tokens; rewards differ within a group."""
    rng = np.random.default_rng(0)
    groups = []
    for number in range(GROUPS):
        prompt = tuple(rng.integers(4, 320, 5 + number).tolist())
        siblings = []
        for index in range(SIBLINGS):
            reply = tuple(rng.integers(4, 320, rng.integers(3, LONGEST + 1)).tolist())
            tokens = TokenLogprobs(prompt, reply, (0.0,) * len(reply))
            turn = EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="", logprobs=tokens)
            siblings.append(Trajectory(episode=[turn], reward=float(index)))
        groups.append(TrajectoryGroup(group_id=str(number), trajectories=siblings))
    return groups


def fill_samples(engine: Engine, reference: Engine, samples: Sequence[TrainingSample], *, off_policy: bool) -> None:
    """Sets advantages (the same for both sides), and old and reference log-probs."""
    rng = np.random.default_rng(1)
    refs = (reference if off_policy else engine).logprobs(samples)
    for sample, own, ref in zip(samples, engine.logprobs(samples), refs, strict=True):
        noise = rng.normal(0.0, NOISE, len(sample)).astype(np.float32) if off_policy else np.float32(0.0)
        sample.old_logprobs = np.where(sample.loss_mask, own + noise, np.float32(0.0)).astype(np.float32)
        sample.ref_logprobs = ref
        sample.advantages = fill_trained_tokens(sample, float(rng.normal()))


def compute_our_gradient(
    engine: Engine, samples: Sequence[TrainingSample], algorithm: Algorithm
) -> tuple[float, list[Tensor]]:
    """Returns the loss and the gradient of one step, which is rolled back."""
    parameters = dict(engine.model.module.named_parameters())
    gradients = {name: torch.zeros_like(p) for name, p in parameters.items()}
    hooks = [p.register_hook(gradients[name].add_) for name, p in parameters.items()]  # before clipping
    engine.begin_job()
    try:
        report = engine.update(samples, algorithm.loss, progress_start=0.0, progress_end=1.0)
    finally:
        for hook in hooks:
            hook.remove()
        engine.rollback()
    return report.metrics["loss"], [gradients[name] for name in sorted(gradients)]


def compute_their_gradient(trainer: Any, inputs: dict[str, Any]) -> tuple[float, list[Tensor]]:
    """Returns TRL's loss of a batch and its gradient."""
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), [p.grad.clone() for _, p in sorted(trainer.model.named_parameters())]


def pad_completions(samples: Sequence[TrainingSample], values: Callable[[TrainingSample], np.ndarray]) -> Tensor:
    """Returns the values after each sample's prompt, padded on the right with 0, `[B, C]`."""
    rows = [torch.from_numpy(np.asarray(values(s)[s.loss_mask.argmax() :])) for s in samples]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def build_group_inputs(samples: Sequence[TrainingSample]) -> dict[str, Any]:
    """Returns a batch for TRL's GRPO and RLOO: prompts padded on the left, replies on the right."""
    prompts = [torch.from_numpy(s.token_ids[: s.loss_mask.argmax()]) for s in samples]
    left = torch.nn.utils.rnn.pad_sequence([p.flip(0) for p in prompts], batch_first=True, padding_value=-1).flip(1)
    mask = pad_completions(samples, lambda s: s.loss_mask.astype(np.int64))
    old = pad_completions(samples, lambda s: s.old_logprobs)
    return {
        "prompt_ids": left.clamp(min=0),
        "prompt_mask": (left >= 0).long(),
        "completion_ids": pad_completions(samples, lambda s: s.token_ids),
        "completion_mask": mask,
        "advantages": torch.tensor([s.advantages[s.loss_mask][0] for s in samples]),
        "num_items_in_batch": mask.sum(),
        "old_per_token_logps": old,
        "old_logps": old.sum(dim=1),
        "ref_per_token_logps": pad_completions(samples, lambda s: s.ref_logprobs),
    }


def pad_whole_rows(samples: Sequence[TrainingSample]) -> dict[str, Tensor]:
    """Returns a batch for TRL's SFT and DPO: whole rows, padded on the right."""
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad([torch.from_numpy(s.token_ids) for s in samples], batch_first=True),
        "attention_mask": pad([torch.ones(len(s), dtype=torch.long) for s in samples], batch_first=True),
        "completion_mask": pad([torch.from_numpy(s.loss_mask.astype(np.int64)) for s in samples], batch_first=True),
    }


def make_trainer(case: Case, folder: Path, reference: Path) -> Any:
    """Returns TRL's trainer for a case."""
    tokenizer = AutoTokenizer.from_pretrained(folder / TOKENIZER)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    shared = {"model": model, "processing_class": tokenizer}
    if case.kind in ("group", "rloo"):
        trainer, config = (GRPOTrainer, GRPOConfig) if case.kind == "group" else (RLOOTrainer, RLOOConfig)
        settings = {"num_generations": SIBLINGS, "per_device_train_batch_size": SIBLINGS * GROUPS, **case.theirs}
        rows = Dataset.from_dict({"prompt": ["w4 w5"] * GROUPS})
        args = config(**COMMON, max_completion_length=LONGEST, **{"beta": 0.0, **settings})
        return trainer(
            reward_funcs=lambda completions, **_: [0.0] * len(completions), args=args, train_dataset=rows, **shared
        )
    if case.kind == "pair":
        rows = Dataset.from_dict({"prompt": ["w4 w5"], "chosen": ["w6"], "rejected": ["w7"]})
        other = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)
        return DPOTrainer(ref_model=other, args=DPOConfig(**COMMON, **case.theirs), train_dataset=rows, **shared)
    rows = Dataset.from_dict({"prompt": ["w4 w5"], "completion": ["w6"]})
    return SFTTrainer(args=SFTConfig(**COMMON, **case.theirs), train_dataset=rows, **shared)


def build_inputs(case: Case, samples: Sequence[TrainingSample]) -> dict[str, Any]:
    """Returns a case's batch for TRL's trainer."""
    if case.kind in ("group", "rloo"):
        return build_group_inputs(samples)
    if case.kind == "pair":
        ordered = sorted(samples, key=lambda s: (-s.reward, s.group_id))  # all preferred samples, then all others
        return pad_whole_rows(ordered)
    rows = pad_whole_rows(samples)
    mask = rows.pop("completion_mask")
    return {**rows, "labels": rows["input_ids"].masked_fill(mask == 0, -100)}


def compute_differences(
    ours: tuple[float, list[Tensor]], theirs: tuple[float, list[Tensor]], case: Case
) -> tuple[float, float]:
    """Returns the differences of loss and gradient, relative to TRL's loss and largest gradient."""
    a, b = case.scale * ours[0], theirs[0]
    largest = max(g.abs().max().item() for g in theirs[1])
    gradient = max((case.scale * x - y).abs().max().item() for x, y in zip(ours[1], theirs[1], strict=True)) / largest
    return (abs(a - b) / max(abs(b), 1e-2) if case.compares_loss else 0.0), gradient


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    worst = 0.0
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        folder = make_model(Path(name) / "model", Shape(prompt=8, reply=LONGEST))
        perturbed = write_perturbed_model(folder, Path(name) / "perturbed")
        policy, reference = (
            PolicyConfig(model=str(f), tokenizer=str(folder / TOKENIZER), batch=BatchConfig(steps_per_job=1))
            for f in (folder, perturbed)
        )
        with Engine.load(policy, seed=0, device="cpu") as engine, Engine.load(reference, seed=0, device="cpu") as other:
            print(f"{'loss':32s} {'policy':6s}  {'loss':>12s} {'gradient':>16s}   (relative differences)")
            for case in list_cases():
                trainers = {"on": make_trainer(case, folder, folder)}
                if "off" in case.policies:
                    trainers["off"] = make_trainer(case, folder, perturbed) if case.kind == "pair" else trainers["on"]
                for where in case.policies:
                    samples = case.ours.build_samples(make_groups())
                    fill_samples(engine, other, samples, off_policy=where == "off")
                    theirs = compute_their_gradient(trainers[where], build_inputs(case, samples))
                    loss, gradient = compute_differences(compute_our_gradient(engine, samples, case.ours), theirs, case)
                    worst = max(worst, loss, gradient)
                    loss_text = f"{loss:12.1e}" if case.compares_loss else f"{'-':>12s}"
                    print(f"{case.name:32s} {where:6s}  {loss_text} {gradient:16.1e}", flush=True)
    print(f"largest: {worst:.1e}, allowed {TOLERANCE:.0e}")
    sys.exit(int(not worst <= TOLERANCE))


def write_perturbed_model(folder: Path, target: Path) -> Path:
    """Writes a copy of the model with noise on its weights: the reference for off-policy cases."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(target)
    return target


if __name__ == "__main__":
    main()
