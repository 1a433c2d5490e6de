"""How a small pretrained model is trained where nothing is configured."""

import pytest
import torch
from safetensors.torch import save_file

from reinforge.config.loader import build_config
from reinforge.engine.small_models import fill_in_training
from reinforge.trainer.api import build_run_data

WIDTH = 256


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders with the weights of models of about 0.07, 21 and 310 M parameters, in the smallest type."""
    found = {}
    for rows in (1 << 8, 82_000, 1_210_000):
        found[rows] = tmp_path_factory.mktemp(str(rows))
        save_file({"embed": torch.zeros(rows, WIDTH, dtype=torch.int8)}, found[rows] / "model.safetensors")
        (found[rows] / "config.json").write_text("{}")
    return [str(folder) for folder in found.values()]


def fill_in(model, policy=None, builder=None, **finetuning):
    finetuning, builder = {"policy": {"model": model, **(policy or {})}, **finetuning}, dict(builder or {})
    fill_in_training(finetuning, builder)
    return finetuning, builder


def test_a_small_pretrained_model_trains_adapters(folders):
    finetuning, builder = fill_in(folders[1], limits={"max_refills": 1}, num_epochs=3)
    assert finetuning["policy"]["lora"] == {"r": 16, "lora_alpha": 32}
    assert finetuning["policy"]["optimizer"] == {"learning_rate": 3e-4}
    assert (finetuning["limits"], finetuning["num_epochs"]) == ({"min_groups": 0.5, "max_refills": 1}, 3)
    assert builder == {"examples_per_epoch": 16}
    assert fill_in(folders[1], builder={"examples_per_epoch": 5})[1] == {"examples_per_epoch": 5}


@pytest.mark.parametrize("model", ["tiny", "bundled:tickets"])
def test_a_tiny_model_trains_all_its_weights_on_short_epochs(folders, model):
    finetuning, builder = fill_in(folders[0] if model == "tiny" else model)
    assert finetuning["policy"] == {"model": finetuning["policy"]["model"], "batch": {"steps_per_job": 4}}
    assert finetuning["algorithm"]["clip_high"] == 0.28
    assert {name: stage["num_epochs"] for name, stage in finetuning["pipeline"].items()} == {
        "answers": 3,
        "reinforce": 12,
    }
    assert builder == {"examples_per_epoch": 64}


@pytest.mark.parametrize(
    "said",
    [{"num_epochs": 3}, {"num_epochs": -5}, {"num_epochs": "many"}, {"limits": {"max_staleness": 1}}, {"limits": [1]}],
)
def test_a_short_run_and_one_that_samples_ahead_have_one_stage(folders, said):
    """So does one with settings that the loader refuses."""
    assert "pipeline" not in fill_in(folders[1], **said)[0]


@pytest.mark.parametrize(
    "said",
    [
        {"policy": {"optimizer": {"learning_rate": 1e-5}}},
        {"policy": {"batch": {"steps_per_job": 2}}},
        {"algorithm": {"_type": "ppo"}},
        {"pipeline": {"one": {}}},
    ],
)
def test_whoever_says_how_to_train_gets_that_alone(folders, said):
    finetuning, builder = fill_in(folders[1], **said)
    assert (finetuning["policy"].get("lora"), builder) == (None, {})


def test_larger_and_unknown_models_keep_the_settings_defaults(folders):
    for model in (folders[2], "owner/name", "/no/such/folder"):
        assert fill_in(model) == ({"policy": {"model": model}}, {})


def test_python_and_an_environment_train_so_and_a_file_with_all_sections_does_not(folders, monkeypatch):
    def agent(item):
        return item

    data = build_run_data(agent, [{"id": "1", "question": "a", "answer": "b"}], "exact_match", folders[1])
    assert data["finetuning"]["policy"]["lora"]["r"] == 16
    assert data["trajectory_builders"]["builder"]["examples_per_epoch"] == 16
    policy = {"policy": {"model": folders[1]}}
    played = build_config({"environment": {"_type": "python", "source": "a:B"}, "finetuning": policy}).config
    assert (played.finetuning.policy.lora.r, played.finetuning.num_epochs) == (16, 15)
    assert played.trajectory_builders["answers"].examples_per_epoch == 3 * 16 * 8
    data["finetuning"] = {name: value for name, value in data["finetuning"].items() if name != "algorithm"} | policy
    assert build_config(data).config.finetuning.policy.lora is None
