"""The sampler's arrays and the sampling of tokens, checkable by hand."""

import numpy as np
import pytest
import torch

from reinforge.engine.model.attention import decode_attention
from reinforge.engine.sampling.kv_cache import round_up
from reinforge.engine.sampling.token_sampling import (
    SamplingFilters,
    apply_filters,
    draw_uniforms,
    rank_logprobs,
    sample_tokens,
)


def make_filters(*rows):
    return SamplingFilters(*map(torch.tensor, zip(*rows, strict=True)))


def test_uniforms_depend_on_seed_and_count_only():
    seeds, counts = np.array([1, 2, 1], np.uint64), np.array([0, 0, 1])
    values = draw_uniforms(seeds, counts)
    assert len(set(values.tolist())) == 3
    assert draw_uniforms(seeds[2:], counts[2:]) == values[2:]
    many = draw_uniforms(np.arange(20_000, dtype=np.uint64), np.zeros(20_000, np.int64))
    assert 0 <= many.min() < many.max() < 1
    assert abs(many.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(many[1:], many[:-1])[0, 1]) < 0.03


def test_sampling_inverts_the_distribution_function():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(5, 3)
    u = torch.tensor([0.0, 0.49, 0.51, 0.79, 1 - 2.0**-23])
    tokens, logprobs, kept = sample_tokens(logits, torch.ones(5), u)
    assert kept is None
    assert tokens.tolist() == [0, 0, 1, 1, 2]
    assert torch.allclose(logprobs.exp(), torch.tensor([0.5, 0.5, 0.3, 0.3, 0.2]))


@pytest.mark.parametrize("vocab_size", [5000, 8192])
def test_a_large_vocabulary_is_sampled_by_blocks(vocab_size):
    """The token at which the summed probabilities exceed u, in float64, at three temperatures; tokens without any
    probability are never sampled, not even by rounding."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, vocab_size, generator=generator) * 3
    logits[:, ::2] = -1e9
    temperatures = torch.tensor([1.0, 0.7, 0.0]).repeat(100)
    u = torch.rand(300, generator=generator)
    u[:6] = torch.tensor([0.0, 0.0, 0.0, 1 - 2.0**-23, 1 - 2.0**-23, 0.5])
    tokens, logprobs, kept = sample_tokens(logits, temperatures, u)
    exact = (logits.double() / torch.where(temperatures == 0, 1.0, temperatures)[:, None]).log_softmax(-1)
    assert kept is None
    assert (logprobs - exact.gather(1, tokens[:, None])[:, 0]).abs().max() < 1e-4
    greedy = temperatures == 0
    assert torch.equal(tokens[greedy], logits[greedy].argmax(-1))
    sums = exact.exp().cumsum(-1)
    after, before = sums.gather(1, tokens[:, None])[:, 0], (sums - exact.exp()).gather(1, tokens[:, None])[:, 0]
    assert ((before <= u + 1e-6) & (u <= after + 1e-6))[~greedy].all()
    assert (tokens % 2 == 1).all()


def test_the_most_likely_tokens_are_ranked_over_the_whole_vocabulary():
    """At temperature 0.5 each probability is squared; at 0 the log-probs are those at 1."""
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log().expand(3, 3)
    tokens, logprobs = rank_logprobs(logits, torch.tensor([1.0, 0.5, 0.0]), 2)
    assert tokens.tolist() == [[1, 2]] * 3
    assert torch.allclose(logprobs.exp(), torch.tensor([[0.5, 0.3], [0.25 / 0.38, 0.09 / 0.38], [0.5, 0.3]]))
    tokens, _ = rank_logprobs(torch.zeros(1, 3), torch.ones(1), 20)
    assert tokens.tolist() == [[0, 1, 2]], "a small vocabulary, in which all are equal"


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    probs = torch.tensor([[0.2, 0.5, 0.3]]).expand(4, 3)
    filtered, kept = apply_filters(probs, make_filters((0.6, 3, 0), (0.5, 3, 0), (1.0, 1, 0), (1.0, 3, 0)))
    assert (filtered > 0).tolist() == [[False, True, True], [False, True, False], [False, True, False], [True] * 3]
    assert kept.counts_B.tolist() == [2, 1, 1, 3]
    assert kept.tokens_BK[0, :2].tolist() == [1, 2]
    assert torch.allclose(kept.log_mass_B.exp(), torch.tensor([0.8, 0.5, 0.5, 1.0]))


def test_min_p_alone_and_all_three_filters_together():
    """p = 0.4, 0.3, 0.2, 0.1: min_p 0.5 requires 0.2; a token has to pass all three filters."""
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).expand(6, 4)
    rows = [(1.0, 4, 0.5), (1.0, 4, 1.0), (1.0, 2, 0.5), (0.7, 3, 0.1), (0.9, 4, 0.6), (1.0, 4, 0.0)]
    filtered, kept = apply_filters(probs, make_filters(*rows))
    found = [sorted(tokens[:count]) for tokens, count in zip(kept.tokens_BK.tolist(), kept.counts_B, strict=True)]
    assert found == [[1, 2, 3], [1], [1, 3], [1, 3], [1, 3], [0, 1, 2, 3]]
    assert torch.allclose(filtered.sum(dim=1), torch.tensor([0.9, 0.4, 0.7, 0.7, 0.7, 1.0]))
    assert torch.allclose(kept.log_mass_B.exp(), filtered.sum(dim=1))


def test_only_kept_tokens_are_sampled_and_their_mass_is_returned():
    """0.5, 0.3, 0.2 with top_k 2: u covers 0.8; log p is over all tokens, and over the kept ones it is 0.3 / 0.8."""
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(3, 3)
    u, filters = torch.tensor([0.62, 0.63, 0.99]), make_filters(*[(1.0, 2, 0)] * 3)
    tokens, logprobs, kept = sample_tokens(logits, torch.ones(3), u, filters)
    assert tokens.tolist() == [0, 1, 1]
    assert torch.allclose(logprobs.exp(), torch.tensor([0.5, 0.3, 0.3]))
    assert torch.allclose((logprobs - kept.log_mass_B).exp(), torch.tensor([0.625, 0.375, 0.375]))


def test_a_set_larger_than_what_is_recorded_is_complete():
    """As many of 3000 tokens are ranked as the widest row needs: 64, 1025 or all; the unfiltered row needs none."""
    probs = torch.arange(3000, 0, -1.0).expand(3, 3000) / 4_501_500
    for widest, ranked in ((63, 64), (64, 1025), (1024, 1025), (1025, 3000), (1500, 3000)):
        filtered, kept = apply_filters(probs, make_filters((1.0, widest, 0), (1.0, 7, 0), (1.0, 3000, 0)))
        assert (filtered > 0).sum(dim=1).tolist() == kept.counts_B.tolist() == [widest, 7, 3000]
        assert kept.tokens_BK.shape == (3, ranked)
        assert kept.tokens_BK[1, :7].tolist() == list(range(7))
        assert torch.allclose(kept.log_mass_B.exp(), filtered.sum(dim=1))


def test_the_kept_tokens_of_a_row_do_not_depend_on_other_rows():
    """Bit for bit, with many tokens of exactly the same probability, as in half precision."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(24, 3000, generator=generator) * 3).bfloat16().float()
    probs = torch.softmax(logits, -1)
    rows = [((0.3, 0.6, 0.9, 0.99, 1.0)[i % 5], (3000, 40, 2000, 7)[i % 4], (0.0, 0.02, 0.4)[i % 3]) for i in range(24)]
    together, kept = apply_filters(probs, make_filters(*rows))
    for i, row in enumerate(rows):
        alone, own = apply_filters(probs[i : i + 1], make_filters(row))
        assert torch.equal(alone[0], together[i])
        assert torch.equal(own.log_mass_B[0], kept.log_mass_B[i])
        count = int(own.counts_B)
        assert count == kept.counts_B[i] == (alone > 0).sum()
        assert row == (1.0, 3000, 0.0) or torch.equal(own.tokens_BK[0, :count], kept.tokens_BK[i, :count])


