"""Runs whose candidates become preference pairs, from a YAML file."""

import json

from tests.protocols.hosted import use_openai_adapter
from tests.protocols.nemo import AGENT


def test_a_run_sends_the_pairs_to_a_service(project, openai_service, monkeypatch):
    monkeypatch.setenv("STANDIN_KEY", openai_service.key)
    use_openai_adapter(project, openai_service)
    project.write("task.py", AGENT)
    project.settings["trajectory_builders"] = {
        "builder": {"_type": "dpo_traj_builder", "min_score_diff": 0.1, "max_pairs_per_turn": 1}
    }
    project.set("finetuning.algorithm", {"_type": "dpo"}).set("finetuning.num_epochs", 1)
    project.rows = project.rows[:32]
    project.finetune(code=0)
    (job,) = openai_service.jobs.values()
    rows = openai_service.get_job_rows(job["id"])
    assert job["method"]["type"] == "dpo"
    assert {len(row["input"]["messages"]) for row in rows} == {1, 3}, "candidates of both turns"
    metrics = json.loads((project.run / "training_metrics.jsonl").read_text().splitlines()[0])
    assert metrics["avg_reward"] is None, "a difference of scores says nothing about the policy"


def test_pairs_of_texts_are_refused_where_tokens_are_trained(project):
    project.settings["trajectory_builders"] = {
        "builder": {"_type": "dpo_traj_builder", "require_multiple_candidates": False}
    }
    project.set("finetuning.algorithm", {"_type": "dpo"})
    result = project.finetune(code=2)
    assert "makes pairs of strings, but `_type: local` trains on sampled tokens" in result.output
    assert "require_multiple_candidates: is false" in result.output
