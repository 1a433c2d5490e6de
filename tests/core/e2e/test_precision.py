"""A whole run in bfloat16: the canary, old log-probs by the learner, and the correction for what lies between."""

import pytest
import torch
import yaml
from safetensors import safe_open

from tests.core.e2e.test_resume import killed_at
from tests.project import call


def test_a_run_in_bfloat16_trains_and_says_how_far_sampler_and_learner_are_apart(project):
    project.set("finetuning.policy.dtype", "bfloat16").shrink(2).finetune(code=0)
    rows = project.metrics
    assert len(rows) == 2
    for row in rows:
        assert 1e-5 < row["mismatch"] < 0.1
        assert 0 < row["mismatch_kl"] < 0.01
        assert 0.9 < row["tis_weight"] < 1.1
    newest = sorted((project.run / "checkpoints").iterdir())[-1]
    with safe_open(newest / "model.safetensors", "pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.bfloat16}  # noqa: SIM118
    with safe_open(newest / "training" / "optimizer.safetensors", "pt") as kept:
        assert {kept.get_tensor(name).dtype for name in kept.keys()} == {torch.float32}  # noqa: SIM118


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [{"name": "sgd", "momentum": 0.9, "learning_rate": 0.3}, {"name": "adagrad"}])
def test_a_killed_run_in_bfloat16_ends_as_an_undisturbed_one(project, optimizer):
    """Weights, their float32 copies and the optimizer, to the last bit, with layers that are computed again."""
    project.set("finetuning.policy.dtype", "bfloat16").set("finetuning.policy.optimizer", optimizer)
    project.set("finetuning.policy.activation_checkpointing", True)
    project.set("finetuning.num_epochs", 2).set("finetuning.deterministic", True)
    ends = []
    for is_killed in (True, False):
        if is_killed:
            killed_at(project, "batch.sealed:2")
            result = call("finetune", "run.yml", "--resume", "last")
        else:
            project.set("finetuning.output_dir", "undisturbed").write_files()
            result = call("finetune", "run.yml", "--run_name", "r", "-o", "finetuning.output_dir", "undisturbed")
        assert result.exit_code == 0, result.output
        folder = project.folder / ("runs" if is_killed else "undisturbed") / "r" / "checkpoints" / "step-000002"
        files = ("model.safetensors", "training/optimizer.safetensors")
        ends.append([(folder / file).read_bytes() for file in files])
    assert ends[0] == ends[1]


def set_speedup(monkeypatch, speedup):
    """Replaces the measurement of `policy.dtype: auto`, for models of any size."""
    monkeypatch.setattr("reinforge.engine.model.dtype.MIN_FEATURES", 1)
    monkeypatch.setattr("reinforge.engine.model.dtype.measure_speedup", lambda *_: speedup)


@pytest.mark.slow
def test_an_automatic_type_is_printed_recorded_and_kept_when_the_run_is_resumed(project, monkeypatch):
    set_speedup(monkeypatch, 3.0)
    project.set("finetuning.policy.dtype", "auto").shrink()
    result = project.finetune(code=0)
    assert "bfloat16 (products of this model are 3.0 x as fast in bfloat16 as in float32 here)" in result.output
    assert read_type(project.run) == "bfloat16"
    set_speedup(monkeypatch, 0.5)  # on another machine, a new run would choose float32
    more = ("-o", "finetuning.num_epochs", "2")
    result = call("finetune", "run.yml", "--resume", project.run.name, *more, code=0)
    assert "bfloat16 (as when the run started)" in result.output
    assert read_type(project.run) == "bfloat16"
    newest = sorted((project.run / "checkpoints").iterdir())[-1]
    with safe_open(newest / "model.safetensors", "pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.bfloat16}  # noqa: SIM118
    changed = ("-o", "finetuning.policy.dtype", "float32", "-o", "finetuning.num_epochs", "3")
    other = call("finetune", "run.yml", "--resume", project.run.name, *changed)
    assert other.exit_code != 0
    assert "finetuning.policy.dtype" in other.output


def read_type(folder):
    return yaml.safe_load((folder / "config.yml").read_text())["finetuning"]["policy"]["dtype"]
