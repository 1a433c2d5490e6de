"""What the sampler reports equals a plain forward of transformers, whoever shares the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reinforge.config.schema import PolicyConfig
from reinforge.engine import Engine
from tests.models import make_tiny_model
from tests.samples import ask, request

FAMILIES = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "gemma2": {"sliding_window": 8, "head_dim": 16, "final_logit_softcapping": 5.0},
    "mistral": {"sliding_window": 8},
}


def plain_logprobs(engine: Engine, tokens) -> np.ndarray:
    """log p of the reply's tokens by one call of the Hugging Face module."""
    ids = torch.tensor([tokens.prompt_token_ids + tokens.token_ids])
    with torch.no_grad():
        logits = engine.model.module(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].double()
    logprobs = torch.log_softmax(logits / (tokens.temperature or 1.0), -1)
    start = len(tokens.prompt_token_ids)
    return np.array([logprobs[t - 1, ids[0, t]].item() for t in range(start, ids.shape[1])])


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_a_plain_forward(family, tmp_path):
    folder = make_tiny_model(tmp_path, family, **FAMILIES[family])
    with Engine.load(PolicyConfig(model=str(folder), max_batch=5), seed=0, device="cpu") as engine:
        assert engine.model.separable == (family != "gemma2")
        requests = [
            request("a" * (1 + i // 3), temperature=(1.0, 0.6, 1.7, 0.0)[i % 4], max_tokens=3 + 5 * (i % 5))
            for i in range(14)
        ]
        replies = ask(engine.policy, requests)
        for reply in replies:
            assert np.abs(plain_logprobs(engine, reply.tokens) - reply.tokens.logprobs).max() <= 1e-5
        assert max(len(reply.tokens.token_ids) for reply in replies) > 10


@pytest.fixture(scope="module")
def engine(tiny_model_dir):
    with Engine.load(PolicyConfig(model=str(tiny_model_dir), max_batch=8), seed=0, device="cpu") as engine:
        yield engine


def test_a_reply_does_not_depend_on_who_shares_the_batch(engine):
    asked = request("the fox", seed=7, max_tokens=30)
    alone = ask(engine.policy, [asked])[0]
    crowd = [request(f"number {i} " * (i % 6), max_tokens=1 + i) for i in range(20)]
    together = ask(engine.policy, [*crowd[:10], asked, *crowd[10:]])[10]
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
