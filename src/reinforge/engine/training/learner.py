"""Optimizer steps: takes samples and a loss, updates the weights and returns a report."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise

import torch
from torch import Tensor

from reinforge.config.schema import PolicyConfig
from reinforge.crash import crash_point
from reinforge.engine.losses.base import Loss, LossOutput, as_loss_output, find_loss
from reinforge.engine.memory import free_cached_memory, is_out_of_memory
from reinforge.engine.model.activation_checkpointing import checkpoint_activations, find_checkpointable_layers
from reinforge.engine.model.causal_model import CausalModel
from reinforge.engine.model.masks import AttentionMasks
from reinforge.engine.model.value_head import CRITIC_PREFIX, ValueHead
from reinforge.engine.token_batch import TokenBatch
from reinforge.engine.training.collate import collate, group_pairs
from reinforge.engine.training.data_parallel import DataParallel, MetricSums
from reinforge.engine.training.kl_baseline import estimate_kl
from reinforge.engine.training.logprobs import sample_logprobs, token_logprobs
from reinforge.engine.training.micro_batches import make_micro_batches
from reinforge.engine.training.scheduled_optimizer import ScheduledOptimizer, log_skipped_step
from reinforge.errors import EngineError
from reinforge.types.sample import LossSpec, TrainingSample, UpdateReport, are_finite
from reinforge.types.seeding import stable_random

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JobProgress:
    """The part of the run that a job covers.

    Attributes:
        start, end: Shares of the run done before and after the job, in [0, 1].
        epoch: The epoch, from 0; it seeds the order of samples.
    """

    start: float
    end: float
    epoch: int = 0


class Learner(ScheduledOptimizer):
    """Computes gradients of one model and makes optimizer steps with them.

    Args:
        model: The model.
        config: Optimizer, schedule and batches.
        seed: Seed of the order of samples.
        masks: Attention masks for shared prefixes; None: each sample is computed whole.
        critic: The value head, if the algorithm has one.

    Attributes:
        stage: The stage of a pipeline that it trains; None: no stage has begun.
        stage_version: Version of the weights that the stage began with; None: no stage has begun.
        micro_batch_tokens: Tokens per micro-batch; halved when memory runs out.
        stopping: Set from any thread to stop an update at the next micro-batch, with an error.
        peers: The processes that share each step, of which this one computes its part; None: it computes all.
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
            parameters |= {f"{CRITIC_PREFIX}{name}": p for name, p in critic.named_parameters()}
        super().__init__(parameters, config.optimizer, config.schedule, config.critic)
        self.model, self.config, self.seed = model, config, seed
        self.stage: str | None = None
        self.stage_version: int | None = None
        self.stopping = threading.Event()
        self.peers: DataParallel | None = None
        self.micro_batch_tokens = config.batch.micro_batch_tokens
        self.masks, self.critic = masks, critic
        self._checkpointed_layers = find_checkpointable_layers(model) if config.activation_checkpointing else None

    def begin_stage(self, stage: str | None, config: PolicyConfig, version: int | None) -> None:
        """Begins a stage of a pipeline: an optimizer without state, and the stage's schedule and batches.

        Args:
            stage: Its name; None: the run has not begun its first stage.
            config: The policy with the stage's settings.
            version: Version of the weights that it begins with.
        """
        self.stage, self.config, self.stage_version = stage, config, version
        self.micro_batch_tokens = config.batch.micro_batch_tokens
        self.configure(config.optimizer, config.schedule, config.critic)

    def update(self, samples: Sequence[TrainingSample], spec: LossSpec, progress: JobProgress) -> UpdateReport:
        """Trains on the samples and returns a report.

        A step whose credit, log-probs, loss or gradient is not finite is skipped: it changes no bit of the weights.

        Args:
            samples: The job's samples; those without trained tokens or weight are left out.
            spec: The loss.
            progress: The part of the run that the job covers; it sets the learning rate.
        """
        loss = partial(find_loss(spec), **spec.params)
        steps = self.plan_steps(samples, progress.epoch)
        entropy_grad = bool(spec.params.get("entropy_coef"))
        made: list[dict[str, float]] = []
        trained: set[int] = set()
        skipped: set[int] = set()
        skipped_steps: list[int] = []
        for i, indices in enumerate(steps):
            share = progress.start + (progress.end - progress.start) * i / len(steps)
            if not made:  # a skipped step has changed no weights, and has not scored all of its samples
                self._score_later_steps(samples, steps[i:])
            metrics = self.step(
                [samples[index] for index in indices], loss, share, entropy_grad=entropy_grad, measure_mismatch=not made
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
            metrics=_average(made),
            skipped_samples=sorted(skipped),
            skipped_steps=skipped_steps,
        )

    def _score_later_steps(self, samples: Sequence[TrainingSample], steps: Sequence[Sequence[int]]) -> None:
        """Sets deferred log-probs that the first of the steps does not compute, before a step changes the weights."""
        first = set(steps[0]) if steps else set()
        later = [samples[i] for i in dict.fromkeys(chain.from_iterable(steps[1:])) if i not in first]
        later = [sample for sample in later if sample.defers_old_logprobs and sample.old_logprobs is None]
        later = [sample for sample in later if are_finite([sample])]  # the steps of the others are skipped
        if later:
            rows = sample_logprobs(self.model, later, self.micro_batch_tokens, self.masks)
            for sample, logprobs in zip(later, rows, strict=True):
                sample.old_logprobs = logprobs

    def plan_steps(self, samples: Sequence[TrainingSample], epoch: int) -> list[list[int]]:
        """Returns the samples' indices for each optimizer step, reshuffled in each iteration; pairs are never split.

        Example: 5 samples, batch_size 2 -> 3 steps of 2, 2 and 1 samples.
        """
        settings = self.config.batch
        usable = [i for i, sample in enumerate(samples) if sample.num_trained and sample.weight > 0]
        units = [[usable[i] for i in unit] for unit in group_pairs([samples[i] for i in usable])]
        num_steps = settings.steps_per_job or math.ceil(len(usable) / settings.batch_size)
        num_steps = min(num_steps, len(units))
        steps = []
        for number in range(settings.num_iterations):
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
        own = list(samples) if self.peers is None else self.peers.choose_share(samples)
        try:
            if self.peers is None:
                sums = self._compute_gradients(samples, own, loss, entropy_grad, measure_mismatch)
            else:
                with self.peers.report_failure():
                    sums = self._compute_gradients(samples, own, loss, entropy_grad, measure_mismatch)
                sums = self.peers.combine(sums)
            if sums is None:
                return None
            if self.peers is not None:
                self.sum_gradients(self.peers.add)
            metrics = self.optimizer_step(progress)
            return None if metrics is None else {"loss": sums.loss, **metrics, **sums.means()}
        finally:
            self.clear_gradients()

    def _compute_gradients(
        self,
        samples: Sequence[TrainingSample],
        own: Sequence[TrainingSample],
        loss: Loss,
        entropy_grad: bool,
        measure_mismatch: bool,
    ) -> MetricSums | None:
        """Accumulates the gradients of this process's samples, in smaller micro-batches if memory runs out.

        Args:
            samples: All samples of the step, by whose weights the loss is normalized.
            own: Those that this process computes.
            loss: The loss.
            entropy_grad: It reads entropies with gradient.
            measure_mismatch: Also sum how far sampler and learner differ.

        Returns:
            The sums of the metrics; None if a number is not finite.
        """
        while True:
            try:
                layers = self._checkpointed_layers
                with nullcontext() if layers is None else checkpoint_activations(layers):
                    return self._try_gradients(samples, own, loss, entropy_grad, measure_mismatch)
            except (MemoryError, RuntimeError) as cause:
                self.clear_gradients()
                if not is_out_of_memory(cause) or not self._halve_micro_batches(own):
                    raise

    def _halve_micro_batches(self, samples: Sequence[TrainingSample]) -> bool:
        """Halves the micro-batches, which changes no gradient; False if each holds a single sample already."""
        batches = self._micro_batches(samples)
        if max(map(len, batches)) == 1:
            return False
        while self._micro_batches(samples) == batches:
            self.micro_batch_tokens //= 2
        logger.warning("out of memory: reducing micro-batches to %d tokens", self.micro_batch_tokens)
        free_cached_memory(self.model.device)
        return True

    def _micro_batches(self, samples: Sequence[TrainingSample]) -> list[list[int]]:
        return make_micro_batches(samples, self.micro_batch_tokens, share=self.masks is not None)

    def _try_gradients(
        self,
        samples: Sequence[TrainingSample],
        own: Sequence[TrainingSample],
        loss: Loss,
        entropy_grad: bool,
        measure_mismatch: bool,
    ) -> MetricSums | None:
        if not are_finite(samples):
            log_skipped_step("the advantages or the log-probs of a sample are")
            return None
        token_weight = sum(sample.weight * sample.num_trained for sample in samples)
        sample_weight = sum(sample.weight for sample in samples)
        sums = MetricSums()
        kl_baseline = estimate_kl(self.model, samples, self.micro_batch_tokens, self.masks)
        if kl_baseline is not None and not math.isfinite(kl_baseline):
            log_skipped_step("the KL baseline is")
            return None
        for indices in self._micro_batches(own):
            if self.stopping.is_set():
                raise EngineError("the engine is closed")
            batch = collate([own[i] for i in indices], self.model.device)
            logprobs_BT, batch.entropies = token_logprobs(
                self.model, batch, masks=self.masks, entropy_grad=entropy_grad, critic=self.critic
            )
            _set_deferred_logprobs([own[i] for i in indices], batch, logprobs_BT)
            batch.kl_baseline = kl_baseline
            output = as_loss_output(loss(batch, logprobs_BT))
            part = scale_loss(output, batch, token_weight, sample_weight)
            if not torch.isfinite(part) or not torch.isfinite(logprobs_BT).all():
                log_skipped_step("the loss or the log-probs are")
                return None
            part.backward()
            self.take_gradients()
            crash_point("step.after_backward")
            sums.loss += part.item()
            sums.add({"entropy": batch.entropies, **output.metrics}, batch.loss_mask)
            if measure_mismatch:
                sums.add(*_compute_mismatch(batch, logprobs_BT.detach()))
        return sums


