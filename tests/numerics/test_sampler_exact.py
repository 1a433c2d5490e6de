"""The sampler's log-probs equal a plain forward, whatever else is in the batch."""

from __future__ import annotations

import numpy as np
import pytest

from reinforge.config.schema import PolicyConfig
from reinforge.engine import Engine
from tests.samples import ask, request


@pytest.fixture(scope="module", params=[True, False], ids=["fast", "general"])
def engine(request, tiny_model_dir):
    config = PolicyConfig(model=str(tiny_model_dir), max_num_seqs=8, fast_paths=request.param)
    with Engine.load(config, seed=0, device="cpu") as engine:
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
