"""Constraints of a reply by hand: banned tokens, biases, penalties, and sampling from what they leave."""

import math

import numpy as np
import pytest
import torch

from reinforge.engine.sampling import constraints as constraints_module
from reinforge.engine.sampling.constrained_sampling import RowConstraints, sample_constrained
from reinforge.engine.sampling.constraints import TokenConstraint, build_constraint
from reinforge.engine.sampling.token_sampling import SamplingFilters, sample_tokens
from reinforge.types.request import SamplingParams
from reinforge.types.supports import MAX_SUPPORT, Supports, unpack_mask


def make(vocab_size=4, **params):
    return TokenConstraint(SamplingParams(**params), vocab_size)


def sample(probs, uniforms, constrained, filters=None):
    """Samples from these probabilities; `constrained` maps rows to their constraints."""
    constraints = RowConstraints.collect(list(constrained), list(constrained.values()), torch.device("cpu"))
    return sample_constrained(
        torch.tensor(probs).log(), torch.ones(len(probs)), torch.tensor(uniforms), filters, constraints
    )


def test_a_free_reply_has_no_constraint():
    assert build_constraint(SamplingParams(top_p=0.5, logit_bias=((1, 0.0),)), 4, None) is None
    assert build_constraint(SamplingParams(logit_bias=((1, 1.0),)), 4, None) is not None


def test_a_bias_of_minus_100_bans_and_any_other_changes_the_distribution():
    banned = make(logit_bias=((1, -100.0), (3, -100.0)))
    assert unpack_mask(banned.allowed.tobytes()).tolist() == [0, 2]
    assert not banned.changes_logits
    biased = make(logit_bias=((1, -99.0), (2, 3.0)))
    assert unpack_mask(biased.allowed.tobytes()).tolist() == [0, 1, 2, 3]
    assert biased.changes_logits
    assert biased.compute_offsets() == {1: -99.0, 2: 3.0}


def test_penalties_count_the_tokens_of_the_reply():
    """Presence once, frequency for each time, and a bias on top."""
    constraint = make(presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((2, 1.0),))
    assert constraint.compute_offsets() == {2: 1.0}
    for token in (2, 3, 2):
        constraint.advance(token)
    assert constraint.compute_offsets() == {2: 1.0 - 0.5 - 2 * 0.25, 3: -0.5 - 0.25}


def test_a_reply_whose_every_first_token_is_banned_is_refused():
    with pytest.raises(ValueError, match="bans every token that the reply could begin with"):
        build_constraint(SamplingParams(logit_bias=tuple((token, -100.0) for token in range(4))), 4, None)


def test_sampling_is_over_the_allowed_tokens_and_offsets_change_their_shares():
    """Probs .5 .3 .2: without the first token .6 and .4; with log 2 on the second logit .5/1.3, .6/1.3 and .2/1.3."""
    probs = [[0.5, 0.3, 0.2]] * 3
    constrained = {1: make(3, logit_bias=((0, -100.0),)), 2: make(3, logit_bias=((1, math.log(2)),))}
    for uniform, tokens in ((0.0, [0, 1, 0]), (0.45, [0, 1, 1]), (0.65, [1, 2, 1]), (0.99, [2, 2, 2])):
        sampled = sample(probs, [uniform] * 3, constrained)
        assert sampled.tokens_B.tolist() == tokens
        assert sampled.logprobs_B.exp().tolist() == pytest.approx([probs[0][token] for token in tokens])
        expected = [{1: 0.6, 2: 0.4}[tokens[1]], [0.5 / 1.3, 0.6 / 1.3, 0.2 / 1.3][tokens[2]]]
        assert sampled.processed_R.exp().tolist() == pytest.approx(expected)


def test_filters_look_at_the_allowed_tokens():
    """top_p 0.4 of [0, .6, .4] keeps the second token; without the constraint it keeps the first."""
    filters = SamplingFilters(torch.full((2,), 0.4), torch.full((2,), 3), torch.zeros(2))
    sampled = sample([[0.5, 0.3, 0.2]] * 2, [0.99, 0.99], {1: make(3, logit_bias=((0, -100.0),))}, filters=filters)
    assert sampled.tokens_B.tolist() == [0, 1]
    assert sampled.processed_R.tolist() == pytest.approx([0.0], abs=1e-6)
    assert sampled.kept.counts_B.tolist() == [1, 1]


def test_rows_without_a_constraint_get_the_same_token_and_the_same_bits():
    generator = torch.Generator().manual_seed(0)
    logits, uniforms = torch.randn(16, 500, generator=generator), torch.rand(16, generator=generator)
    temperatures = torch.full((16,), 0.8)
    tokens, logprobs, _ = sample_tokens(logits, temperatures, uniforms)
    constraints = RowConstraints.collect([3], [make(500, logit_bias=((7, 5.0),))], torch.device("cpu"))
    sampled = sample_constrained(logits, temperatures, uniforms, None, constraints)
    others = torch.arange(16) != 3
    assert torch.equal(sampled.tokens_B[others], tokens[others])
    assert torch.equal(sampled.logprobs_B[others], logprobs[others])


def test_a_token_that_is_not_allowed_is_never_taken_however_sums_are_rounded():
    """Where the sums point to a token without probability, the most likely one is taken instead."""
    constraint = make(3, logit_bias=((2, -100.0),))
    sampled = sample([[0.5, 0.3, 0.2]], [1.0 + 1e-6], {0: constraint})  # u is below 1; a sum in parallel may be less
    assert sampled.tokens_B.tolist() == [0]


def test_supports_are_the_smaller_of_ids_and_bits():
    few = make(64 * 32, logit_bias=tuple((token, -100.0) for token in range(64 * 32) if token not in (5, 9)))
    assert few.read_support().tolist() == [5, 9]
    many = make(2000, logit_bias=((7, -100.0),))
    assert len(many.read_support()) == 250
    assert unpack_mask(many.read_support()).tolist() == [token for token in range(2000) if token != 7]
    assert many.read_support() is many.read_support(), "equal masks of a reply are stored once"


def test_masks_of_one_reply_have_a_limit(monkeypatch):
    """Two masks of 250 bytes fit 600 bytes; a third one is not recorded, an old one still is."""
    constraint = make(2000, logit_bias=((7, -100.0),))
    recorded = []
    for limit in (600, constraints_module.MAX_MASK_BYTES):
        monkeypatch.setattr(constraints_module, "MAX_MASK_BYTES", limit)
        for first in (255, 254, 252, 255):
            constraint.allowed[0] = first
            recorded.append(len(constraint.read_support()))
    assert recorded == [250, 250, 0, 250, 250, 250, 250, 250]


def test_supports_keep_ids_and_masks_apart():
    """Every position gets its own set back, and a mask that comes again is stored once."""
    mask, other = bytes([0b1101] + [255] * 200), bytes([0b1] + [255] * 200)
    sets = [mask, np.array([3, 8], np.int32), other, np.zeros(0, np.int32), mask, np.array([1], np.int32)]
    supports = Supports.from_sets(sets)
    assert supports.counts.tolist() == [-1, 2, -2, 0, -1, 1]
    assert supports.masks == (mask, other)
    assert supports.token_ids.tolist() == [3, 8, 1]
    kept = [each if isinstance(each, bytes) else each.tolist() for each in supports.sets]
    assert kept == [mask, [3, 8], other, [], mask, [1]]
    assert len(supports) == 6
    assert supports == Supports.from_sets(list(sets))
    assert supports != Supports.from_sets(sets[:2])
    assert Supports.from_sets([]).sets == []
    assert len(unpack_mask(mask)) > MAX_SUPPORT
