"""The prefix cache: the longest common prefix, the memory budget, and what is evicted first."""

import random

import pytest
import torch

from reinforge.engine.sampling.prefix_cache import CachedPrefix, PrefixCache, count_common_tokens


def sequence(*token_ids: int) -> CachedPrefix:
    """Keys and values of one layer, one head, two numbers a token in float32: 16 bytes a token."""
    return CachedPrefix(token_ids, [torch.zeros(1, len(token_ids), 2)] * 2)


def run(start: int, count: int) -> tuple[int, ...]:
    return tuple(range(start, start + count))


@pytest.fixture
def cache():
    return PrefixCache(16 * 100)


def add(cache, token_ids):
    if cache.accepts(token_ids):
        cache.add(sequence(*token_ids))


def test_the_longest_common_prefix_is_found(cache):
    add(cache, run(0, 40))
    add(cache, run(0, 20) + run(60, 31))
    for prompt, length in (
        ((*run(0, 40), 99), 40),
        ((*run(0, 30), 99), 30),
        (run(0, 20) + run(60, 16), 35),  # all 36 are cached, but the last one is needed for its features
        ((*run(0, 20), 59), 20),
        ((*run(0, 20), 99), 20),
        ((*run(0, 16), 1), 16),
    ):
        found = cache.find(prompt)
        assert found is not None
        assert found[1] == length
        assert found[0].token_ids[:length] == prompt[:length]
    assert cache.find(run(0, 15) + (99,) * 10) is None, "15 tokens are not worth it"
    assert cache.find(run(0, 16)) is None
    assert cache.find(run(0, 20) + (99,) * 60)[1] == 20
    assert cache.find(run(0, 20) + (99,) * 61) is None, "less than a quarter of the prompt"
    assert cache.find(run(1, 40)) is None


def test_no_cached_sequence_shares_more_than_the_one_found():
    rng, cache = random.Random(0), PrefixCache(10**9)
    everything = []
    for _ in range(100):
        token_ids = (1,) * 30 + tuple(rng.choices((1, 2), k=rng.randrange(2, 12)))
        everything.append(token_ids)
        add(cache, token_ids)
        prompt = (1,) * 30 + tuple(rng.choices((1, 2), k=12))
        found = cache.find(prompt)
        assert found is not None
        assert found[1] == min(max(count_common_tokens(other, prompt) for other in everything), len(prompt) - 1)


def test_a_sequence_replaces_the_one_it_extends(cache):
    add(cache, run(0, 40))
    assert (len(cache), cache.num_bytes) == (1, 16 * 40)
    add(cache, run(0, 60))
    assert (len(cache), cache.num_bytes) == (1, 16 * 60)
    assert not cache.accepts(run(0, 40)), "it is a prefix of a cached sequence"
    assert not cache.accepts(run(0, 60))
    add(cache, (*run(0, 32), 99))
    assert (len(cache), cache.num_bytes) == (2, 16 * 93)


def test_short_sequences_are_not_cached(cache):
    assert not cache.accepts(run(0, 31))
    assert cache.accepts(run(0, 32))
    assert not PrefixCache(0).accepts(run(0, 99))


def test_the_least_recently_used_is_evicted_first(cache):
    a, b, c = run(0, 40), run(100, 40), run(200, 40)
    add(cache, a)
    add(cache, b)
    assert cache.num_bytes == 1280
    assert cache.find((*a, 1))
    add(cache, c)  # 1,920 bytes are over the budget of 1,600, so b is evicted
    assert cache.num_bytes == 1280
    assert cache.find((*b, 1)) is None
    assert cache.find((*a, 1))
    assert cache.find((*c, 1))
    add(cache, run(300, 101))  # 1,616 bytes alone are too many, so nothing changes
    assert cache.num_bytes == 1280
    add(cache, run(300, 100))
    assert (len(cache), cache.num_bytes) == (1, 1600)


def test_a_found_sequence_outlives_its_eviction(cache):
    add(cache, run(0, 90))
    found = cache.find(run(0, 91))
    add(cache, run(200, 90))
    assert cache.find(run(0, 91)) is None
    assert found[0].states[0].shape == (1, 90, 2)


def test_adapters_share_the_budget_and_nothing_else(cache):
    for adapter in "ac":
        assert cache.accepts(run(0, 40), adapter)
        cache.add(CachedPrefix(run(0, 40), sequence(*run(0, 40)).states, adapter))
    assert (len(cache), cache.num_bytes) == (2, 16 * 80)
    for adapter, length in (("a", 40), ("b", None), ("c", 40), ("0", None), ("d", None)):
        found = cache.find(run(0, 41), adapter)
        assert (found and found[1]) == length
        assert not found or found[0].adapter == adapter
    assert cache.accepts(run(0, 40), "b")
    cache.clear("a")
    assert (len(cache), cache.num_bytes) == (1, 16 * 40)
    assert cache.find(run(0, 41), "a") is None
    assert cache.find(run(0, 41), "c")
