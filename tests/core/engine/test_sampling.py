"""The sampler's arrays and the sampling of tokens, checkable by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reinforge.engine.sampling.kv_cache import round_up
from reinforge.engine.sampling.prefill import batch_by_length
from reinforge.engine.sampling.running_batch import RunningBatch, SampleRequest
from reinforge.engine.sampling.token_sampling import (
    SamplingFilters,
    apply_filters,
    draw_uniforms,
    rank_logprobs,
    sample_tokens,
)
from reinforge.types.request import SamplingParams
from reinforge.types.supports import Supports


def make_filters(*rows):
    """Filters of rows of (top_p, top_k, min_p)."""
    return SamplingFilters(*map(torch.tensor, zip(*rows, strict=True)))


def test_lengths_are_rounded_up_to_a_multiple():
    assert [round_up(n) for n in (1, 16, 17)] == [16, 16, 32]


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


def test_a_token_without_probability_is_never_sampled():
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf")]])
    for u in (0.0, 0.5, 1 - 2.0**-23):
        assert sample_tokens(logits, torch.ones(1), torch.tensor([u]))[0].item() == 1


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
    assert [sorted(tokens[:count]) for tokens, count in zip(kept.tokens_BK.tolist(), kept.counts_B, strict=True)] == [
        [1, 2, 3],
        [1],
        [1, 3],
        [1, 3],
        [1, 3],
        [0, 1, 2, 3],
    ]
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


def test_filtered_rows_record_their_kept_tokens():
    """Not the greedy row, and not the one whose top_k is the vocabulary; too many tokens are recorded as none."""
    params = [{"top_k": 2}, {}, {"top_p": 0.9}, {"top_k": 9}, {"top_k": 2, "temperature": 0}, {"min_p": 0.1}]
    batch = RunningBatch(6)
    for number, given in enumerate(params):
        batch.add(SampleRequest((number,), 5, SamplingParams(**given)), seed=0, vocab_size=9)
    batch.record(0, np.array([4, 1, 2, 3, 4, 8]), np.full(6, -1, np.float32))
    tokens = np.array([[7, 4, 1]] * 5 + [[0, 1, 2]], np.int32)
    counts = np.array([2, 9, 4, 9, 2, 3])
    batch.record_supports(0, counts, tokens, np.full(6, -0.25, np.float32))
    assert [[kept.tolist() for kept in request.supports] for request in batch.requests] == [
        [[4, 7]],
        [],
        [[]],
        [],
        [],
        [[]],
    ], "the third kept 4 tokens where 3 are recorded, the last sampled one that is not among the kept tokens"
    assert batch.requests[0].processed_logprobs == [-0.75]


def test_supports_keep_ragged_sets():
    sets = [np.array([4, 9], np.int32), np.zeros(0, np.int32), np.array([7], np.int32)]
    supports = Supports.from_sets(sets)
    assert (supports.counts.tolist(), supports.token_ids.tolist(), len(supports)) == ([2, 0, 1], [4, 9, 7], 3)
    assert [tokens.tolist() for tokens in supports.sets] == [[4, 9], [], [7]]
    assert supports == Supports.from_sets([np.array(tokens) for tokens in sets])
    assert supports != Supports.from_sets(sets[:2])
    assert Supports.from_sets([]).sets == []


def test_the_batch_closes_holes():
    batch = RunningBatch(4)
    for name in "abcd":
        batch.add(SampleRequest((ord(name),), 5), seed=0, vocab_size=9)
    batch.record(0, np.array([1, 2, 3, 4]), np.array([-1, -2, -3, -4], np.float32))
    sources, targets = batch.remove(np.array([True, False, True, False]))
    assert (sources.tolist(), targets.tolist()) == ([3], [0])
    assert [chr(request.prompt[0]) for request in batch.requests] == ["d", "b"]
    assert batch.last_tokens[:2].tolist() == [4, 2]
    assert batch.count == 2


def test_the_batch_grows_with_replies():
    batch = RunningBatch(1)
    batch.add(SampleRequest((1,), 100), seed=0, vocab_size=9)
    for token in range(40):
        batch.record(0, np.array([token]), np.array([0.0], np.float32))
    assert batch.token_ids[0, :40].tolist() == list(range(40))


def test_prompts_are_batched_with_prompts_of_similar_length():
    prompts = [(0,) * n for n in (30, 10, 12, 25)]
    lengths = [[len(prompt) for prompt in batch] for batch in batch_by_length(prompts, 1000, len)]
    assert lengths == [[10, 12], [25, 30]]
    assert [len(batch) for batch in batch_by_length(prompts, 25, len)] == [2, 1, 1]


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
