"""Models that several threads load at the same time."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import PreTrainedModel

from reinforge.engine.model import loading
from reinforge.engine.model.loading import load_module
from tests.models import make_tiny_model

NUM_THREADS = 8


@pytest.fixture
def tied(tmp_path, monkeypatch):
    monkeypatch.setattr(PreTrainedModel, "tie_weights", PreTrainedModel.tie_weights)  # what a race leaves is undone
    return make_tiny_model(tmp_path / "tied", tie_word_embeddings=True)


def load_in_threads(folder):
    types = [torch.float32, torch.bfloat16] * NUM_THREADS
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        modules = list(threads.map(lambda dtype: load_module(folder, dtype), types))
    assert [module.dtype for module in modules] == types
    assert all(module.lm_head.weight is module.model.embed_tokens.weight for module in modules)


def test_each_has_its_type_and_tied_weights_and_so_has_the_next(tied):
    load_in_threads(tied)
    load_in_threads(tied)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.fault
def test_without_the_lock_weights_are_not_tied(tied, monkeypatch):
    """Mutation check; the threads meet within a few attempts."""
    monkeypatch.setattr(loading, "MAKING", contextlib.nullcontext())
    try:
        with pytest.raises(Exception, match=r"lm_head|dtype|assert|float"):  # noqa: PT012
            for _ in range(50):
                load_in_threads(tied)
    finally:
        torch.set_default_dtype(torch.float32)
