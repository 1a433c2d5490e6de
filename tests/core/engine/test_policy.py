"""How replies are sampled: seeds, greedy, filters, stop texts, limits, versions, loops and failures."""

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from reinforge.engine.sampling.params import check_params
from reinforge.errors import ContextOverflow, EngineError
from reinforge.interfaces import PolicyServer
from reinforge.types.request import ModelRequest, SamplingParams
from tests.device import DEVICE
from tests.engines import load_engine
from tests.samples import ask, hold_steps, request


@pytest.fixture(scope="module")
def engine(tiny_model_dir):
    with load_engine(tiny_model_dir, max_num_seqs=8) as engine:
        yield engine


def get_tokens(reply) -> tuple[int, ...]:
    return reply.tokens.token_ids


def test_the_port_is_implemented(engine):
    assert isinstance(engine.policy, PolicyServer)
    assert engine.policy.model_name.endswith("tiny-llama")
    assert engine.policy.version == 0


def test_a_reply_has_its_exact_tokens(engine):
    reply = ask(engine.policy, [request("what is the capital", temperature=0.8)])[0]
    tokens = reply.tokens
    prompt = engine.tokenizer.decode(tokens.prompt_token_ids)
    assert prompt == "<|user|>what is the capital<|end|><|assistant|>"
    assert len(tokens.token_ids) == len(tokens.logprobs) == len(tokens.texts) == reply.num_completion_tokens
    assert reply.num_prompt_tokens == len(tokens.prompt_token_ids)
    assert reply.message == {
        "role": "assistant",
        "content": engine.tokenizer.decode(tokens.token_ids, skip_special_tokens=True),
    }
    assert (tokens.temperature, tokens.restricted, tokens.policy_version) == (0.8, False, 0)


def test_a_seed_makes_a_reply_reproducible(engine):
    first, second = (ask(engine.policy, [request(seed=s) for s in (1, 2, 1)]) for _ in range(2))
    assert get_tokens(first[0]) == get_tokens(first[2]) == get_tokens(second[0])
    assert get_tokens(first[0]) != get_tokens(first[1])


def test_without_a_seed_siblings_differ_and_runs_repeat(tiny_model_dir):
    runs = []
    for _ in range(2):
        with load_engine(tiny_model_dir) as engine:
            runs.append([get_tokens(reply) for reply in ask(engine.policy, [request()] * 4)])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 4


def test_temperature_zero_takes_the_most_likely_token(engine):
    reply = ask(engine.policy, [request("greedy", temperature=0)])[0]
    ids = list(reply.tokens.prompt_token_ids)
    with torch.no_grad():
        for token in get_tokens(reply):
            assert (
                engine.model.module(input_ids=torch.tensor([ids], device=DEVICE)).logits[0, -1].argmax().item() == token
            )
            ids.append(token)
    assert reply.tokens.restricted


def test_a_filtered_row_does_not_change_other_rows(engine):
    """Rows of all kinds in one batch sample what they sample alone; only filtered rows have a support."""
    kinds = [{}, {"top_k": 2}, {"temperature": 0}, {"top_p": 0.6}, {"top_k": 320}, {"temperature": 0, "min_p": 0.5}]
    alone = [ask(engine.policy, [request("mix", seed=3, **kind)])[0].tokens for kind in kinds]
    together = [reply.tokens for reply in ask(engine.policy, [request("mix", seed=3, **kind) for kind in kinds])]
    assert [tokens.token_ids for tokens in alone] == [tokens.token_ids for tokens in together]
    assert [tokens.supports is not None for tokens in together] == [False, True, False, True, False, False]
    assert [tokens.restricted for tokens in together] == [False, True, True, True, False, True]
    assert together[0].token_ids == together[4].token_ids, "a top_k of the whole vocabulary keeps all"
    assert together[2].processed_logprobs == (0.0,) * len(together[2].token_ids), "a certain token has log p 0"


