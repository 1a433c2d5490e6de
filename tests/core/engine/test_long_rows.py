"""Replies of very different lengths in one batch: long ones attend apart, and nobody's reply changes."""

import asyncio

import numpy as np
import pytest

from reinforge.engine.sampling import sampler
from reinforge.engine.sampling.fast_llama import FastLlama
from reinforge.engine.sampling.running_batch import find_long_rows
from reinforge.types.request import ModelRequest, SamplingParams
from tests.device import DEVICE
from tests.engines import load_engine
from tests.models import make_tiny_model

PROMPTS = [12, 3, 350, 5, 200, 9, 4, 400]
"""Words of the prompts that are sampled from together."""


@pytest.mark.parametrize(
    ("lengths", "least", "expected"),
    [
        ([900, 100, 120], 1000, [True, False, False]),
        ([900, 100, 120], 1561, [True, True, True]),
        ([900, 500, 520], 1, [True, True, True]),
        ([100, 900, 400, 400, 400], 1, [False, True, False, False, False]),
        ([7], 1, [True]),
    ],
)
def test_rows_are_split_where_most_places_are_saved(lengths, least, expected):
    assert find_long_rows(np.array(lengths), least).tolist() == expected


async def sample_together(engine):
    """Returns tokens and log-probs of replies to all prompts at once; those that end leave their rows to others."""

    async def ask(number, count):
        params = SamplingParams(temperature=1.0, max_tokens=6 + 3 * number, seed=number, ignore_eos=True)
        return await engine.policy.sample(ModelRequest([{"role": "user", "content": "a " * count}], params))

    replies = await asyncio.gather(*(ask(*each) for each in enumerate(PROMPTS)))
    return [(reply.tokens.token_ids, reply.tokens.logprobs) for reply in replies]


def test_replies_are_the_same_whether_long_rows_attend_apart_or_not(tmp_path, monkeypatch):
    parts, decode_step = [], FastLlama.decode_step

    def count_parts(self, token_ids, positions, lengths, num_long=None):
        parts.append((num_long, *lengths))
        return decode_step(self, token_ids, positions, lengths, num_long)

    monkeypatch.setattr(FastLlama, "decode_step", count_parts)
    engine = load_engine(make_tiny_model(tmp_path / "m", max_position_embeddings=4096))
    try:
        monkeypatch.setitem(sampler.LEAST_SAVED, DEVICE, 2**60)
        together = asyncio.run(sample_together(engine))
        assert {num_long for num_long, *_ in parts} == {None}
        parts.clear()
        monkeypatch.setitem(sampler.LEAST_SAVED, DEVICE, 1)
        apart = asyncio.run(sample_together(engine))
    finally:
        engine.close()
    assert any(num_long == 3 for num_long, *_ in parts), "the three long prompts"
    assert all(length[0] > length[-1] for num_long, *length in parts if num_long is not None)
    assert [tokens for tokens, _ in apart] == [tokens for tokens, _ in together]
    for (_, found), (_, expected) in zip(apart, together, strict=True):
        assert found == pytest.approx(expected, abs=1e-5)
