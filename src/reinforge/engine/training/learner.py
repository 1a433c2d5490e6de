"""Optimizer steps: samples and a named loss in, moved weights and a report out."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise

import torch
from torch import Tensor

from reinforge.config.schema import PolicyConfig
from reinforge.crash import crash_point
from reinforge.engine.losses.base import Loss, LossOutput, find_loss, output_of
from reinforge.engine.memory import is_out_of_memory
from reinforge.engine.model.activation_checkpointing import layers_of, recomputed
from reinforge.engine.model.causal_model import CausalModel
from reinforge.engine.model.masks import AttentionMasks
from reinforge.engine.model.value_head import PREFIX, ValueHead
from reinforge.engine.token_batch import TokenBatch
from reinforge.engine.training.collate import collate, units_of
from reinforge.engine.training.logprobs import token_logprobs
from reinforge.engine.training.micro_batches import cut
from reinforge.engine.training.optimizer_step import Mover, refused
from reinforge.errors import EngineError
from reinforge.types.sample import LossSpec, TrainingSample, UpdateReport, are_finite
from reinforge.types.seeding import stable_random

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Progress:
    """Which part of the run a job is.

    Attributes:
        start, end: Shares of the run done before and after the job, in [0, 1].
        epoch: The epoch, from 0; orders of samples derive from it.
    """

    start: float
    end: float
    epoch: int = 0


@dataclass(slots=True)
class Sums:
    """Sums over the trained tokens of steps, or over their samples."""

    totals: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, metrics: Mapping[str, Tensor], mask_BT: Tensor) -> None:
        """Adds the values of one micro-batch: `[B, T]`, read where the mask is True, `[B]`, or one number."""
        for name, values in metrics.items():
            read = values.detach()[mask_BT] if values.ndim == 2 else values.detach()
            self.totals[name] = self.totals.get(name, 0.0) + read.sum().item()
            self.counts[name] = self.counts.get(name, 0) + read.numel()

    def means(self) -> dict[str, float]:
        """Returns the mean of each metric over the tokens or samples that have it."""
        return {name: total / self.counts[name] for name, total in self.totals.items()}


class Learner(Mover):
    """Makes the gradients of one model and moves it by them.

    Args:
        model: The model.
        config: Optimizer, schedule and batches.
        seed: Orders of samples derive from it.
        masks: For prefixes that siblings share; None: each sample is computed whole.
        critic: The value head, where the algorithm has one.

    Attributes:
        micro_batch_tokens: Tokens computed at once; fewer than configured after memory ran out.
        stopping: Set from any thread to end an update at the next micro-batch, with an error.
    """

    def __init__(
        self,
        model: CausalModel,
        config: PolicyConfig,
        seed: int,
        masks: AttentionMasks | None = None,
        critic: ValueHead | None = None,
    ):
        parameters = model.trained_parameters
        if critic is not None:
            parameters |= {f"{PREFIX}{name}": p for name, p in critic.named_parameters()}
        super().__init__(parameters, config.optimizer, config.schedule, config.critic)
        self.model, self.config, self.seed = model, config, seed
        self.stopping = threading.Event()
        self.micro_batch_tokens = config.batch.micro_batch_tokens
        self.masks, self.critic = masks, critic
        self._recomputed = layers_of(model) if config.activation_checkpointing else None

    def update(self, samples: Sequence[TrainingSample], spec: LossSpec, progress: Progress) -> UpdateReport:
        """Trains on the samples and says what that did.

        A step whose credit, log-probs, loss or gradient is not finite is refused: the weights stay as they are, bit
        by bit.

        Args:
            samples: The job's samples; those without trained tokens or weight are left out.
            spec: The loss.
            progress: Which part of the run this is; it moves the learning rate.
        """
        loss = partial(find_loss(spec), **spec.params)
        steps = self.plan(samples, progress.epoch)
        entropy_grad = bool(spec.params.get("entropy_coef"))
        made: list[dict[str, float]] = []
        trained: set[int] = set()
        skipped: set[int] = set()
        skipped_steps: list[int] = []
        for i, indices in enumerate(steps):
            share = progress.start + (progress.end - progress.start) * i / len(steps)
            metrics = self.step(
                [samples[index] for index in indices], loss, share, entropy_grad=entropy_grad, compare=not made
            )
            if metrics is None:
                skipped.update(indices)
                skipped_steps.append(i)
            else:
                made.append(metrics)
                trained.update(indices)
        return UpdateReport(
            num_updates=len(made),
            num_skipped_steps=len(steps) - len(made),
            num_samples=len(trained),
            num_tokens=sum(samples[index].num_trained for index in trained),
            metrics=_means(made),
            skipped_samples=sorted(skipped),
            skipped_steps=skipped_steps,
        )

    def plan(self, samples: Sequence[TrainingSample], epoch: int) -> list[list[int]]:
        """Returns the samples' indices by optimizer step, shuffled anew in each pass; a pair is never parted.

        Example: 5 samples, batch_size 2 -> 3 steps of 2, 2 and 1 samples.
        """
        settings = self.config.batch
        usable = [i for i, sample in enumerate(samples) if sample.num_trained and sample.weight > 0]
        units = [[usable[i] for i in unit] for unit in units_of([samples[i] for i in usable])]
        num_steps = settings.steps_per_job or math.ceil(len(usable) / settings.batch_size)
        num_steps = min(num_steps, len(units))
        steps = []
        for number in range(settings.passes):
            order = units.copy()
            stable_random(self.seed, "shuffle", epoch, number).shuffle(order)
            bounds = [round(step * len(order) / num_steps) for step in range(num_steps + 1)] if num_steps else []
            steps += [sorted(chain(*order[a:b])) for a, b in pairwise(bounds)]
        return steps

    def step(
        self,
        samples: Sequence[TrainingSample],
        loss: Loss,
        progress: float,
        *,
        entropy_grad: bool = False,
        compare: bool = False,
    ) -> dict[str, float] | None:
        """Makes one optimizer step on all of the samples; returns its metrics, or None if it was refused.

        Loss of the step: sum_t w_s l_t / sum_t w_s over all trained tokens t, w_s the weight of their sample; where
        the loss is one number a sample, sum_s w_s l_s / sum_s w_s; where it is one number, that of each micro-batch
        counts by the weights of its samples.

        Args:
            samples: With trained tokens, and whole pairs; how they are cut does not change the step.
            loss: `loss(batch, logprobs_BT)` as `find_loss` returns it, its parameters bound, or any other.
            progress: Share of the run that is done; it moves the learning rate.
            entropy_grad: The loss reads `batch.entropies` with gradient.
            compare: The weights are those that drew the samples: say how far sampler and learner are apart.
        """
        while True:
            try:
                with nullcontext() if self._recomputed is None else recomputed(self._recomputed):
                    return self._try_step(samples, loss, progress, entropy_grad=entropy_grad, compare=compare)
            except (MemoryError, RuntimeError) as cause:
                if not is_out_of_memory(cause) or not self._halve(samples):
                    raise
            finally:
                self.clear_gradients()

    def _halve(self, samples: Sequence[TrainingSample]) -> bool:
        """Halves the micro-batches from now on, which changes no gradient; False: they hold one sample each already."""
        batches = self._micro_batches(samples)
        if max(map(len, batches)) == 1:
            return False
        while self._micro_batches(samples) == batches:
            self.micro_batch_tokens //= 2
        logger.warning("memory ran out: micro-batches of %d tokens from now on", self.micro_batch_tokens)
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        return True

    def _micro_batches(self, samples: Sequence[TrainingSample]) -> list[list[int]]:
        return cut(samples, self.micro_batch_tokens, share=self.masks is not None)

    def _try_step(
        self, samples: Sequence[TrainingSample], loss: Loss, progress: float, *, entropy_grad: bool, compare: bool
    ) -> dict[str, float] | None:
        if not are_finite(samples):
            refused("credit or log-probs that a sample brought are")
            return None
        token_weight = sum(sample.weight * sample.num_trained for sample in samples)
        sample_weight = sum(sample.weight for sample in samples)
        step_loss, sums = 0.0, Sums()
        for indices in self._micro_batches(samples):
            if self.stopping.is_set():
                raise EngineError("the engine is closed")
            batch = collate([samples[i] for i in indices], self.model.device)
            logprobs_BT, batch.entropies = token_logprobs(
                self.model, batch, masks=self.masks, entropy_grad=entropy_grad, critic=self.critic
            )
            output = output_of(loss(batch, logprobs_BT))
            part = share_of(output, batch, token_weight, sample_weight)
            if not torch.isfinite(part) or not torch.isfinite(logprobs_BT).all():
                refused("the loss or the log-probs are")
                return None
            part.backward()
            self.take_gradients()
            crash_point("step.after_backward")
            step_loss += part.item()
            sums.add({"entropy": batch.entropies, **output.metrics}, batch.loss_mask)
            if compare:
                sums.add(*_mismatch(batch, logprobs_BT.detach()))
        moved = self.move(progress)
        return None if moved is None else {"loss": step_loss, **moved, **sums.means()}


def share_of(output: LossOutput, batch: TokenBatch, token_weight: float, sample_weight: float) -> Tensor:
    """Returns what a micro-batch adds to the loss of its step.

    Raises:
        EngineError: The loss has another shape than a loss has.
    """
    loss = output.loss
    if loss.ndim == 0:
        return loss * batch.weights.sum() / sample_weight
    if loss.shape == batch.weights.shape:
        return (loss * batch.weights).sum() / sample_weight
    if loss.shape == batch.loss_mask.shape:
        weights_BT = batch.weights[:, None] * batch.loss_mask / token_weight
        return (torch.where(batch.loss_mask, loss, 0.0) * weights_BT).sum()
    shapes = f"[B, T] = {list(batch.loss_mask.shape)}, [B], or one number"
    raise EngineError(f"the loss has the shape {list(loss.shape)}; it has to be {shapes}")


def _mismatch(batch: TokenBatch, logprobs_BT: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Returns how far the learner is from the sampler on tokens that the sampler drew, and which tokens those are.

    With d = log p_learner - log p_sampler: |d|, and exp(d) - 1 - d, whose mean estimates KL(sampler, learner).
    """
    drawn_BT = batch.loss_mask & ~batch.sampling_logprobs.isnan()
    if not drawn_BT.any():
        return {}, drawn_BT
    d_BT = torch.where(drawn_BT, logprobs_BT - batch.sampling_logprobs, 0.0)
    return {"mismatch": d_BT.abs(), "mismatch_kl": d_BT.exp() - 1 - d_BT}, drawn_BT


def _means(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the mean of each metric over the steps that have it."""
    found: dict[str, list[float]] = {}
    for metrics in steps:
        for name, value in metrics.items():
            found.setdefault(name, []).append(value)
    return {name: math.fsum(values) / len(values) for name, values in found.items()}