def _set_deferred_logprobs(samples: Sequence[TrainingSample], batch: TokenBatch, logprobs_BT: Tensor) -> None:
    """Sets deferred log-probs, of samples and batch, to those of the forward pass of the first step."""
    waiting = [i for i, each in enumerate(samples) if each.defers_old_logprobs and each.old_logprobs is None]
    if not waiting:
        return
    rows_BT = logprobs_BT.detach()
    batch.old_logprobs[waiting] = rows_BT[waiting]
    batch.old_logprobs_from_learner = True
    for i in waiting:
        samples[i].old_logprobs = rows_BT[i, : len(samples[i])].cpu().numpy().copy()


def scale_loss(output: LossOutput, batch: TokenBatch, token_weight: float, sample_weight: float) -> Tensor:
    """Returns a micro-batch's share of the loss of its step.

    Raises:
        EngineError: The loss has an unexpected shape.
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
    raise EngineError(f"the loss has the shape {list(loss.shape)}; it must be {shapes}")


def _compute_mismatch(batch: TokenBatch, logprobs_BT: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Returns how far learner and sampler differ on the sampled tokens, and the mask of those tokens.

    With d = log p_learner - log p_sampler: |d|, and exp(d) - 1 - d, whose mean estimates KL(sampler, learner).
    """
    sampled_BT = batch.loss_mask & ~batch.sampling_logprobs.isnan()
    if not sampled_BT.any():
        return {}, sampled_BT
    d_BT = torch.where(sampled_BT, logprobs_BT - batch.sampling_logprobs, 0.0)
    return {"mismatch": d_BT.abs(), "mismatch_kl": d_BT.exp() - 1 - d_BT}, sampled_BT


def _average(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the mean of each metric over the steps that have it."""
    by_name: dict[str, list[float]] = {}
    for metrics in steps:
        for name, value in metrics.items():
            by_name.setdefault(name, []).append(value)
    return {name: math.fsum(values) / len(values) for name, values in by_name.items()}