def test_a_token_without_probability_is_not_sampled_at_the_border_of_a_block():
    """The first token of each block of 128 has probability 0; every u is a border, where sums of blocks round."""
    logits = torch.randn(256, 4096, generator=torch.Generator().manual_seed(0))
    logits[:, ::128] = -torch.inf
    sums = logits.softmax(-1).reshape(256, 32, 128).sum(-1).cumsum(-1)
    for border in range(31):
        tokens, logprobs, _ = sample_tokens(logits, torch.ones(256), sums[:, border] / sums[:, -1])
        assert torch.isfinite(logprobs).all()
        assert (tokens // 128 - border).abs().max() <= 1


def attend_to(length, query_BHD, keys_BHCD, values_BHCD, count):
    """Returns the attention to the first `count` tokens of slots, in a step that attends to `length` of them."""
    mask = torch.zeros(1, 1, 1, length)
    mask[..., count:] = torch.finfo(torch.float32).min
    return decode_attention(query_BHD, keys_BHCD[:, :, :length], values_BHCD[:, :, :length], mask, 0.25)


@pytest.mark.parametrize("head_size", [16, 32, 64])
def test_attention_of_a_short_row_does_not_depend_on_longer_ones(head_size):
    generator = torch.Generator().manual_seed(0)
    query, (keys, values) = (
        torch.randn(shape, generator=generator) for shape in ((8, 4, head_size), (2, 8, 4, 128, head_size))
    )
    alone = attend_to(round_up(9), query, keys, values, 9)
    beside = [attend_to(round_up(longest), query, keys, values, 9) for longest in (17, 33, 60, 128)]
    assert all(torch.equal(alone, each) for each in beside)
