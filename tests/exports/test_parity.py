"""Parity: what counts as the same model."""

import asyncio

import numpy as np
import pytest

from reinforge.exports.generate_policy import GeneratePolicy
from reinforge.exports.judge import Parity, compare, make_greedy
from reinforge.interfaces import PolicyServer
from reinforge.types.request import Grammar, ModelReply, ModelRequest, SamplingParams, TokenLogprobs
from tests.models import make_tiny_model


class Fixed(PolicyServer):
    version, model_name = 0, "fixed"

    def __init__(self, prompts, replies, logprob):
        self.prompts, self.replies, self.logprob, self.asked = prompts, replies, logprob, []

    async def sample(self, request):
        number = int(request.messages[0]["content"])
        self.asked.append(request)
        tokens = TokenLogprobs(self.prompts[number], self.replies[number], (0.0,) * len(self.replies[number]))
        return ModelReply({"role": "assistant", "content": ""}, "stop", tokens)

    async def score(self, token_ids):
        return [np.full(len(row), self.logprob, np.float32) for row in token_ids]

    async def publish(self, version):
        pass

    async def fingerprint(self):
        return "0"


REQUESTS = [ModelRequest([{"role": "user", "content": str(number)}]) for number in (0, 1)]
PROMPTS, REPLIES = [(1, 2), (3,)], [(4, 5, 6), (7, 8)]


async def run(artifact):
    model = Fixed(PROMPTS, REPLIES, -1.0)
    expected = [await model.sample(request) for request in REQUESTS]
    logprobs = await model.score([(*p, *r) for p, r in zip(PROMPTS, REPLIES, strict=True)])
    return await compare(expected, logprobs, artifact, REQUESTS)


async def test_the_same_model():
    parity = await run(Fixed(PROMPTS, REPLIES, -1.0))
    assert parity == Parity(2, 2, 2, 5, 5, 0.0, 0.0)
    assert parity.is_equal
    assert str(parity).startswith("2 of 2 greedy replies have the same tokens; log-probs differ by 0.0e+00 nats")


async def test_another_reply_prompt_and_logprob():
    parity = await run(Fixed([(1, 2), (9,)], [(4, 9, 6), (7, 8)], -1.25))
    assert parity == Parity(2, 1, 1, 5, 3, 0.25, 0.25)
    assert not parity.is_equal
    assert "1 of 2 greedy replies have the same tokens (3 of 5 tokens before the first other one)" in str(parity)
    assert "only 1 of the prompts have" in str(parity)


async def test_a_reply_that_goes_on_is_another_one():
    parity = await run(Fixed(PROMPTS, [(4, 5, 6, 6), (7, 8)], -1.0))
    assert (parity.num_equal_replies, parity.num_equal_tokens) == (1, 5)


def test_greedy_requests_keep_messages_and_the_limit():
    sampling = SamplingParams(temperature=0.9, top_k=3, stop=("x",), max_tokens=8, logit_bias=((1, 2.0),))
    tools = [{"type": "function", "function": {"name": "f"}}]
    request = ModelRequest([{"role": "user", "content": "a"}], sampling, tools, grammar=Grammar("regex", "a"))
    greedy = make_greedy(request)
    assert greedy.sampling == SamplingParams(temperature=0.0, max_tokens=8)
    assert greedy.tools == tools
    assert greedy.grammar is None
    assert make_greedy(ModelRequest([])).sampling.max_tokens == 64


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
