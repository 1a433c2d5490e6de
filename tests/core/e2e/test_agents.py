"""Two agents on one tiny model, trained with expert iteration, MALT and GRPO, from the configuration to the report."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.babble import settings
from tests.journal_rows import read_rows
from tests.project import call

ROOT = Path(__file__).parents[3]


@pytest.fixture
def talk(project):
    """Returns a function that makes a project with a prover and a verifier, whose reply must contain a vowel."""

    def make(algorithm, *, epochs=2, builder=None, **protocol):
        parts = settings(**protocol)
        project.settings["workflow"] = parts["workflow"]
        project.settings["eval"]["evaluators"] = {"accuracy": parts["evaluator"]}
        project.settings["finetuning"]["reward_function"] = {"name": "accuracy"}
        project.settings["trajectory_builders"]["builder"] = {
            "_type": "agents",
            "num_generations": 4,
            "examples_per_epoch": 4,
            **(builder or {}),
        }
        project.set("finetuning.num_epochs", epochs).set("finetuning.algorithm", algorithm)
        project.set("finetuning.policy.batch.steps_per_job", 2)
        project.rows = [{"id": str(i), "question": f"say {i}", "answer": "accept"} for i in range(32)]
        return project

    return make


def transcripts(project, name):
    return yaml.safe_load((project.run / "transcripts" / name).read_text())


WEIGHTED = {"_type": "expert_iteration", "rollout_selection_method": "weighted_sampling"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "builder", "protocol"),
    [
        ({"_type": "expert_iteration"}, {}, {}),
        pytest.param(WEIGHTED, {}, {}, marks=pytest.mark.slow),
        pytest.param({"_type": "malt"}, {"num_generations": 1}, {"num_responses": 2}, marks=pytest.mark.slow),
        ({"_type": "malt", "num_initial_ei_epochs": 1}, {"num_generations": 1}, {"num_responses": 2}),
        ({"_type": "grpo"}, {"agent_weights": {"verifier": 2.0}}, {}),
        pytest.param({"_type": "grpo"}, {"num_generations": 2}, {"num_responses": 2}, marks=pytest.mark.slow),
        pytest.param(
            {"_type": "expert_iteration"}, {"verifier_guess_replacement_proportion": 0.5}, {}, marks=pytest.mark.slow
        ),
    ],
    ids=["threshold", "weighted_sampling", "malt", "malt_after_expert_iteration", "grpo", "grpo_on_trees", "guesses"],
)
def test_agents_are_trained_together(talk, algorithm, builder, protocol):
    run = talk(algorithm, builder=builder, **protocol)
    run.finetune(code=0)
    rows = run.metrics
    assert [version["num_updates"] for version in run.summary["policy_versions"]] == [0, 2, 2]
    assert all(row["direction"] > 0 for row in rows), (
        "each job changed its tokens' log-probs in the direction of their advantages"
    )
    assert all(0 <= row["avg_reward"] <= 1 for row in rows), "the run's reward, not the rewards of single agents"
    page = transcripts(run, "epoch-0001.yml")
    assert (page["num_episodes"], page["num_shown"]) == (len(page["transcripts"]), page["num_episodes"])
    assert transcripts(run, "baseline.yml")["transcripts"][0]["dialogue"][1]["agent"] == "verifier"
    first = page["transcripts"][0]
    if protocol:
        assert [len(branch["branches"]) for branch in first["branches"]] == [2, 2]
        had_branches = "branches" in transcripts(run, "epoch-0000.yml")["transcripts"][0]
        assert had_branches is ("num_initial_ei_epochs" not in algorithm)
    else:
        assert [message["agent"] for message in first["dialogue"]] == ["prover", "verifier"]


@pytest.mark.slow
def test_the_verifier_learns_in_one_epoch_and_the_trained_weights_are_tested(talk):
    """The right answer is always "accept", so the rule to learn is: a vowel."""
    run = talk({"_type": "expert_iteration"}, epochs=1, builder={"examples_per_epoch": 24})
    run.settings["finetuning"]["policy"]["batch"] = {"steps_per_job": 12}
    run.finetune(code=0)
    assert run.summary["final"]["mean"] > run.summary["baseline"]["mean"] + 0.1
    assert [version["num_updates"] for version in run.summary["policy_versions"]] == [0, 12]
    tested = read_rows(run.run, "SELECT phase, data FROM episodes WHERE phase LIKE 'confirm%'")
    versions = {(phase, call["policy_version"]) for phase, data in tested for call in json.loads(data)["calls"]}
    assert versions == {("confirm_base", 0), ("confirm_tuned", 1)}


def run_until_killed(run, site):
    """Runs the project in another process, with the protocol registered, which kills itself at `site`."""
    code = "import tests.babble; from reinforge.cli import main; main()"
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "REINFORGE_CRASH_AT": site}
    command = [sys.executable, "-c", code, "finetune", "run.yml", "--run_name", "r"]
    out = subprocess.run(command, env=env, cwd=run.folder, capture_output=True, text=True)
    assert out.returncode == -9, out.stderr


@pytest.mark.slow
def test_a_resumed_run_still_trains_on_the_rollouts_of_previous_epochs(talk):
    """Trees; epochs 0, 1 and 2 train on the rollouts of 1, 2 and 3 epochs, even if killed in the third one."""
    builder = {"fine_tune_on_all_previous_rollouts": True, "examples_per_epoch": 4, "num_generations": 1}
    run = talk({"_type": "malt"}, epochs=3, builder=builder, num_responses=2)
    run.set("finetuning.deterministic", True)
    run.write_files()
    run_until_killed(run, "batch.sealed:3")
    call("finetune", "--resume", "runs/r", code=0)
    call("finetune", "run.yml", "--run_name", "s", code=0)
    counts = [row["num_groups"] for row in run.metrics]
    assert counts[0] <= 12, "four trees, each with one group of the prover and at most two of the verifier"
    assert counts[1] - counts[0] >= 8
    assert counts[2] - counts[1] >= 8
    summaries = [json.loads((run.folder / "runs" / name / "summary.json").read_text()) for name in "rs"]
    fingerprints = [[row["fingerprint"] for row in summary["policy_versions"]] for summary in summaries]
    assert fingerprints[0] == fingerprints[1]
    jobs = read_rows(run.run, "SELECT epoch, status FROM jobs ORDER BY epoch")
    assert jobs == [(0, "completed"), (1, "completed"), (2, "completed")]


def test_incompatible_settings_are_rejected_before_the_run_starts(talk):
    result = talk({"_type": "malt"}).finetune(code=2)
    assert "workflow.num_responses" in result.output
    run = talk({"_type": "grpo"}, builder={"fine_tune_on_all_previous_rollouts": True, "agent_weights": {"judge": 2}})
    run.set("finetuning.curriculum_learning.collect_only_included", True)
    (run.folder / "run.yml").unlink()
    output = run.finetune().output
    assert "trajectory_builders.builder.fine_tune_on_all_previous_rollouts" in output
    assert "the protocol has no agent judge" in output
    assert "collect_only_included" in output
