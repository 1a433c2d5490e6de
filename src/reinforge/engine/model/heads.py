"""The heads on top of the last states: log-probabilities without whole logits, and the critic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from reinforge.engine.model.attention import AttentionMasks
from reinforge.engine.model.causal_model import CausalModel
from reinforge.engine.token_batch import TokenBatch
from reinforge.engine.training.collate import collate
from reinforge.engine.training.micro_batches import make_micro_batches
from reinforge.engine.training.shared_prefix import trained_features
from reinforge.errors import ConfigError, Problem
from reinforge.types.sample import FloatArray, TrainingSample

Multiply = Callable[[Tensor, Tensor], Tensor]  # (x [M, I], weight [O, I]) -> x weight^T
CHUNK_LOGITS = 2**24  # logits in memory at a time: 64 MiB in float32, twice in a pass

FROZEN_CHUNK_LOGITS = 2**22
"""The same where the output layer is frozen: fewer stay in a CPU's cache, and no gradient of the weight adds up."""

GPU_CHUNK_LOGITS = 2**27  # the same on other devices than CPUs, where launching many small operations takes longer


class ChunkedLMHead(Function):
    """`(features [N, H], weight [V, H], targets [N], scales [N], entropy_grad, multiply) -> log p [N], entropy [N]`.

    With z = features weight^T / scale, p = softmax(z), H = -sum_v p_v log p_v and t the target:

        d log p_t / d z_v = [v = t] - p_v
        d H / d z_v       = -p_v (log p_v + H)
    """

    @staticmethod
    def forward(
        ctx: Any,
        features_NH: Tensor,
        weight_VH: Tensor,
        targets_N: Tensor,
        scales_N: Tensor,
        entropy_grad: bool,
        multiply: Multiply = F.linear,
    ) -> tuple[Tensor, Tensor]:
        """Returns log-probs and entropies; saves the inputs and two numbers per token."""
        ctx.multiply = multiply
        ctx.is_frozen = not (weight_VH.requires_grad or entropy_grad)
        if ctx.is_frozen:
            logprobs_N, entropies_N, slopes_NH = _compute_with_slopes(
                features_NH, weight_VH, targets_N, scales_N, ctx.needs_input_grad[0], multiply
            )
            ctx.save_for_backward(slopes_NH)
            ctx.mark_non_differentiable(entropies_N)
            return logprobs_N, entropies_N
        none = features_NH.new_zeros(0, dtype=torch.float32)
        logprobs, entropies, sums = [none], [none], [none]
        scales = _find_scales(scales_N)
        for n in _split(features_NH, weight_VH, CHUNK_LOGITS):
            logits_nV = _compute_logits(features_NH[n], weight_VH, scales, n, multiply)
            sums_n = logits_nV.logsumexp(-1)
            logprobs.append(logits_nV.gather(1, targets_N[n, None])[:, 0] - sums_n)
            probs_nV = (logits_nV - sums_n[:, None]).exp_()
            entropies.append(sums_n - probs_nV.mul_(logits_nV).sum(-1))
            sums.append(sums_n)
        logprobs_N, entropies_N, sums_N = torch.cat(logprobs), torch.cat(entropies), torch.cat(sums)
        ctx.entropy_grad = entropy_grad
        ctx.save_for_backward(features_NH, weight_VH, targets_N, scales_N, sums_N, entropies_N)
        if not entropy_grad:
            ctx.mark_non_differentiable(entropies_N)
        return logprobs_N, entropies_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of features and weight."""
        if ctx.is_frozen:
            (slopes_NH,) = ctx.saved_tensors
            return slopes_NH * gradients[0][:, None].to(slopes_NH.dtype), *(None,) * 5
        features_NH, weight_VH, targets_N, scales_N, sums_N, entropies_N = ctx.saved_tensors
        logprob_grads_N, entropy_grads_N = gradients
        features_grad = torch.empty_like(features_NH) if ctx.needs_input_grad[0] else None
        weight_grad = torch.zeros_like(weight_VH, dtype=sums_N.dtype) if ctx.needs_input_grad[1] else None
        scales = _find_scales(scales_N)
        for n in _split(features_NH, weight_VH, CHUNK_LOGITS):
            logits_nV = _compute_logits(features_NH[n], weight_VH, scales, n, ctx.multiply).sub_(sums_N[n, None])
            if ctx.entropy_grad:
                factors_nV = (logits_nV + entropies_N[n, None]).mul_(entropy_grads_N[n, None])
                factors_nV.add_(logprob_grads_N[n, None])
                logits_nV.exp_().mul_(factors_nV).neg_()
            else:
                logits_nV.exp_().mul_(-logprob_grads_N[n, None])
            logits_nV.scatter_add_(1, targets_N[n, None], logprob_grads_N[n, None])
            logits_nV.div_(scales_N[n, None])
            logits_grad_nV = logits_nV.to(weight_VH.dtype)
            if features_grad is not None:
                features_grad[n] = ctx.multiply(logits_grad_nV, weight_VH.T)
            if weight_grad is not None and weight_grad.dtype == logits_grad_nV.dtype:
                weight_grad.addmm_(logits_grad_nV.T, features_NH[n])
            elif weight_grad is not None:  # in half precision the sum over chunks is made in float32
                weight_grad += logits_grad_nV.T @ features_NH[n]
        return features_grad, None if weight_grad is None else weight_grad.to(weight_VH.dtype), *(None,) * 4


def _compute_with_slopes(
    features_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, scales_N: Tensor, needs_slopes: bool, multiply: Multiply
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns log-probs, entropies, and the gradient of each log-prob by its features, `[N, H]`, if it is needed.

    Where the output layer is frozen, the gradient of the features is this slope times one number per token, so the
    backward pass needs no logits: two products with the weight instead of three. With m = max_v z_v and p = softmax(z),
    log sum_v exp z_v = m - log max_v p_v.
    """
    logprobs, entropies = ([features_NH.new_zeros(0, dtype=torch.float32)] for _ in range(2))
    slopes_NH = torch.empty_like(features_NH) if needs_slopes else None
    scales = _find_scales(scales_N)
    for n in _split(features_NH, weight_VH, FROZEN_CHUNK_LOGITS):
        logits_nV = _compute_logits(features_NH[n], weight_VH, scales, n, multiply)
        probs_nV = logits_nV.softmax(-1)
        sums_n = logits_nV.amax(-1) - probs_nV.amax(-1).log_()
        logprobs.append(logits_nV.gather(1, targets_N[n, None])[:, 0] - sums_n)
        entropies.append(sums_n - torch.linalg.vecdot(probs_nV, logits_nV))
        if slopes_NH is not None:
            probs_nV.scatter_add_(1, targets_N[n, None], -torch.ones_like(sums_n)[:, None])
            slopes_NH[n] = multiply(probs_nV.to(weight_VH.dtype), weight_VH.T)
            slopes_NH[n] /= -scales_N[n, None].to(slopes_NH.dtype)
    return torch.cat(logprobs), torch.cat(entropies), slopes_NH


