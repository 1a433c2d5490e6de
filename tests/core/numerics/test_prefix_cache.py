"""The prefix cache changes no number: with it = without it = scored by the learner; and it is used.

The tiny models have 2 layers with 2 heads of keys and values of 16 numbers: 2 * 2 * 2 * 16 * 4 = 512 bytes a token.
"""

import asyncio

import numpy as np
import pytest
import torch

from reinforge.engine.sampling.fast_llama import FastLlama
from reinforge.engine.sampling.prefill import Prefiller
from reinforge.types.request import ModelRequest, SamplingParams
from tests.engines import load_engine, measure_error, train
from tests.models import FAMILIES, make_tiny_model
from tests.samples import ask, hold_steps, random_samples, request, sample_replies

BYTES = 512


@pytest.fixture(scope="module")
def loaded(tiny_model_dir):
    with load_engine(tiny_model_dir, max_num_seqs=8) as engine:
        yield engine


@pytest.fixture
def engine(loaded):
    """An engine with an empty cache."""
    loaded.policy.sampler.pause()
    loaded.policy.sampler.resume(0)
    loaded.counts_before = read_counts(loaded)
    return loaded


def tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(6, 320, count).tolist())


def read_counts(engine):
    stats = engine.policy.stats()
    return np.array((stats.prompt_tokens, stats.prefilled_tokens, stats.reused_tokens))


def counts(engine):
    """Tokens of prompts, tokens that were computed and tokens that were reused in this test."""
    return tuple((read_counts(engine) - engine.counts_before).tolist())


SLOW_CASES = [*((family, True) for family in FAMILIES if family != "llama"), ("llama", False), ("gemma2", False)]


@pytest.mark.parametrize(
    ("family", "fast_paths"), [("llama", True), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)]
)
def test_replies_are_the_same_without_the_cache(family, fast_paths, tmp_path):
    """Four conversations of three turns, of different lengths, side by side; sliding windows are shorter than they."""
    folder = make_tiny_model(tmp_path / family, family, **FAMILIES[family])
    settings = {"fast_paths": fast_paths, "max_num_seqs": 8}
    with load_engine(folder, **settings) as engine, load_engine(folder, kv_cache_mb=0, **settings) as plain:
        histories = [()] * 4
        for turn in range(3):
            new = [tokens((30 if turn == 0 else 5) + 3 * i, seed=turn) for i in range(4)]
            prompts = [history + more for history, more in zip(histories, new, strict=True)]
            replies, others = sample_replies(engine, prompts, 6), sample_replies(plain, prompts, 6)
            for one, other in zip(replies, others, strict=True):
                assert one.token_ids == other.token_ids
                assert np.abs(np.subtract(one.logprobs, other.logprobs)).max() <= 1e-5
            assert measure_error(engine, replies) <= 1e-5
            histories = [reply.prompt + reply.token_ids for reply in replies]
        cached, whole = engine.policy.stats(), plain.policy.stats()
        assert cached.prefilled_tokens + cached.reused_tokens == whole.prefilled_tokens == whole.prompt_tokens
        assert cached.prefilled_tokens < whole.prefilled_tokens / 2
        assert (whole.reused_tokens, whole.prefix_cache_bytes) == (0, 0)


def test_four_turns_are_counted(engine):
    """Turns of 20 new tokens and 16 sampled ones: the next turn computes the last sampled token with its 20."""
    history = ()
    for turn, (computed, reused) in enumerate([(20, 0), (21, 35), (21, 71), (21, 107)]):
        before = counts(engine)
        reply = sample_replies(engine, [history + tokens(20, seed=turn)])[0]
        assert reply.finish_reason == "length"
        after = counts(engine)
        assert [b - a for a, b in zip(before, after, strict=True)] == [computed + reused, computed, reused]
        history = reply.prompt + reply.token_ids
        size = engine.policy.stats().prefix_cache_bytes
        assert size == (len(history) - 1) * BYTES, "this turn replaces the one before, which it extends"
    assert len(history) == 4 * 36


def test_three_children_continue_one_node(engine):
    """One after the other and all at once, with equal prompts, too. The node stays available to each of them."""
    node = sample_replies(engine, [tokens(40)])[0]
    path = node.prompt + node.token_ids
    children = [path + tokens(6 + n, seed=9 + n) for n in range(3)]
    one_by_one = [sample_replies(engine, [child], seeds=[n])[0] for n, child in enumerate(children)]
    assert len(path) == 56
    assert counts(engine)[2] == 55 + 56 + 56, "the first child computes the node's last token, which was only sampled"
    before = counts(engine)
    together = sample_replies(engine, [children[0], children[1], children[1], children[2]], seeds=[0, 1, 7, 2])
    after = counts(engine)
    assert after[2] - before[2] == sum(len(child) - 1 for child in children), "each is a prefix of a cached sequence"
    assert after[1] - before[1] == 3
    for one, other in zip(one_by_one, [together[0], together[1], together[3]], strict=True):
        assert one.token_ids == other.token_ids
    assert measure_error(engine, [*one_by_one, *together]) <= 1e-5


