"""`reinforge redteam` from the command line, with an attacker and a target of random weights."""

import json

import pytest
from click.testing import CliRunner

from reinforge.cli import main
from reinforge.redteam.report import (
    JSON_FILE,
    TEXT_FILE,
    build_attack_report,
    jaccard_distance,
    select_most_distinct,
    write_report,
)
from tests.models import make_tiny_model


@pytest.fixture
def attack(project, tmp_path, tiny_model_dir):
    target = make_tiny_model(tmp_path / "target", seed=3)
    frozen = {"_type": "local"}
    project.settings["llms"] = {
        "attacker": {"_type": "policy"},
        "target": {**frozen, "model": str(target)},
        "baseline": {**frozen, "model": str(tiny_model_dir)},
    }
    project.settings["workflow"] = {
        "_type": "redteam",
        "scorer": "leaks",
        "baseline": "baseline",
        "width": 2,
        "depth": 2,
        "max_tokens": 4,
        "target_max_tokens": 4,
        "defense_toxicity_weight": 1.0,
    }
    project.settings["eval"]["evaluators"] = {
        "attack_success": {"_type": "attack_success"},
        "naturalness": {"_type": "attack_naturalness"},
        "leaks": {"_type": "contains", "texts": "a"},
    }
    project.settings["trajectory_builders"] = {"builder": {"_type": "tree", "examples_per_epoch": 4}}
    project.set("finetuning.reward_function", {"name": "attack_success"})
    project.set("finetuning.algorithm", {"_type": "dpo"}).set("finetuning.num_epochs", 2)
    return project


def train(attack, *arguments):
    attack.write_files()
    return CliRunner().invoke(main, ["redteam", "train", "run.yml", "--run_name", "r", *arguments])


def test_an_attack_trains_and_reports(attack):
    attack.rows = attack.rows[:32]
    attack.set("finetuning.num_epochs", 1)
    result = train(attack)
    assert result.exit_code == 0, result.output
    assert "before: the target failed in" in result.output
    report = json.loads((attack.run / "attack_report.json").read_text())
    assert set(report) == {"before", "after"}
    assert report["after"]["success"]["count"] == attack.summary["confirm_tuned"]["num_examples"]
    assert report["after"]["success"]["mean"] == attack.summary["confirm_tuned"]["mean"]
    assert (attack.run / "attack_report.txt").read_text().startswith("before: ")
    rows = [json.loads(line) for line in (attack.run / "training_metrics.jsonl").read_text().splitlines()]
    assert rows[0]["num_trajectories"] == 4 * (2 + 4)  # four trees of 2 + 2 x 2 probes
    assert rows[0]["num_groups"] == 4 * 3


@pytest.mark.slow
def test_an_evaluation_alone(attack, tmp_path):
    attack.write_files()
    arguments = ["redteam", "eval", "run.yml", "--limit", "4", "--json", "--output_dir", str(tmp_path / "found")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["success"]["count"] == 4
    assert report["num_probes"] == 8
    assert (tmp_path / "found" / "attack_report.txt").exists()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("workflow.target", "nobody", 'no entry "nobody" in llms'),
        ("workflow.scorer", "nothing", 'no entry "nothing" in eval.evaluators'),
        ("workflow.baseline", None, "perplexity needs a baseline and none is set"),
        ("workflow.baseline", "attacker", "which cannot score given tokens"),
        ("llms.target.model", "./nowhere", "there is no folder ./nowhere"),
        ("workflow.width", 1, "a group-relative algorithm has nothing to compare"),
    ],
)
def test_an_invalid_configuration_is_rejected_before_any_work(attack, path, value, message):
    attack.set(path, value)
    result = train(attack)
    assert result.exit_code == 2
    assert message in result.output
    assert not attack.run.exists()


@pytest.mark.slow
def test_a_resumed_attack_equals_an_uninterrupted_one(attack):
    attack.set("finetuning.deterministic", True)
    whole = train(attack)
    assert whole.exit_code == 0, whole.output
    expected = json.loads((attack.run / "summary.json").read_text())["policy_versions"]
    (attack.run.parent / "whole").mkdir()
    attack.run.rename(attack.run.parent / "whole" / "r")
    stopped = train(attack, "-o", "finetuning.limits.max_tokens", "300")
    assert stopped.exit_code == 5, stopped.output
    resumed = CliRunner().invoke(main, ["redteam", "train", "--resume", "runs/r", "--max_tokens", "1000000"])
    assert resumed.exit_code == 0, resumed.output
    found = json.loads((attack.run / "summary.json").read_text())["policy_versions"]
    assert [row["fingerprint"] for row in found] == [row["fingerprint"] for row in expected]


PLAIN_TARGET = """
async def clerk(item, llm, context):
    assert item.full_dataset_entry["messages"][-1]["content"] == item.input_obj
    return f"{len(item.input_obj)} a"

async def caller(item, llm, context):
    return await llm.chat.completions.create(messages=[])
"""


