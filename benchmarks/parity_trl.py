"""Our losses against TRL's own: the same model folder, tokens, advantages and log-probs, equal settings.

    python benchmarks/parity_trl.py

Ours is a whole `Engine.update` (samples with shared prompts, prefix sharing, the learner's weights); TRL's is its
trainer's `compute_loss` and `backward` on padded rows. Printed is the largest relative difference of loss and gradient,
on policy (old or reference log-probs are the model's own) and off policy (moved by noise, so that clips bite).
Exits with 1 above 1e-4.

Settings that are equal by another name: a mean over sequences is TRL's `grpo`, over tokens `bnpo` and `dapo`, a sum by
a constant `dr_grpo`; `dual_clip` is `delta`; CISPO's `epsilon_high` is the bound itself, ours is what it adds to 1;
TRL's IPO divides by lengths (`length_normalised`); its factor on the KL (`use_bias_correction_kl`) is off. Its RLOO
clips the ratio of whole sequences and ours that of tokens, and ours divides by `constant_length`: they are equal on
policy up to that factor, and compared there.
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

from benchmarks.words import TOKENIZER, Shape, make_model
from reinforge.algorithms import cispo, dapo, dpo, dr_grpo, gspo, ipo, rloo, sft
from reinforge.algorithms import grpo as grpo_
from reinforge.algorithms.samples import on_mask
from reinforge.config.schema import BatchConfig, PolicyConfig
from reinforge.engine import Engine
from reinforge.interfaces import Algorithm
from reinforge.types.request import TokenLogprobs
from reinforge.types.sample import TrainingSample
from reinforge.types.trajectory import EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryGroup

TOLERANCE = 1e-4
GROUPS, SIBLINGS, LONGEST = 4, 4, 9
"""Prompts, replies to each, and tokens of the longest reply."""
NOISE = 0.3
"""Nats that old log-probs are moved by where a batch is off policy."""

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
        name: For a person.
        ours: Our algorithm.
        kind: `group`, `rloo`, `pair` or `sft`: which trainer of TRL's.
        theirs: TRL's settings.
        scale: What our loss and gradient are multiplied by.
        policies: Where they are compared.
        compares_loss: False: the gradient alone.
    """

    name: str
    ours: Algorithm
    kind: str
    theirs: dict[str, Any] = field(default_factory=dict)
    scale: float = 1.0
    policies: tuple[str, ...] = ("on", "off")
    compares_loss: bool = True


def cases() -> list[Case]:
    """Returns everything that is compared."""
    grpo = grpo_.GRPOConfig
    wide = {"clip_low": 0.2, "clip_high": 0.28}
    return [
        Case("GRPO", grpo_.GRPO(), "group", {"loss_type": "grpo"}),
        Case("GRPO, token mean", grpo_.GRPO(grpo(aggregation="token")), "group", {"loss_type": "bnpo"}),
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
            grpo_.GRPO(grpo(aggregation="token", entropy_coef=0.03)),
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
    """Returns groups of replies of 3 to 9 tokens to prompts of 5 to 8; rewards differ within each."""
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


def fill(engine: Engine, reference: Engine, samples: Sequence[TrainingSample], *, off_policy: bool) -> None:
    """Sets advantages (the same for both sides), and old and reference log-probs."""
    rng = np.random.default_rng(1)
    refs = (reference if off_policy else engine).logprobs(samples)
    for sample, own, ref in zip(samples, engine.logprobs(samples), refs, strict=True):
        noise = rng.normal(0.0, NOISE, len(sample)).astype(np.float32) if off_policy else np.float32(0.0)
        sample.old_logprobs = np.where(sample.loss_mask, own + noise, np.float32(0.0)).astype(np.float32)
        sample.ref_logprobs = ref
        sample.advantages = on_mask(sample, float(rng.normal()))


def update_ours(engine: Engine, samples: Sequence[TrainingSample], algorithm: Algorithm) -> tuple[float, list[Tensor]]:
    """Returns the loss and the gradient of one step; the weights are put back."""
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


def loss_theirs(trainer: Any, inputs: dict[str, Any]) -> tuple[float, list[Tensor]]:
    """Returns TRL's loss of a batch and its gradient."""
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), [p.grad.clone() for _, p in sorted(trainer.model.named_parameters())]


