"""Who waits for whom in the sampler: long prompts, running streams and several clients."""

import asyncio

import numpy as np
import pytest

from reinforge.engine.sampling import sampler as sampler_module
from reinforge.engine.sampling.admission import take_turns
from reinforge.engine.sampling.running_batch import SampleRequest
from reinforge.types.request import CLIENT, SamplingParams
from tests.architectures import make_tiny_architecture
from tests.engines import load_engine, measure_error
from tests.models import FAMILIES, make_tiny_model
from tests.samples import Waiter, hold_steps, request, sample_replies

PART = 32


def tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(6, 320, count).tolist())


def read_along() -> SampleRequest:
    """A reply of 240 tokens that a client reads as it grows."""
    return SampleRequest(tokens(5), 240, SamplingParams(seed=1, ignore_eos=True), owner=Waiter(1), new_tokens=[])


def end_stream(engine, stream):
    stream.cancelled = True
    engine.policy.sampler.pause()
    engine.policy.sampler.resume(0)


def send(engine, *requests):
    """Sends requests beside a stream that has its first token.

    Returns:
        Of each, in the order of their first tokens: its number, and the decode steps until then.
    """
    sampler, waiter, order, stream = engine.policy.sampler, Waiter(len(requests)), [], read_along()

    def submit():
        sampler.submit([stream])
        sampler._advance()
        before = sampler.stats().steps
        for number, sent in enumerate(requests):

            def note(_, number=number):
                if number not in dict(order):
                    order.append((number, sampler.stats().steps - before))

            sent.owner, sent.has_stop_text, sent.num_stop_tokens = waiter, note, 1
        sampler.submit(requests)

    sampler.call(submit)
    assert waiter.done.wait(30)
    assert [each.error for each in requests] == [None] * len(requests)
    end_stream(engine, stream)
    return order


@pytest.fixture(scope="module")
def engine(tiny_model_dir):
    with load_engine(tiny_model_dir) as engine:
        yield engine


@pytest.fixture
def parts(monkeypatch):
    monkeypatch.setattr(sampler_module, "READER_TOKENS", PART)


def make(tmp_path, family):
    if family in FAMILIES:
        return make_tiny_model(tmp_path / family, family, **FAMILIES[family])
    return make_tiny_architecture(tmp_path / family, family)


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(each, marks=pytest.mark.slow) for each in ("gemma3_text", "olmo_hybrid"))]
)
def test_a_long_prompt_is_computed_in_parts_between_the_steps_of_a_stream(family, parts, tmp_path):
    """200 tokens are 6 parts of 32, and 8: six decode steps come between."""
    with load_engine(make(tmp_path, family)) as engine:
        long = SampleRequest(tokens(200), 20, SamplingParams(seed=7))
        assert send(engine, long) == [(0, 6)]
        stats = engine.policy.stats()
        assert (stats.prompt_tokens, stats.prefilled_tokens, stats.reused_tokens) == (205, 205, 0)
        assert long.computed is None
        assert measure_error(engine, [long]) <= 1e-5
        [alone] = sample_replies(engine, [tokens(200)], 20, seeds=[7])
        assert alone.token_ids == long.token_ids
        assert np.abs(np.subtract(alone.logprobs, long.logprobs)).max() <= 1e-5


def test_without_parts_the_stream_stands_still(engine):
    assert send(engine, SampleRequest(tokens(200), 2, SamplingParams(seed=7))) == [(0, 0)]


def test_prompts_are_computed_whole_where_the_parts_would_change_bits(parts, tiny_model_dir):
    with load_engine(tiny_model_dir, deterministic=True) as engine:
        assert send(engine, SampleRequest(tokens(200), 2, SamplingParams(seed=7))) == [(0, 0)]


def test_prompts_are_computed_whole_where_nobody_reads(parts, engine):
    before = engine.policy.stats().steps
    sample_replies(engine, [tokens(200, seed) for seed in range(4)], 4)
    assert engine.policy.stats().steps - before == 3, "all four begin before the first step"


def test_short_prompts_do_not_wait_for_a_long_one_nor_stream_for_all_of_them(parts, engine):
    """A long prompt came first; of six short ones of 10 tokens, 3 fit into what a step may compute beside it."""
    engine.policy.sampler.pause()  # which empties the prefix cache
    engine.policy.sampler.resume(0)
    prompts = [tokens(200), *(tokens(10, seed) for seed in range(6))]
    params = [SamplingParams(seed=seed, ignore_eos=True) for seed in range(7)]
    requests = [SampleRequest(prompt, 40, each) for prompt, each in zip(prompts, params, strict=True)]
    order = send(engine, *requests)
    assert order == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (6, 1), (0, 6)]
    assert measure_error(engine, requests) <= 1e-5


