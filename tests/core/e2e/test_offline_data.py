"""Training on a file of rows through the command line: the gate judges by running the agent."""

import pytest

from reinforge.runs.run_folder import find_resume_point, read_record

AGENT = """
async def agent(item, llm, context):
    reply = await llm.chat.completions.create(messages=item.input_obj, max_tokens=6)
    return reply.choices[0].message.content
"""
PROMPTED = AGENT.replace("item.input_obj", '[{"role": "user", "content": item.input_obj}]')


@pytest.fixture
def offline(project):
    """Rows that teach to say `yes`, whatever is asked."""
    project.write("task.py", AGENT)
    project.set("eval.evaluators", {"right": {"_type": "exact_match"}})
    project.set("finetuning.reward_function.name", "right")
    project.set("trajectory_builders.builder", {"_type": "dataset"})
    project.set("finetuning.algorithm", {"_type": "sft"}).set("finetuning.num_epochs", 3)
    project.set("finetuning.policy.optimizer.learning_rate", 1e-2).set(
        "finetuning.policy.schedule", {"warmup_steps": 2}
    )
    project.rows = [conversation(n, "yes") for n in range(48)]
    return project


def conversation(number, *said):
    messages = [{"role": "user", "content": f"say {number}"}, {"role": "assistant", "content": said[0]}]
    for text in said[1:]:
        messages += [{"role": "user", "content": "more"}, {"role": "assistant", "content": text}]
    return {"messages": messages}


def test_sft_on_messages_teaches_an_answer_and_the_gate_says_so(offline):
    result = offline.finetune("--require_improvement", code=0)
    summary = offline.summary
    assert summary["confirm_base"]["mean"] < 0.1
    assert summary["confirm_tuned"]["mean"] > 0.9
    history = offline.history
    assert [row["avg_reward"] for row in history] == [None] * 3, "a row's reward says nothing about the policy"
    assert history[0]["direction"] > 0
    assert [row["num_tokens"] for row in history] == [29 * len(("ye", "s", "<|end|>"))] * 3
    assert not [key for key in summary["episodes"] if key.startswith("collect")]
    assert "loss" in result.output


def test_sft_on_preferences_learns_the_chosen_reply_if_the_rejected_one_is_left_out(offline):
    offline.write("task.py", PROMPTED)
    offline.rows = [{"prompt": f"say {n}", "chosen": "yes", "rejected": "no"} for n in range(48)]
    refused = offline.finetune()
    assert (refused.exit_code, "so sft would also train on the rejected replies" in refused.output) == (2, True)
    (offline.folder / "run.yml").unlink()
    offline.set("finetuning.algorithm.min_reward", 0.5)
    offline.finetune("--require_improvement", code=0)


@pytest.fixture
def scored(offline):
    """Single replies with a score, two to each prompt in no order: `yes` is good, `no` is bad."""
    offline.write("task.py", PROMPTED)
    offline.set("eval.evaluators", {"right": {"_type": "contains", "texts": "yes"}})
    splits = ["train"] * 16 + ["select"] * 4 + ["confirm"] * 4
    offline.rows = [
        {"prompt": f"say {n}", "completion": text, "score": score, "split": split}
        for text, score in (("yes", 0.75), ("no", 0.25))
        for n, split in enumerate(splits)
    ]
    offline.set("finetuning.gate.allow_no_verdict", True)  # it has four prompts
    return offline.set("finetuning.num_epochs", 2).set("finetuning.splits", {"key": "split"})


def count_tokens(offline):
    return [row["num_tokens"] for row in offline.history]


@pytest.mark.parametrize(
    "algorithm",
    [{"_type": "sft"}, pytest.param({"_type": "rejection_sampling", "best_k": None}, marks=pytest.mark.slow)],
)
def test_only_rows_that_reach_min_reward_are_trained(scored, algorithm):
    scored.set("finetuning.algorithm", {**algorithm, "min_reward": 0.5})
    scored.finetune(code=0)
    assert count_tokens(scored) == [16 * len(("ye", "s", "<|end|>"))] * 2, "of 32 rows to train on, 16 are good"


@pytest.mark.slow
def test_dpo_pairs_scored_replies_to_the_same_prompt(scored):
    scored.set("finetuning.algorithm", {"_type": "dpo", "beta": 0.5})
    scored.finetune(code=0)
    history = scored.history
    assert all(row["direction"] > 0 for row in history)
    assert history[0]["num_groups"] == history[0]["num_groups_kept"] == 16


