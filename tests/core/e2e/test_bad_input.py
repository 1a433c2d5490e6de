"""Bad input is rejected before any work, with file, line and fix, and leaves no files behind."""

import re
import time

import pytest

from tests.project import call


def assert_rejected(project, *patterns, code=2):
    result = project.finetune()
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    for pattern in patterns:
        assert re.search(pattern, result.output, re.DOTALL), f"{pattern!r} is not in:\n{result.output}"
    if code == 2:
        assert not project.run.exists(), "the run was started although its input was invalid"
    return result.output


@pytest.mark.parametrize(
    ("change", "patterns"),
    [
        (lambda rows: None, [r"run\.yml:\d+:\d+ eval\.general\.dataset", r"data\.jsonl", "fix:"]),
        (lambda rows: [], [r"data\.jsonl", "empty|no rows|no examples"]),
        (lambda rows: [*rows[:5], {"id": "5", "qestion": "x", "answer": "y"}], [r"data\.jsonl:6", "question"]),
        (lambda rows: [*rows[:7], {**rows[7], "id": "3"}], [r"data\.jsonl:(4|8)", r"[\"']?3"]),
    ],
    ids=["missing", "empty", "without the question", "duplicate ids"],
)
def test_rows_that_cannot_be_used(project, change, patterns):
    project.rows = change(project.rows)
    assert_rejected(project, *patterns)


@pytest.mark.parametrize(
    ("path", "value", "patterns"),
    [
        ("trainers.trainer._type", "epoc", [r"run\.yml:\d+", 'did you mean "epoch"']),
        ("finetuning.num_epocs", 3, [r"run\.yml:\d+.*num_epocs", 'did you mean "num_epochs"']),
        ("finetuning.num_epochs", "many", [r"run\.yml:\d+.*finetuning\.num_epochs", "many"]),
        ("finetuning.policy.model", "${NOT_SET_ANYWHERE}", [r"run\.yml:\d+", "NOT_SET_ANYWHERE"]),
        ("finetuning.policy.model", "./nowhere", [r"finetuning\.policy\.model", "nowhere", "fix:"]),
        ("finetuning.reward_function.name", "vowel", [r"run\.yml:\d+", 'did you mean "vowels"']),
        ("workflow.function", "task:agnt", ["workflow", 'did you mean "agent"|agent']),
        ("workflow.function", "os:system", ["os:system"]),
        ("finetuning.enabled", False, [r"finetuning\.enabled"]),
        (
            "finetuning.policy.chat_template",
            "{% for m in messages %}{{ m.content }}",
            [r"run\.yml:\d+", "is not valid Jinja: line 1: Unexpected end of template", "fix:"],
        ),
    ],
)
def test_a_setting_that_cannot_work(project, path, value, patterns):
    project.set(path, value)
    assert_rejected(project, *patterns)


def test_a_run_folder_that_exists(project):
    project.run.mkdir(parents=True)
    result = project.finetune(code=2)
    assert "already exists" in result.output
    assert list(project.run.iterdir()) == []


def test_groups_of_one(project):
    project.set("trajectory_builders.builder.num_generations", 1)
    assert_rejected(project, r"num_generations", "sft")


def test_a_chat_template_that_would_never_end(project):
    loops = "{% for a in range(99999) %}" * 9 + "{{ 'x' * 999 }}" + "{% endfor %}" * 9
    project.write("endless.jinja", loops)
    project.set("finetuning.policy.chat_template", str(project.folder / "endless.jinja"))
    assert_rejected(
        project, r"run\.yml:\d+.*finetuning\.policy\.chat_template", r"endless\.jinja builds more than 64 Mi characters"
    )


def test_a_chat_template_that_rejects_the_agents_messages(project):
    template = "{% if 'say' in messages[0].content %}{{ raise_exception('be polite') }}{% endif %}"
    project.set("finetuning.policy.chat_template", template)
    project.set("finetuning.outcomes", {"retries": 0})
    assert_rejected(project, "tool_error: MessagesRejected: cannot render the chat template: .*be polite", code=3)


def test_a_missing_file_is_a_usage_error(project):
    result = call("finetune", "nowhere.yml", code=2)
    assert "nowhere.yml" in result.output


def test_the_file_is_validated_in_under_a_second(project):
    project.set("finetuning.num_epocs", 3)
    project.finetune()
    started = time.thread_time()
    project.finetune()
    assert time.thread_time() - started < 1.0


@pytest.mark.parametrize("name", ["../elsewhere", "last", "\x1b[31m", "", "ünï", "x" * 129])
def test_a_name_that_a_run_cannot_have(project, name):
    result = project.finetune("--run_name", name)
    assert (result.exit_code, "cannot be the name of a run" in result.output) == (2, True), result.output
    assert "fix: use up to 128 letters" in result.output or "fix: choose another name" in result.output
    assert "\x1b" not in result.output
    assert not (project.folder / "runs").exists()


def test_a_trained_model_that_is_never_called(project):
    """A file of another framework that still has its `openai` llm: the agent would never call the trained model."""
    project.set("llms.agent", {"_type": "openai", "model_name": "m", "base_url": "http://127.0.0.1:9", "api_key": "x"})
    assert_rejected(
        project,
        r"run\.yml:1.*llms: no entry is `_type: policy`.*agent is openai",
        "fix: set `_type: policy` for the entry",
    )
