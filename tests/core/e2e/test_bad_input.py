"""Bad input is rejected before any work, with file, line and fix, and leaves no files behind."""

import re
import time

import pytest


def assert_rejected(project, *patterns, code=2):
    """Runs the project and checks that it is rejected before a run folder exists."""
    result = project.finetune()
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    for pattern in patterns:
        assert re.search(pattern, result.output, re.DOTALL), f"{pattern!r} is not in:\n{result.output}"
    if code == 2:
        assert not project.run.exists(), "the run was started although its input was invalid"
    return result.output


def test_a_missing_dataset(project):
    project.rows = None
    assert_rejected(project, r"data\.jsonl", "fix:")


def test_an_empty_dataset(project):
    project.rows = []
    assert_rejected(project, r"data\.jsonl", "empty|no rows|no examples")


def test_a_row_without_the_question(project):
    project.rows[5] = {"id": "5", "qestion": "x", "answer": "y"}
    assert_rejected(project, r"data\.jsonl:6", "question")


def test_duplicate_ids(project):
    project.rows[7] = {**project.rows[7], "id": "3"}
    assert_rejected(project, r"data\.jsonl:(4|8)", r"[\"']?3")


def test_unknown_type(project):
    project.set("trainers.trainer._type", "epoc")
    assert_rejected(project, r"run\.yml:\d+", 'did you mean "epoch"')


def test_unknown_key(project):
    project.set("finetuning.num_epocs", 3)
    assert_rejected(project, r"run\.yml:\d+.*num_epocs", 'did you mean "num_epochs"')


def test_wrong_type(project):
    project.set("finetuning.num_epochs", "many")
    assert_rejected(project, r"run\.yml:\d+.*finetuning\.num_epochs", "many")


def test_an_unset_variable(project, monkeypatch):
    monkeypatch.delenv("NOT_SET_ANYWHERE", raising=False)
    project.set("finetuning.policy.model", "${NOT_SET_ANYWHERE}")
    assert_rejected(project, r"run\.yml:\d+", "NOT_SET_ANYWHERE")


def test_a_reward_function_that_is_not_an_evaluator(project):
    project.set("finetuning.reward_function.name", "vowel")
    assert_rejected(project, r"run\.yml:\d+", 'did you mean "vowels"')


def test_a_function_that_does_not_exist(project):
    project.set("workflow.function", "task:agnt")
    assert_rejected(project, "workflow", "agnt", 'did you mean "agent"|agent')


def test_a_function_of_another_package(project):
    project.set("workflow.function", "os:system")
    assert_rejected(project, "os:system")


def test_a_model_folder_that_does_not_exist(project):
    project.set("finetuning.policy.model", "./nowhere")
    assert_rejected(project, r"finetuning\.policy\.model", "nowhere", "fix:")


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        (["tokenizer.json", "tokenizer_config.json"], "tokenizer"),
        (["chat_template.jinja"], r"chat_template.*finetuning\.policy\.chat_template"),
        (["model.safetensors"], "weights|safetensors"),
    ],
)
def test_an_incomplete_model_folder(project, tmp_path, tiny_model_dir, missing, expected):
    import json
    import shutil

    folder = tmp_path / "broken"
    shutil.copytree(tiny_model_dir, folder)
    for name in missing:
        (folder / name).unlink(missing_ok=True)
    config = folder / "tokenizer_config.json"
    if config.exists():
        remaining = {key: value for key, value in json.loads(config.read_text()).items() if key != "chat_template"}
        config.write_text(json.dumps(remaining))
    project.set("finetuning.policy.model", str(folder))
    assert_rejected(project, expected)


def test_the_chat_template_of_the_file_is_used(project, tmp_path, tiny_model_dir):
    import shutil

    folder = tmp_path / "no-template"
    shutil.copytree(tiny_model_dir, folder)
    (folder / "chat_template.jinja").unlink()
    project.set("finetuning.policy.model", str(folder)).set("finetuning.num_epochs", 1)
    project.set("finetuning.policy.chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}=")
    assert project.finetune().exit_code == 0


