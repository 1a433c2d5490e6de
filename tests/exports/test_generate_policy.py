"""A folder served by transformers' `generate`."""

import asyncio

import pytest

from reinforge.exports.generate_policy import GeneratePolicy
from reinforge.types.request import ModelRequest, SamplingParams
from tests.models import make_tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


@pytest.fixture
def policy(tmp_path):
    server = GeneratePolicy(make_tiny_model(tmp_path / "model"), device="cpu", history="template", seed=0)
    yield server
    server.close()


def ask(text):
    return ModelRequest([{"role": "user", "content": text}], GREEDY)


async def test_requests_that_wait_together_get_the_replies_that_they_get_alone(policy):
    alone = [(await policy.sample(ask(text))).tokens for text in ("a", "longer")]
    together = await asyncio.gather(policy.sample(ask("a")), policy.sample(ask("longer")))
    assert [reply.tokens.token_ids for reply in together] == [tokens.token_ids for tokens in alone]
    assert [reply.tokens.prompt_token_ids for reply in together] == [tokens.prompt_token_ids for tokens in alone]


async def test_a_reply_that_cannot_be_read_raises_where_its_caller_waits(policy, monkeypatch):
    def fail(tokens):
        raise RuntimeError("no text")

    monkeypatch.setattr(policy.renderer, "decode", fail)
    with pytest.raises(RuntimeError, match="no text"):
        await asyncio.wait_for(policy.sample(ask("a")), timeout=60)
