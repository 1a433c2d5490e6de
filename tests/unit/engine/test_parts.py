"""The sampler's arrays and the draw, checkable by hand."""

from __future__ import annotations

import numpy as np
import torch

from reinforge.engine.sampling.kv_cache import round_up
from reinforge.engine.sampling.prefill import batches_by_length
from reinforge.engine.sampling.running_batch import Rows, SampleRequest
from reinforge.engine.sampling.token_drawing import Cuts, draw, restrict, uniforms
from reinforge.types.request import SamplingParams
from reinforge.types.supports import Supports


def cuts_of(*rows):
    """Cuts of rows of (top_p, top_k, min_p)."""
    return Cuts(*map(torch.tensor, zip(*rows, strict=True)))


def test_lengths_round_up_to_the_chunk():
    assert [round_up(n) for n in (1, 16, 17)] == [16, 16, 32]


def test_uniforms_depend_on_seed_and_count_only():
    seeds, counts = np.array([1, 2, 1], np.uint64), np.array([0, 0, 1])
    values = uniforms(seeds, counts)
    assert len(set(values.tolist())) == 3
    assert uniforms(seeds[2:], counts[2:]) == values[2:]
    many = uniforms(np.arange(20_000, dtype=np.uint64), np.zeros(20_000, np.int64))
    assert 0 <= many.min() < many.max() < 1
    assert abs(many.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(many[1:], many[:-1])[0, 1]) < 0.03


def test_draw_inverts_the_distribution_function():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(5, 3)
    u = torch.tensor([0.0, 0.49, 0.51, 0.79, 1 - 2.0**-23])
    tokens, logprobs, kept = draw(logits, torch.ones(5), u)
    assert kept is None
    assert tokens.tolist() == [0, 0, 1, 1, 2]
    assert torch.allclose(logprobs.exp(), torch.tensor([0.5, 0.5, 0.3, 0.3, 0.2]))


def test_draw_never_takes_what_has_no_probability():
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf")]])
    for u in (0.0, 0.5, 1 - 2.0**-23):
        assert draw(logits, torch.ones(1), torch.tensor([u]))[0].item() == 1


def test_restrict_keeps_the_smallest_set_that_reaches_top_p():
    probs = torch.tensor([[0.2, 0.5, 0.3]]).expand(4, 3)
    left, kept = restrict(probs, cuts_of((0.6, 3, 0), (0.5, 3, 0), (1.0, 1, 0), (1.0, 3, 0)))
    assert (left > 0).tolist() == [[False, True, True], [False, True, False], [False, True, False], [True] * 3]
    assert kept.counts_B.tolist() == [2, 1, 1, 3]
    assert kept.words_BK[0, :2].tolist() == [1, 2]
    assert torch.allclose(kept.log_mass_B.exp(), torch.tensor([0.8, 0.5, 0.5, 1.0]))


def test_restrict_by_min_p_and_all_three_together():
    """p = 0.4, 0.3, 0.2, 0.1: min_p 0.5 asks for 0.2; a word has to pass each of the three."""
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).expand(6, 4)
    rows = [(1.0, 4, 0.5), (1.0, 4, 1.0), (1.0, 2, 0.5), (0.7, 3, 0.1), (0.9, 4, 0.6), (1.0, 4, 0.0)]
    left, kept = restrict(probs, cuts_of(*rows))
    assert [sorted(words[:count]) for words, count in zip(kept.words_BK.tolist(), kept.counts_B, strict=True)] == [
        [1, 2, 3],
        [1],
        [1, 3],
        [1, 3],
        [1, 3],
        [0, 1, 2, 3],
    ]
    assert torch.allclose(left.sum(dim=1), torch.tensor([0.9, 0.4, 0.7, 0.7, 0.7, 1.0]))
    assert torch.allclose(kept.log_mass_B.exp(), left.sum(dim=1))


def test_draw_takes_only_what_is_kept_and_tells_its_mass():
    """0.5, 0.3, 0.2 with top_k 2: u runs over 0.8; log p is that of all words, over the kept ones 0.3 / 0.8."""
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(3, 3)
    tokens, logprobs, kept = draw(logits, torch.ones(3), torch.tensor([0.62, 0.63, 0.99]), cuts_of(*[(1.0, 2, 0)] * 3))
    assert tokens.tolist() == [0, 1, 1]
    assert torch.allclose(logprobs.exp(), torch.tensor([0.5, 0.3, 0.3]))
    assert torch.allclose((logprobs - kept.log_mass_B).exp(), torch.tensor([0.625, 0.375, 0.375]))