def rows_of(samples: Sequence[TrainingSample], values: Callable[[TrainingSample], np.ndarray]) -> Tensor:
    """Returns what is right of each sample's prompt, padded on the right with 0, `[B, C]`."""
    rows = [torch.from_numpy(np.asarray(values(s)[s.loss_mask.argmax() :])) for s in samples]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def group_inputs(samples: Sequence[TrainingSample]) -> dict[str, Any]:
    """Returns a batch as TRL's GRPO and RLOO take it: prompts padded on the left, replies on the right."""
    prompts = [torch.from_numpy(s.token_ids[: s.loss_mask.argmax()]) for s in samples]
    left = torch.nn.utils.rnn.pad_sequence([p.flip(0) for p in prompts], batch_first=True, padding_value=-1).flip(1)
    mask = rows_of(samples, lambda s: s.loss_mask.astype(np.int64))
    old = rows_of(samples, lambda s: s.old_logprobs)
    return {
        "prompt_ids": left.clamp(min=0),
        "prompt_mask": (left >= 0).long(),
        "completion_ids": rows_of(samples, lambda s: s.token_ids),
        "completion_mask": mask,
        "advantages": torch.tensor([s.advantages[s.loss_mask][0] for s in samples]),
        "num_items_in_batch": mask.sum(),
        "old_per_token_logps": old,
        "old_logps": old.sum(dim=1),
        "ref_per_token_logps": rows_of(samples, lambda s: s.ref_logprobs),
    }


def whole_rows(samples: Sequence[TrainingSample]) -> dict[str, Tensor]:
    """Returns a batch as TRL's SFT and DPO take it: whole rows, padded on the right."""
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad([torch.from_numpy(s.token_ids) for s in samples], batch_first=True),
        "attention_mask": pad([torch.ones(len(s), dtype=torch.long) for s in samples], batch_first=True),
        "completion_mask": pad([torch.from_numpy(s.loss_mask.astype(np.int64)) for s in samples], batch_first=True),
    }


def make_trainer(case: Case, folder: Path, reference: Path) -> Any:
    """Returns TRL's trainer of a case."""
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


def inputs_of(case: Case, samples: Sequence[TrainingSample]) -> dict[str, Any]:
    """Returns a case's batch as its trainer of TRL's takes it."""
    if case.kind in ("group", "rloo"):
        return group_inputs(samples)
    if case.kind == "pair":
        ordered = sorted(samples, key=lambda s: (-s.reward, s.group_id))  # every preferred one, then every other one
        return whole_rows(ordered)
    rows = whole_rows(samples)
    mask = rows.pop("completion_mask")
    return {**rows, "labels": rows["input_ids"].masked_fill(mask == 0, -100)}


def differ(ours: tuple[float, list[Tensor]], theirs: tuple[float, list[Tensor]], case: Case) -> tuple[float, float]:
    """Returns the differences of loss and gradient, relative to their loss and to their largest gradient."""
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
        moved = move(folder, Path(name) / "moved")
        policy, reference = (
            PolicyConfig(model=str(f), tokenizer=str(folder / TOKENIZER), batch=BatchConfig(steps_per_job=1))
            for f in (folder, moved)
        )
        with Engine.load(policy, seed=0, device="cpu") as engine, Engine.load(reference, seed=0, device="cpu") as other:
            print(f"{'loss':32s} {'policy':6s}  {'of the loss':>12s} {'of the gradient':>16s}   (relative differences)")
            for case in cases():
                trainers = {"on": make_trainer(case, folder, folder)}
                if "off" in case.policies:
                    trainers["off"] = make_trainer(case, folder, moved) if case.kind == "pair" else trainers["on"]
                for where in case.policies:
                    samples = case.ours.build_samples(make_groups())
                    fill(engine, other, samples, off_policy=where == "off")
                    theirs = loss_theirs(trainers[where], inputs_of(case, samples))
                    loss, gradient = differ(update_ours(engine, samples, case.ours), theirs, case)
                    worst = max(worst, loss, gradient)
                    told = f"{loss:12.1e}" if case.compares_loss else f"{'-':>12s}"
                    print(f"{case.name:32s} {where:6s}  {told} {gradient:16.1e}", flush=True)
    print(f"largest: {worst:.1e}, allowed {TOLERANCE:.0e}")
    sys.exit(int(not worst <= TOLERANCE))


def move(folder: Path, target: Path) -> Path:
    """Writes the model with weights moved by noise: the reference of what is off policy."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(target)
    return target


if __name__ == "__main__":
    main()
