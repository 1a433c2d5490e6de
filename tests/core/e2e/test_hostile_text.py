"""Escape sequences, markup and secrets, planted wherever text enters: none reaches the terminal, a log or report.md."""

import pytest
import yaml
from aiohttp import web

from reinforge import errors, safe_text
from tests.fault.kit import Child
from tests.loop_thread import serve_in_thread
from tests.openai_server import OpenAIServer
from tests.project import Project, call

HOSTILE = "\x1b]0;pwn\x07\x1b[2J\x9b31m\u202e\r<img src=x onerror=alert(1)>![x](http://evil.example/x.png)"
CONTROLS = ["\x1b", "\x07", "\x9b", "\u202e", "\r"]
CANARY = "cornflower"
ENVIRON = {"PLANTED_KEY": "cornflower-of-the-environment", "PLANTED_URL_PASSWORD": "cornflower-password"}
LITERAL, EXTRA, HEADER = "cornflower-literal-key", "cornflower-in-extra-body", "Bearer cornflower-header-1"

AGENT = f"""
import logging
import os

HOSTILE = {HOSTILE!r}

async def agent(item, llm, context):
    messages = [{{"role": "user", "content": item.input_obj}}]
    reply = await llm.chat.completions.create(messages=messages, max_tokens=4)
    if context.seed % 7 == 0:
        key = os.environ["PLANTED_KEY"]
        raise ValueError(f"{{HOSTILE}} {{key}} {LITERAL} sk-cornflower1234 https://u:cornflower-url@host/ {EXTRA}")
    logging.getLogger("reinforge.planted").info("%s %s", HOSTILE, os.environ["PLANTED_KEY"])
    return HOSTILE + reply.choices[0].message.content

def vowels(output, expected):
    return sum(letter in "aeiou" for letter in output[len(HOSTILE):]) / 4

def broken(output, expected):
    raise RuntimeError(HOSTILE + os.environ["PLANTED_KEY"])
"""


def echo(request, body):
    """Rejects a call, and repeats the caller's key among escape sequences."""
    message = f"{HOSTILE} wrong key {request.headers['Authorization']}"
    return web.json_response({"error": {"message": message}}, status=401)


def plant(folder, model, url):
    """Returns a project with hostile ids, names, texts and errors, and with a secret in every place for one."""
    project = Project(folder, model)
    project.write("task.py", AGENT)
    project.rows = [{"id": f"{HOSTILE}{i}", "question": f"{HOSTILE} say {i}", "answer": HOSTILE} for i in range(32)]
    judge = {"_type": "openai", "model_name": HOSTILE, "base_url": url, "api_key": "${PLANTED_KEY}", "max_retries": 0}
    extra = {"session_token": EXTRA, "headers": {"Authorization": HEADER, "X-Api-Key": EXTRA}, "note": HOSTILE}
    project.settings["llms"] |= {
        f"judge{HOSTILE}": judge,
        "literal": {**judge, "api_key": LITERAL, "extra_body": extra},
    }
    project.settings["workflow"]["llm"] = "agent"
    rewards = project.settings["eval"]["evaluators"]
    rewards[f"v{HOSTILE}"] = rewards.pop("vowels")
    rewards["broken"] = {"_type": "python", "function": "task:broken"}
    rewards["judged"] = {"_type": "llm_judge", "llm": "literal", "rubric": HOSTILE}
    project.set("finetuning.reward_function.name", f"v{HOSTILE}").set("finetuning.num_epochs", 1)
    project.set("finetuning.outcomes", {"retries": 0, "max_missing": 0.9})
    project.set("trajectory_builders.builder", {"_type": "group", "num_generations": 4, "examples_per_epoch": 4})
    project.write_files()
    return project


