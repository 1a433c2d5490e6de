"""Stop tokens and ignored end tokens of single requests, in a batch with requests that have neither."""

from __future__ import annotations

import pytest

from reinforge.config.policy import PolicyConfig
from reinforge.engine import Engine
from reinforge.engine.sampling.params import check_params
from reinforge.types.request import ModelRequest, SamplingParams
from tests.device import DEVICE
from tests.samples import ask

PROMPT = (5, 6, 7)


@pytest.fixture(scope="module")
def engine(tiny_model_dir):
    with Engine.load(PolicyConfig(model=str(tiny_model_dir)), seed=0, device=DEVICE) as engine:
        yield engine


def sample(engine, *params):
    replies = ask(engine.policy, [ModelRequest([], SamplingParams(**each), prompt=PROMPT) for each in params])
    return [(reply.tokens.token_ids, reply.finish_reason) for reply in replies]


def test_a_stop_token_ends_its_own_reply_alone(engine):
    own = {"max_tokens": 20, "seed": 4, "ignore_eos": True}
    [(free, reason)] = sample(engine, own)
    assert (len(free), reason) == (20, "length")
    stop = free[6]
    first = free.index(stop) + 1
    stopped, other = sample(engine, {**own, "stop_token_ids": (stop, 1)}, own)
    assert stopped == (free[:first], "stop")
    assert other == (free, "length")


def test_end_tokens_are_ignored_where_the_request_says_so(engine):
    end = engine.tokenizer.eos_token_id
    forced = {"max_tokens": 4, "logit_bias": ((end, 100),)}
    ended, ignored = sample(engine, forced, {**forced, "ignore_eos": True})
    assert ended == ((end,), "stop")
    assert ignored == ((end,) * 4, "length")


def test_a_token_that_the_model_lacks_is_refused():
    with pytest.raises(ValueError, match="stop has token 320, expected token ids from 0 to 319"):
        check_params(SamplingParams(stop_token_ids=(320,)), 320)