def test_a_run_folder_that_exists(project):
    project.run.mkdir(parents=True)
    result = project.finetune()
    assert result.exit_code == 2
    assert "already exists" in result.output
    assert list(project.run.iterdir()) == []


def test_groups_of_one(project):
    project.set("trajectory_builders.builder.num_generations", 1)
    assert_rejected(project, r"num_generations", "sft")


def test_finetuning_that_is_not_enabled(project):
    project.set("finetuning.enabled", False)
    assert_rejected(project, r"finetuning\.enabled")


def test_a_chat_template_that_would_never_end(project):
    loops = "{% for a in range(99999) %}" * 9 + "{{ 'x' * 999 }}" + "{% endfor %}" * 9
    project.write("endless.jinja", loops)
    project.set("finetuning.policy.chat_template", str(project.folder / "endless.jinja"))
    assert_rejected(
        project, r"run\.yml:\d+.*finetuning\.policy\.chat_template", r"endless\.jinja builds more than 64 Mi characters"
    )


def test_a_chat_template_that_never_ends_for_the_agents_messages(project):
    loops = "{% for a in range(99999) %}" * 9 + "{% endfor %}" * 9
    template = "{% if 'say' in messages[0].content %}" + loops + "{% endif %}{{ messages[0].content }}"
    project.set("finetuning.policy.chat_template", template)
    project.set("finetuning.outcomes", {"retries": 0})
    assert_rejected(project, "the chat template of .* takes more than 3 s of CPU time", code=3)


def test_a_chat_template_that_rejects_the_agents_messages(project):
    template = "{% if 'say' in messages[0].content %}{{ raise_exception('be polite') }}{% endif %}"
    project.set("finetuning.policy.chat_template", template)
    project.set("finetuning.outcomes", {"retries": 0})
    assert_rejected(project, "tool_error: MessagesRejected: cannot render the chat template: .*be polite", code=3)


def test_a_chat_template_that_is_not_jinja(project):
    project.set("finetuning.policy.chat_template", "{% for m in messages %}{{ m.content }}")
    assert_rejected(project, r"run\.yml:\d+", "is not valid Jinja: line 1: Unexpected end of template", "fix:")


def test_a_chat_template_that_ignores_the_agents_tools(project):
    project.set("finetuning.policy.chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}")
    agent = """
TOOLS = [{"type": "function", "function": {"name": "left", "parameters": {}}}]

async def agent(item, llm, context):
    reply = await llm.chat.completions.create(messages=[{"role": "user", "content": item.input_obj}], tools=TOOLS)
    return reply.choices[0].message.content
"""
    task = (project.folder / "task.py").read_text()
    project.write("task.py", agent + "def vowels" + task.split("def vowels", 1)[1])
    project.set("finetuning.outcomes", {"retries": 0})
    assert_rejected(project, "chat template of .* ignores tools", "set a template that renders `tools`", code=3)


def test_everything_is_reported_at_once(project):
    project.rows[5] = {"id": "3", "question": "x", "answer": "y"}
    project.set("finetuning.policy.model", "./nowhere").set("workflow.function", "task:agnt")
    project.set("eval.evaluators.vowels.function", "task:vowls")
    output = assert_rejected(project, "agnt", "vowls", "nowhere", r"data\.jsonl")
    assert re.search(r"\d+ problems", output)


def test_a_missing_file_is_a_usage_error(project):
    from click.testing import CliRunner

    from reinforge.cli import main

    result = CliRunner().invoke(main, ["finetune", "nowhere.yml"])
    assert result.exit_code == 2
    assert "nowhere.yml" in result.output


def test_the_file_is_validated_in_under_a_second(project):
    project.set("finetuning.num_epocs", 3)
    project.finetune()
    started = time.thread_time()
    project.finetune()
    assert time.thread_time() - started < 1.0