def split_tokens(num_tokens: int, vocab_size: int, chunk_logits: int | None = None) -> list[slice]:
    """Returns the tokens of each chunk.

    Example: 5 tokens and a vocabulary of a third of `CHUNK_LOGITS` -> [slice(0, 3), slice(3, 6)].
    """
    size = max(1, (chunk_logits or CHUNK_LOGITS) // vocab_size)
    return [slice(start, start + size) for start in range(0, num_tokens, size)]


def _split(features_NH: Tensor, weight_VH: Tensor, cpu_logits: int) -> list[slice]:
    logits = cpu_logits if features_NH.device.type == "cpu" else GPU_CHUNK_LOGITS
    return split_tokens(len(features_NH), len(weight_VH), logits)


def _find_scales(scales_N: Tensor) -> Tensor | None:
    """Returns the scales; None: all are 1."""
    return None if bool((scales_N == 1).all()) else scales_N


def _compute_logits(
    features_nH: Tensor, weight_VH: Tensor, scales_N: Tensor | None, n: slice, multiply: Multiply
) -> Tensor:
    logits_nV = multiply(features_nH, weight_VH)
    if logits_nV.dtype in (torch.bfloat16, torch.float16):
        logits_nV = logits_nV.float()
    return logits_nV if scales_N is None else logits_nV.div_(scales_N[n, None])


CRITIC_PREFIX = "value_head."  # prefix of the critic's parameter names among the policy's


class ValueHead(nn.Module):
    """V = w . x + b on the features of the last layer, in float32.

    Args:
        shares_trunk: True if the critic's gradient also trains the policy's layers.
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
    for indices in make_micro_batches(
        samples, max_tokens, share=masks is not None, share_stems=masks is not None and masks.shares_stems
    ):
        batch = collate([samples[i] for i in indices], model.device)
        rows = scatter_to_tokens(batch, critic(trained_features(model, batch, masks))).cpu().numpy()
        for i, row in zip(indices, rows, strict=True):
            values[i] = row[: len(samples[i])].copy()
    return values


def scatter_to_tokens(batch: TokenBatch, values_N: Tensor) -> Tensor:
    """Returns values at their trained tokens, `[B, T]`, 0 elsewhere."""
    return values_N.new_zeros(batch.token_ids.shape).index_put(batch.loss_mask.nonzero(as_tuple=True), values_N)
