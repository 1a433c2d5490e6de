"""The sampler's arrays and the draw, checkable by hand."""

from __future__ import annotations

import numpy as np
import torch

from reinforge.engine.draw import draw, restrict, uniforms
from reinforge.engine.prefill import batches_by_length
from reinforge.engine.rows import Rows, SampleRequest
from reinforge.engine.slots import round_up


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
    tokens, logprobs = draw(logits, torch.ones(5), u, None, None)
    assert tokens.tolist() == [0, 0, 1, 1, 2]
    assert torch.allclose(logprobs.exp(), torch.tensor([0.5, 0.5, 0.3, 0.3, 0.2]))


def test_draw_never_takes_what_has_no_probability():
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf")]])
    for u in (0.0, 0.5, 1 - 2.0**-23):
        assert draw(logits, torch.ones(1), torch.tensor([u]), None, None)[0].item() == 1


def test_restrict_keeps_the_smallest_set_that_reaches_top_p():
    probs = torch.tensor([[0.2, 0.5, 0.3]]).expand(4, 3)
    kept = restrict(probs, torch.tensor([0.6, 0.5, 1.0, 1.0]), torch.tensor([3, 3, 1, 3]))
    assert (kept > 0).tolist() == [[False, True, True], [False, True, False], [False, True, False], [True] * 3]


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
