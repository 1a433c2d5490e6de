"""`policy.dtype: auto`: chosen by a measurement, where it matters."""

import json

import pytest

from reinforge.config.policy import PolicyConfig
from reinforge.engine.model.dtype import MIN_FEATURES, choose_dtype, measure_speedup


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


def test_the_measurement_gives_a_ratio():
    assert 0 < measure_speedup(64, 96) < 1000
