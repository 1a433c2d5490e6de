"""Log-probs and values of whole replies, one row a reply, and the losses of `TokenBatch` on such rows.

    prompts of 5 and 9 tokens, replies of 2 and 3  =>  `[2, 3]`, mask [1, 1, 0] and [1, 1, 1]; the prompts are gone

For losses that somebody writes in torch: gradients flow through the log-probs and the values.
Shapes: B replies, T tokens of the longest reply, P pairs, N tokens of all replies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reinforge.engine.losses.base import LossOutput, mean_by_sample
from reinforge.engine.model.causal_model import CausalModel
from reinforge.engine.model.masks import AttentionMasks
from reinforge.engine.model.value_head import ValueHead
from reinforge.engine.token_batch import TokenBatch
from reinforge.engine.training.collate import collate, plain_sample
from reinforge.engine.training.learner import Sums, share_of
from reinforge.engine.training.logprobs import token_logprobs
from reinforge.engine.training.micro_batches import cut
from reinforge.errors import TrajectoryError
from reinforge.types.request import TokenLogprobs
from reinforge.types.sample import TrainingSample


@dataclass(slots=True)
class Replies:
    """What a model makes of replies.

    Attributes:
        logprobs: `[B, T]` log p of each token, 0 behind a reply's end.
        mask: `[B, T]` True where there is a token.
        values: `[B, T]` the critic's values before each token; None where there is no critic.
    """

    logprobs: Tensor
    mask: Tensor
    values: Tensor | None = None


def score_replies(
    model: CausalModel,
    said: Sequence[TokenLogprobs],
    max_tokens: int,
    masks: AttentionMasks | None = None,
    critic: ValueHead | None = None,
) -> Replies:
    """Returns log-probs of given replies, with gradient unless it is switched off; equal prompts are computed once.

    Args:
        model: The model.
        said: Prompt, tokens and temperature of each reply; the log-probs in it are not read.
        max_tokens: Tokens computed at once.
        masks: For prefixes that replies share; None: each is computed whole.
        critic: Adds values, from the same features.

    Raises:
        TrajectoryError: A reply or its prompt has no tokens.
    """
    if any(not tokens.token_ids or not tokens.prompt_token_ids for tokens in said):
        raise TrajectoryError("a reply without tokens, or one that nothing comes before, has no log-probs")
    samples = [_sample(tokens) for tokens in said]
    counts_B = torch.tensor([sample.num_trained for sample in samples], device=model.device)
    order, logprobs, values = list[int](), list[Tensor](), list[Tensor]()
    for indices in cut(samples, max_tokens, share=masks is not None):
        batch = collate([samples[i] for i in indices], model.device)
        logprobs_BL, _ = token_logprobs(model, batch, masks=masks, critic=critic)
        logprobs.append(logprobs_BL[batch.loss_mask])
        if batch.values is not None:
            values.append(batch.values[batch.loss_mask])
        order += indices
    places_T = torch.arange(int(counts_B.max()), device=model.device)
    mask_BT = places_T < counts_B[:, None]
    order_B = torch.tensor(order, device=model.device)
    rows_N, places_N = mask_BT[order_B].nonzero(as_tuple=True)
    empty_BT = logprobs[0].new_zeros(mask_BT.shape)

    def on_rows(parts: list[Tensor]) -> Tensor:
        return empty_BT.index_put((order_B[rows_N], places_N), torch.cat(parts))

    return Replies(on_rows(logprobs), mask_BT, on_rows(values) if values else None)


def _sample(tokens: TokenLogprobs) -> TrainingSample:
    sample = plain_sample((*tokens.prompt_token_ids, *tokens.token_ids))
    sample.loss_mask[: len(tokens.prompt_token_ids)] = False
    sample.temperatures[sample.loss_mask] = tokens.temperature
    return sample


def batch_of_replies(
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
    """Returns rows of replies as the batch that a loss reads; every row weighs 1.

    Args:
        mask_BT: True where there is a token.
        old_logprobs: `[B, T]` log p when the replies were drawn.
        ref_logprobs: `[B, T]` log p under the reference.
        advantages: `[B, T]` credit.
        returns: `[B, T]` what the critic's values should be.
        old_values: `[B, T]` the critic's values when the replies were drawn.
        values: `[B, T]` the critic's values as it is, with gradient.
        pairs: Rows (preferred, other) of each preference pair.
    """
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


def mean_loss(output: LossOutput, batch: TokenBatch) -> tuple[Tensor, dict[str, float]]:
    """Returns the mean of a loss over the batch, over tokens or samples as the learner takes it, and its metrics."""
    loss = share_of(output, batch, float(batch.loss_mask.sum()), float(batch.weights.sum()))
    sums = Sums()
    sums.add(output.metrics, batch.loss_mask)
    return loss, sums.means()


@torch.no_grad()
def perplexities(logprobs_BT: Tensor, mask_BT: Tensor) -> list[float]:
    """Returns exp(-mean_t log p_t) of each row.

    Example: log-probs [-2, -2, -2] -> e^2 = 7.39, whatever the length.
    """
    return torch.exp(-mean_by_sample(logprobs_BT, mask_BT)).tolist()
