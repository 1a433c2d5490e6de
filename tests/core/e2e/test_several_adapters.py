"""Two agents with an adapter each on one base model, through the command line."""

import json

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from tests.project import call

TEAM = """
async def team(item, llm, context):
    plan = await llm.chat.completions.create(messages=[{"role": "user", "content": item.input_obj}], max_tokens=4)
    text = plan.choices[0].message.content
    asked = [{"role": "user", "content": f"go on: {text}"}]
    work = await context.llm("worker").chat.completions.create(messages=asked, max_tokens=4)
    return text + work.choices[0].message.content
"""


@pytest.fixture
def team(project):
    project.write_agent(TEAM)
    project.rows = project.rows[:32]
    project.set("llms", {"planner": {"_type": "policy", "adapter": "a"}, "worker": {"_type": "policy", "adapter": "b"}})
    project.set("workflow", {"_type": "python", "function": "task:team", "llm": "planner"})
    project.set("trajectory_builders.builder.examples_per_epoch", 4).set("finetuning.num_epochs", 1)
    project.set("finetuning.policy.lora", {"r": 16}).set("finetuning.policy.optimizer.learning_rate", 3e-2)
    project.set("finetuning.policy.schedule", {"warmup_steps": 0})
    return project


def weights(run, version, adapter):
    return load_file(run / "checkpoints" / f"step-{version:06d}" / adapter / "adapter_model.safetensors")


def has_changed(project, adapter, last):
    """Returns True if an adapter's weights differ between the first checkpoint and the last."""
    before, after = (weights(project.run, version, adapter) for version in (0, last))
    return any(not np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_both_adapters_are_trained_evaluated_and_promoted(team, tiny_model_dir):
    base = load_file(tiny_model_dir / "model.safetensors")
    team.rows = [{"id": str(i), "question": f"say {i}", "answer": "a"} for i in range(64)]
    team.set("finetuning.splits", {"train": 0.3, "select": 0.35, "confirm": 0.35})
    team.set("trajectory_builders.builder.examples_per_epoch", 8).set("finetuning.num_epochs", 3)
    result = team.finetune("--require_improvement", code=0)
    summary = team.summary
    assert [has_changed(team, name, 3) for name in "ab"] == [True, True]
    assert summary["improvement"]["ci_low"] > 0
    assert [row["version"] for row in summary["policy_versions"]] == [0, 1, 2, 3]
    assert len({row["fingerprint"] for row in summary["policy_versions"]}) == 4
    for row in team.metrics:
        groups = row["groups"]
        assert row["num_groups"] == 16, "eight examples, two adapters"
        assert row["num_updates"] == sum(groups[name]["num_updates"] for name in "ab") == 8
        assert row["num_tokens"] == sum(groups[name]["num_tokens"] for name in "ab")
    directions = {name: sum(row["groups"][name]["direction"] for row in team.metrics) for name in "ab"}
    assert min(directions.values()) > 0, "each adapter has improved"
    after = load_file(tiny_model_dir / "model.safetensors")
    assert all(np.array_equal(base[name], after[name]) for name in base)
    assert "a: planner; b: worker" in result.output
    assert "adapters a, b: load each with from_pretrained" in result.output
    assert sorted(path.name for path in (team.run / "model").iterdir()) == ["a", "b", "manifest.json"]
    call("runs", "verify", str(team.run), code=0)

    tuned = call("eval", "run.yml", "--json", "--split", "confirm", "--model", "r", code=0)
    mean = json.loads(tuned.stdout)["metrics"]["vowels"]["mean"]
    assert mean > summary["confirm_base"]["ci_high"], "the adapters are used"

    part = team.run / "checkpoints" / "step-000003" / "b" / "adapter_model.safetensors"
    whole = part.read_bytes()
    part.write_bytes(whole[:-1])
    damaged = call("runs", "verify", str(team.run))
    assert damaged.exit_code != 0
    assert "b/adapter_model.safetensors has" in damaged.output
    part.write_bytes(whole)

    refused = call("chat", "r", "--output_dir", "runs", input="x\n", code=2)
    assert "has several adapters (a, b)" in refused.output
    assert "reinforge chat runs/r/model/a" in refused.output
    call("chat", "runs/r/model/a", "--device", "cpu", "--max_tokens", "4", "--seed", "1", input="say 1\n", code=0)

    other = {"planner": {"_type": "policy"}, "worker": {"_type": "policy"}}
    (team.folder / "run.yml").write_text(yaml.safe_dump({**team.settings, "llms": other}))
    unnamed = call("eval", "run.yml", "--model", "r", code=2)
    assert "no entry of llms says which one to use" in unnamed.output
    other["worker"]["adapter"] = other["planner"]["adapter"] = "c"
    (team.folder / "run.yml").write_text(yaml.safe_dump({**team.settings, "llms": other}))
    assert "holds the adapters a, b, but llms names c" in call("eval", "run.yml", "--model", "r").output
    other["worker"]["adapter"] = other["planner"]["adapter"] = "b"
    (team.folder / "run.yml").write_text(yaml.safe_dump({**team.settings, "llms": other}))
    one = call("eval", "run.yml", "--model", "runs/r/model", "--limit", "2", "--json")
    assert (one.exit_code, "model/b" in one.stdout) == (0, True), one.output


@pytest.mark.slow
def test_a_single_adapter_name_is_a_single_policy(team):
    team.settings["llms"]["worker"]["adapter"] = "a"
    team.finetune(code=0)
    assert (team.run / "checkpoints/step-000001/adapter_model.safetensors").is_file()
    (row,) = team.metrics
    assert (row["num_groups"], "groups" in row) == (4, False)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (
            "llms.worker",
            {"_type": "policy"},
            ["llms.worker.adapter", "other entries of llms name an adapter", "planner: a", "run.yml:"],
        ),
        ("llms.worker.adapter", "my worker", ["llms.worker.adapter", "is not a valid adapter name"]),
        ("finetuning.policy.lora", None, ["finetuning.policy.lora", "names the adapters a, b", "set it to {}"]),
        ("finetuning.algorithm", {"_type": "ppo"}, ["finetuning.algorithm", "cannot serve several adapters (a, b)"]),
        (
            "finetuning.curriculum_learning.collect_only_included",
            True,
            ["collect_only_included", "a group per adapter (a, b)"],
        ),
        ("trajectory_builders.builder", {"_type": "dataset"}, ["do not say which adapter to train: a, b"]),
        ("llms.worker.adapter", "layers", ["a module of the model is also called layers", "another name"]),
    ],
)
def test_impossible_adapter_settings_are_refused(team, path, value, said):
    result = team.set(path, value).finetune(code=2)
    assert all(text in result.output for text in said), result.output


def test_a_custom_trainer_adapter_without_named_policies_is_refused(team):
    from tests.core.e2e.test_user_components import EngineAdapterConfig  # noqa: F401  registers it

    result = team.set("trainer_adapters.adapter._type", "test_engine_adapter").finetune(code=2)
    assert "EmbeddedPolicy serves a single policy, none named a" in result.output
