"""Bad input: refused before any work, with file, line and fix, and nothing half-made is left behind."""

import re
import time

import pytest


def refused(project, *patterns, code=2):
    """Runs the project and checks that it was refused before a run folder was made."""
    result = project.finetune()
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    for pattern in patterns:
        assert re.search(pattern, result.output, re.DOTALL), f"{pattern!r} is not in:\n{result.output}"
    if code == 2:
        assert not project.run.exists(), "nothing may be started that could have been refused"
    return result.output


def test_a_missing_dataset(project):
    project.rows = None
    refused(project, r"data\.jsonl", "fix:")


def test_an_empty_dataset(project):
    project.rows = []
    refused(project, r"data\.jsonl", "empty|no rows|no examples")


def test_a_row_without_the_asked_field(project):
    project.rows[5] = {"id": "5", "qestion": "x", "answer": "y"}
    refused(project, r"data\.jsonl:6", "question")


def test_duplicate_ids(project):
    project.rows[7] = {**project.rows[7], "id": "3"}
    refused(project, r"data\.jsonl:(4|8)", r"[\"']?3")


def test_unknown_type(project):
    project.set("trainers.trainer._type", "epoc")
    refused(project, r"run\.yml:\d+", 'did you mean "epoch"')


def test_unknown_key(project):
    project.set("finetuning.num_epocs", 3)
    refused(project, r"run\.yml:\d+.*num_epocs", 'did you mean "num_epochs"')


def test_wrong_type(project):
    project.set("finetuning.num_epochs", "many")
    refused(project, r"run\.yml:\d+.*finetuning\.num_epochs", "many")


def test_an_unset_variable(project, monkeypatch):
    monkeypatch.delenv("NOT_SET_ANYWHERE", raising=False)
    project.set("finetuning.policy.model", "${NOT_SET_ANYWHERE}")
    refused(project, r"run\.yml:\d+", "NOT_SET_ANYWHERE")


def test_a_reward_function_that_is_no_evaluator(project):
    project.set("finetuning.reward_function.name", "vowel")
    refused(project, r"run\.yml:\d+", 'did you mean "vowels"')


def test_a_function_that_is_not_there(project):
    project.set("workflow.function", "task:agnt")
    refused(project, "workflow", "agnt", 'did you mean "agent"|agent')


def test_a_function_of_another_package_is_refused(project):
    project.set("workflow.function", "os:system")
    refused(project, "os:system")


def test_a_model_folder_that_is_not_there(project):
    project.set("finetuning.policy.model", "./nowhere")
    refused(project, r"finetuning\.policy\.model", "nowhere", "fix:")


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (["tokenizer.json", "tokenizer_config.json"], "tokenizer"),
        (["chat_template.jinja"], r"chat_template.*finetuning\.policy\.chat_template"),
        (["model.safetensors"], "weights|safetensors"),
    ],
)
def test_a_model_folder_that_lacks_something(project, tmp_path, tiny_model_dir, missing, said):
    import json
    import shutil

    folder = tmp_path / "broken"
    shutil.copytree(tiny_model_dir, folder)
    for name in missing:
        (folder / name).unlink(missing_ok=True)
    config = folder / "tokenizer_config.json"
    if config.exists():
        kept = {key: value for key, value in json.loads(config.read_text()).items() if key != "chat_template"}
        config.write_text(json.dumps(kept))
    project.set("finetuning.policy.model", str(folder))
    refused(project, said)


def test_a_chat_template_given_in_the_file_is_used(project, tmp_path, tiny_model_dir):
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
    assert "exists already" in result.output
    assert list(project.run.iterdir()) == []


def test_groups_of_one(project):
    project.set("trajectory_builders.builder.num_generations", 1)
    refused(project, r"num_generations", "sft")


def test_finetuning_that_is_not_enabled(project):
    project.set("finetuning.enabled", False)
    refused(project, r"finetuning\.enabled")