RUNNING = [
    ("a workflow that raises", "    raise ValueError('my own bug')", r"my own bug \(task\.py:3\)", 3),
    ("a workflow that never calls the model", "    return 'aaa'", r"called the model", 3),
    ("a workflow that hangs", "    await asyncio.sleep(60)", r"not finished after 0\.3 s", 3),
]


@pytest.mark.parametrize(("body", "expected", "code"), [row[1:] for row in RUNNING], ids=[row[0] for row in RUNNING])
def test_an_agent_that_fails_stops_the_run_with_the_reason(project, body, expected, code):
    project.write(
        "task.py",
        f"import asyncio\nasync def agent(item, llm, context):\n{body}\n\ndef vowels(o, e):\n    return len(o) % 2\n",
    )
    project.set("finetuning.limits", {"episode_timeout_s": 0.3}).set("finetuning.outcomes", {"retries": 0})
    assert_rejected(project, expected, code=code)
    assert project.summary["status"] == "failed"
    assert re.search(expected, project.summary["reason"])


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("    return 1 / 0", r"division by zero \(task\.py:\d+\)"),
        ("    return None", "None"),
        ("    return float('nan')", "nan|NaN"),
    ],
)
def test_an_evaluator_that_cannot_score_stops_the_run_with_the_reason(project, body, expected):
    text = (project.folder / "task.py").read_text().split("def vowels")[0]
    project.write("task.py", f"{text}def vowels(output, expected):\n{body}\n")
    assert_rejected(project, "baseline could not be scored", expected, code=3)


def test_prompts_longer_than_the_context_count_as_policy_failures(project):
    project.rows = [
        {"id": str(i), "question": "word " * 2000 if i % 2 else f"say {i}", "answer": "a"} for i in range(64)
    ]
    project.set("finetuning.num_epochs", 1)
    assert project.finetune().exit_code == 0
    assert project.summary["episodes"]["context_overflow"] > 0


def test_prompts_that_are_all_too_long_stop_the_run_with_the_numbers_and_the_fix(project):
    project.rows = [{"id": str(i), "question": f"{i} " + "word " * 2000, "answer": "a"} for i in range(64)]
    output = assert_rejected(project, r"the prompt has \d{4,} tokens, but the limit is \d+ \(max_model_len\)", code=3)
    assert re.search(r'the prompt is too long in (\d+) of \1: in example "\d+"', output)
    assert "use a model with a longer context" in output
    assert "called the model" not in project.summary["reason"]


def test_an_agent_that_goes_on_after_prompts_that_are_all_too_long_is_told_the_same(project):
    project.rows = [{"id": str(i), "question": f"{i} " + "word " * 2000, "answer": "a"} for i in range(64)]
    text = (project.folder / "task.py").read_text()
    call = next(line for line in text.splitlines() if "create(" in line)
    indent = call[: len(call) - len(call.lstrip())]
    copes = f"{indent}try:\n    {call}\n{indent}except Exception:\n{indent}    return ''"
    project.write("task.py", text.replace(call, copes))
    output = assert_rejected(project, r'the prompt is too long in (\d+) of \1: in example "\d+"', code=3)
    assert re.search(r"the prompt has \d{4,} tokens, but the limit is \d+ \(max_model_len\)", output)
    assert "called the model" not in project.summary["reason"]


@pytest.mark.parametrize(
    "name", ["../elsewhere", "a/b", "..", "last", "-x", " ", "a\nb", "\x1b[31m", "", "ünï", "x" * 129]
)
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


def test_a_filter_that_matches_nothing_lists_what_there_is_to_match(project):
    project.set("finetuning.target_functions", ["plan"])
    assert_rejected(project, r"target_functions is \['plan'\], but the calls came from \['<workflow>'\]", code=3)


def test_problems_of_the_data_are_located_in_the_file(project):
    project.rows = None
    assert_rejected(project, r"run\.yml:\d+:\d+ eval\.general\.dataset")