@pytest.mark.slow
def test_rows_beyond_the_context_are_left_out_and_counted_once(offline):
    offline.set("finetuning.policy.max_model_len", 40).set("finetuning.splits", {"key": "split"})
    offline.rows = [{**row, "split": ("train", "select", "confirm")[n % 3]} for n, row in enumerate(offline.rows)]
    for number in (0, 3, 6):
        offline.rows[number] = {**conversation(number, "yes " * 60), "split": "train"}
    result = offline.finetune(code=0)
    assert result.output.count("3 of 16 training rows do not fit the model's context") == 1
    history = offline.history
    assert [row["num_trajectories"] for row in history] == [13] * 3


@pytest.mark.slow
def test_rows_that_all_exceed_the_context_are_an_error(offline):
    offline.rows = [conversation(n, f"{n} " * 400) for n in range(32)]
    result = offline.finetune()
    assert (result.exit_code, "rows fits the model's context" in result.output) == (2, True), result.output


def test_invalid_rows_are_listed_with_their_lines_before_any_work(offline):
    splits = ["train"] * 10 + ["select", "confirm"]
    offline.rows = [{"prompt": f"say {n}", "completion": "yes", "split": split} for n, split in enumerate(splits)]
    broken = [{"role": "assistant", "content": "yes"}, {"role": "tool", "content": "?"}]
    offline.rows = [{**row, "completion": broken} if n in (4, 7) else row for n, row in enumerate(offline.rows)]
    result = offline.set("finetuning.splits", {"key": "split"}).finetune(code=2)
    said = "data.jsonl:5: 2 × completion: the last message has role tool, expected assistant (also at data.jsonl:8)"
    assert said in result.output
    assert not offline.run.exists()


def test_rows_that_show_no_reply_are_refused(offline):
    offline.write("task.py", PROMPTED)
    offline.rows = [{"question": f"say {n}", "answer": "yes"} for n in range(12)]
    result = offline.finetune()
    assert (result.exit_code, "which has no assistant replies to train on" in result.output) == (2, True), result.output


@pytest.mark.slow
def test_the_small_run_does_everything_once(offline):
    offline.finetune("--smoke", code=0)
    folder = offline.run.with_name("r-smoke")
    assert find_resume_point(folder, read_record(folder), lambda checkpoint: True).epoch == 0


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["full", pytest.param("lora", marks=pytest.mark.slow)])
def test_kto_learns_from_thumbs_alone(offline, shape):
    """Half of the replies are `yes` with a thumb up, half are `no` with a thumb down; no prompt has both."""
    offline.write("task.py", PROMPTED)
    offline.rows = [
        {"prompt": f"say {n}", "completion": "no" if n % 2 else "yes", "label": n % 2 == 0} for n in range(48)
    ]
    offline.set("finetuning.algorithm", {"_type": "kto", "beta": 0.05}).set("finetuning.num_epochs", 6)
    if shape == "lora":
        offline.set("finetuning.policy.lora", {"r": 8, "lora_alpha": 16})
    offline.set("eval.evaluators", {"right": {"_type": "contains", "texts": "yes"}})
    result = offline.finetune(code=0)
    assert shape == "lora" or offline.summary["promoted"], result.output
    history = offline.history
    assert history[0]["direction"] > 0
    assert history[-1]["desirable_logratio"] > 2 > -2 > history[-1]["undesirable_logratio"]
    assert history[-1]["loss"] < history[0]["loss"] < 0.5, "at the reference every reply has the loss sigma(0)"


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        {"_type": "dpo", "beta": 0.5},
        {"_type": "rejection_sampling"},
        pytest.param({"_type": "orpo"}, marks=pytest.mark.slow),
        pytest.param({"_type": "simpo"}, marks=pytest.mark.slow),
    ],
    ids=lambda algorithm: algorithm["_type"],
)
def test_preferences_of_a_file_train_pairs_and_best_of_n(offline, algorithm):
    """Both replies of a pair are tokens that were not sampled; no algorithm may have read their log-probs."""
    offline.write("task.py", PROMPTED)
    offline.rows = [{"prompt": f"say {n}", "chosen": "yes", "rejected": "no"} for n in range(48)]
    offline.set("finetuning.algorithm", algorithm)
    offline.finetune(code=0)
    history = offline.history
    assert all(row["direction"] > 0 for row in history[: 1 if algorithm["_type"] == "simpo" else None])
    assert history[-1]["loss"] < history[0]["loss"]
    if algorithm["_type"] == "dpo":
        assert history[0]["loss"] < 0.7, "log 2 at first, and then less"
    if algorithm["_type"] in ("orpo", "simpo"):
        assert history[-1]["margin"] > history[0]["margin"]
