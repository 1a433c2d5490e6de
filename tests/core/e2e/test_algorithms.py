"""Algorithms through the command line: a run of two epochs each, from the file to the report."""

import json

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "told"),
    [
        pytest.param({"_type": "gspo", "clip_low": 0.05, "clip_high": 0.05}, "clip_fraction", marks=pytest.mark.slow),
        pytest.param({"_type": "rejection_sampling", "best_k": 2}, "entropy", marks=pytest.mark.slow),
        ({"_type": "sft", "min_reward": 0.1}, "loss"),
        ({"_type": "dpo", "sft_coef": 0.5, "pairs": "all", "min_margin": 0.2}, "margin"),
        ({"_type": "kto", "threshold": 0.3, "balance": True}, "kl_baseline"),
        pytest.param({"_type": "orpo"}, "log_odds_ratio", marks=pytest.mark.slow),
        pytest.param({"_type": "simpo", "pairs": "all"}, "chosen_logprob", marks=pytest.mark.slow),
        pytest.param({"_type": "sapo"}, "gate", marks=pytest.mark.slow),
    ],
    ids=lambda value: value["_type"] if isinstance(value, dict) else "",
)
def test_an_algorithm_named_in_the_file_trains(project, algorithm, told):
    project.shrink(2).set("finetuning.algorithm", algorithm)
    project.set("finetuning.policy.batch.steps_per_job", 2)
    project.finetune(code=0)
    rows = project.metrics
    assert len(rows) == 2
    assert all(told in row for row in rows)
    assert all(row["direction"] > 0 for row in rows), "each job moved its tokens the way that their credit says"
    assert [version["num_updates"] for version in project.summary["policy_versions"]][1:] == [2, 2]


def test_an_epoch_with_fewer_examples_than_asked_for_is_empty_and_says_why(project):
    project.set("finetuning.algorithm", {"_type": "expert_iteration", "reward_threshold": 0.0, "min_examples": 1000})
    project.shrink(2).set("finetuning.limits.max_empty_updates", 2)
    result = project.finetune(code=3)
    assert "16 trajectories reach reward_threshold, but min_examples is 1000" in " ".join(result.output.split())
    assert not json.loads((project.run / "summary.json").read_text())["policy_versions"][1:], "nothing was trained"


def test_reinforce_pp_needs_no_siblings(project):
    project.set("finetuning.num_epochs", 2).set("finetuning.algorithm", {"_type": "reinforce_pp", "kl_coef": 0.01})
    project.settings["trajectory_builders"]["builder"].update(num_generations=1, examples_per_epoch=8)
    project.finetune(code=0)
    assert [version["num_updates"] for version in project.summary["policy_versions"]][1:] == [4, 4]
    assert all("ratio" in row and row["direction"] > 0 for row in project.metrics)


CHOOSER = """
async def agent(item, llm, context):
    messages = [{"role": "user", "content": item.input_obj}]
    reply = await llm.chat.completions.create(messages=messages, max_tokens=4, n=2)
    return reply.choices[1].message.content
"""


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("reinforce_pp", "rejection_sampling")]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "dpo", *SLOW])
def test_a_cut_support_is_trained_with_choices_too(project, algorithm):
    """top-p 0.8, an agent that takes the second of two choices, a reference: from the file to the metrics."""
    settings = {"kl_coef": 0.01} if algorithm == "reinforce_pp" else {}
    project.write_agent(CHOOSER)
    project.shrink().set("finetuning.algorithm", {"_type": algorithm, **settings})
    project.set("finetuning.sampling", {"top_p": 0.8, "min_p": 0.01})
    project.set("finetuning.policy.batch.steps_per_job", 2)
    project.finetune(code=0)
    rows = project.metrics
    for row in rows:
        assert row["direction"] > 0
        assert row["num_tokens_left_out"] == 0
        assert row["num_tokens_of_other_choices"] > 0
        assert row["canary_difference"] < 1e-4
    if algorithm == "grpo":
        trained = sum(row["num_tokens"] + row["num_tokens_of_other_choices"] for row in rows)
        assert trained <= project.summary["tokens"]["completion"]