def test_rows_record_what_a_cut_row_was_drawn_from():
    """Only rows that are cut: not the greedy one, not that whose top_k is the vocabulary; too many words are none."""
    params = [{"top_k": 2}, {}, {"top_p": 0.9}, {"top_k": 9}, {"top_k": 2, "temperature": 0}, {"min_p": 0.1}]
    rows = Rows(6)
    for number, given in enumerate(params):
        rows.add(SampleRequest((number,), 5, SamplingParams(**given)), seed=0, vocab_size=9)
    rows.record(0, np.array([4, 1, 2, 3, 4, 8]), np.full(6, -1, np.float32))
    words = np.array([[7, 4, 1]] * 5 + [[0, 1, 2]], np.int32)
    counts = np.array([2, 9, 4, 9, 2, 3])
    rows.record_supports(0, counts, words, np.full(6, -0.25, np.float32))
    assert [[kept.tolist() for kept in request.supports] for request in rows.requests] == [
        [[4, 7]],
        [],
        [[]],
        [],
        [],
        [[]],
    ], "the third kept 4 words where 3 are recorded, the last drew one that is not among those kept"
    assert rows.requests[0].processed_logprobs == [-0.75]


def test_supports_keep_ragged_sets():
    sets = [np.array([4, 9], np.int32), np.zeros(0, np.int32), np.array([7], np.int32)]
    supports = Supports.of(sets)
    assert (supports.counts.tolist(), supports.token_ids.tolist(), len(supports)) == ([2, 0, 1], [4, 9, 7], 3)
    assert [words.tolist() for words in supports.sets] == [[4, 9], [], [7]]
    assert supports == Supports.of([np.array(words) for words in sets])
    assert supports != Supports.of(sets[:2])
    assert Supports.of([]).sets == []


def test_rows_close_holes():
    rows = Rows(4)
    for name in "abcd":
        rows.add(SampleRequest((ord(name),), 5), seed=0, vocab_size=9)
    rows.record(0, np.array([1, 2, 3, 4]), np.array([-1, -2, -3, -4], np.float32))
    sources, targets = rows.remove(np.array([True, False, True, False]))
    assert (sources.tolist(), targets.tolist()) == ([3], [0])
    assert [chr(request.prompt[0]) for request in rows.requests] == ["d", "b"]
    assert rows.last_tokens[:2].tolist() == [4, 2]
    assert rows.count == 2


def test_rows_grow_with_replies():
    rows = Rows(1)
    rows.add(SampleRequest((1,), 100), seed=0, vocab_size=9)
    for token in range(40):
        rows.record(0, np.array([token]), np.array([0.0], np.float32))
    assert rows.token_ids[0, :40].tolist() == list(range(40))


def test_prompts_are_prefilled_with_those_of_like_length():
    prompts = [(0,) * n for n in (30, 10, 12, 25)]
    lengths = [[len(prompt) for prompt in batch] for batch in batches_by_length(prompts, 1000, len)]
    assert lengths == [[10, 12], [25, 30]]
    assert [len(batch) for batch in batches_by_length(prompts, 25, len)] == [2, 1, 1]


def test_a_set_of_more_words_than_are_recorded_is_whole():
    """Of 3000 words as many are ranked as the widest row needs: 64, 1025 or all; the row that is not cut needs none."""
    probs = torch.arange(3000, 0, -1.0).expand(3, 3000) / 4_501_500
    for widest, ranked in ((63, 64), (64, 1025), (1024, 1025), (1025, 3000), (1500, 3000)):
        left, kept = restrict(probs, cuts_of((1.0, widest, 0), (1.0, 7, 0), (1.0, 3000, 0)))
        assert (left > 0).sum(dim=1).tolist() == kept.counts_B.tolist() == [widest, 7, 3000]
        assert kept.words_BK.shape == (3, ranked)
        assert kept.words_BK[1, :7].tolist() == list(range(7))
        assert torch.allclose(kept.log_mass_B.exp(), left.sum(dim=1))


def test_what_a_row_keeps_does_not_depend_on_the_rows_beside_it():
    """Bit for bit, with many words of exactly the same probability, as half precision makes them."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(24, 3000, generator=generator) * 3).bfloat16().float()
    probs = torch.softmax(logits, -1)
    rows = [((0.3, 0.6, 0.9, 0.99, 1.0)[i % 5], (3000, 40, 2000, 7)[i % 4], (0.0, 0.02, 0.4)[i % 3]) for i in range(24)]
    together, kept = restrict(probs, cuts_of(*rows))
    for i, row in enumerate(rows):
        alone, own = restrict(probs[i : i + 1], cuts_of(row))
        assert torch.equal(alone[0], together[i])
        assert torch.equal(own.log_mass_B[0], kept.log_mass_B[i])
        count = int(own.counts_B)
        assert count == kept.counts_B[i] == (alone > 0).sum()
        assert row == (1.0, 3000, 0.0) or torch.equal(own.words_BK[0, :count], kept.words_BK[i, :count])
