"""What different prompts begin with: up to which token it is computed once, and whose it is."""

from __future__ import annotations

import pytest
import torch

from reinforge.engine.training.collate import WORTH_TOKENS, collate, stems_of
from reinforge.types.request import TokenLogprobs
from tests.samples import sample_of, sibling_samples


def found(prompts, width):
    stems = stems_of(prompts, width, None)
    return None if stems is None else (stems.token_ids.tolist(), stems.groups.tolist())


def test_instructions_that_all_prompts_begin_with():
    """20 prompts of 10 equal tokens and one of their own: 190 of 220 tokens saved."""
    prompts = [(*range(10), 50 + i) for i in range(20)]
    assert found(prompts, 11) == ([list(range(10))], [0] * 20)


def test_the_length_that_leaves_the_fewest_tokens():
    """40 rows of 2 stems of 6 tokens save 38 x 6 = 228, of 10 stems of 7 tokens 30 x 7 = 210."""
    prompts = [(*[i % 2] * 6, i % 10, i, i) for i in range(40)]
    token_ids, groups = found(prompts, 9)
    assert token_ids == [[0] * 6, [1] * 6]
    assert groups == [i % 2 for i in range(40)]


def test_rows_that_begin_alike_need_not_stand_side_by_side():
    prompts = [(*[7 + i % 3] * 12, 100 + i) for i in range(30)]
    token_ids, groups = found(prompts, 13)
    assert [token_ids[group] for group in groups] == [list(prompt[:12]) for prompt in prompts]


@pytest.mark.parametrize(
    ("prompts", "width"),
    [
        ([(i, *range(20)) for i in range(40)], 21),
        ([(*range(10), i) for i in range(WORTH_TOKENS // 10)], 11),
        ([(*range(20), i) for i in range(20)], 300),
        ([(1,)] * 200, 5),
        ([(1, 2, 3)], 400),
    ],
    ids=["no two begin alike", "too few tokens", "too small a share", "no token before the last", "one prompt"],
)
def test_where_it_saves_little_nothing_is_shared(prompts, width):
    assert found(prompts, width) is None


def test_the_last_token_of_the_shortest_prompt_is_behind_the_stem():
    """Its reply is predicted from there."""
    prompts = [(1,) * 9] + [(*[1] * 9, i) for i in range(30)]
    assert found(prompts, 11)[0] == [[1] * 8]


def test_a_batch_has_those_of_its_prefixes_or_of_its_samples():
    siblings = collate(sibling_samples(stem=50))
    assert siblings.prefixes is not None
    assert siblings.stems is not None
    assert len(siblings.stems.groups) == len(siblings.prefixes.lengths) == 6
    assert siblings.stems.token_ids.shape == (2, 50)
    alone = collate([sample_of(TokenLogprobs((*range(9), i), (1, 2), (0.0, 0.0))) for i in range(30)])
    assert alone.prefixes is None
    assert alone.stems is not None
    assert torch.equal(alone.stems.groups, torch.zeros(30, dtype=torch.long))
