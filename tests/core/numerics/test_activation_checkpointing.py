"""Activation checkpointing: the same gradients, from layers that save their inputs and little else."""

from contextlib import nullcontext

import pytest
import torch

from reinforge.engine import Engine
from reinforge.engine.model.causal_model import CausalModel, checkpoint_activations, find_checkpointable_layers
from reinforge.engine.model.loading import load_module
from reinforge.engine.training.collate import collate
from reinforge.engine.training.logprobs import token_logprobs
from reinforge.engine.training.micro_batches import make_micro_batches
from reinforge.errors import ConfigError
from tests.device import DEVICE
from tests.engines import copy_weights, load_engine, measure_difference, train
from tests.models import FAMILIES, make_tiny_model
from tests.samples import random_samples, sibling_samples

LAYERS = 6

EXACT = 1e-6 if DEVICE == "cpu" else 1e-4  # difference of gradients of up to 30: a GPU may add in another order


@pytest.fixture(scope="module")
def deep_model_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("deep") / "llama", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module", params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["fast", "general"])
def engine(request, deep_model_dir):
    with load(deep_model_dir, fast_paths=request.param) as engine:
        yield engine


def load(folder, *, again: bool = True, **policy) -> Engine:
    batch = {"steps_per_job": 1, "micro_batch_tokens": 150}
    return load_engine(folder, activation_checkpointing=again, batch=batch, **policy)


def backward(engine: Engine, samples, *, again: bool, shares: bool, max_tokens: int = 500):
    model, held, most, shared = engine.model, {}, 0, False

    def pack(tensor):
        if not isinstance(tensor, torch.nn.Parameter):  # weights are in memory anyway
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model.module.zero_grad()
    masks = engine.learner.masks if shares else None
    assert masks is not None or not shares
    for indices in make_micro_batches(samples, max_tokens, share=shares):
        batch, held = collate([samples[i] for i in indices], model.device), {}
        shared = shared or (shares and batch.prefixes is not None)
        with checkpoint_activations(find_checkpointable_layers(model)) if again else nullcontext():
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                logprobs, entropies = token_logprobs(model, batch, masks=masks, entropy_grad=True)
            most = max(most, sum(held.values()))
            (logprobs.sum() + 0.1 * entropies.sum()).backward()
    assert shared == shares
    return {name: p.grad.clone() for name, p in engine.learner.parameters.items()}, most


@pytest.mark.parametrize(
    ("samples", "shares", "max_tokens"),
    [(random_samples(8), False, 500), (sibling_samples(), True, 500), (sibling_samples(stem=80), True, 2000)],
    ids=["rows", "prefixes", "stems"],
)
def test_gradients_stay_and_saved_memory_falls(engine, samples, shares, max_tokens):
    """A layer saves its input, and the keys and values that siblings share."""
    plain, saved = backward(engine, samples, again=False, shares=shares, max_tokens=max_tokens)
    gradients, saved_again = backward(engine, samples, again=True, shares=shares, max_tokens=max_tokens)
    batches = [collate([samples[i] for i in batch]) for batch in make_micro_batches(samples, max_tokens)]
    assert any(batch.stems for batch in batches) == (max_tokens == 2000)
    assert engine.learner.masks.shares_stems
    assert measure_difference(gradients.values(), plain.values()) <= EXACT
    assert saved_again < 0.2 * saved, (saved, saved_again)


@pytest.mark.parametrize(
    "family", [name if name == "qwen2" else pytest.param(name, marks=pytest.mark.slow) for name in sorted(FAMILIES)]
)
def test_every_family(tmp_path, family):
    """A job with checkpointing ends with the weights of one without: dropout is off and nothing is random.

    SGD, because AdamW's first step divides each gradient by its size, which turns the rounding of a small one into a
    step.
    """
    folder = make_tiny_model(tmp_path / family, family)
    samples, weights = sibling_samples(), []
    for again in (False, True):
        with load(folder, again=again, optimizer={"name": "sgd", "learning_rate": 0.1}) as engine:
            train(engine, samples)
            weights.append(copy_weights(engine.learner).values())
    assert measure_difference(*weights) <= 1e-6


@pytest.mark.slow
def test_adapters_of_a_frozen_model_get_their_gradients(deep_model_dir):
    """The input of the first layer carries no gradient."""
    samples = sibling_samples()
    with load(deep_model_dir, lora={"r": 4}) as engine:
        with torch.no_grad():
            for name, p in engine.learner.parameters.items():
                p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))).to(DEVICE))
        plain, _ = backward(engine, samples, again=False, shares=True)
        gradients, _ = backward(engine, samples, again=True, shares=True)
    assert any("layers.0." in name and gradient.abs().max() > 1e-4 for name, gradient in plain.items())
    assert measure_difference(gradients.values(), plain.values()) <= EXACT


def test_layers_are_restored_after_a_step(tiny_model_dir):
    """A copy made between two jobs has its own layers, even if memory ran out within a step."""
    model = CausalModel(load_module(tiny_model_dir, torch.float32))
    with pytest.raises(MemoryError), checkpoint_activations(find_checkpointable_layers(model)):
        raise MemoryError
    assert all("forward" not in vars(layer) for layer in find_checkpointable_layers(model))
    copy = model.make_frozen_copy()
    with torch.no_grad():
        for p in model.module.parameters():
            p.zero_()
    assert copy.features(torch.tensor([[1, 2, 3]])).abs().max() > 0


def test_a_family_without_marked_layers_is_rejected():
    class Unmarked:
        module = torch.nn.Linear(2, 2)
        config = type("Config", (), {"model_type": "own"})

    with pytest.raises(ConfigError, match=r"activation_checkpointing: transformers does not support .* for own models"):
        find_checkpointable_layers(Unmarked())
