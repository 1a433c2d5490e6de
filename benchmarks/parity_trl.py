"""Our losses against TRL's own: the same model folder, tokens, advantages and log-probs, equal settings.

    python benchmarks/parity_trl.py

reinforge runs a whole `Engine.update` (samples with shared prompts, prefix sharing, the learner's weights); TRL runs
its trainer's `compute_loss` and `backward` on padded rows. The script prints the relative differences of loss and
gradient, on policy (old or reference log-probs are the model's own) and off policy (with added noise, so that clipping
is active). It exits with 1 if one is above 1e-4.

The same settings have different names: a mean over sequences is TRL's `grpo`, over tokens `bnpo` and `dapo`, a sum
divided by a constant `dr_grpo`; `dual_clip` is `delta`. CISPO's `epsilon_high` is the limit itself, ours is added to 1.
TRL's IPO averages over tokens (`length_normalized`); its factor on the KL (`use_bias_correction_kl`) is off. TRL's RLOO
clips the ratio of sequences, ours that of tokens divided by `constant_length`; the two are equal on policy up to that
factor, so they are compared there. TRL's ORPO also imitates the prompt; what is compared is the difference that the
odds ratio makes. Its KTO gets our mismatched replies, since it chooses them when it reads the dataset.
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
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from benchmarks.workload import TOKENIZER, Shape, make_model
from reinforge.algorithms import cispo, dapo, dpo, dr_grpo, gspo, ipo, kto, orpo, rloo, sapo, sft, simpo
from reinforge.algorithms import grpo as grpo_
from reinforge.algorithms.samples import fill_trained_tokens
from reinforge.config.policy import BatchConfig, PolicyConfig
from reinforge.engine import Engine
from reinforge.interfaces import Algorithm
from reinforge.types.request import TokenLogprobs
from reinforge.types.sample import LossSpec, TrainingSample, add_mismatched_samples
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
        kind: TRL's trainer: `group`, `rloo`, `pair`, `simpo`, `orpo`, `kto` or `sft`.
        theirs: TRL's settings.
        scale: Factor on our loss and gradient.
        policies: Compare `on` policy, `off` policy, or both.
        compares_loss: False: compare the gradient only.
        contrast: The names of a parameter, ours and TRL's: compare the difference to 0; None: the whole loss.
    """

    name: str
    ours: Algorithm
    kind: str
    theirs: dict[str, Any] = field(default_factory=dict)
    scale: float = 1.0
    policies: tuple[str, ...] = ("on", "off")
    compares_loss: bool = True
    contrast: tuple[str, str] | None = None


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
            "DPO, length-normalized",
            dpo.DPO(dpo.DPOConfig(beta=2.0, length_normalized=True)),
            "pair",
            {"loss_type": ["sigmoid_norm"], "beta": 2.0},
        ),
        Case(
            "IPO, length-normalized",
            ipo.IPO(ipo.IPOConfig(beta=0.1, length_normalized=True)),
            "pair",
            {"loss_type": ["ipo"], "beta": 0.1},
        ),
        Case(
            "SAPO", sapo.SAPO(sapo.SAPOConfig(tau_neg=1.3)), "group", {"loss_type": "sapo", "sapo_temperature_neg": 1.3}
        ),
        Case(
            "SimPO",
            simpo.SimPO(simpo.SimPOConfig(beta=2.0, gamma=1.0)),
            "simpo",
            {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0},
            policies=("on",),
        ),
        Case(
            "ORPO (odds ratio)",
            orpo.ORPO(orpo.ORPOConfig(odds_ratio_coef=0.25)),
            "orpo",
            {"beta": 0.25},
            policies=("on",),
            contrast=("odds_ratio_coef", "beta"),
        ),
        Case(
            "KTO",
            kto.KTO(kto.KTOConfig(beta=0.2, desirable_weight=1.2, undesirable_weight=0.8, threshold=1.5)),
            "kto",
            {"beta": 0.2, "desirable_weight": 1.2, "undesirable_weight": 0.8},
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


def fill_samples(
    engine: Engine, reference: Engine, case: Case, samples: Sequence[TrainingSample], *, off_policy: bool
) -> None:
    """Sets advantages (the same for both sides), and old and reference log-probs."""
    rng = np.random.default_rng(1)
    scored = add_mismatched_samples(samples)
    for sample, ref in zip(scored, (reference if off_policy else engine).logprobs(scored), strict=True):
        sample.ref_logprobs = ref
    for sample, own in zip(samples, engine.logprobs(samples), strict=True):
        noise = rng.normal(0.0, NOISE, len(sample)).astype(np.float32) if off_policy else np.float32(0.0)
        sample.old_logprobs = np.where(sample.loss_mask, own + noise, np.float32(0.0)).astype(np.float32)
        sample.sampling_logprobs = sample.old_logprobs  # TRL has no importance weights against another sampler here
        sample.advantages = fill_trained_tokens(sample, float(rng.normal()))
    if case.kind == "kto":  # its advantages are labels
        for sample, credit in zip(samples, case.ours.credit(samples), strict=True):
            sample.advantages = credit


def compute_our_gradient(
    engine: Engine, samples: Sequence[TrainingSample], loss: LossSpec
) -> tuple[float, list[Tensor]]:
    """Returns the loss and the gradient of one step, which is rolled back."""
    parameters = dict(engine.model.module.named_parameters())
    gradients = {name: torch.zeros_like(p) for name, p in parameters.items()}
    hooks = [p.register_hook(gradients[name].add_) for name, p in parameters.items()]  # before clipping
    engine.begin_job()
    try:
        report = engine.update(samples, loss, progress_start=0.0, progress_end=1.0)
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


def build_pair_inputs(samples: Sequence[TrainingSample]) -> dict[str, Tensor]:
    """Returns a batch for TRL's SimPO and ORPO: preferred and other rows apart, of one length."""
    rows = pad_whole_rows([*split_pairs(samples)[0], *split_pairs(samples)[1]])
    rows["labels"] = rows["input_ids"].masked_fill(rows.pop("completion_mask") == 0, -100)
    half = len(samples) // 2
    return {
        f"{name}_{key}": value[part]
        for name, part in (("chosen", slice(half)), ("rejected", slice(half, None)))
        for key, value in rows.items()
    }


def split_pairs(samples: Sequence[TrainingSample]) -> list[list[TrainingSample]]:
    """Returns the preferred samples and the others, in the same order of groups."""
    ordered = sorted(samples, key=lambda s: (-s.reward, s.group_id))
    return [ordered[: len(ordered) // 2], ordered[len(ordered) // 2 :]]


def build_kto_inputs(samples: Sequence[TrainingSample]) -> dict[str, Tensor]:
    """Returns a batch for TRL's KTO, with reference log-probs and mismatched rows."""
    mismatched = add_mismatched_samples(samples)[len(samples) :]
    sums = [[torch.tensor(s.ref_logprobs[s.loss_mask].sum()) for s in rows] for rows in (samples, mismatched)]
    return {
        **pad_whole_rows(samples),
        **{f"KL_{key}": value for key, value in pad_whole_rows(mismatched).items()},
        "label": torch.tensor([sample.reward > 0 for sample in samples]),
        "ref_logps": torch.stack(sums[0]),
        "ref_KL_logps": torch.stack(sums[1]),
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
    if case.kind in ("simpo", "orpo"):
        trainer, config = (CPOTrainer, CPOConfig) if case.kind == "simpo" else (ORPOTrainer, ORPOConfig)
        rows = Dataset.from_dict({"prompt": ["w4 w5"], "chosen": ["w6"], "rejected": ["w7"]})
        return trainer(args=config(**COMMON, **case.theirs), train_dataset=rows, **shared)
    if case.kind == "kto":
        rows = Dataset.from_dict({"prompt": ["w4 w5"] * 2, "completion": ["w6", "w7"], "label": [True, False]})
        trainer = KTOTrainer(args=KTOConfig(**COMMON, **case.theirs), train_dataset=rows, **shared)
        trainer.precompute_ref_logps = True  # they come with the batch
        return trainer
    rows = Dataset.from_dict({"prompt": ["w4 w5"], "completion": ["w6"]})
    return SFTTrainer(args=SFTConfig(**COMMON, **case.theirs), train_dataset=rows, **shared)


def build_inputs(case: Case, samples: Sequence[TrainingSample]) -> dict[str, Any]:
    """Returns a case's batch for TRL's trainer."""
    if case.kind in ("group", "rloo"):
        return build_group_inputs(samples)
    if case.kind == "pair":
        return pad_whole_rows([*split_pairs(samples)[0], *split_pairs(samples)[1]])
    if case.kind in ("simpo", "orpo"):
        return build_pair_inputs(samples)
    if case.kind == "kto":
        return build_kto_inputs(samples)
    rows = pad_whole_rows(samples)
    mask = rows.pop("completion_mask")
    return {**rows, "labels": rows["input_ids"].masked_fill(mask == 0, -100)}


def compute_both(
    engine: Engine, trainer: Any, case: Case, samples: Sequence[TrainingSample]
) -> list[tuple[float, list[Tensor]]]:
    """Returns loss and gradient of both sides, ours first; with a contrast, the difference that it makes."""
    inputs, loss = build_inputs(case, samples), case.ours.loss
    both = [compute_our_gradient(engine, samples, loss), compute_their_gradient(trainer, inputs)]
    if case.contrast is None:
        return both
    ours, theirs = case.contrast
    setattr(trainer, theirs, 0.0)
    without = LossSpec(loss.name, {**loss.params, ours: 0.0})
    base = [compute_our_gradient(engine, samples, without), compute_their_gradient(trainer, inputs)]
    return [
        (whole[0] - rest[0], [a - b for a, b in zip(whole[1], rest[1], strict=True)])
        for whole, rest in zip(both, base, strict=True)
    ]


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
                    fill_samples(engine, other, case, samples, off_policy=where == "off")
                    ours, theirs = compute_both(engine, trainers[where], case, samples)
                    loss, gradient = compute_differences(ours, theirs, case)
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
