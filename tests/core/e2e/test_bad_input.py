"""Bad input is rejected before any work, with file, line and fix, and leaves no files behind."""

import re
import time

import pytest


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
    ("path", "value", "patterns"),
    [
        ("finetuning.policy.model", "./nowhere", [r"finetuning\.policy\.model", "nowhere", "fix:"]),
        ("workflow.function", "os:system", ["os:system"]),
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


def test_groups_of_one(project):
    project.set("trajectory_builders.builder.num_generations", 1)
    assert_rejected(project, r"num_generations", "sft")


def test_the_file_is_validated_in_under_a_second(project):
    project.set("finetuning.num_epocs", 3)
    project.finetune()
    started = time.thread_time()
    project.finetune()
    assert time.thread_time() - started < 1.0
