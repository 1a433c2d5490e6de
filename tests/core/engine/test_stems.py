"""Stems: the length of the beginning that prompts share, and which prompts share it."""

import pytest
import torch

from reinforge.engine.training.collate import PASS_OVERHEAD_TOKENS, collate, find_stems
from reinforge.types.request import TokenLogprobs
from tests.samples import make_sample, sibling_samples


def found(prompts, width):
    stems = find_stems(prompts, width, None)
    return None if stems is None else (stems.token_ids.tolist(), stems.groups.tolist())


def test_common_instructions_of_all_prompts():
    """20 prompts of 10 common tokens and one own token each: 190 of 220 tokens saved."""
    prompts = [(*range(10), 50 + i) for i in range(20)]
    assert found(prompts, 11) == ([list(range(10))], [0] * 20)


def test_the_length_that_saves_most_tokens():
    """40 rows of 2 stems of 6 tokens save 38 x 6 = 228, of 10 stems of 7 tokens 30 x 7 = 210."""
    prompts = [(*[i % 2] * 6, i % 10, i, i) for i in range(40)]
    token_ids, groups = found(prompts, 9)
    assert token_ids == [[0] * 6, [1] * 6]
    assert groups == [i % 2 for i in range(40)]


def test_rows_with_one_stem_need_not_be_adjacent():
    prompts = [(*[7 + i % 3] * 12, 100 + i) for i in range(30)]
    token_ids, groups = found(prompts, 13)
    assert [token_ids[group] for group in groups] == [list(prompt[:12]) for prompt in prompts]


@pytest.mark.parametrize(
    ("prompts", "width"),
    [
        ([(i, *range(20)) for i in range(40)], 21),
        ([(*range(10), i) for i in range(PASS_OVERHEAD_TOKENS // 10)], 11),
        ([(*range(20), i) for i in range(20)], 300),
        ([(1,)] * 200, 5),
        ([(1, 2, 3)], 400),
    ],
    ids=["no two begin alike", "too few tokens", "too small a share", "no token before the last", "one prompt"],
)
def test_nothing_is_shared_if_that_saves_little(prompts, width):
    assert found(prompts, width) is None


def test_a_stem_ends_before_the_last_token_of_the_shortest_prompt():
    """Its reply is predicted from there."""
    prompts = [(1,) * 9] + [(*[1] * 9, i) for i in range(30)]
    assert found(prompts, 11)[0] == [[1] * 8]


def test_a_batch_has_the_stems_of_its_prefixes_or_of_its_samples():
    siblings = collate(sibling_samples(stem=50))
    assert siblings.prefixes is not None
    assert siblings.stems is not None
    assert len(siblings.stems.groups) == len(siblings.prefixes.lengths) == 6
    assert siblings.stems.token_ids.shape == (2, 50)
    alone = collate([make_sample(TokenLogprobs((*range(9), i), (1, 2), (0.0, 0.0))) for i in range(30)])
    assert alone.prefixes is None
    assert alone.stems is not None
    assert torch.equal(alone.stems.groups, torch.zeros(30, dtype=torch.long))