def test_more_conversations_than_slots_next_to_new_ones(engine):
    first = sample_replies(engine, [tokens(30 + n, seed=n) for n in range(12)], 8)
    histories = [reply.prompt + reply.token_ids for reply in first]
    prompts = [history + tokens(1 + n, seed=50 + n) for n, history in enumerate(histories)]
    new = [tokens(5 + n, seed=100 + n) for n in range(12)]
    mixed = [prompt for pair in zip(prompts, new, strict=True) for prompt in pair]
    assert measure_error(engine, sample_replies(engine, mixed, 8)) <= 1e-5
    assert counts(engine)[2] == sum(len(history) - 1 for history in histories)


def test_a_rewritten_history_is_used_up_to_the_change(engine):
    """By messages: the template adds an end to a reply, and an agent may send another reply than the sampled one."""
    start = [{"role": "user", "content": "the quick brown fox jumps over the lazy dog, " * 3}]
    first = ask(engine.policy, [ModelRequest(start, SamplingParams(max_tokens=12, seed=1))])[0]
    rewritten = [{"role": "assistant", "content": "something else"}, {"role": "user", "content": "and then?"}]
    second = ask(engine.policy, [ModelRequest(start + rewritten, SamplingParams(max_tokens=12, seed=2))])[0]
    prompt = second.tokens.prompt_token_ids
    assert prompt[: first.num_prompt_tokens] == first.tokens.prompt_token_ids
    reused = counts(engine)[2]
    assert first.num_prompt_tokens <= reused <= first.num_prompt_tokens + 2
    assert measure_error(engine, [second]) <= 1e-5


def test_new_weights_empty_the_cache(engine):
    history = tokens(40)
    sample_replies(engine, [history])
    assert engine.policy.stats().prefix_cache_bytes
    train(engine, random_samples(6))
    assert engine.policy.stats().prefix_cache_bytes == 0
    asyncio.run(engine.policy.publish(1))
    replies = sample_replies(engine, [(*history, 9)])
    assert counts(engine)[2] == 0
    assert measure_error(engine, replies) <= 1e-5


def test_publishing_the_same_weights_keeps_the_cache(engine):
    sample_replies(engine, [tokens(40)])
    asyncio.run(engine.policy.publish(1))
    assert measure_error(engine, sample_replies(engine, [(*tokens(40), 9)])) <= 1e-5
    assert counts(engine)[2] == 40


def test_a_deterministic_engine_has_no_cache(tiny_model_dir):
    with load_engine(tiny_model_dir, deterministic=True) as engine:
        reply = sample_replies(engine, [tokens(40)])[0]
        sample_replies(engine, [reply.prompt + reply.token_ids + (9,)])
        assert engine.policy.stats().prefix_cache_bytes == 0
        assert read_counts(engine)[1:].tolist() == [97, 0]


async def test_a_cancelled_reply_is_not_cached(engine):
    with hold_steps(engine) as held:
        task = asyncio.create_task(engine.policy.sample(request("long " * 20, max_tokens=100, temperature=0.1)))
        assert await asyncio.to_thread(held.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    reply = await engine.policy.sample(request("another one that is long enough " * 4, max_tokens=3, seed=1))
    length = reply.num_prompt_tokens + reply.num_completion_tokens
    assert engine.policy.stats().prefix_cache_bytes == (length - 1) * BYTES


def test_the_cache_shrinks_when_memory_runs_out(engine, caplog, monkeypatch):
    """During a prefill, and during a decode step: the reply is still complete, and the cache takes half from now on."""
    cache = engine.policy.sampler._prefix_cache
    monkeypatch.setattr(cache, "max_bytes", cache.max_bytes)  # which the test changes
    one, other = tokens(100, seed=1), tokens(100, seed=2)
    prefill = (Prefiller, "run", (one, other), (*one[:90], 7, 8), 96)
    step = (FastLlama, "decode_step", (one,), tokens(40), 44)
    for owner, name, cached, prompt, left in (prefill, step):
        sample_replies(engine, cached, 1)
        assert engine.policy.stats().prefix_cache_bytes == 100 * len(cached) * BYTES
        with monkeypatch.context() as patch:

            def fail_once(*args, patch=patch):
                patch.undo()
                raise torch.OutOfMemoryError("CUDA out of memory")

            patch.setattr(owner, name, fail_once)
            caplog.clear()
            assert measure_error(engine, sample_replies(engine, [prompt], 5)) <= 1e-5
        assert "out of memory: reducing the prefix cache to at most" in caplog.text
        assert engine.policy.stats().prefix_cache_bytes == left * BYTES
