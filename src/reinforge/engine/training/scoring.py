"""Log-probs and values of given tokens under the policy, the reference and the critic.

Runs in the sampler's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from reinforge.engine.model.attention import AttentionMasks
from reinforge.engine.model.causal_model import CausalModel
from reinforge.engine.model.heads import ValueHead, compute_values
from reinforge.engine.training.logprobs import sample_logprobs
from reinforge.errors import EngineError
from reinforge.types.request import TokenLogprobs
from reinforge.types.sample import FloatArray, Needs, TrainingSample

if TYPE_CHECKING:
    from reinforge.engine.training.reply_logprobs import ReplyLogprobs
    from reinforge.engine.training.sharding import ShardedModel


class LogprobScorer:
    """Scores samples and replies in micro-batches.

    Args:
        masks: Attention masks for shared prefixes; None: each sample is computed whole.
        max_tokens: Maximum tokens of a micro-batch, padding included.
        keeps_reference: True if there is a reference: `reference`, or the model without its adapters.
        reference: A frozen copy of the loaded weights.
        critic: The value head; None: there is none.
        take_turns: Called between micro-batches of samples; None: nothing is.
    """

    def __init__(
        self,
        model: CausalModel,
        masks: AttentionMasks | None,
        max_tokens: int,
        *,
        keeps_reference: bool,
        reference: CausalModel | None,
        critic: ValueHead | None,
        take_turns: Callable[[], None] | None = None,
    ):
        self.take_turns = take_turns
        self.model, self.masks, self.max_tokens = model, masks, max_tokens
        self.keeps_reference, self.reference, self.critic = keeps_reference, reference, critic
        self.sharded: ShardedModel | None = None  # a model that stays divided
        self.sharded_reference: ShardedModel | None = None  # its reference, if that is not a model without adapters
        self._adapters: dict[str, Tensor] | None = None  # those of the reference; None: it has no adapters

    def require(self, *, reference: bool, values: bool) -> None:
        """Refuses what the engine has no reference or no critic for."""
        if values and self.critic is None:
            raise EngineError("values need a critic: load the engine with critic=True")
        if reference and not self.keeps_reference:
            raise EngineError("ref_logprobs need a reference: load the engine with keep_reference=True")

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Returns log p of each sample's trained tokens at their temperatures, `[T]` each, 0 elsewhere."""
        return self._score(self._trained, samples)

    def ref_logprobs(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        if self.sharded_reference is not None:
            return self.sharded_reference.score(samples, self.max_tokens)
        with self._use_reference() as reference:
            return self._score(reference, samples)

    def _score(self, model: CausalModel, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        if self.sharded is not None:
            return self.sharded.score(samples, self.max_tokens)
        return sample_logprobs(model, samples, self.max_tokens, self.masks, self.take_turns)

    @property
    def _trained(self) -> CausalModel:
        return self.model if self.sharded is None else self.sharded.copied

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The trained weights; of a divided model, this process's rows."""
        return self.model.trained_parameters if self.sharded is None else self.sharded.shards

    @torch.no_grad()
    def take_reference(self) -> None:
        """Makes the model's current weights those of the reference; of a divided model, all processes call it."""
        if self.sharded is not None and self.sharded_reference is not None:
            self.sharded_reference.copy_rows(self.sharded)
            return
        if self.reference is None:
            self._adapters = {name: p.detach().clone() for name, p in self.parameters.items()}
            return
        for name, parameter in self.reference.module.named_parameters():
            parameter.copy_(self.model.module.get_parameter(name))

    @contextmanager
    def _use_reference(self) -> Iterator[CausalModel]:
        """Yields the reference: the frozen copy, or the model without its adapters, or with those of the reference."""
        if self.reference is not None:
            yield self.reference
        elif self._adapters is None:
            with self._trained.without_adapters() as reference:
                yield reference
        else:
            with replace_weights(self.parameters, self._adapters):
                yield self._trained

    def values(self, samples: Sequence[TrainingSample]) -> list[FloatArray]:
        """Returns the critic's value before each trained token, `[T]` each, 0 elsewhere."""
        assert self.critic is not None  # the caller has called `require`
        if self.sharded is not None:
            return self.sharded.score(samples, self.max_tokens, self.critic)
        return compute_values(self.model, self.critic, samples, self.max_tokens, self.masks)

    def reply_logprobs(
        self, replies: Sequence[TokenLogprobs], *, reference: bool, values: bool, grad: bool
    ) -> ReplyLogprobs:
        from reinforge.engine.training.reply_logprobs import score_replies  # for losses written by hand

        if self.sharded is not None:
            raise EngineError("reply_logprobs: the weights are divided among several processes")
        with self._use_reference() if reference else nullcontext(self.model) as model, torch.set_grad_enabled(grad):
            return score_replies(model, replies, self.max_tokens, self.masks, self.critic if values else None)


def choose_unscored(
    samples: Sequence[TrainingSample], needs: Needs, *, is_inexact: bool, defer: bool
) -> list[TrainingSample]:
    """Returns the samples whose old log-probs must be computed now, and marks those that the next job computes.

    Args:
        is_inexact: The sampler's log-probs are not exactly the learner's.
    """
    needed = needs.old_logprobs
    needing = [each for each in samples if needed is True or (needed and (is_inexact or each.is_stale))]
    is_deferred = defer and needed == "inexact" and not needs.ref_logprobs  # credit may compare the two
    for sample in samples:
        sample.defers_old_logprobs = False
    for sample in needing if is_deferred else ():
        sample.defers_old_logprobs = True
        sample.old_logprobs = None  # of an earlier job
    return [] if is_deferred else needing


@contextmanager
def replace_weights(parameters: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Gives parameters other weights, and afterwards their own again, bit by bit."""
    own = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    try:
        _copy_weights(parameters, weights)
        yield
    finally:
        _copy_weights(parameters, own)


@torch.no_grad()
def _copy_weights(parameters: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])
