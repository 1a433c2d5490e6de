"""What a run's folder says of its model."""

import json

import pytest
import torch
from safetensors.torch import save_file

from reinforge.adapters.hosted_model import HostedModel
from reinforge.errors import ConfigError
from reinforge.exports.trained_model import BaseModel, TrainedModel, find_trained_model
from reinforge.runs.journal.journal import RunJournal
from reinforge.runs.summary import RunSummary


def make(folder, **policy):
    config = {"finetuning": {"policy": policy}}
    summary = RunSummary("r", "completed", folder)
    return TrainedModel(folder, folder, "", None, summary, config, BaseModel("org/base", "org/base"))


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "model.safetensors"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_data_type_is_that_of_the_weights_where_the_configuration_left_it_open(tmp_path, file, dtype):
    save_file({"w": torch.zeros(2, 2, dtype=getattr(torch, dtype))}, tmp_path / file)
    assert make(tmp_path, dtype="auto").dtype == dtype
    assert make(tmp_path, dtype="bfloat16").dtype == "bfloat16", "what the run recorded counts"


def test_a_damaged_file_of_weights_is_no_crash(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    assert make(tmp_path).dtype == "float32"


@pytest.fixture
def run(tmp_path):
    RunJournal(tmp_path / "runs" / "r").close()
    return tmp_path / "runs" / "r"


def find(run, adapter=None):
    return find_trained_model("r", run.parent, adapter)


def write_adapter(folder):
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base", "revision": "abc"}))


def test_of_several_adapters_one_is_named(run):
    for name in ("planner", "worker"):
        write_adapter(run / "model" / name)
    with pytest.raises(ConfigError, match=r"several adapters \(planner, worker\), and a format holds one"):
        find(run)
    with pytest.raises(ConfigError, match="there is none named boss"):
        find(run, "boss")
    found = find(run, "worker")
    assert (found.folder, found.name) == (run / "model" / "worker", "r-worker")
    assert (found.base.location, found.base.revision) == ("org/base", "abc")


def test_a_hosted_model_and_a_run_without_a_model_are_refused(run):
    with pytest.raises(ConfigError, match="has no model: none was promoted"):
        find(run)
    HostedModel("ft:gpt", "gpt", "https://api").write(run / "model")
    with pytest.raises(ConfigError, match="hosted by a service"):
        find(run)


def test_a_base_model_that_stayed_is_no_export(run):
    write_adapter(run / "checkpoints" / "step-000000")
    rows = [{"epoch": -1, "avg_reward": 0.5, "checkpoint": "checkpoints/step-000000"}]
    (run / "validation_history.json").write_text(json.dumps(rows))
    with pytest.raises(ConfigError, match="no checkpoint was better than the base model"):
        find(run)


def test_a_running_run_waits(run):
    journal = RunJournal(run.parent / "s")
    try:
        with pytest.raises(ConfigError, match="is still running"):
            find_trained_model("s", run.parent)
    finally:
        journal.close()


def test_starters_and_folders_are_no_runs(tmp_path):
    for name, reason in (("bundled:shop", "a starter that no run has trained"), (str(tmp_path), "is not a run folder")):
        with pytest.raises(ConfigError, match=reason):
            find_trained_model(name, tmp_path)
