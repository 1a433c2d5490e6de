"""The sampler's log-probs equal a plain forward, whatever else is in the batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from reinforge.config.policy import PolicyConfig
from reinforge.engine import Engine
from tests.device import DEVICE
from tests.samples import ask, request


@pytest.fixture(scope="module", params=[True, False], ids=["fast", "general"])
def engine(request, tiny_model_dir):
    config = PolicyConfig(model=str(tiny_model_dir), max_num_seqs=8, fast_paths=request.param)
    with Engine.load(config, seed=0, device=DEVICE) as engine:
        yield engine


def test_a_reply_does_not_depend_on_the_rest_of_the_batch(engine):
    single = request("the fox", seed=7, max_tokens=30)
    alone = ask(engine.policy, [single])[0]
    crowd = [request(f"number {i} " * (i % 6), max_tokens=1 + i) for i in range(20)]
    together = ask(engine.policy, [*crowd[:10], single, *crowd[10:]])[10]
    assert together.tokens.token_ids == alone.tokens.token_ids
    assert np.abs(np.subtract(together.tokens.logprobs, alone.tokens.logprobs)).max() <= 1e-5


def test_equal_prompts_are_prefilled_once_and_give_the_same(engine):
    siblings = [request("one prompt", seed=seed, max_tokens=20) for seed in range(6)]
    before = engine.policy.stats()
    together = ask(engine.policy, siblings)
    after = engine.policy.stats()
    length = together[0].num_prompt_tokens
    assert after.prefilled_tokens - before.prefilled_tokens == length
    assert after.prompt_tokens - before.prompt_tokens == 6 * length
    for sibling, reply in zip(siblings, together, strict=True):
        alone = ask(engine.policy, [sibling])[0]
        assert alone.tokens.token_ids == reply.tokens.token_ids
        assert np.abs(np.subtract(alone.tokens.logprobs, reply.tokens.logprobs)).max() <= 1e-5


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
    """Returns the highest log-probs at each position of a reply by one forward, and the texts of their tokens."""
    whole = torch.tensor([reply.prompt_token_ids + reply.token_ids], device=DEVICE)
    with torch.no_grad():
        logits = engine.model.logits(engine.model.features(whole)[0]).float()
    logits = logits[len(reply.prompt_token_ids) - 1 : -1] / reply.temperature
    top = torch.log_softmax(logits, dim=-1).topk(count)
    texts = [engine.policy.renderer.decode_each(row) for row in top.indices.tolist()]
    return top.values.tolist(), texts
