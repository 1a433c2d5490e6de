"""The critic: a value head on the policy's features; the loss `ppo` trains both.

V(s_t) is what the tokens before t are worth; it is read where token t is predicted from, so it stands at t as the
token's log-prob does. The head is linear and begins at zero: before anything is known every state is worth nothing.
Shapes: B samples, T tokens, N trained tokens, H features.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from reinforge.engine.model.causal_model import CausalModel
from reinforge.engine.model.masks import AttentionMasks
from reinforge.engine.token_batch import TokenBatch
from reinforge.engine.training.collate import collate
from reinforge.engine.training.micro_batches import cut
from reinforge.engine.training.shared_prefix import trained_features
from reinforge.errors import ConfigError, Problem
from reinforge.types.sample import FloatArray, TrainingSample

PREFIX = "value_head."
"""Before the critic's names where they stand among the policy's."""


class ValueHead(nn.Module):
    """V = w . x + b on the features of the last layer, in float32.

    Args:
        model: The policy.
        shares_trunk: The critic's gradient goes on into the policy's layers.

    Raises:
        ConfigError: The family's features cannot be had apart from its logits.
    """

    def __init__(self, model: CausalModel, *, shares_trunk: bool):
        super().__init__()
        if not model.separable:
            message = f"{model.config.model_type} models give no features apart from their logits, which a critic needs"
            fix = "use an algorithm without a critic, such as grpo"
            raise ConfigError(Problem("finetuning.algorithm", message, fix))
        self.shares_trunk = shares_trunk
        self.weight = nn.Parameter(torch.zeros(model.config.hidden_size, device=model.device))
        self.bias = nn.Parameter(torch.zeros((), device=model.device))

    def forward(self, features_NH: Tensor) -> Tensor:
        """Returns values, `[N]`."""
        features_NH = features_NH if self.shares_trunk else features_NH.detach()
        return features_NH.float() @ self.weight + self.bias

    @torch.no_grad()
    def reset(self) -> None:
        """Forgets everything."""
        self.weight.zero_()
        self.bias.zero_()


@torch.no_grad()
def sample_values(
    model: CausalModel,
    critic: ValueHead,
    samples: Sequence[TrainingSample],
    max_tokens: int,
    masks: AttentionMasks | None = None,
) -> list[FloatArray]:
    """Returns the value before each sample's trained tokens, `[T]` each and 0 elsewhere; no logits are made."""
    values: list[FloatArray] = [np.zeros(0, np.float32)] * len(samples)
    for indices in cut(samples, max_tokens, share=masks is not None):
        batch = collate([samples[i] for i in indices], model.device)
        rows = at_trained(batch, critic(trained_features(model, batch, masks))).cpu().numpy()
        for i, row in zip(indices, rows, strict=True):
            values[i] = row[: len(samples[i])].copy()
    return values


def at_trained(batch: TokenBatch, values_N: Tensor) -> Tensor:
    """Returns values at their trained tokens, `[B, T]`, 0 elsewhere."""
    return values_N.new_zeros(batch.token_ids.shape).index_put(batch.loss_mask.nonzero(as_tuple=True), values_N)
