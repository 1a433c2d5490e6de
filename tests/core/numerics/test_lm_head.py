"""Log-probs and entropies straight from features, against the softmax written out."""

import pytest
import torch

from reinforge.engine.model import heads
from reinforge.engine.model.heads import ChunkedLMHead, split_tokens


def test_chunks_by_hand():
    assert split_tokens(5, heads.CHUNK_LOGITS // 3) == [slice(0, 3), slice(3, 6)]
    assert split_tokens(2, 2 * heads.CHUNK_LOGITS) == [slice(0, 1), slice(1, 2)]


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("tokens_at_once", [1, 3, 100])
@pytest.mark.parametrize("trained", [(True, True), (True, False), (False, True)])
def test_gradients_equal_those_of_the_softmax(entropy_grad, tokens_at_once, trained, monkeypatch):
    for name in ("CHUNK_LOGITS", "FROZEN_CHUNK_LOGITS"):
        monkeypatch.setattr(heads, name, 11 * tokens_at_once)
    torch.manual_seed(0)
    given = [torch.randn(7, 4, dtype=torch.float64), torch.randn(11, 4, dtype=torch.float64)]
    ours = [tensor.clone().requires_grad_(needed) for tensor, needed in zip(given, trained, strict=True)]
    theirs = [tensor.clone().requires_grad_(needed) for tensor, needed in zip(given, trained, strict=True)]
    targets, scales = torch.randint(11, (7,)), torch.linspace(0.5, 2, 7, dtype=torch.float64)
    credit, weight = torch.randn(2, 7, dtype=torch.float64)
    logprobs, entropies = ChunkedLMHead.apply(*ours, targets, scales, entropy_grad)
    log_p = (theirs[0] @ theirs[1].T / scales[:, None]).log_softmax(-1)
    wanted, its = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    assert torch.allclose(logprobs, wanted)
    assert torch.allclose(entropies, its)
    assert entropies.requires_grad == entropy_grad
    (logprobs * credit + (entropies * weight if entropy_grad else 0.0)).sum().backward()
    (wanted * credit + (its * weight if entropy_grad else 0.0)).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.allclose(a.grad, b.grad)


def test_in_half_precision_chunks_add_up_in_float32(monkeypatch):
    """1,024 chunks that each add a 64th: a bfloat16 sum would stop at 4, where a 64th is half of its last digit."""
    monkeypatch.setattr(heads, "CHUNK_LOGITS", 2)
    features = torch.full((1024, 1), 1 / 32, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    logprobs, _ = ChunkedLMHead.apply(features, weight, torch.zeros(1024, dtype=torch.long), torch.ones(1024), False)
    logprobs.sum().backward()
    assert weight.grad[:, 0].tolist() == pytest.approx([16.0, -16.0])
