"""How much disk the checkpoints of a run need."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from reinforge.config.schema import FinetuneConfig
from reinforge.trainer.setup.disk_space import measure_disk

MATRIX = 100 * 20


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    weights = {"layer.up_proj.weight": torch.zeros(100, 20), "norm.weight": torch.zeros(8)}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


def measure(model, **policy):
    finetuning = FinetuneConfig(policy={"model": str(model), **policy})
    return measure_disk(SimpleNamespace(config=SimpleNamespace(finetuning=finetuning)), lambda folder: 0).needed


@pytest.mark.parametrize(
    ("policy", "size"),
    [
        ({"r": 4}, 4 * 4 * (100 + 20)),
        ({"r": 8}, 4 * 8 * (100 + 20)),
        ({"r": 4, "modules_to_save": ["up_proj"]}, 4 * 4 * (100 + 20) + 4 * MATRIX),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpoints_of_an_adapter_need_little_whatever_the_model_has(model, policy, size, dtype):
    """Weights and AdamW's two moments, three times, and the adapter once; a vector counts as a matrix of one row."""
    vector = 4 * policy["r"] * (8 + 1)
    assert measure(model, lora=policy, dtype=dtype) == 10 * (size + vector)


def test_checkpoints_of_all_weights(model):
    file = (model / "model.safetensors").stat().st_size
    assert measure(model) == 10 * file
    assert measure(model, optimizer={"name": "sgd"}) < 10 * file
    assert measure(model, dtype="bfloat16") == 22 * file


def test_a_model_that_is_elsewhere_is_not_known():
    assert measure("someone/some-model", lora={}) is None
