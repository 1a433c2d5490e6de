"""Training on expected answers through the command line: the agent's own prompts, with the answers as replies."""

import pytest

from reinforge import finetune
from tests.core.e2e.test_tools import HERMES

AGENT = """
def read(text):
    return text.rpartition(":")[2].strip()

async def agent(item, llm, context):
    messages = [{"role": "system", "content": "Reply at once."}, {"role": "user", "content": item.input_obj}]
    reply = await llm.chat.completions.create(messages=messages, max_tokens=6)
    return reply.choices[0].message.content

def right(output, expected):
    return float(read(output) == expected and SHOWN in output)
"""
SETTINGS = {"device": "cpu", "output_dir": "runs", "limits": {"allow_no_training": True, "max_empty_updates": 9}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture
def answered(project):
    """Examples that all expect `yes`; the model never says it."""
    project.write("task.py", AGENT.replace("SHOWN", "''"))
    project.set("eval.evaluators", {"right": {"_type": "python", "function": "task:right"}})
    project.set("finetuning.reward_function.name", "right")
    project.set("trajectory_builders.builder", {"_type": "answers"})
    project.set("finetuning.algorithm", {"_type": "sft"}).set("finetuning.num_epochs", 3)
    project.set("finetuning.policy.optimizer.learning_rate", 1e-2).set(
        "finetuning.policy.schedule", {"warmup_steps": 2}
    )
    project.rows = [{"id": str(n), "question": f"say {n}", "answer": "yes"} for n in range(48)]
    return project


def test_the_agent_learns_what_its_examples_expect(answered):
    result = answered.finetune("--require_improvement", code=0)
    assert "in the form '{answer}', which scores 1 on 8 training examples (0 for the agent's own replies)" in (
        " ".join(result.output.split())
    )
    assert answered.summary["confirm_base"]["mean"] < 0.1
    assert answered.summary["confirm_tuned"]["mean"] > 0.9
    assert [row["num_tokens"] for row in answered.history] == [29 * len(("ye", "s", "<|end|>"))] * 3
    assert [row["avg_reward"] for row in answered.history] == [None] * 3, "no reply was sampled, so none has a reward"
    assert not [key for key in answered.summary["episodes"] if key.startswith("collect")]


@pytest.mark.parametrize(
    ("shown", "form"), [pytest.param("'Answer'", None, marks=pytest.mark.slow), ("'So'", "So: {answer}")]
)
def test_the_form_that_the_evaluators_accept_is_imitated(answered, shown, form):
    """Usual forms are tried; another one must be given."""
    answered.write("task.py", AGENT.replace("SHOWN", shown).replace("max_tokens=6", "max_tokens=20"))
    answered.set("trajectory_builders.builder.form", form).set("finetuning.num_epochs", 1)
    result = answered.finetune(code=0)
    assert f"in the form '{form or 'Answer: {answer}'}', which scores 1" in " ".join(result.output.split())


def test_the_first_of_several_right_answers_is_imitated(answered):
    answered.set("eval.evaluators", {"right": {"_type": "exact_match", "any_of": True}})
    answered.rows = [{**row, "answer": ["yes", "ye"]} for row in answered.rows]
    result = answered.finetune("--require_improvement", code=0)
    assert "in the form '{first}', which scores 1" in " ".join(result.output.split())


def test_answers_that_the_evaluators_do_not_accept_are_never_imitated(answered):
    """Half of the answers are in capitals, which this reward does not accept."""
    answered.write("task.py", AGENT.replace("SHOWN", "output.lower()"))
    answered.rows = [{**row, "answer": "yes" if n % 2 else "YES"} for n, row in enumerate(answered.rows)]
    result = answered.set("finetuning.num_epochs", 1).finetune(code=0)
    kept = answered.history[0]["num_groups"]
    assert 0 < kept < 29
    assert f"{29 - kept} of 29 expected answers are not imitated" in " ".join(result.output.split())


def test_without_an_accepted_form_the_run_says_what_to_do(answered):
    answered.write("task.py", AGENT.replace("SHOWN", "'nowhere'"))
    output = " ".join(answered.finetune(code=2).output.split())
    assert "the evaluators do not accept the expected answers as replies: 0 on 8 examples" in output
    assert "set `form` to how a reply shows its answer" in output


def test_an_agent_with_tools_does_not_learn_to_answer_without_them(answered):
    answered.write("task.py", AGENT.replace("SHOWN", "''").replace("max_tokens=6", f"max_tokens=6, tools={TOOLS}"))
    output = answered.finetune(code=2).output
    assert "none of the 29 expected answers can be imitated: 29 × the agent offers tools" in output


def test_an_answer_that_is_a_call_of_an_offered_tool_is_made(answered):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": {}}}}}]
    agent = AGENT.replace("SHOWN", "''").replace("max_tokens=6", f"max_tokens=90, tools={tools}")
    agent = agent.replace("reply.choices[0].message.content", "str(reply.choices[0].message.tool_calls)")
    answered.write("task.py", agent.replace("read(output) == expected", "'sky' in output"))
    answered.write("template.jinja", HERMES)
    answered.set("finetuning.policy.chat_template", "template.jinja").set("finetuning.num_epochs", 1)
    answered.rows = [{**row, "answer": 'look(at="sky")'} for row in answered.rows]
    result = answered.finetune(code=0)
    assert "in the form '{answer}', which scores 1" in " ".join(result.output.split())
    assert answered.history[0]["num_groups"] == 29


def test_answers_that_the_agent_has_no_room_for_are_left_out(answered):
    answered.rows = [{**row, "answer": "yes" if n % 2 else "yes yes yes yes"} for n, row in enumerate(answered.rows)]
    result = answered.set("finetuning.num_epochs", 1).finetune(code=0)
    kept = answered.history[0]["num_groups"]
    assert f"{29 - kept} of 29 expected answers are not imitated: {29 - kept} × longer than" in result.output
    assert 0 < kept < 29


def test_examples_without_expected_answers_are_refused_before_any_work(answered):
    answered.rows = [{"id": str(n), "question": f"say {n}"} for n in range(48)]
    answered.write("task.py", AGENT.replace("SHOWN", "''"))
    result = answered.finetune(code=2)
    assert "none of the training examples has an expected answer to imitate" in result.output
    assert not answered.run.exists()


def test_each_answer_is_scored_once(answered):
    """29 examples in three epochs: 8 are tried first, then each runs once, whatever its reward costs."""
    count = "    open('scored', 'a').write('x')\n    return float("
    answered.write("task.py", AGENT.replace("SHOWN", "''").replace("    return float(", count))
    answered.finetune(code=0)
    own = sum(answered.summary["episodes"].values())
    assert len((answered.folder / "scored").read_text()) - own == 8 + 29


@pytest.mark.slow
@pytest.mark.parametrize("answers", [True, False])
def test_defaults_learn_the_answers_first_where_there_are_some(answered, tiny_model_dir, answers):
    """Without them the run has one stage, as long as it was asked for."""

    async def agent(item, llm, context):
        reply = await llm.chat.completions.create(messages=[{"role": "user", "content": item.input_obj}], max_tokens=3)
        return reply.choices[0].message.content

    def right(output, expected):
        return float(output == "yes")

    rows = [row if answers else {**row, "answer": None} for row in answered.rows]
    summary = finetune(agent, rows, right, tiny_model_dir, epochs=8, examples_per_epoch=8, settings=SETTINGS)
    assert summary.stages == ({"answers": 2, "reinforce": 8} if answers else {})
    if answers:
        assert summary.improvement.mean_difference > 0.3


@pytest.mark.parametrize("why", ["none has one", "none is accepted"])
def test_a_stage_that_is_not_required_is_passed_over(answered, why):
    if why == "none has one":
        answered.rows = [{"id": str(n), "question": f"say {n}"} for n in range(48)]
    odd = "return len(output) % 2 - 2.0 * (expected is not None and expected in output)"
    answered.write("task.py", AGENT.partition("    return float(")[0] + f"    {odd}\n")
    stages = {
        "learn": {"algorithm": {"_type": "sft"}, "trajectory_builder": "builder"},
        "reinforce": {"algorithm": {"_type": "grpo"}, "trajectory_builder": "groups"},
    }
    answered.set("trajectory_builders.groups", {"_type": "group", "num_generations": 4, "examples_per_epoch": 4})
    answered.set("finetuning.pipeline", stages).set("finetuning.num_epochs", 2)
    answered.set("trajectory_builders.builder.required", False)
    output = answered.finetune(code=0).output
    assert (
        f"no expected answer is imitated: {'none of the training' if why == 'none has one' else 'the eval'}" in output
    )
    assert [row["num_groups"] for row in answered.history] == [0, 4]


def test_other_wrong_settings_are_refused(answered):
    answered.set("trajectory_builders.builder.form", "Answer:").set("finetuning.algorithm", {"_type": "grpo"})
    assert "has no {answer}, where the expected answer belongs" in answered.finetune(code=2).output
    answered.set("trajectory_builders.builder.form", None).save()
    assert "GRPO needs the sampler's log-prob of each token" in answered.finetune(code=2).output


@pytest.mark.slow
def test_a_run_that_has_learned_all_there_is_ends_with_its_verdict(answered):
    """Its replies no longer differ, so reinforcement learning has nothing to compare, which is not a failure."""
    answered.set("trajectory_builders.groups", {"_type": "group", "num_generations": 2, "examples_per_epoch": 4})
    stages = {
        "learn": {"num_epochs": 4, "algorithm": {"_type": "sft"}, "trajectory_builder": "builder"},
        "reinforce": {"num_epochs": 20, "algorithm": {"_type": "grpo"}, "trajectory_builder": "groups"},
    }
    answered.set("finetuning.pipeline", stages).set("finetuning.num_epochs", 24)
    output = " ".join(answered.finetune("--require_improvement", code=0).output.split())
    assert "training ends early, and what it has learned is judged: 100% of the groups have identical" in output
    assert answered.summary["status"] == "completed"
    assert answered.summary["confirm_tuned"]["mean"] > 0.9
    assert len(answered.history) < 24


@pytest.mark.slow
def test_a_stage_of_answers_starts_reinforcement_learning_where_nothing_is_solved(answered):
    answered.set("trajectory_builders.groups", {"_type": "group", "num_generations": 4, "examples_per_epoch": 4})
    stages = {
        "learn": {"num_epochs": 2, "algorithm": {"_type": "sft"}, "trajectory_builder": "builder"},
        "reinforce": {"algorithm": {"_type": "grpo"}, "trajectory_builder": "groups"},
    }
    answered.set("finetuning.pipeline", stages).set("finetuning.num_epochs", 3)
    answered.finetune("--require_improvement", code=0)
    assert [row["stage"] for row in answered.history] == ["learn", "learn", "reinforce"]
    assert answered.history[2]["avg_reward"] > 0.5