def test_everything_wrong_at_once(project):
    project.rows[5] = {"id": "3", "question": "x", "answer": "y"}
    project.set("finetuning.policy.model", "./nowhere").set("workflow.function", "task:agnt")
    project.set("eval.evaluators.vowels.function", "task:vowls")
    output = refused(project, "agnt", "vowls", "nowhere", r"data\.jsonl")
    assert re.search(r"\d+ problems", output)


def test_a_missing_file_is_a_usage_error(project):
    from click.testing import CliRunner

    from reinforge.cli import main

    result = CliRunner().invoke(main, ["finetune", "nowhere.yml"])
    assert result.exit_code == 2
    assert "nowhere.yml" in result.output


def test_the_file_is_checked_in_under_a_second_without_torch(project):
    project.set("finetuning.num_epocs", 3)
    project.finetune()
    started = time.monotonic()
    project.finetune()
    assert time.monotonic() - started < 1.0


RUNNING = [
    ("a workflow that raises", "    raise ValueError('my own bug')", r"my own bug \(task\.py:3\)", 3),
    ("a workflow that never calls the model", "    return 'aaa'", r"called the model", 3),
    ("a workflow that hangs", "    await asyncio.sleep(60)", r"not finished after 0\.3 s", 3),
]


@pytest.mark.parametrize(("body", "said", "code"), [row[1:] for row in RUNNING], ids=[row[0] for row in RUNNING])
def test_an_agent_that_cannot_work_stops_the_run_with_the_reason(project, body, said, code):
    project.write(
        "task.py",
        f"import asyncio\nasync def agent(item, llm, context):\n{body}\n\ndef vowels(o, e):\n    return len(o) % 2\n",
    )
    project.set("finetuning.limits", {"episode_timeout_s": 0.3}).set("finetuning.outcomes", {"retries": 0})
    refused(project, said, code=code)
    assert project.summary["status"] == "failed"
    assert re.search(said, project.summary["reason"])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("    return 1 / 0", r"division by zero \(task\.py:\d+\)"),
        ("    return None", "None"),
        ("    return float('nan')", "nan|NaN"),
    ],
)
def test_an_evaluator_that_cannot_score_stops_the_run_with_the_reason(project, body, said):
    text = (project.folder / "task.py").read_text().split("def vowels")[0]
    project.write("task.py", f"{text}def vowels(output, expected):\n{body}\n")
    refused(project, "baseline cannot be scored", said, code=3)


def test_prompts_longer_than_the_context_are_the_policys_own_failure(project):
    project.rows = [
        {"id": str(i), "question": "word " * 2000 if i % 2 else f"say {i}", "answer": "a"} for i in range(64)
    ]
    project.set("finetuning.num_epochs", 1)
    assert project.finetune().exit_code == 0
    assert project.summary["episodes"]["context_overflow"] > 0


@pytest.mark.parametrize("name", ["../elsewhere", "a/b", ".."])
def test_a_run_name_that_leaves_the_folder_of_runs(project, name):
    result = project.finetune("--run_name", name)
    assert (result.exit_code, "is no name of a folder below" in result.output) == (2, True), result.output
    assert not (project.folder / "runs").exists()


def test_a_model_that_is_trained_and_never_called(project):
    """The file of another harness, brought here with its `openai` llm left in: nothing that is trained would answer."""
    project.set("llms.agent", {"_type": "openai", "model_name": "m", "base_url": "http://127.0.0.1:9", "api_key": "x"})
    refused(project, r"run\.yml:1.*llms: no entry is `_type: policy`.*agent is openai", "fix: make the entry")


def test_a_filter_that_matches_nothing_names_what_it_could_match(project):
    project.set("finetuning.target_functions", ["plan"])
    refused(project, r"target_functions \['plan'\].*functions \['<workflow>'\] and the llms \['agent'\]", code=3)


def test_all_problems_of_the_data_have_their_place_in_a_run_too(project):
    project.rows = None
    refused(project, r"run\.yml:\d+:\d+ eval\.general\.dataset")
