"""The last MLP runs only for needed tokens: their features, and every gradient, stay the same."""

import pytest
import torch

from reinforge.engine.model import heads
from reinforge.engine.model.causal_model import CausalModel, compute_mlp_at, find_last_layer
from reinforge.engine.model.heads import ChunkedLMHead, split_tokens
from reinforge.engine.model.loading import load_module
from reinforge.engine.sampling.fast_llama import MAX_PROMPT
from reinforge.engine.training.collate import collate
from reinforge.engine.training.logprobs import token_logprobs
from tests.engines import assert_close, load_engine
from tests.models import FAMILIES, make_tiny_model
from tests.samples import ask, random_samples, request, sibling_samples

QUICK = ("llama", "gpt2")


@pytest.fixture(
    scope="module", params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def engine(request, tmp_path_factory):
    folder = make_tiny_model(tmp_path_factory.mktemp(request.param), request.param, **FAMILIES[request.param])
    with load_engine(folder, max_num_seqs=5) as engine:
        yield engine


class TokenCounter:
    def __init__(self, module):
        self.count = 0
        self.hook = module.register_forward_hook(self._count)

    def _count(self, module, inputs, output):
        self.count += inputs[0].shape[:-1].numel()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.hook.remove()


def train_on(engine, samples, *, shares):
    model, batch = engine.model, collate(samples, engine.model.device)
    model.module.zero_grad()
    with TokenCounter(find_last_layer(model.module).mlp) as counter:
        logprobs, entropies = token_logprobs(model, batch, masks=engine.learner.masks if shares else None)
        (logprobs.sum() + 0.1 * entropies.sum()).backward()
    return logprobs.detach(), {name: p.grad.clone() for name, p in engine.learner.parameters.items()}, counter.count


@pytest.mark.parametrize("shares", [False, True])
def test_log_probs_and_gradients_stay(engine, monkeypatch, shares):
    """Prefixes of 30 tokens, of which one is needed: counted by hand."""
    samples = sibling_samples() if shares else random_samples(6)
    model, trained = engine.model, sum(sample.num_trained for sample in samples)
    logprobs, gradients, count = train_on(engine, samples, shares=shares)
    shared = collate(samples).prefixes
    saved = 0 if shared is None or not shares else len(samples) - len(shared.lengths)
    assert count == trained - saved, "one per trained token; the first tokens of siblings share one"
    monkeypatch.setattr(model, "_last_layer", None)
    whole, whole_gradients, whole_count = train_on(engine, samples, shares=shares)
    assert whole_count > 1.5 * count
    assert (logprobs - whole).abs().max() <= 1e-5
    assert_close(gradients, whole_gradients, least=1e-2)


def test_only_the_last_token_of_a_prompt_is_computed(engine):
    """In prompts longer than those of `fast_llama.py`, which has its own code for this."""
    asked = [request("a" * (MAX_PROMPT + i), max_tokens=1) for i in range(3)]
    with TokenCounter(find_last_layer(engine.model.module).mlp) as counter:
        ask(engine.policy, asked)
    assert counter.count == 3


def test_a_family_whose_last_mlp_mixes_tokens_is_detected_at_load(tiny_model_dir, monkeypatch):
    """As if an MLP used other tokens of the row."""
    module = load_module(tiny_model_dir, torch.float32)
    assert CausalModel(module)._last_layer is not None
    plain = module.model.layers[-1].mlp.forward
    monkeypatch.setattr(module.model.layers[-1].mlp, "forward", lambda x: plain(x + x.mean(1, keepdim=True)))
    assert CausalModel(module)._last_layer is None


def test_hooks_are_removed_after_an_error(tiny_model_dir):
    layer = find_last_layer(load_module(tiny_model_dir, torch.float32))
    with pytest.raises(MemoryError), compute_mlp_at(torch.tensor([0]), layer):
        raise MemoryError
    assert not layer.mlp._forward_hooks
    assert not layer.mlp._forward_pre_hooks


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