@pytest.fixture(scope="module")
def planted(tiny_model_dir, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch, serve_in_thread(OpenAIServer(echo)) as server:
        for name, value in ENVIRON.items():
            patch.setenv(name, value)
        project = plant(tmp_path_factory.mktemp("planted"), tiny_model_dir, server.url)
        patch.chdir(project.folder)
        child = Child(project.folder, ["run.yml", "--run_name", "r"], mutation=set_environment)
        code = child.wait()
        assert (project.run / "report.md").exists(), child.said
        yield project, code, child.output.read_bytes()


def set_environment():
    """Sets the variables in the child: the fork server has the environment of its own start."""
    import os

    os.environ.update(ENVIRON)


def leak_in_reasons():
    """Removes the redaction of errors."""
    set_environment()
    errors.redact_secrets = lambda text: text


COMMANDS = [
    ("check", "run.yml"),
    ("check", "run.yml", "--no_import"),
    ("check", "run.yml", "--json"),
    ("config", "show", "run.yml"),
    ("config", "show", "run.yml", "--origin"),
    ("config", "show", "run.yml", "--json"),
    ("runs", "list", "--output_dir", "runs"),
    ("runs", "show", "runs/r"),
    ("runs", "show", "runs/r", "--json"),
    ("runs", "show", "runs/r", "--episode", "0"),
    ("runs", "show", "runs/r", "--episode", "0", "--json"),
    ("runs", "verify", "runs/r"),
    ("finetune", "--resume", "runs/r"),
    ("finetune", "run.yml", "--resume", "runs/r", "-o", f"finetuning.{HOSTILE}", HOSTILE),
    ("finetune", "run.yml", "--run_name", HOSTILE),
    ("finetune", "run.yml", "--debug", "-o", "workflow.function", f"task:{HOSTILE}"),
    ("finetune", HOSTILE),
    ("runs", "show", HOSTILE),
    ("config", "show", "broken.yml"),
]


def test_no_control_character_reaches_the_terminal(planted, monkeypatch):
    project, _, said = planted
    monkeypatch.chdir(project.folder)
    project.write("broken.yml", f"llms: {{x: {{_type: openai, {HOSTILE.encode('unicode_escape').decode()!r}: 1}}}}\n")
    found = {("finetune",): said.decode()}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRON.items():
            patch.setenv(name, value)
        found |= {command: call(*command).output for command in COMMANDS}
    for command, output in found.items():
        assert output, command
        assert not [repr(char) for char in CONTROLS if char in output], (command, output)
        assert CANARY not in output, (command, output)
        assert "this is a bug" not in output, (command, output)


def test_the_report_holds_no_markup_and_loads_nothing(planted):
    text = (planted[0].run / "report.md").read_text()
    assert "&lt;img src=x onerror=alert(1)>" in text, "the evaluator's name is in it, as text"
    assert not [repr(char) for char in (*CONTROLS, "<img", "](http", "://") if char in text], text


def test_no_secret_is_in_the_run_folder(planted):
    project, _, said = planted
    assert CANARY.encode() not in said
    assert b"PLANTED_KEY in llms.judge\\x1b]0;pwn" in said, "which variable goes to which host"
    assert b"llms.literal.api_key is written in the configuration; use ${VAR}" in said
    for path in project.run.rglob("*"):
        if path.is_file():
            assert CANARY.encode() not in path.read_bytes(), path
    log = (project.run / "run.log").read_text()
    assert "\\x1b]0;pwn" in log
    assert "***" in log
    written = yaml.safe_load((project.run / "config.yml").read_text())["llms"]
    assert written[f"judge{HOSTILE}"]["api_key"] == "${PLANTED_KEY}"
    assert written["literal"]["api_key"] == "${LLMS_LITERAL_API_KEY}"
    extra = written["literal"]["extra_body"]
    assert extra["session_token"] == "${LLMS_LITERAL_EXTRA_BODY_SESSION_TOKEN}"
    assert extra["headers"]["Authorization"] == "${LLMS_LITERAL_EXTRA_BODY_HEADERS_AUTHORIZATION}"
    assert extra["note"] == HOSTILE


def test_resuming_without_the_file_asks_for_the_secret_that_stood_in_it(planted, monkeypatch):
    project = planted[0]
    monkeypatch.chdir(project.folder)
    monkeypatch.setenv("PLANTED_KEY", ENVIRON["PLANTED_KEY"])
    output = call("finetune", "--resume", "runs/r").output
    assert "the run was started with a secret written in its file, which run folders do not keep" in output
    assert "fix: export LLMS_LITERAL_API_KEY=..., or pass the file: reinforge finetune FILE --resume runs/r" in output


def test_text_that_is_not_escaped_reaches_the_terminal(planted, monkeypatch):
    """Mutation check."""
    monkeypatch.chdir(planted[0].folder)
    monkeypatch.setattr(safe_text, "escape_controls", lambda text: text)
    assert "\x1b]0;pwn\x07" in call("runs", "show", "runs/r", "--episode", "0").output


@pytest.mark.slow
def test_errors_that_are_not_redacted_put_the_key_into_the_journal(tiny_model_dir, tmp_path):
    """Mutation check."""
    with serve_in_thread(OpenAIServer(echo)) as server:
        project = plant(tmp_path, tiny_model_dir, server.url)
        child = Child(project.folder, ["run.yml", "--run_name", "r"], mutation=leak_in_reasons)
        child.wait()
    journals = [path.read_bytes() for path in project.run.glob("run.sqlite*")]
    assert any(ENVIRON["PLANTED_KEY"].encode() in each for each in journals), child.said
