"""A single reply that repeats its context: several tokens a step, and the same reply."""

import asyncio

import numpy as np
import pytest

from reinforge.engine.sampling import guessing_sampler
from reinforge.engine.sampling.guessing_sampler import FEW, MANY, MAX_PAUSE, RepeatedText
from reinforge.types.request import ModelRequest, SamplingParams
from tests.engines import load_engine
from tests.models import make_tiny_model

FAMILIES = ["qwen2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("llama", "qwen3", "mistral"))]
GREEDY = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}


def make_text(token_ids):
    text = RepeatedText()
    text.extend(token_ids)
    return text


def test_guesses_are_what_followed_the_last_tokens_before():
    assert make_text([1, 2, 3, 4, 5, 1, 2, 3]).guess() == [4, 5, 1]
    assert make_text([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3]).guess() == [5, 1, 2], "the newest place counts"
    assert make_text([1, 2, 3, 4, 5, 9, 2, 3]).guess() == [], "three tokens must be equal"
    assert make_text([1, 2]).guess() == make_text([]).guess() == []


def test_right_guesses_become_longer_and_wrong_ones_rare():
    text = make_text([*range(20), 0, 1, 2])
    assert text.guess() == [3, 4, 5] == [*range(3, 3 + FEW)]
    text.learn(FEW, FEW)
    assert text.guess() == [*range(3, 3 + MANY)]
    text.learn(MANY, 1)
    assert len(text.guess()) == FEW
    waits = []
    for _ in range(8):
        text.learn(FEW, 0)
        waits.append(next(count for count in range(99) if text.guess()))
    assert waits == [1, 2, 4, 8, 16, MAX_PAUSE, MAX_PAUSE, MAX_PAUSE]


def ask(engine, prompt="a b c " * 8, **params):
    """Returns a reply, and the steps that it took."""
    before = engine.policy.sampler.stats().steps
    request = ModelRequest([{"role": "user", "content": prompt}], SamplingParams(**{**GREEDY, **params}))
    reply = asyncio.run(engine.policy.sample(request)).tokens
    return reply, engine.policy.sampler.stats().steps - before


@pytest.fixture(params=FAMILIES, scope="module")
def engines(request, tmp_path_factory):
    """One that guesses and one that does not, of the same model."""
    folder = make_tiny_model(tmp_path_factory.mktemp("m"), request.param, max_position_embeddings=512)
    with load_engine(folder, serves_only=True) as guessing, load_engine(folder) as plain:
        yield guessing, plain


def assert_equal(found, wanted):
    assert found.token_ids == wanted.token_ids
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=1e-4)


def test_a_reply_that_repeats_itself_takes_fewer_steps_and_is_the_same(engines):
    (found, steps), (wanted, all_steps) = (ask(engine) for engine in engines)
    assert_equal(found, wanted)
    assert len(wanted.token_ids) == all_steps + 1 == 60
    assert steps < 50, "a model with random weights repeats itself at temperature 0"


@pytest.mark.parametrize("params", [{"temperature": 1.0, "seed": 3}, {"temperature": 0.2, "seed": 4, "max_tokens": 9}])
def test_sampled_replies_are_the_same_too(engines, params):
    (found, _), (wanted, _) = (ask(engine, **params) for engine in engines)
    assert_equal(found, wanted)


def guess_wrongly(monkeypatch):
    monkeypatch.setattr(RepeatedText, "guess", lambda self: [7, 8, 9])


def test_wrong_guesses_change_nothing(engines, monkeypatch):
    guess_wrongly(monkeypatch)
    (found, steps), (wanted, _) = (ask(engine) for engine in engines)
    assert_equal(found, wanted)
    assert steps > 50, "the guesses were wrong"


def test_guesses_that_are_not_compared_change_the_reply(engines, monkeypatch):
    """Mutation check."""
    guess_wrongly(monkeypatch)
    monkeypatch.setattr(guessing_sampler, "count_right", lambda sampled, guesses: len(guesses))
    (found, _), (wanted, _) = (ask(engine) for engine in engines)
    assert found.token_ids != wanted.token_ids


def test_a_conversation_continues_after_guesses(engines):
    """The prefix cache has the keys and values of the tokens that were kept."""
    for engine in engines:
        ask(engine)
    prompts = ["a b c " * 8, "a b c " * 8 + "d e f"]
    for prompt in prompts:
        (found, _), (wanted, _) = (ask(engine, prompt, max_tokens=20) for engine in engines)
        assert_equal(found, wanted)


def test_several_replies_at_once_are_not_guessed(engines):
    async def ask_two(engine):
        requests = [
            ModelRequest([{"role": "user", "content": each * 20}], SamplingParams(**{**GREEDY, "max_tokens": 20}))
            for each in ("a b ", "c d ")
        ]
        return [reply.tokens for reply in await asyncio.gather(*map(engine.policy.sample, requests))]

    for found, wanted in zip(*(asyncio.run(ask_two(engine)) for engine in engines), strict=True):
        assert_equal(found, wanted)


def test_a_stop_string_among_the_guesses_ends_the_reply(engines):
    stop = ask(engines[1])[0].texts[7]
    (found, _), (wanted, _) = (ask(engine, stop=[stop]) for engine in engines)
    assert_equal(found, wanted)
    assert len(wanted.token_ids) <= 8


def test_a_model_that_is_trained_or_deterministic_does_not_guess(tiny_model_dir, monkeypatch):
    monkeypatch.setattr(RepeatedText, "guess", lambda self: pytest.fail("it has guessed"))
    for settings in ({}, {"serves_only": True, "deterministic": True}):
        with load_engine(tiny_model_dir, **settings) as engine:
            ask(engine)