def test_stop_texts_end_and_cut_the_reply(engine):
    whole = ask(engine.policy, [request("stop", seed=3, max_tokens=30)])[0]
    content = whole.message["content"]
    stop = content[len(content) // 2 :][:3]
    assert stop
    reply = ask(engine.policy, [request("stop", seed=3, max_tokens=30, stop=("never", stop))])[0]
    assert reply.message["content"] == content[: content.find(stop)]
    assert reply.finish_reason == "stop"
    assert get_tokens(reply) == get_tokens(whole)[: len(get_tokens(reply))]
    assert len(get_tokens(reply)) < len(get_tokens(whole))


def test_the_end_token_ends_a_reply_and_is_kept(engine):
    replies = ask(engine.policy, [request(f"end {i}", max_tokens=60, temperature=2.0, seed=i) for i in range(24)])
    ended = [reply for reply in replies if reply.finish_reason == "stop"]
    assert ended
    assert all(get_tokens(reply)[-1] == engine.tokenizer.eos_token_id for reply in ended)
    assert all("<|end|>" not in reply.message["content"] for reply in ended)
    assert all(len(get_tokens(reply)) == 60 for reply in replies if reply.finish_reason == "length")


def test_without_max_tokens_a_reply_fills_the_context(tiny_model_dir):
    with load_engine(tiny_model_dir, max_model_len=24) as engine:
        replies = ask(engine.policy, [request("x", max_tokens=None, seed=s) for s in range(8)])
        longest = max(replies, key=lambda reply: reply.num_completion_tokens)
        assert longest.num_prompt_tokens + longest.num_completion_tokens == 24
        assert longest.finish_reason == "length"
        with pytest.raises(ContextOverflow, match="the limit is 24"):
            ask(engine.policy, [request("many " * 30)])


def test_several_loops_in_threads_sample_at_once(engine):
    counts = []

    def work() -> None:
        counts.append(sum(reply.num_completion_tokens for reply in ask(engine.policy, [request(seed=5)] * 5)))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(counts) == 3
    assert len(set(counts)) == 1


async def test_a_cancelled_request_frees_its_slot(engine):
    """Its row would still run when a later request of three tokens is done."""
    long = request("long", max_tokens=40, temperature=0.1, seed=1)
    assert (await engine.policy.sample(long)).num_completion_tokens > 10
    with hold_steps(engine) as held:
        task = asyncio.create_task(engine.policy.sample(long))
        assert await asyncio.to_thread(held.wait, 60)
        assert engine.policy.stats().running == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await engine.policy.sample(request(max_tokens=3))
    assert engine.policy.stats().running == 0


def test_a_failure_in_the_thread_reaches_every_caller(tiny_model_dir):
    with load_engine(tiny_model_dir) as engine:
        engine.begin_job()  # outside of jobs, weights do not change
        engine.policy.sampler.call(lambda: engine.model.head.weight.data.fill_(float("nan")))
        engine.end_job()
        asyncio.run(engine.policy.publish(1))
        for _ in range(2):  # and the thread survives
            with pytest.raises(EngineError, match="not finite"):
                ask(engine.policy, [request()] * 20)


def test_after_close_requests_fail(tiny_model_dir):
    engine = load_engine(tiny_model_dir)
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        ask(engine.policy, [request()])
    with pytest.raises(EngineError, match="closed"):
        engine.begin_job()


async def test_close_fails_what_is_in_flight(tiny_model_dir):
    engine = load_engine(tiny_model_dir)
    with hold_steps(engine) as held:
        task = asyncio.create_task(engine.policy.sample(request("long", max_tokens=240)))
        assert await asyncio.to_thread(held.wait, 60)
        closing = asyncio.create_task(asyncio.to_thread(engine.close))
        while not engine.policy.sampler._closing:
            await asyncio.sleep(0.001)
    await closing
    with pytest.raises(EngineError, match="closed"):
        await task


def sample_from_tokens(engine, *params):
    replies = ask(engine.policy, [ModelRequest([], SamplingParams(**each), prompt=(5, 6, 7)) for each in params])
    return [(reply.tokens.token_ids, reply.finish_reason) for reply in replies]


def test_a_stop_token_ends_its_own_reply_alone(engine):
    own = {"max_tokens": 20, "seed": 4, "ignore_eos": True}
    [(free, reason)] = sample_from_tokens(engine, own)
    assert (len(free), reason) == (20, "length")
    stop = free[6]
    first = free.index(stop) + 1
    stopped, other = sample_from_tokens(engine, {**own, "stop_token_ids": (stop, 1)}, own)
    assert stopped == (free[:first], "stop")
    assert other == (free, "length")


def test_end_tokens_are_ignored_where_the_request_says_so(engine):
    end = engine.tokenizer.eos_token_id
    forced = {"max_tokens": 4, "logit_bias": ((end, 100),)}
    ended, ignored = sample_from_tokens(engine, forced, {**forced, "ignore_eos": True})
    assert ended == ((end,), "stop")
    assert ignored == ((end,) * 4, "length")


def test_a_token_that_the_model_lacks_is_refused():
    with pytest.raises(ValueError, match="stop has token 320, expected token ids from 0 to 319"):
        check_params(SamplingParams(stop_token_ids=(320,)), 320)


async def test_score_gives_every_token_after_the_first(engine):
    reply = await engine.policy.sample(request("score me"))
    rows = await engine.policy.score([reply.tokens.prompt_token_ids + reply.tokens.token_ids, [9, 8, 7]])
    assert np.abs(rows[0][-len(reply.tokens.logprobs) :] - reply.tokens.logprobs).max() <= 1e-5
    assert rows[0][0] == 0
    assert (rows[0][1:] < 0).all()
    assert rows[1].shape == (3,)


def test_the_most_likely_tokens_are_those_of_a_plain_forward(engine):
    """Requests with and without them, in one batch: the same replies, and four tokens at each position."""
    plain = [request(f"fox {i}", seed=i, max_tokens=3 + i, temperature=0.7, top_p=0.9) for i in range(4)]
    asked = [replace(each, num_top_logprobs=4 - i) for i, each in enumerate(plain[:2])]
    replies, named = ask(engine.policy, plain), ask(engine.policy, [*plain[2:], *asked])[2:]
    assert {reply.tokens.top_logprobs for reply in replies} == {()}
    for number, (reply, other) in enumerate(zip(named, replies, strict=False)):
        assert reply.tokens.token_ids == other.tokens.token_ids
        logprobs, tokens = rank_plainly(engine, reply.tokens, 4 - number)
        assert [tuple(each.token for each in top) for top in reply.tokens.top_logprobs] == tokens
        found = [[each.logprob for each in top] for top in reply.tokens.top_logprobs]
        assert np.abs(np.subtract(found, logprobs)).max() <= 1e-5
        assert [each.top_logprobs for each in reply.tokens.content] == list(reply.tokens.top_logprobs)


def rank_plainly(engine, reply, count):
    whole = torch.tensor([reply.prompt_token_ids + reply.token_ids], device=DEVICE)
    with torch.no_grad():
        logits = engine.model.logits(engine.model.features(whole)[0]).float()
    logits = logits[len(reply.prompt_token_ids) - 1 : -1] / reply.temperature
    top = torch.log_softmax(logits, dim=-1).topk(count)
    texts = [engine.policy.renderer.decode_each(row) for row in top.indices.tolist()]
    return top.values.tolist(), texts
