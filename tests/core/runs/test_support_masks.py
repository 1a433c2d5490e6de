"""Supports under a grammar in the journal: bit masks come back as they were."""

import json

import numpy as np

from reinforge.files import to_json
from reinforge.runs.journal.episode_json import dump_tokens, parse_tokens
from reinforge.types.request import TokenLogprobs
from reinforge.types.supports import Supports


def make_tokens(*sets) -> TokenLogprobs:
    return TokenLogprobs(
        (1, 2),
        (5,) * len(sets),
        (-1.0,) * len(sets),
        restricted=True,
        processed_logprobs=(-0.5,) * len(sets),
        supports=Supports.from_sets(sets),
    )


def test_masks_round_trip_bit_for_bit():
    rng = np.random.default_rng(0)
    first, second = rng.bytes(6144), rng.bytes(6144)
    tokens = make_tokens(first, np.array([3, 5], np.int32), second, first, np.zeros(0, np.int32))
    assert parse_tokens(json.loads(to_json(dump_tokens(tokens)))) == tokens


def test_the_masks_of_a_text_take_little_room():
    """Ten masks that differ in a few tokens: 60 KB in memory, under 4 KB in the record."""
    masks = []
    for number in range(10):
        bits = bytearray(b"\xff" * 6144)
        bits[number * 7] = 0
        masks.append(bytes(bits))
    assert len(to_json(dump_tokens(make_tokens(*masks)))) < 4000


def test_a_record_without_masks_has_no_keys_for_them():
    tokens = make_tokens(np.array([3, 5], np.int32))
    dumped = dump_tokens(tokens)
    assert dumped["supports"].keys() == {"counts", "token_ids"}
    assert parse_tokens(dumped) == tokens
