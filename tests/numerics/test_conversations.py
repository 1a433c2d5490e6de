"""Kept keys and values change no number: with them = without them = scored anew; and they are used.

The tiny models have 2 layers with 2 heads of keys and values of 16 numbers: 2 * 2 * 2 * 16 * 4 = 512 bytes a token.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from reinforge.config.schema import PolicyConfig
from reinforge.engine import Engine
from reinforge.engine.sampling.fast_llama import DirectLlama
from reinforge.engine.sampling.prefill import Prefill
from reinforge.types.request import ModelRequest, SamplingParams
from reinforge.types.sample import LossSpec
from tests.models import FAMILIES, make_tiny_model
from tests.samples import ask, draw, hold_steps, random_samples, request

BYTES = 512


def load(folder, **config) -> Engine:
    deterministic = config.pop("deterministic", False)
    settings = PolicyConfig(model=str(folder), **{"max_batch": 8, **config})
    return Engine.load(settings, seed=0, device="cpu", deterministic=deterministic)


@pytest.fixture
def engine(tiny_model_dir):
    with load(tiny_model_dir) as engine:
        yield engine


def tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(6, 320, count).tolist())


def assert_scored_alike(engine, requests):
    scored = engine._score_tokens([drawn.prompt + drawn.token_ids for drawn in requests])
    for drawn, logprobs in zip(requests, scored, strict=True):
        assert np.abs(logprobs[len(drawn.prompt) :] - drawn.logprobs).max() <= 1e-5


def counts(engine):
    stats = engine.policy.stats()
    return stats.prompt_tokens, stats.prefilled_tokens, stats.reused_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_with_kept_keys_is_without(family, tmp_path):
    """Six conversations of four turns, of different lengths, side by side; sliding windows are shorter than they."""
    folder = make_tiny_model(tmp_path / family, family, **FAMILIES[family])
    with load(folder) as engine, load(folder, kv_cache_mb=0) as plain:
        histories = [()] * 6
        for turn in range(4):
            new = [tokens((30 if turn == 0 else 5) + 3 * i, seed=turn) for i in range(6)]
            prompts = [history + more for history, more in zip(histories, new, strict=True)]
            kept, anew = draw(engine, prompts, 9), draw(plain, prompts, 9)
            for one, other in zip(kept, anew, strict=True):
                assert one.token_ids == other.token_ids
                assert np.abs(np.subtract(one.logprobs, other.logprobs)).max() <= 1e-5
            assert_scored_alike(engine, kept)
            histories = [drawn.prompt + drawn.token_ids for drawn in kept]
        read, whole = engine.policy.stats(), plain.policy.stats()
        assert read.prefilled_tokens + read.reused_tokens == whole.prefilled_tokens == whole.prompt_tokens
        assert read.prefilled_tokens < whole.prefilled_tokens / 2
        assert (whole.reused_tokens, whole.kept_bytes) == (0, 0)


def test_four_turns_are_counted(engine):
    """Turns of 20 new tokens and 16 drawn ones: the last one drawn is read by the next turn, with the 20."""
    history = ()
    for turn, (read, reused) in enumerate([(20, 0), (21, 35), (21, 71), (21, 107)]):
        before = counts(engine)
        drawn = draw(engine, [history + tokens(20, seed=turn)])[0]
        assert drawn.finish_reason == "length"
        after = counts(engine)
        assert [b - a for a, b in zip(before, after, strict=True)] == [read + reused, read, reused]
        history = drawn.prompt + drawn.token_ids
        assert engine.policy.stats().kept_bytes == (len(history) - 1) * BYTES, "the turn before is part of this one"
    assert len(history) == 4 * 36


def test_three_children_go_on_from_one_node(engine):
    """One after the other and all at once; siblings with equal prompts too. None of them uses the node up."""
    node = draw(engine, [tokens(40)])[0]
    path = node.prompt + node.token_ids
    children = [path + tokens(6 + n, seed=9 + n) for n in range(3)]
    one_by_one = [draw(engine, [child], seeds=[n])[0] for n, child in enumerate(children)]
    assert len(path) == 56
    assert counts(engine)[2] == 55 + 56 + 56, "the node's last token was drawn: its first child reads it"
    before = counts(engine)
    together = draw(engine, [children[0], children[1], children[1], children[2]], seeds=[0, 1, 7, 2])
    after = counts(engine)
    assert after[2] - before[2] == sum(len(child) - 1 for child in children), "each is the beginning of a kept one"
    assert after[1] - before[1] == 3
    for one, other in zip(one_by_one, [together[0], together[1], together[3]], strict=True):
        assert one.token_ids == other.token_ids
    assert_scored_alike(engine, [*one_by_one, *together])


def test_more_conversations_than_slots_beside_new_ones(engine):
    histories = [
        drawn.prompt + drawn.token_ids for drawn in draw(engine, [tokens(30 + n, seed=n) for n in range(20)], 8)
    ]
    prompts = [history + tokens(1 + n, seed=50 + n) for n, history in enumerate(histories)]
    new = [tokens(5 + n, seed=100 + n) for n in range(20)]
    mixed = [prompt for pair in zip(prompts, new, strict=True) for prompt in pair]
    assert_scored_alike(engine, draw(engine, mixed, 8))
    assert counts(engine)[2] == sum(len(history) - 1 for history in histories)


def test_a_rewritten_history_is_used_up_to_there(engine):
    """Through messages: the template ends the reply that it is told, and an agent may tell another one."""
    opening = [{"role": "user", "content": "the quick brown fox jumps over the lazy dog, " * 3}]
    first = ask(engine.policy, [ModelRequest(opening, SamplingParams(max_tokens=12, seed=1))])[0]
    told = [{"role": "assistant", "content": "something else"}, {"role": "user", "content": "and then?"}]
    second = ask(engine.policy, [ModelRequest(opening + told, SamplingParams(max_tokens=12, seed=2))])[0]
    prompt = second.tokens.prompt_token_ids
    assert prompt[: first.num_prompt_tokens] == first.tokens.prompt_token_ids
    reused = counts(engine)[2]
    assert first.num_prompt_tokens <= reused <= first.num_prompt_tokens + 2
    scored = engine._score_tokens([prompt + second.tokens.token_ids])[0]
    assert np.abs(scored[len(prompt) :] - second.tokens.logprobs).max() <= 1e-5


def test_memory_stays_within_the_budget(tiny_model_dir):
    """Sequences of 100 tokens are 51,200 bytes: 20 of them fit into a MiB, and the last 20 are there."""
    with load(tiny_model_dir, kv_cache_mb=1) as engine:
        prompts = [tokens(100, seed=n) for n in range(30)]
        for prompt in prompts:
            draw(engine, [prompt], 1)
        assert engine.policy.stats().kept_bytes == 20 * 100 * BYTES
        for prompt in prompts[:10]:
            draw(engine, [(*prompt, 7)], 1)
        assert counts(engine)[2] == 0
    with load(tiny_model_dir, kv_cache_mb=1) as engine:
        for prompt in prompts:
            draw(engine, [prompt], 1)
        for n, prompt in enumerate(prompts[10:], 1):
            draw(engine, [(*prompt, 7)], 1)
            assert counts(engine)[2] == 100 * n


def test_new_weights_keep_nothing(engine):
    history = tokens(40)
    draw(engine, [history])
    assert engine.policy.stats().kept_bytes
    engine.begin_job()
    assert engine.policy.stats().kept_bytes == 0
    engine.update(random_samples(6), LossSpec("cross_entropy"), progress_start=0.0, progress_end=0.1)
    engine.end_job()
    asyncio.run(engine.policy.publish(1))
    drawn = draw(engine, [(*history, 9)])
    assert counts(engine)[2] == 0
    assert_scored_alike(engine, drawn)


def test_the_same_weights_keep_what_there_is(engine):
    draw(engine, [tokens(40)])
    asyncio.run(engine.policy.publish(1))
    assert_scored_alike(engine, draw(engine, [(*tokens(40), 9)]))
    assert counts(engine)[2] == 40


def test_where_bits_count_nothing_is_kept(tiny_model_dir):
    with load(tiny_model_dir, deterministic=True) as engine:
        drawn = draw(engine, [tokens(40)])[0]
        draw(engine, [drawn.prompt + drawn.token_ids + (9,)])
        assert engine.policy.stats().kept_bytes == 0
        assert counts(engine)[1:] == (97, 0)


async def test_a_cancelled_reply_is_not_kept(engine, monkeypatch):
    held, gate = hold_steps(engine, monkeypatch)
    task = asyncio.create_task(engine.policy.sample(request("long " * 20, max_tokens=100, temperature=0.1)))
    assert await asyncio.to_thread(held.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()
    reply = await engine.policy.sample(request("another one that is long enough " * 4, max_tokens=3, seed=1))
    assert engine.policy.stats().kept_bytes == (reply.num_prompt_tokens + reply.num_completion_tokens - 1) * BYTES


def test_what_is_kept_makes_room_where_memory_runs_out(engine, caplog, monkeypatch):
    """While a prompt is read, and while a step is made: the reply comes all the same, and half is kept from now on."""
    one, other = tokens(100, seed=1), tokens(100, seed=2)
    read, step = (Prefill, "read", (one, other), (*one[:90], 7, 8), 96), (DirectLlama, "step", (one,), tokens(40), 44)
    for owner, name, kept, prompt, left in (read, step):
        draw(engine, kept, 1)
        assert engine.policy.stats().kept_bytes == 100 * len(kept) * BYTES
        with monkeypatch.context() as patch:

            def fail_once(*args, patch=patch):
                patch.undo()
                raise torch.OutOfMemoryError("CUDA out of memory")

            patch.setattr(owner, name, fail_once)
            caplog.clear()
            assert_scored_alike(engine, draw(engine, [prompt], 5))
        assert "memory ran out: at most" in caplog.text
        assert engine.policy.stats().kept_bytes == left * BYTES
