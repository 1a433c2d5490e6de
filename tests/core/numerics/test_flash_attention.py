"""Attention in chunks and over shared prefixes equals softmax(q k^T) v written out, and so do its gradients."""

import math

import pytest
import torch

from reinforge.config.policy import PolicyConfig
from reinforge.engine.model.attention import few_keys_attention, grouped_attention
from reinforge.engine.model.flash_attention import (
    PrefixRun,
    find_prefix_runs,
    flash_attention,
    is_attention_correct,
    is_kernel_exact,
)
from reinforge.engine.model.loading import load_model
from reinforge.engine.training.shared_prefix import make_sharing_masks


def test_the_kernel_exists_and_is_exact():
    assert is_kernel_exact()


def test_runs_are_adjacent_rows_with_equally_many_members():
    runs = find_prefix_runs([0, 0, 1, 1, 2], [3, 3, 5])
    assert runs == [PrefixRun(slice(0, 4), slice(0, 2), 2, 3), PrefixRun(slice(4, 5), slice(2, 3), 1, 5)]
    assert find_prefix_runs([0, 1, 0], [3, 3]) is None


@pytest.mark.parametrize("length", [1, 63, 192, 193, 400])
@pytest.mark.parametrize("lengths", [None, (9, 9, 9), (9, 2, 7)])
@pytest.mark.parametrize(
    ("dtype", "long_row", "errors"),
    [("float32", 1024, (1e-5, 1e-4)), ("bfloat16", 1024, (0.02, 0.05)), ("bfloat16", 1, (0.02, 0.05))],
)
def test_attention_and_gradients_equal_the_formula(length, lengths, dtype, long_row, errors, monkeypatch):
    """In bfloat16 the kernel gets float32 or, for long rows, what it is given."""
    monkeypatch.setattr("reinforge.engine.model.flash_attention.LONG_ROW", long_row)
    torch.manual_seed(0)
    groups = [0, 0, 1, 1, 2]
    shapes = [(5, 6, length, 8), (5, 2, length, 8), (5, 2, length, 8)] + ([(3, 2, 9, 8)] * 2 if lengths else [])
    ours = [torch.randn(shape, dtype=getattr(torch, dtype)).requires_grad_() for shape in shapes]
    theirs = [states.detach().float().clone().requires_grad_() for states in ours]
    seen = torch.ones(5, 1, length, length).tril()
    if lengths:
        runs = find_prefix_runs(groups, lengths)
        found = flash_attention(*ours[:3], 0.3, tuple(ours[3:]), runs)
        before = torch.arange(9) < torch.tensor(lengths)[groups][:, None]
        seen = torch.cat((before[:, None, None].expand(-1, 1, length, -1), seen), dim=3)
        query, *own = theirs[:3]
        keys, values = (torch.cat((p[groups], o), dim=2) for p, o in zip(theirs[3:], own, strict=True))
    else:
        found = flash_attention(*ours, 0.3)
        query, keys, values = theirs
    scores = query @ keys.repeat_interleave(3, 1).transpose(-1, -2) * 0.3 + seen.log()
    wanted = (scores.softmax(-1) @ values.repeat_interleave(3, 1)).transpose(1, 2)
    assert (found - wanted).abs().max() < errors[0]
    credit = torch.randn_like(wanted).to(found.dtype)
    (found * credit).sum().backward()
    (wanted * credit).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        assert (a.grad - b.grad).abs().max() <= errors[1] * b.grad.abs().max() + 1e-6


@pytest.mark.parametrize(
    "off",
    [
        lambda *given: flash_attention(*given) * 1.01,
        lambda *given: flash_attention(*given).detach() + 0 * given[0].sum(),
        lambda query, key, value, scale, *_: flash_attention(query, key, value, scale),
    ],
    ids=["values", "gradients", "no prefix"],
)
def test_a_kernel_that_computes_something_else_is_detected(off):
    """As if a later torch changed it: grouped heads would be wrong without any error."""
    assert is_attention_correct(flash_attention)
    assert not is_attention_correct(off)


@pytest.mark.parametrize("length", [1, 5])
def test_few_keys_by_two_products(length):
    """Heads in groups of two, each row with its own mask, gradients included."""
    torch.manual_seed(0)
    ours = [torch.randn(shape).requires_grad_() for shape in ((3, 4, length, 8), (3, 2, 9, 8), (3, 2, 9, 8))]
    theirs = [states.detach().clone().requires_grad_() for states in ours]
    mask = torch.zeros(3, 1, length, 9).masked_fill(torch.rand(3, 1, length, 9) < 0.3, torch.finfo(torch.float32).min)
    found = few_keys_attention(*ours, mask, 0.3)
    query, key, value = theirs
    scores = query @ key.repeat_interleave(2, 1).transpose(-1, -2) * 0.3 + mask
    wanted = (scores.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2)
    assert torch.allclose(found, wanted, atol=1e-6)
    found.square().sum().backward()
    wanted.square().sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-5)


def test_attention_that_is_not_causal_sees_every_key():
    module = torch.nn.Module()
    module.is_causal = False
    query, key, value = (torch.randn(2, 4, 5, 8) for _ in range(3))
    output, _ = grouped_attention(module, query, key, value, None)
    wanted = (query @ key.transpose(-1, -2) / math.sqrt(8)).softmax(-1) @ value
    assert torch.allclose(output, wanted.transpose(1, 2), atol=1e-5)


def test_a_family_that_does_not_pass_shared_keys_on_copies_them_for_each_row(tiny_model_dir):
    model = load_model(PolicyConfig(model=str(tiny_model_dir)), seed=0, device="cpu")
    masks = make_sharing_masks(model)
    assert masks is not None
    assert masks.shares_in_place

    def drop_shared_keys(forward):
        return lambda *args, shared_keys=None, **kwargs: forward(*args, **kwargs)

    for layer in model.base.layers:
        layer.self_attn.forward = drop_shared_keys(layer.self_attn.forward)
    masks = make_sharing_masks(model)
    assert masks is not None
    assert not masks.shares_in_place
