"""The critic: a value head on the policy's features; the loss `ppo` trains both.

V(s_t) is the value of the tokens before t. It is computed from the features that predict token t, so it has the same
place in a row as the token's log-prob. The head is linear and starts at zero: every state is worth nothing at first.

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
from reinforge.engine.training.micro_batches import make_micro_batches
from reinforge.engine.training.shared_prefix import trained_features
from reinforge.errors import ConfigError, Problem
from reinforge.types.sample import FloatArray, TrainingSample

CRITIC_PREFIX = "value_head."
"""Prefix of the critic's parameter names among the policy's."""


class ValueHead(nn.Module):
    """V = w . x + b on the features of the last layer, in float32.

    Args:
        model: The policy.
        shares_trunk: True if the critic's gradient also trains the policy's layers.

    Raises:
        ConfigError: The family has no features apart from its logits.
    """

    def __init__(self, model: CausalModel, *, shares_trunk: bool):
        super().__init__()
        if not model.separable:
            message = (
                f"{model.config.model_type} models return only logits, but a critic needs the features before them"
            )
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
        self.weight.zero_()
        self.bias.zero_()


@torch.no_grad()
def compute_values(
    model: CausalModel,
    critic: ValueHead,
    samples: Sequence[TrainingSample],
    max_tokens: int,
    masks: AttentionMasks | None = None,
) -> list[FloatArray]:
    """Returns the value before each sample's trained tokens, `[T]` each and 0 elsewhere, without computing logits."""
    values: list[FloatArray] = [np.zeros(0, np.float32)] * len(samples)
    for indices in make_micro_batches(samples, max_tokens, share=masks is not None):
        batch = collate([samples[i] for i in indices], model.device)
        rows = scatter_to_tokens(batch, critic(trained_features(model, batch, masks))).cpu().numpy()
        for i, row in zip(indices, rows, strict=True):
            values[i] = row[: len(samples[i])].copy()
    return values


def scatter_to_tokens(batch: TokenBatch, values_N: Tensor) -> Tensor:
    """Returns values at their trained tokens, `[B, T]`, 0 elsewhere."""
    return values_N.new_zeros(batch.token_ids.shape).index_put(batch.loss_mask.nonzero(as_tuple=True), values_N)