def begin_long(engine, stream):
    """A long prompt beside a stream, of which two parts are computed; another call goes on from there."""
    sampler, long = engine.policy.sampler, SampleRequest(tokens(200), 20, SamplingParams(seed=7), owner=Waiter(1))
    sampler.submit([stream])
    sampler._advance()
    sampler.submit([long])
    sampler._advance()
    sampler._advance()
    assert (len(long.computed.token_ids), sampler.stats().waiting, sampler.stats().running) == (2 * PART, 1, 1)
    return long


def test_weights_change_only_after_a_prompt_that_is_half_computed_has_its_reply(parts, engine):
    sampler = engine.policy.sampler
    long = sampler.call(lambda: begin_long(engine, read_along()))
    sampler.pause()
    assert (len(long.token_ids), long.version, long.error, sampler.stats().running) == (20, 0, None, 0)
    sampler.resume(1)
    assert sample_replies(engine, [tokens(9)])[0].version == 1
    sampler.resume(0)


def test_a_half_computed_prompt_that_nobody_waits_for_is_dropped(parts, engine):
    sampler, stream = engine.policy.sampler, read_along()

    def cancel():
        long = begin_long(engine, stream)
        long.cancelled = True
        sampler._advance()
        return long.token_ids, sampler.stats().waiting, sampler.stats().running

    assert sampler.call(cancel) == ((), 0, 1)
    end_stream(engine, stream)


def test_a_failure_reaches_a_prompt_that_is_half_computed(parts, tiny_model_dir):
    with load_engine(tiny_model_dir) as engine:
        sampler = engine.policy.sampler
        long, _ = sampler.call(lambda: (begin_long(engine, read_along()), setattr(sampler, "_closing", True)))
    assert "the engine is closed" in str(long.error)
    assert (long.token_ids, sampler.stats().waiting) == ((), 0)


def ask(client):
    return SampleRequest(tokens(4), 1, client=client)


def test_a_client_with_fewer_replies_in_flight_comes_first():
    first, second, third, other = ask(1), ask(1), ask(1), ask(2)
    assert take_turns([first, second, third, other], [ask(1)], {}) == [other, first, second, third]
    assert take_turns([first, second, third, other], [], {}) == [first, other, second, third]
    assert take_turns([first, second, third, other], [], {1: 5.0, 2: 4.0}) == [other, first, second, third]
    assert take_turns([first, second, other], [ask(2), ask(2)], {}) == [first, second, other]
    assert take_turns([first, second, third], [ask(1)], {1: 5.0}) == [first, second, third], "one: in their order"


@pytest.fixture(scope="module")
def one_slot(tiny_model_dir):
    with load_engine(tiny_model_dir, max_num_seqs=1) as engine:
        yield engine


def test_a_client_with_many_requests_delays_another_by_one_reply(one_slot):
    """One slot: client 1 has a reply in it and eight that wait when client 2 comes."""
    order, waiter = [], Waiter(10)
    requests = [SampleRequest(tokens(4, n), 3, client=1 + (n == 9), owner=waiter) for n in range(10)]
    for sent in requests:
        sent.has_stop_text = lambda _, sent=sent: order.append(sent.client)
        sent.num_stop_tokens = 1
    with hold_steps(one_slot) as held:
        one_slot.policy.sampler.submit(requests[:1])
        assert held.wait(30)
        one_slot.policy.sampler.submit(requests[1:])
    assert waiter.done.wait(30)
    assert list(dict.fromkeys(order[:4])) == [1, 2], "right after the reply that ran"


async def test_the_sampler_knows_the_client_of_a_call(one_slot):
    order = []

    async def call(client):
        CLIENT.set(client)
        await one_slot.policy.sample(request(max_tokens=3))
        order.append(client)

    with hold_steps(one_slot) as held:
        tasks = [asyncio.create_task(call(1))]
        assert await asyncio.to_thread(held.wait, 30)
        tasks += [asyncio.create_task(call(client)) for client in (1, 1, 1, 2)]
        async with asyncio.timeout(30):
            while one_slot.policy.count_waiting() < 4:
                await asyncio.sleep(0.01)
    await asyncio.gather(*tasks)
    assert order == [1, 2, 1, 1, 1]
