"""A request that the sampler cannot follow fails alone: the other replies of its batch are sampled as without it."""

import asyncio

import numpy as np
import pytest

from tests.engines import load_engine
from tests.samples import outcomes, request

NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def engine(tiny_model_dir):
    with load_engine(tiny_model_dir, max_num_seqs=20, deterministic=True) as engine:
        yield engine


def sample_among_others(engine, all_settings):
    """Samples all of them in one batch with two plain requests, whose replies must be those without them."""
    plain = request(seed=1), request(seed=2)
    first, *found, last = outcomes(engine, plain[0], *(request(**settings) for settings in all_settings), plain[1])
    assert [first, last] == outcomes(engine, *plain)
    return found


BAD = [
    ({"temperature": NAN}, "temperature is nan, expected a number from 0 to 10000"),
    ({"temperature": INF}, "temperature is inf"),
    ({"temperature": -1}, "temperature is -1"),
    ({"temperature": 1e-40}, "temperature is 1e-40, expected 0 (the most likely token), or a number from 0.0001"),
    ({"temperature": "x"}, "temperature is 'x'"),
    ({"temperature": True}, "temperature is True"),
    ({"top_p": 0}, "top_p is 0, which keeps no token"),
    ({"top_p": 1e-46}, "top_p is 1e-46, which keeps no token"),
    ({"top_p": 1.5}, "top_p is 1.5, expected a number from 0 to 1"),
    ({"min_p": 5}, "min_p is 5"),
    ({"top_k": -1}, "top_k is -1, expected a whole number of at least 0"),
    ({"top_k": None}, "top_k is None"),
    ({"seed": "x"}, "seed is 'x', expected a whole number"),
    ({"seed": [1]}, "seed is "),
    ({"max_tokens": 2.5}, "max_tokens is 2.5"),
    ({"stop": (5,)}, "stop has 5, expected strings"),
    ({"stop": ("\ud800",)}, "stop has an unpaired surrogate (U+D800)"),
    ({"stop": ("x",) * 129}, "stop has 129 entries, expected at most 128"),
    ({"stop": ("x" * 4097,)}, "stop has 4,097 bytes, expected at most 4,096"),
    ({"logit_bias": ((1, 1.0),) * 4097}, "logit_bias has 4,097 entries, expected at most 4,096"),
    *[({"num_top_logprobs": count}, "num_top_logprobs is ") for count in (-1, 21, 10**30)],
    ({"text": "a\ud800"}, "an unpaired surrogate (U+D800)"),
]


def test_an_impossible_request_fails_alone(engine):
    for found, (settings, message) in zip(sample_among_others(engine, [each for each, _ in BAD]), BAD, strict=True):
        assert isinstance(found, ValueError), settings  # the agent's own failure; an EngineError would be the machine's
        assert message in str(found)


def test_scores_of_short_rows_and_unknown_tokens(engine):
    short, long = asyncio.run(engine.policy.score([[5], [1, 2, 3]]))
    assert short.tolist() == [0.0]
    assert long.tolist() == asyncio.run(engine.policy.score([[1, 2, 3]]))[0].tolist()
    assert asyncio.run(engine.policy.score([[]]))[0].tolist() == []
    for token in (-1, 10**9, 2**70):
        with pytest.raises(ValueError, match="cannot score tokens that the model does not have; it has "):
            asyncio.run(engine.policy.score([[1, token]]))
    assert outcomes(engine, request(seed=1)), "the engine goes on"


EDGES = [
    {"temperature": 0}, {"temperature": 1e-4}, {"temperature": 1e4}, {"temperature": np.float32(0.7)},
    {"top_p": 1e-30}, {"top_k": 10**30}, {"min_p": 1e-46}, {"min_p": 1.0, "top_p": 1e-30, "top_k": 1},
    {"seed": 10**40}, {"seed": -(10**40)}, {"max_tokens": 10**30, "seed": 3}, {"max_tokens": None, "seed": 3},
    {"max_tokens": np.int64(2)}, {"stop": ("", "é", "😀")},
    {"frequency_penalty": 2, "presence_penalty": -2, "temperature": 1e-4},
    {"logit_bias": tuple((token, -100.0) for token in range(300)), "temperature": 1e-4},
]  # fmt: skip


def test_requests_at_the_edge_of_what_is_allowed_harm_no_other(engine):
    found = sample_among_others(engine, EDGES)
    assert [settings for settings, reply in zip(EDGES, found, strict=True) if isinstance(reply, Exception)] == []
