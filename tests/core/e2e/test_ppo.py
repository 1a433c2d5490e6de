"""PPO through the command line: one episode of an example is enough, and the critic lies in the checkpoint."""

import json

import pytest

from tests.core.e2e.test_resume import call, killed_at


@pytest.mark.slow
def test_ppo_trains_and_goes_on_with_its_critic_where_it_was_killed(project):
    project.set("finetuning.algorithm", {"_type": "ppo"}).set("finetuning.num_epochs", 2)
    project.set("trajectory_builders.builder", {"_type": "group", "num_generations": 1})
    project.set("finetuning.policy.batch.num_iterations", 2).set("finetuning.deterministic", True)
    result = project.finetune()
    assert result.exit_code == 0, result.output
    history = json.loads((project.run / "reward_history.json").read_text())
    assert {"value", "return", "value_error", "clip_fraction", "ratio"} <= set(history[0])
    assert history[1]["value_error"] < history[0]["value_error"]
    assert project.summary["final"]["mean"] > project.summary["baseline"]["mean"]
    assert (project.run / "checkpoints" / "step-000002" / "training" / "critic.safetensors").is_file()
    straight = project.summary["policy_versions"]
    project.run.rename(project.folder / "straight")
    killed_at(project, "batch.sealed:2")
    result = call("finetune", "--resume", "runs/r")
    assert result.exit_code == 0, result.output
    assert project.summary["policy_versions"] == straight, "bit by bit, so the critic came back too"
