"""Samples tokens in a step in which some rows are constrained.

Shapes: B rows, R constrained rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reinforge.engine.sampling.constraints import TokenConstraint
from reinforge.engine.sampling.token_sampling import (
    KeptTokens,
    SamplingFilters,
    apply_filters,
    compute_logprobs,
    invert_distribution,
)


@dataclass(frozen=True, slots=True)
class RowConstraints:
    """The constraints of one step."""

    rows_R: Tensor  # the constrained rows, rising
    allowed_RV: Tensor  # True where a token may be sampled
    offset_rows: Tensor  # rows of the places in `[R, V]` whose logits change, each place once
    offset_tokens: Tensor  # tokens of these places
    offsets: Tensor  # by how much they change

    @classmethod
    def collect(
        cls, rows: Sequence[int], constraints: Sequence[TokenConstraint], device: torch.device
    ) -> RowConstraints:
        vocab_size = constraints[0].vocab_size
        packed = np.stack([constraint.allowed for constraint in constraints])
        allowed = np.unpackbits(packed, axis=1, count=vocab_size, bitorder="little").view(np.bool_)
        places: list[tuple[int, int]] = []
        values: list[float] = []
        for number, constraint in enumerate(constraints):
            if constraint.changes_logits:
                offsets = constraint.compute_offsets()
                places += [(number, token) for token in offsets]
                values += offsets.values()
        columns = np.array(places, np.int64).reshape(-1, 2).T.copy()
        arrays: list[NDArray] = [np.array(rows, np.int64), allowed, *columns, np.array(values, np.float32)]
        return cls(*(torch.from_numpy(array).to(device) for array in arrays))


@dataclass(frozen=True, slots=True)
class ConstrainedTokens:
    """The tokens of one step in which some rows are constrained."""

    tokens_B: Tensor  # the sampled tokens
    logprobs_B: Tensor  # their log-probs after temperature, before constraint and filters, over the whole vocabulary
    processed_R: Tensor  # Log-probs of the constrained rows' tokens in the distributions that they were sampled from
    kept: KeptTokens | None  # as in `sample_tokens`; some of a constrained row may not be allowed


def sample_constrained(
    logits_BV: Tensor,
    temperatures_B: Tensor,
    uniforms_B: Tensor,
    filters: SamplingFilters | None,
    constraints: RowConstraints,
) -> ConstrainedTokens:
    """Returns a token for each row; a row without a constraint gets the token that `sample_tokens` gives it.

    In a constrained row logits change first, then tokens that are not allowed are removed, and the filters look at what
    is left, so that they never remove all of it.

    Example: probs [0.5, 0.3, 0.2], the second and third allowed, top_p 0.5
        => [0, 0.6, 0.4] => [0, 0.6, 0]: logprobs log 0.3, processed log 1
    """
    rows_R = constraints.rows_R
    changed_RV = logits_BV[rows_R]
    changed_RV[constraints.offset_rows, constraints.offset_tokens] += constraints.offsets
    changed_RV.masked_fill_(~constraints.allowed_RV, -torch.inf)
    changed_BV = logits_BV.index_copy(0, rows_R, changed_RV)
    logprobs_BV = compute_logprobs(logits_BV, temperatures_B)
    own_RV = compute_logprobs(changed_RV, temperatures_B[rows_R])
    probs_BV = logprobs_BV.exp().index_copy_(0, rows_R, own_RV.exp())
    kept = None
    if filters is not None:
        probs_BV, kept = apply_filters(probs_BV, filters)
    tokens_B, _ = invert_distribution(changed_BV, logprobs_BV, probs_BV, temperatures_B, uniforms_B)
    probs_RV, tokens_R = probs_BV[rows_R], tokens_B[rows_R]
    # sums in parallel may round so that the token next to a possible one is found
    is_possible_R = probs_RV.gather(1, tokens_R[:, None])[:, 0] > 0
    tokens_R = torch.where(is_possible_R, tokens_R, probs_RV.argmax(dim=-1))
    tokens_B = tokens_B.index_copy(0, rows_R, tokens_R)
    processed_R = own_RV.gather(1, tokens_R[:, None])[:, 0]
    if kept is not None:
        processed_R = processed_R - kept.log_mass_B[rows_R]
    return ConstrainedTokens(tokens_B, logprobs_BV.gather(1, tokens_B[:, None])[:, 0], processed_R, kept)
