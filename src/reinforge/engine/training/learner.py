"""Optimizer steps: takes samples and a loss, updates the weights and returns a report."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from reinforge.config.policy import PolicyConfig
from reinforge.crash import crash_point
from reinforge.engine.devices import Destination, free_cached_memory, is_out_of_memory
from reinforge.engine.losses.base import Loss, as_loss_output, find_loss
from reinforge.engine.model.attention import AttentionMasks
from reinforge.engine.model.causal_model import CausalModel, checkpoint_activations, find_checkpointable_layers
from reinforge.engine.model.heads import ValueHead
from reinforge.engine.token_batch import TokenBatch
from reinforge.engine.training.collate import collate
from reinforge.engine.training.logprobs import sample_logprobs, token_logprobs
from reinforge.engine.training.micro_batch_loss import MetricSums, compute_mismatch, scale_loss, set_deferred_logprobs
from reinforge.engine.training.micro_batches import choose_micro_batch_tokens, make_micro_batches, plan_steps
from reinforge.engine.training.scheduled_optimizer import log_skipped_step
from reinforge.engine.training.sharded_optimizer import ShardedOptimizer
from reinforge.errors import EngineError
from reinforge.types.sample import FloatArray, GradientReport, LossSpec, TrainingSample, UpdateReport, are_finite

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class JobProgress:
    """The part of the run that a job covers."""

    start: float  # share of the run done before the job, in [0, 1]
    end: float  # share of the run done after the job
    epoch: int = 0  # the epoch, from 0; it seeds the order of samples


@dataclass(frozen=True, slots=True)
class GradientOptions:
    """What a forward and backward pass over samples does besides summing gradients."""

    entropy_grad: bool = False  # the loss reads `batch.entropies` with gradient
    measure_mismatch: bool = False  # also sum how far sampler and learner differ
    backward: bool = True  # False: compute the loss, and no gradient
    sums_tokens: bool = False  # the caller undoes the mean over tokens, so the loss must give one number per token
    kl_baseline: float | None = None  # KTO's baseline of the step; None: it has none
    observe: Callable[[Sequence[int], Tensor], None] | None = None
    """Receives the indices of each micro-batch's samples and their log-probs, `[B, T]`; if memory runs out, samples
    come again."""


class Learner(ShardedOptimizer):
    """Computes gradients of one model and makes optimizer steps with them.

    Args:
        model: The model.
        config: Optimizer, schedule and batches.
        seed: Seed of the order of samples.
        masks: Attention masks for shared prefixes; None: each sample is computed whole.
        critic: The value head, if the algorithm has one.
        waits: The model's weights come later, by `shard` or `use_parameters`.

    Attributes:
        stage: The stage of a pipeline that it trains; None: no stage has begun.
        stage_version: Version of the weights that the stage began with; None: no stage has begun.
        micro_batch_tokens: Tokens per micro-batch; halved when memory runs out.
        stopping: Set from any thread to stop an update at the next micro-batch, with an error.
        share_done: How much of the job is done, in [0, 1], by its optimizer steps.
        take_turns: Called after each micro-batch, so that a sampler in the same thread can work; None: nothing is.
    """

    def __init__(
        self,
        model: CausalModel,
        config: PolicyConfig,
        seed: int,
        masks: AttentionMasks | None = None,
        critic: ValueHead | None = None,
        *,
        waits: bool = False,
    ):
        super().__init__(model, config, critic, waits=waits)
        self.config, self.seed = config, seed
        self.stage: str | None = None
        self.stage_version: int | None = None
        self.stopping = threading.Event()
        self.share_done = 0.0
        self.take_turns: Callable[[], None] | None = None
        self.micro_batch_tokens = choose_micro_batch_tokens(config.batch.micro_batch_tokens, model)
        self.masks = masks
        self._checkpointed_layers = find_checkpointable_layers(model) if config.activation_checkpointing else None

    def begin_stage(self, stage: str | None, config: PolicyConfig, version: int | None) -> None:
        """Begins a stage of a pipeline: an optimizer without state, and the stage's schedule and batches.

        Args:
            stage: Its name; None: the run has not begun its first stage.
        """
        self.stage, self.config, self.stage_version = stage, config, version
        self.micro_batch_tokens = choose_micro_batch_tokens(config.batch.micro_batch_tokens, self.model)
        self.configure(config.optimizer, config.schedule, config.critic)

    def update(self, samples: Sequence[TrainingSample], spec: LossSpec, progress: JobProgress) -> UpdateReport:
        """Trains on the samples and returns a report.

        A step whose credit, log-probs, loss or gradient is not finite is skipped: it changes no bit of the weights.

        Args:
            samples: The job's samples; those without trained tokens or weight are left out.
            progress: The part of the run that the job covers; it sets the learning rate.
        """
        loss = partial(find_loss(spec), **spec.params)
        steps = self.plan_steps(samples, progress.epoch)
        entropy_grad = bool(spec.params.get("entropy_coef"))
        made: list[dict[str, float]] = []
        trained: set[int] = set()
        skipped: set[int] = set()
        skipped_steps: list[int] = []
        with self.divide_weights():
            for i, indices in enumerate(steps):
                self.share_done = i / len(steps)
                share = progress.start + (progress.end - progress.start) * i / len(steps)
                if not made:  # a skipped step has changed no weights, and has not scored all of its samples
                    self._score_later_steps(samples, steps[i:])
                chosen = [samples[index] for index in indices]
                metrics = self.step(chosen, loss, share, entropy_grad=entropy_grad, measure_mismatch=not made)
                if metrics is None:
                    skipped.update(indices)
                    skipped_steps.append(i)
                else:
                    made.append(metrics)
                    trained.update(indices)
        self.share_done = 1.0
        return UpdateReport(
            num_updates=len(made),
            num_skipped_steps=len(steps) - len(made),
            num_samples=len(trained),
            num_tokens=sum(samples[index].num_trained for index in trained),
            metrics=_average(made),
            skipped_samples=sorted(skipped),
            skipped_steps=skipped_steps,
        )

    def _score_later_steps(self, samples: Sequence[TrainingSample], steps: Sequence[Sequence[int]]) -> None:
        """Sets deferred log-probs that the first of the steps does not compute, before a step changes the weights."""
        first = set(steps[0]) if steps else set()
        later = [samples[i] for i in dict.fromkeys(chain.from_iterable(steps[1:])) if i not in first]
        later = [sample for sample in later if sample.defers_old_logprobs and sample.old_logprobs is None]
        if later:
            for sample, logprobs in zip(later, self._compute_logprobs_of(later), strict=True):
                sample.old_logprobs = logprobs

    def _compute_logprobs_of(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Returns log-probs under the current weights, `[T]` each; where these are sharded, all processes call it."""
        if self.sharded is not None:
            return self.sharded.score(samples, self.micro_batch_tokens)
        return sample_logprobs(self.model, samples, self.micro_batch_tokens, self.masks, self.take_turns)

    def plan_steps(self, samples: Sequence[TrainingSample], epoch: int) -> list[list[int]]:
        return plan_steps(samples, self.config.batch, self.seed, epoch)

    def step(
        self,
        samples: Sequence[TrainingSample],
        loss: Loss,
        progress: float,
        *,
        entropy_grad: bool = False,
        measure_mismatch: bool = False,
    ) -> dict[str, float] | None:
        """Makes one optimizer step on all of the samples; returns its metrics, or None if it was skipped.

        Loss of the step: sum_t w_s l_t / sum_t w_s over all trained tokens t, w_s the weight of their sample. If the
        loss returns one number per sample: sum_s w_s l_s / sum_s w_s. If it returns a single number, each
        micro-batch's counts by the weights of its samples.

        Args:
            samples: Samples with trained tokens, and whole pairs; how they are split into micro-batches does not
                change the step.
            loss: `loss(batch, logprobs_BT)`, its parameters bound.
            progress: Share of the run that is done, in [0, 1]; it sets the learning rate.
            entropy_grad: The loss reads `batch.entropies` with gradient.
            measure_mismatch: The samples come from the current weights: also report how far sampler and learner differ.
        """
        options = GradientOptions(entropy_grad, measure_mismatch)
        try:
            with self.divide_weights():
                sums = self._compute_step(samples, loss, options)
                if sums is None:
                    return None
                if self.peers is not None:
                    self.sum_gradients(self.peers.add, only_critic=self.sharded is not None)
                metrics = self.optimizer_step(progress)
                return None if metrics is None else {"loss": sums.loss, **metrics, **sums.means()}
        finally:
            self.clear_gradients()

    def _compute_step(
        self, samples: Sequence[TrainingSample], loss: Loss, options: GradientOptions
    ) -> MetricSums | None:
        """Accumulates the gradients of a step, of which each process computes its part; returns the sums over all."""
        if self.peers is None:
            options = replace(options, kl_baseline=self._estimate_kl(samples, samples))
            return self._compute_gradients(samples, samples, loss, options)
        own = self.peers.choose_share(samples)
        with self.peers.report_failure():
            options = replace(options, kl_baseline=self._estimate_kl(samples, own))
            sums = self._compute_gradients(samples, own, loss, options)
        return self.peers.combine(sums)

    def _estimate_kl(self, samples: Sequence[TrainingSample], own: Sequence[TrainingSample]) -> float | None:
        """Returns KTO's baseline of a step; None: no sample needs it.

        Args:
            own: Those that this process computes.
        """
        if all(sample.mismatched is None for sample in samples) or not are_finite(samples):
            return None

        from reinforge.engine.training.kl_baseline import combine_kl, sum_kl  # for KTO alone

        part = self._retry(lambda: sum_kl(own, self._compute_logprobs_of), own)
        if self.peers is None:
            return combine_kl([part])
        found = self.peers.collect({"total": part[0], "weights": part[1]})
        return combine_kl([(each["total"], each["weights"]) for each in found])

    def accumulate(
        self, samples: Sequence[TrainingSample], loss: Loss, *, backward: bool = True
    ) -> GradientReport | None:
        """Adds the gradient of a loss to those accumulated so far, for a later `apply`; returns its sums.

        The loss is sum_t l_t over all trained tokens t: a sum, not a mean, so it does not matter how samples are spread
        over calls. If a number is not finite, or the call fails, what was accumulated before is unchanged.

        Args:
            loss: `loss(batch, logprobs_BT)`, its parameters bound; one number per token.

        Returns:
            Loss and log-probs; None if a number is not finite.
        """
        if self.peers is not None:
            raise EngineError("accumulate: gradients of several calls add up in one process only")
        rows: list[FloatArray] = [np.zeros(0, np.float32)] * len(samples)

        def observe(indices: Sequence[int], logprobs_BT: Tensor) -> None:
            for i, row in zip(indices, logprobs_BT.cpu().numpy(), strict=True):
                rows[i] = row[: len(samples[i])].copy()

        num_tokens = sum(sample.num_trained for sample in samples)
        earlier = self.take_out_gradients()
        try:
            options = GradientOptions(backward=backward, sums_tokens=True, observe=observe)
            sums = self._compute_gradients(samples, samples, loss, options)
            if sums is None:
                self.clear_gradients()
                return None
            self.scale_gradients(num_tokens)
        except BaseException:
            self.clear_gradients()
            raise
        finally:
            self.add_gradients(earlier)
        return GradientReport(sums.loss * num_tokens, rows, sums.means())

    def _compute_gradients(
        self, samples: Sequence[TrainingSample], own: Sequence[TrainingSample], loss: Loss, options: GradientOptions
    ) -> MetricSums | None:
        """Accumulates the gradients of this process's samples, in smaller micro-batches if memory runs out.

        Returns:
            The sums of the metrics; None if a number is not finite.
        """
        layers = self._checkpointed_layers
        with nullcontext() if layers is None else checkpoint_activations(layers):
            return self._retry(lambda: self._try_gradients(samples, own, loss, options), own)

    def _retry(self, compute: Callable[[], T], samples: Sequence[TrainingSample]) -> T:
        """Returns what `compute` returns; if memory runs out, tries again with smaller micro-batches of the samples.

        Shards of a model are computed once: the other processes would not make the passes again.
        """
        while True:
            try:
                return compute()
            except (MemoryError, RuntimeError) as cause:
                self.clear_gradients()
                is_over = self.sharded is not None or not is_out_of_memory(cause)
                if is_over or not self._halve_micro_batches(samples):
                    raise

    def _halve_micro_batches(self, samples: Sequence[TrainingSample]) -> bool:
        """Halves the micro-batches, which changes no gradient; False if each holds a single sample already."""
        batches = self._micro_batches(samples)
        if max(map(len, batches), default=1) == 1:
            return False
        while self._micro_batches(samples) == batches:
            self.micro_batch_tokens //= 2
        logger.warning("out of memory: reducing micro-batches to %d tokens", self.micro_batch_tokens)
        free_cached_memory(self.model.device)
        return True

    def _micro_batches(self, samples: Sequence[TrainingSample]) -> list[list[int]]:
        return make_micro_batches(
            samples,
            self.micro_batch_tokens,
            share=self.masks is not None,
            share_stems=self.masks is not None and self.masks.shares_stems,
        )

    def _try_gradients(
        self, samples: Sequence[TrainingSample], own: Sequence[TrainingSample], loss: Loss, options: GradientOptions
    ) -> MetricSums | None:
        if not are_finite(samples):
            log_skipped_step("the advantages or the log-probs of a sample are")
            return None
        token_weight = sum(sample.weight * sample.num_trained for sample in samples)
        sample_weight = sum(sample.weight for sample in samples)
        sums, is_skipped = MetricSums(), False
        if options.kl_baseline is not None and not math.isfinite(options.kl_baseline):
            log_skipped_step("the KL baseline is")
            return None
        failure: Exception | None = None
        for indices in self._list_passes(own):
            if self.stopping.is_set():
                with nullcontext() if self.sharded is None else self.sharded.require_end():  # others are in a pass
                    raise EngineError("the engine is closed")
            if indices is None or failure is not None:
                self.help_others()
                continue
            logprobs_BT: Tensor | None = None
            try:
                batch = collate([own[i] for i in indices], self.model.device)
                with torch.set_grad_enabled(options.backward):
                    logprobs_BT, entropies_BT = self._compute_logprobs(batch, options)
                    batch.entropies = entropies_BT
                    set_deferred_logprobs([own[i] for i in indices], batch, logprobs_BT)
                    batch.kl_baseline = options.kl_baseline
                    output = as_loss_output(loss(batch, logprobs_BT))
                    if options.sums_tokens and output.loss.shape != batch.loss_mask.shape:
                        raise EngineError("accumulate: the loss must give one number per token, to be summed")
                    part = scale_loss(output, batch, token_weight, sample_weight)
            except Exception as cause:
                if self.peers is None or self.sharded is None or self.peers.is_broken:
                    raise
                failure = cause  # the others wait for the passes that are left, and for the gradients of this one
                self.help_others(logprobs_BT)
                continue
            if not torch.isfinite(part) or not torch.isfinite(logprobs_BT).all():
                log_skipped_step("the loss or the log-probs are")
                is_skipped = True
                if self.sharded is None:
                    return None  # otherwise the others wait for the passes that are left
            if options.observe is not None:
                options.observe(indices, logprobs_BT.detach())
            if options.backward:
                with nullcontext() if self.sharded is None else self.sharded.require_end():
                    part.backward()
                self.take_gradients()
            crash_point("step.after_backward")
            sums.loss += part.item()
            sums.add({"entropy": entropies_BT, **output.metrics}, batch.loss_mask)
            if options.measure_mismatch:
                sums.add(*compute_mismatch(batch, logprobs_BT.detach(), [own[i].is_stale for i in indices]))
            if self.take_turns is not None:
                self.take_turns()
        if failure is not None:
            raise failure
        return None if is_skipped else sums

    def _compute_logprobs(self, batch: TokenBatch, options: GradientOptions) -> tuple[Tensor, Tensor]:
        """Returns log-probs and entropies of a micro-batch, `[B, T]` each, and sets its values."""
        if self.sharded is not None:
            return self.sharded.compute(batch, entropy_grad=options.entropy_grad, critic=self.critic)
        return token_logprobs(
            self.model, batch, masks=self.masks, entropy_grad=options.entropy_grad, critic=self.critic
        )

    def shard(self, *, stays_divided: bool = False, goes_to: Destination | None = None) -> None:
        """Divides the model among the peers; from now on each sample is computed whole."""
        super().shard(stays_divided=stays_divided, goes_to=goes_to)
        self.masks = None
        if self._checkpointed_layers is not None and self.sharded is not None:
            self._checkpointed_layers = find_checkpointable_layers(self.sharded.copied)

    def _list_passes(self, samples: Sequence[TrainingSample]) -> list[list[int] | None]:
        batches = self._micro_batches(samples)
        return [*batches, *[None] * (self.count_passes(len(batches)) - len(batches))]


def _average(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    by_name: dict[str, list[float]] = {}
    for metrics in steps:
        for name, value in metrics.items():
            by_name.setdefault(name, []).append(value)
    return {name: math.fsum(values) / len(values) for name, values in by_name.items()}
