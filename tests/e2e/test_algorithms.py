"""Algorithms through the command line: a run of two epochs each, from the file to the report."""

import json

import pytest

from tests.e2e.conftest import project  # noqa: F401


@pytest.mark.parametrize(
    ("algorithm", "told"),
    [
        ({"_type": "gspo", "clip_low": 0.05, "clip_high": 0.05}, "clip_fraction"),
        ({"_type": "reinforce_pp", "kl_coef": 0.01}, "ratio"),
        ({"_type": "rejection_sampling", "best_k": 2}, "entropy"),
        ({"_type": "dpo", "sft_coef": 0.5, "pairs": "all", "min_margin": 0.2}, "margin"),
    ],
    ids=lambda value: value["_type"] if isinstance(value, dict) else "",
)
def test_an_algorithm_named_in_the_file_trains(project, algorithm, told):  # noqa: F811
    project.set("finetuning.num_epochs", 2).set("finetuning.algorithm", algorithm)
    project.set("finetuning.policy.batch.steps_per_job", 2)
    result = project.finetune()
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (project.run / "training_metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    assert all(told in row for row in rows)
    assert all(row["direction"] > 0 for row in rows), "each job moved its tokens the way that their credit says"
    assert [version["num_updates"] for version in project.summary["policy_versions"]][1:] == [2, 2]


def test_epochs_in_which_nothing_is_good_enough_are_empty(project):  # noqa: F811
    project.set("finetuning.algorithm", {"_type": "expert_iteration", "min_reward": 2.0})
    project.set("finetuning.limits.max_empty_updates", 2)
    result = project.finetune()
    assert result.exit_code == 3
    assert "2 epochs in a row had nothing to train on" in result.output
    assert "of 16 the algorithm takes nothing" in " ".join(result.output.split())


def test_reinforce_pp_needs_no_siblings(project):  # noqa: F811
    project.set("finetuning.num_epochs", 2).set("finetuning.algorithm", {"_type": "reinforce_pp"})
    project.settings["trajectory_builders"]["builder"].update(num_generations=1, examples_per_epoch=32)
    result = project.finetune()
    assert result.exit_code == 0, result.output
    assert [version["num_updates"] for version in project.summary["policy_versions"]][1:] == [4, 4]
