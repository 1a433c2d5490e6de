"""Grouped attention of one new token equals transformers' sdpa, for grouped and for plain heads."""

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from reinforge.engine.model.attention import grouped_attention


@pytest.mark.parametrize(("heads", "groups"), [(6, 2), (4, 4), (8, 1)])
@pytest.mark.parametrize("scaling", [None, 0.25])
def test_one_new_token_equals_sdpa(heads, groups, scaling):
    torch.manual_seed(0)
    query = torch.randn(3, heads, 1, 16)
    key, value = (torch.randn(3, groups, 40, 16)[:, :, :32] for _ in range(2))
    seen = torch.arange(32)[None] <= torch.tensor([5, 20, 31])[:, None]
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[:, None, None]
    module = SimpleNamespace(num_key_value_groups=heads // groups, is_causal=True)
    with torch.no_grad():
        ours, _ = grouped_attention(module, query, key, value, mask, scaling=scaling)
        theirs, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling)
    assert ours.shape == theirs.shape == (3, 1, heads, 16)
    assert (ours - theirs).abs().max() < 1e-6