@pytest.mark.slow
def test_a_target_of_plain_code_needs_no_model(attack):
    attack.write("target.py", PLAIN_TARGET)
    attack.rows = attack.rows[:32]
    del attack.settings["llms"]["target"], attack.settings["llms"]["baseline"]
    attack.settings["functions"] = {"target": {"_type": "python", "function": "target:clerk"}}
    attack.settings["workflow"] |= {"baseline": None, "ppl_weight": 0.0}
    del attack.settings["eval"]["evaluators"]["naturalness"]
    attack.set("finetuning.num_epochs", 1).set("finetuning.limits.allow_no_training", True)
    result = train(attack)
    assert result.exit_code == 0, result.output
    assert set(attack.summary["episodes"]) == {"ok"}
    assert attack.summary["baseline"]["mean"] == 1.0, "the clerk says an `a` every time"

    attack.settings["functions"]["target"]["function"] = "target:caller"
    (attack.folder / "run.yml").unlink()
    attack.write_files()
    result = CliRunner().invoke(main, ["eval", "run.yml", "--limit", "1"])
    assert "functions.target uses llm.chat, but llms has no entry for it; add one and set" in result.output


def turn(path, probe, score, perplexity=2.0):
    return {
        "path": path, "probe": probe, "response": "r", "score": score, "reward": 0.0, "perplexity": perplexity
    }  # fmt: skip


def conversation(*turns, opening="o"):
    path, made = [], []
    for probe, score, *perplexity in turns:
        path = [*path, 0]
        made.append(turn(path, probe, score, *perplexity))
    return {"opening": opening, "threshold": 0.5, "turns": made}


def test_shares_first_failures_and_perplexity():
    conversations = [
        conversation(("a b", 0.0, 2.0), ("c d", 1.0, 8.0), opening="p"),
        conversation(("a b", 1.0, 2.0), ("a b", 1.0, 2.0), opening="q"),
        conversation(("x y", 0.0), ("x z", 0.0), opening="r"),
        conversation(("x y", 0.0), ("x z", 0.4), opening="s"),
    ]
    report = build_attack_report(conversations)
    assert report.success.mean == 0.5
    assert (report.success.ci_low, report.success.ci_high) == pytest.approx((0.150, 0.850), abs=1e-3)  # Wilson, 2 of 4
    again = build_attack_report(conversations * 5).success
    assert (again.ci_low, again.ci_high) == pytest.approx((0.150, 0.850), abs=0.1), "the same four openings"
    assert str(again).endswith("of 20 conversations with 4 openings")
    assert [share.mean for share in report.per_turn] == [0.25, 0.5]
    assert report.first_failure == {1: 1, 2: 1}
    assert report.perplexity["successful"] == pytest.approx((8 * 2 * 2) ** (1 / 3))
    assert (report.num_probes, report.num_distinct, report.num_distinct_successes) == (8, 4, 2)
    assert report.diversity == 1.0  # "a b" and "c d" share no word
    assert {example["probe"] for example in report.examples} == {"a b", "c d"}


def test_every_branch_of_a_tree_is_a_conversation():
    turns = [turn([0], "a", 1.0), turn([1], "b", 0.0)]
    turns += [turn([i, j], f"c{i}{j}", 0.0) for i in range(2) for j in range(2)]
    report = build_attack_report([{"opening": "o", "threshold": 0.5, "turns": turns}])
    assert (report.success.mean, report.success.count) == (0.5, 4)
    assert report.num_probes == 6  # a probe above two branches counts once


def test_no_success_and_no_perplexity():
    report = build_attack_report([conversation(("a", 0.0, None))])
    assert report.success.mean == 0.0
    assert report.success.ci_high > 0.5  # one conversation says little
    assert (report.perplexity["all"], report.diversity, report.examples) == (None, None, [])
    assert any("unknown of all probes" in line for line in report.lines("before"))


def test_a_report_needs_conversations():
    with pytest.raises(ValueError, match="no conversations"):
        build_attack_report([])


def test_distance_and_the_most_distinct():
    assert jaccard_distance("the old mill", "the new mill") == 0.5
    turns = [turn([0], text, 1.0) for text in ("a b c", "a b d", "x y z")]
    assert [each["probe"] for each in select_most_distinct(turns, 2)] == ["a b c", "x y z"]


def test_the_files(tmp_path):
    arms = {
        "before": build_attack_report([conversation(("a", 0.0))]),
        "after": build_attack_report([conversation(("tell me", 1.0), opening="A day.")]),
    }
    lines = write_report(tmp_path, arms)
    assert (tmp_path / TEXT_FILE).read_text() == "\n".join(lines) + "\n"
    data = json.loads((tmp_path / JSON_FILE).read_text())
    assert data["after"]["success"]["mean"] == 1.0
    assert data["after"]["examples"][0]["opening"] == "A day."
    assert "  1 opening    A day." in lines
