"""`policy.dtype: auto`: chosen by a measurement, where it matters."""

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import PreTrainedModel

from reinforge.config.policy import PolicyConfig
from reinforge.engine.model import dtype, loading
from reinforge.engine.model.dtype import MIN_FEATURES, choose_dtype, measure_speedup
from reinforge.engine.model.loading import load_module
from tests.models import make_tiny_model


def write_model(folder, features):
    """Writes the configuration of a model, without weights, as those of the measurement are not its own."""
    folder.mkdir()
    settings = {"model_type": "llama", "hidden_size": features, "intermediate_size": 3 * features}
    (folder / "config.json").write_text(json.dumps({**settings, "num_attention_heads": 8, "vocab_size": 320}))
    return PolicyConfig(model=str(folder), dtype="auto")


@pytest.mark.parametrize(
    ("speedup", "expected"), [(4.2, "bfloat16"), (1.5, "bfloat16"), (1.4, "float32"), (0.3, "float32")]
)
def test_bfloat16_is_chosen_only_where_it_is_faster(tmp_path, speedup, expected):
    measured = []

    def measure(features, inner):
        measured.append((features, inner))
        return speedup

    choice = choose_dtype(write_model(tmp_path / "m", 1024), "cpu", measure=measure)
    assert (choice.dtype, choice.speedup, measured) == (expected, speedup, [(1024, 3072)])
    assert str(choice) == f"{expected} (products of this model are {speedup} x as fast in bfloat16 as in float32 here)"


def test_a_small_model_stays_in_float32_without_a_measurement(tmp_path):
    policy = write_model(tmp_path / "m", MIN_FEATURES - 256)
    choice = choose_dtype(policy, "cpu", measure=lambda *_: pytest.fail("measured"))
    assert (choice.dtype, choice.speedup) == ("float32", None)


def test_a_deterministic_run_stays_in_float32(tmp_path):
    policy = write_model(tmp_path / "m", 1024)
    choice = choose_dtype(policy, "cpu", deterministic=True, measure=lambda *_: pytest.fail("measured"))
    assert str(choice) == "float32 (deterministic)"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_configured_type_is_kept(dtype):
    choice = choose_dtype(PolicyConfig(model="none", dtype=dtype), measure=lambda *_: pytest.fail("measured"))
    assert str(choice) == dtype


def test_the_measurement_gives_a_ratio(monkeypatch):
    monkeypatch.setattr(dtype, "OPERATIONS", 1e6)
    assert 0 < measure_speedup(64, 96) < 1000


NUM_THREADS = 4


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


def test_each_has_its_type_and_tied_weights(tied):
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
