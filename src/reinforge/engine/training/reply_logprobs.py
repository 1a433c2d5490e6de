"""Log-probs and values of replies, one row per reply, for losses written by hand in torch.

    prompts of 5 and 9 tokens, replies of 2 and 3  =>  `[2, 3]`, mask [1, 1, 0] and [1, 1, 1]; prompts are not included

Gradients flow through the log-probs and the values. `make_reply_batch` turns such rows into a `TokenBatch` for the
registered losses.
Shapes: B replies, T tokens of the longest reply, P pairs, N tokens of all replies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reinforge.engine.losses.base import LossOutput, mean_by_sample
from reinforge.engine.model.attention import AttentionMasks
from reinforge.engine.model.causal_model import CausalModel
from reinforge.engine.model.heads import ValueHead
from reinforge.engine.token_batch import TokenBatch
from reinforge.engine.training.collate import collate, make_plain_sample
from reinforge.engine.training.logprobs import token_logprobs
from reinforge.engine.training.micro_batch_loss import MetricSums, scale_loss
from reinforge.engine.training.micro_batches import make_micro_batches
from reinforge.errors import TrajectoryError
from reinforge.types.request import TokenLogprobs
from reinforge.types.sample import TrainingSample


@dataclass(slots=True)
class ReplyLogprobs:
    """Log-probs of replies, one row per reply."""

    logprobs: Tensor  # `[B, T]` log p of each token, 0 after a reply's end
    mask: Tensor  # `[B, T]` True where there is a token
    entropies: Tensor  # `[B, T]` of the distribution of each token, in nats, 0 after a reply's end
    values: Tensor | None = None  # `[B, T]` the critic's value before each token; None without a critic


def score_replies(
    model: CausalModel,
    replies: Sequence[TokenLogprobs],
    max_tokens: int,
    masks: AttentionMasks | None = None,
    critic: ValueHead | None = None,
) -> ReplyLogprobs:
    """Returns log-probs of given replies, with gradient unless grad mode is off; equal prompts are computed once.

    Args:
        replies: Prompt, tokens and temperature of each reply; the log-probs in it are not read.
        masks: Attention masks for shared prefixes; None: each prompt is computed whole.
        critic: Adds values, computed from the same features.
    """
    if any(not tokens.token_ids or not tokens.prompt_token_ids for tokens in replies):
        raise TrajectoryError("cannot score a reply without tokens or without a prompt")
    samples = [_make_sample(tokens) for tokens in replies]
    counts_B = torch.tensor([sample.num_trained for sample in samples], device=model.device)
    order, logprobs, entropies, values = list[int](), list[Tensor](), list[Tensor](), list[Tensor]()
    for indices in make_micro_batches(
        samples, max_tokens, share=masks is not None, share_stems=masks is not None and masks.shares_stems
    ):
        batch = collate([samples[i] for i in indices], model.device)
        logprobs_BL, entropies_BL = token_logprobs(model, batch, masks=masks, critic=critic)
        logprobs.append(logprobs_BL[batch.loss_mask])
        entropies.append(entropies_BL[batch.loss_mask])
        if batch.values is not None:
            values.append(batch.values[batch.loss_mask])
        order += indices
    places_T = torch.arange(int(counts_B.max()), device=model.device)
    mask_BT = places_T < counts_B[:, None]
    order_B = torch.tensor(order, device=model.device)
    rows_N, places_N = mask_BT[order_B].nonzero(as_tuple=True)
    empty_BT = logprobs[0].new_zeros(mask_BT.shape)

    def fill_rows(parts: list[Tensor]) -> Tensor:
        return empty_BT.index_put((order_B[rows_N], places_N), torch.cat(parts))

    return ReplyLogprobs(fill_rows(logprobs), mask_BT, fill_rows(entropies), fill_rows(values) if values else None)


def _make_sample(tokens: TokenLogprobs) -> TrainingSample:
    sample = make_plain_sample((*tokens.prompt_token_ids, *tokens.token_ids))
    sample.loss_mask[: len(tokens.prompt_token_ids)] = False
    sample.temperatures[sample.loss_mask] = tokens.temperature
    return sample


def make_reply_batch(
    mask_BT: Tensor,
    *,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    advantages: Tensor | None = None,
    returns: Tensor | None = None,
    old_values: Tensor | None = None,
    values: Tensor | None = None,
    pairs: Sequence[tuple[int, int]] | None = None,
) -> TokenBatch:
    """Returns rows of replies as a batch for a registered loss, fields as in `TokenBatch`; each row has weight 1."""
    zeros_BT = torch.zeros(mask_BT.shape, device=mask_BT.device)
    old_BT = zeros_BT if old_logprobs is None else old_logprobs
    return TokenBatch(
        token_ids=zeros_BT.long(),
        lengths=mask_BT.sum(dim=1),
        loss_mask=mask_BT,
        temperatures=zeros_BT + 1,
        sampling_logprobs=old_BT,
        old_logprobs=old_BT,
        ref_logprobs=ref_logprobs,
        advantages=zeros_BT if advantages is None else advantages,
        weights=torch.ones(len(mask_BT), device=mask_BT.device),
        pairs=None if pairs is None else torch.tensor(pairs, device=mask_BT.device),
        returns=returns,
        old_values=old_values,
        values=values,
    )


def compute_mean_loss(output: LossOutput, batch: TokenBatch) -> tuple[Tensor, dict[str, float]]:
    """Returns the mean of a loss over tokens or samples, as the learner computes it, and the means of its metrics."""
    loss = scale_loss(output, batch, float(batch.loss_mask.sum()), float(batch.weights.sum()))
    sums = MetricSums()
    sums.add(output.metrics, batch.loss_mask)
    return loss, sums.means()


@torch.no_grad()
def perplexities(logprobs_BT: Tensor, mask_BT: Tensor) -> list[float]:
    """Returns the perplexity of each row, exp(-mean_t log p_t).

    Example: log-probs [-2, -2, -2] -> e^2 = 7.39, whatever the length.
    """
    return torch.exp(-mean_by_sample(logprobs_BT, mask_BT)).tolist()
