"""What is kept of conversations: the longest common beginning, the budget and who goes first."""

from __future__ import annotations

import random

import pytest
import torch

from reinforge.engine.sampling.prefix_cache import Conversations, KeptSequence, common_length


def sequence(*token_ids: int) -> KeptSequence:
    """Keys and values of one layer, one head, two numbers a token in float32: 16 bytes a token."""
    return KeptSequence(token_ids, [torch.zeros(1, len(token_ids), 2)] * 2)


def run(start: int, count: int) -> tuple[int, ...]:
    return tuple(range(start, start + count))


@pytest.fixture
def kept():
    return Conversations(16 * 100)


def keep(kept, token_ids):
    if kept.wants(token_ids):
        kept.keep(sequence(*token_ids))


def test_common_length():
    pairs = (((1, 2, 3, 4), (1, 2, 5)), ((1, 2), (1, 2, 3)), ((1,), (2,)), ((), (1,)))
    assert [common_length(one, other) for one, other in pairs] == [2, 2, 0, 0]


def test_the_longest_common_beginning_is_found(kept):
    keep(kept, run(0, 40))
    keep(kept, run(0, 20) + run(60, 31))
    for prompt, length in (
        ((*run(0, 40), 99), 40),
        ((*run(0, 30), 99), 30),
        (run(0, 20) + run(60, 16), 35),  # all 36 are there, but the last one is needed for its features
        ((*run(0, 20), 59), 20),
        ((*run(0, 20), 99), 20),
        ((*run(0, 16), 1), 16),
    ):
        found = kept.find(prompt)
        assert found is not None
        assert found[1] == length
        assert found[0].token_ids[:length] == prompt[:length]
    assert kept.find(run(0, 15) + (99,) * 10) is None, "15 tokens are not worth it"
    assert kept.find(run(0, 16)) is None
    assert kept.find(run(0, 20) + (99,) * 60)[1] == 20
    assert kept.find(run(0, 20) + (99,) * 61) is None, "less than a quarter of the prompt"
    assert kept.find(run(1, 40)) is None


def test_what_is_found_has_most_in_common_of_all():
    rng, kept = random.Random(0), Conversations(10**9)
    everything = []
    for _ in range(300):
        token_ids = (1,) * 30 + tuple(rng.choices((1, 2), k=rng.randrange(2, 12)))
        everything.append(token_ids)
        keep(kept, token_ids)
        prompt = (1,) * 30 + tuple(rng.choices((1, 2), k=12))
        found = kept.find(prompt)
        assert found is not None
        assert found[1] == min(max(common_length(other, prompt) for other in everything), len(prompt) - 1)


def test_a_sequence_replaces_what_it_goes_on_from(kept):
    keep(kept, run(0, 40))
    assert (len(kept), kept.num_bytes) == (1, 16 * 40)
    keep(kept, run(0, 60))
    assert (len(kept), kept.num_bytes) == (1, 16 * 60)
    assert not kept.wants(run(0, 40)), "it begins one that is kept"
    assert not kept.wants(run(0, 60))
    keep(kept, (*run(0, 32), 99))
    assert (len(kept), kept.num_bytes) == (2, 16 * 93)


def test_short_sequences_are_not_kept(kept):
    assert not kept.wants(run(0, 31))
    assert kept.wants(run(0, 32))
    assert not Conversations(0).wants(run(0, 99))


def test_the_least_recently_used_goes_first(kept):
    a, b, c = run(0, 40), run(100, 40), run(200, 40)
    keep(kept, a)
    keep(kept, b)
    assert kept.num_bytes == 1280
    assert kept.find((*a, 1))
    keep(kept, c)  # 1,920 bytes are over the budget of 1,600, so b goes
    assert kept.num_bytes == 1280
    assert kept.find((*b, 1)) is None
    assert kept.find((*a, 1))
    assert kept.find((*c, 1))
    keep(kept, run(300, 101))  # 1,616 bytes alone are too many, so nothing changes
    assert kept.num_bytes == 1280
    keep(kept, run(300, 100))
    assert (len(kept), kept.num_bytes) == (1, 1600)


def test_what_was_found_outlives_its_eviction(kept):
    keep(kept, run(0, 90))
    found = kept.find(run(0, 91))
    keep(kept, run(200, 90))
    assert kept.find(run(0, 91)) is None
    assert found[0].states[0].shape == (1, 90, 2)


def test_halving_leaves_room_for_half_of_what_was_taken(kept):
    keep(kept, run(0, 80))
    kept.halve()
    assert (len(kept), kept.num_bytes, kept.max_bytes) == (0, 0, 640)
    assert kept.find(run(0, 81)) is None
    keep(kept, run(0, 41))
    assert len(kept) == 0
    keep(kept, run(0, 40))
    assert len(kept) == 1


def test_adapters_share_the_budget_and_nothing_else(kept):
    for adapter in "ac":
        assert kept.wants(run(0, 40), adapter)
        kept.keep(KeptSequence(run(0, 40), sequence(*run(0, 40)).states, adapter))
    assert (len(kept), kept.num_bytes) == (2, 16 * 80)
    for adapter, length in (("a", 40), ("b", None), ("c", 40), ("0", None), ("d", None)):
        found = kept.find(run(0, 41), adapter)
        assert (found and found[1]) == length
        assert not found or found[0].adapter == adapter
    assert kept.wants(run(0, 40), "b")
    kept.clear("a")
    assert (len(kept), kept.num_bytes) == (1, 16 * 40)
    assert kept.find(run(0, 41), "a") is None
    assert kept.find(run(0, 41), "c")
