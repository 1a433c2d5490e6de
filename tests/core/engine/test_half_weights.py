"""Models that are only served decode from float16 copies of their weights: equal replies, nearly equal log-probs."""

import asyncio

import numpy as np
import pytest
import torch

from reinforge.engine.sampling import llama_weights, projection
from reinforge.engine.sampling.projection import MAX_HALF, can_halve, multiply, pack_weight
from reinforge.types.request import ModelRequest, SamplingParams
from tests.engines import load_engine
from tests.models import make_tiny_model

HAS_FBGEMM = "fbgemm" in torch.backends.quantized.supported_engines
pytestmark = pytest.mark.skipif(not HAS_FBGEMM, reason="float16 products of FBGEMM exist on x86 alone")


def sample(engine):
    """Returns the tokens and log-probs of greedy replies to prompts of several lengths."""

    async def ask(count):
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        return await engine.policy.sample(ModelRequest([{"role": "user", "content": "a " * count}], params))

    async def ask_all():
        return await asyncio.gather(*map(ask, (1, 3, 60, 200)))

    replies = asyncio.run(ask_all())
    tokens = [reply.tokens.token_ids for reply in replies]
    return tokens, np.concatenate([reply.tokens.logprobs for reply in replies])


@pytest.mark.parametrize(
    "family", ["qwen2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("llama", "qwen3"))]
)
def test_replies_stay_and_log_probs_move_by_the_rounding_of_the_weights(tmp_path, monkeypatch, family):
    monkeypatch.setattr(projection, "MIN_HALVED", 1)
    folder = make_tiny_model(tmp_path / "m", family, max_position_embeddings=1024)
    results = []
    for half in (True, False):
        with load_engine(folder, serves_only=half, device="cpu") as engine:
            assert can_halve(engine.model) is half
            results.append(sample(engine))
    (half_tokens, half_logprobs), (tokens, logprobs) = results
    assert half_tokens == tokens
    assert 0 < np.abs(half_logprobs - logprobs).max() < 0.02


@pytest.mark.parametrize("settings", [{}, {"deterministic": True}, {"dtype": "bfloat16"}])
def test_other_models_are_decoded_as_they_are(tiny_model_dir, monkeypatch, settings):
    monkeypatch.setattr(projection, "MIN_HALVED", 1 if settings else projection.MIN_HALVED)
    with load_engine(tiny_model_dir, serves_only=True, **settings) as engine:
        decoder = engine.policy.sampler._prefiller.fast_llama
        assert decoder.weights.collect_outer(8).head.half is None


@pytest.mark.parametrize(("bits", "is_fast"), [(8, True), (4, False)])
def test_rounding_as_large_as_that_of_a_pretrained_model_keeps_the_fast_decoder(tmp_path, monkeypatch, bits, is_fast):
    """Logits of SmolLM2 move by 0.027 of their size, those of random weights of its shape by 0.0015."""
    pack, scale = projection.pack_weight, 2**bits

    def pack_coarsely(weight, bias, *, half):
        most = weight.abs().max() / scale
        return pack((weight / most).round() * most, bias, half=half)

    monkeypatch.setattr(projection, "MIN_HALVED", 1)
    for module in (projection, llama_weights):
        monkeypatch.setattr(module, "pack_weight", pack_coarsely)
    folder = make_tiny_model(tmp_path / "m", "llama", max_position_embeddings=64)
    with load_engine(folder, serves_only=True, device="cpu") as engine:
        assert (engine.policy.sampler._prefiller.fast_llama is not None) is is_fast


def test_a_weight_beyond_the_range_of_float16_stays_as_it_is():
    x, bias = torch.tensor([[1.0, 2.0]]), torch.tensor([0.5])
    for number, is_halved in ((MAX_HALF, True), (MAX_HALF + 1, False)):
        weight = pack_weight(torch.tensor([[number, 1.0]]), bias, half=True)
        assert (weight.half is not None) is is_halved
        assert multiply(x, weight, bias).item() == number + 2.5
