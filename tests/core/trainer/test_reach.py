"""What a configuration reaches, listed before any of it is imported."""

import sys
import textwrap

import pytest

from reinforge.config.loader import load_config
from reinforge.config.schema import WorkflowConfig
from reinforge.errors import ConfigError
from reinforge.registry import REGISTRY
from reinforge.trainer.setup.reach import list_reach

TEXT = """
llms:
  agent: {_type: policy}
  judge: {_type: openai, model_name: m, base_url: "https://judge.example/v1", api_key: "${JUDGE_KEY}"}
  other: {_type: openai, model_name: "${MODEL:-gpt}"}
workflow: {_type: python, function: "rfr_agent:agent"}
eval:
  general: {dataset: {_type: jsonl, file_path: "${DATA}/d.jsonl"}}
  evaluators:
    mine: {_type: python, function: "rfr_pack.scores:score"}
    gone: {_type: python, function: "rfr_nowhere:score"}
finetuning: {policy: {model: org/model}}
"""
ENVIRON = {"JUDGE_KEY": "canary-key-1", "DATA": "d"}


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "canary-key-2")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    (tmp_path / "rfr_pack").mkdir()
    for name in ("rfr_agent.py", "rfr_pack/__init__.py", "rfr_pack/scores.py"):
        (tmp_path / name).write_text("raise SystemExit('imported')\n")
    (tmp_path / "run.yml").write_text(TEXT)
    return tmp_path


def test_imports_variables_and_hosts_are_listed_and_nothing_is_imported(project):
    reach = list_reach(load_config(project / "run.yml", environ=ENVIRON))
    assert [f"{name}: {text}" for name, text in reach.format_rows()] == [
        "imports: workflow.function: rfr_agent:agent (rfr_agent.py)",
        "imports: eval.evaluators.mine.function: rfr_pack.scores:score (rfr_pack/scores.py)",
        "imports: eval.evaluators.gone.function: rfr_nowhere:score (not found)",
        "variable: OPENAI_API_KEY in llms.other.api_key, sent to https://api.openai.com/v1",
        "variable: JUDGE_KEY in llms.judge.api_key, sent to https://judge.example/v1",
        "variable: MODEL in llms.other.model_name, sent to https://api.openai.com/v1",
        "variable: DATA in eval.general.dataset.file_path",
        "host: https://judge.example/v1 (llms.judge)",
        "host: https://api.openai.com/v1 (llms.other)",
        "host: https://huggingface.co (finetuning.policy.model)",
    ]
    assert not [name for name in sys.modules if name.startswith("rfr_")]
    assert "canary" not in str(reach.as_dict())
    assert reach.format_sent_variables()[0][1].startswith("OPENAI_API_KEY in llms.other.api_key, sent to https://api")


def test_a_training_server_is_listed_however_its_address_is_written(project):
    """It receives every prompt and reply; given as ip and port, it was left out."""
    with open(project / "run.yml", "a") as file:
        file.write(
            "\ntrainer_adapters:\n"
            "  one: {_type: openpipe_art_trainer_adapter, backend: {ip: 10.0.0.5, port: 7999}}\n"
            "  two: {_type: openpipe_art_trainer_adapter, backend: {base_url: 'https://art.example/v1'}}\n"
        )
    hosts = list_reach(load_config(project / "run.yml", environ=ENVIRON)).hosts
    assert hosts["http://10.0.0.5:7999"] == ["trainer_adapters.one.backend"]
    assert hosts["https://art.example/v1"] == ["trainer_adapters.two.backend"]


def test_the_validation_file_is_followed(project):
    (project / "other.yml").write_text("eval: {evaluators: {v: {_type: python, function: rfr_agent:check}}}\n")
    text = TEXT.replace("{policy:", f"{{run_configuration: {{validation_config_file: {project}/other.yml}}, policy:")
    (project / "run.yml").write_text(text)
    reach = list_reach(load_config(project / "run.yml", environ=ENVIRON))
    assert "rfr_agent:check" in [each.spec for each in reach.imports]


@pytest.mark.parametrize(
    "url", ["https://evil.example/${AWS_SECRET_ACCESS_KEY}", "https://${HF_TOKEN}.evil.example/v1"]
)
def test_a_secret_in_a_url_is_refused(project, url):
    (project / "f.yml").write_text(f'llms: {{x: {{_type: openai, model_name: m, base_url: "{url}"}}}}\n')
    with pytest.raises(ConfigError, match="is part of a URL, which would end up in logs") as caught:
        load_config(project / "f.yml", environ={"AWS_SECRET_ACCESS_KEY": "canary", "HF_TOKEN": "canary"})
    assert caught.value.problems[0].location.startswith(f"{project}/f.yml:1:")
    assert "canary" not in str(caught.value)


def test_a_url_may_come_from_a_variable(project):
    (project / "f.yml").write_text('llms: {x: {_type: openai, model_name: m, base_url: "${LLM_URL}"}}\n')
    loaded = load_config(project / "f.yml", environ={"LLM_URL": "https://host/v1"})
    assert list_reach(loaded).hosts == {"https://host/v1": ["llms.x"]}


class OwnProgramConfig(WorkflowConfig, name="test_own_program"):
    """A workflow of a user's that runs a program."""

    command: list[str]


def test_the_program_of_a_users_own_workflow_is_listed(project):
    registry = REGISTRY.child()
    registry.add("workflow", OwnProgramConfig, object)
    (project / "f.yml").write_text("workflow: {_type: test_own_program, command: [sh, agent.sh]}\n")
    reach = list_reach(load_config(project / "f.yml", registry=registry), registry)
    assert [each.command for each in reach.commands] == ["sh agent.sh"]


def test_programs_and_deployed_agents_are_listed(project, monkeypatch):
    (project / "agent.sh").write_text("")
    (project / "agent.sh").chmod(0o755)
    monkeypatch.setenv("PATH", "/bin")
    text = """
    workflow: {_type: command, command: ["./agent.sh", "${MODE}", "a b"], env: {TOKEN: "${AGENT_TOKEN}"}}
    functions:
      gone: {_type: command, command: no-such-program --x}
      boxed: {_type: command, command: [agent], container: {image: "repo/image:1", engine: docker}}
      remote: {_type: http, url: "http://127.0.0.1:9/run", headers: {Authorization: "Bearer ${AGENT_TOKEN}"}}
      tools:
        _type: tool_agent
        tools: ["rfr_agent:look", {mcp: {command: [sh, server]}}, {mcp: {url: "https://mcp.example/mcp"}}]
    finetuning: {run_configuration: {endpoint: "http://127.0.0.1:8/agent"}}
    """
    (project / "run.yml").write_text(textwrap.dedent(text))
    reach = list_reach(load_config(project / "run.yml", environ={"MODE": "fast", "AGENT_TOKEN": "canary-token"}))
    assert [f"{name}: {text}" for name, text in reach.format_rows()] == [
        "imports: functions.tools.tools.0.function: rfr_agent:look (rfr_agent.py)",
        "command: functions.gone: no-such-program --x (not found)",
        "command: functions.boxed: agent (in repo/image:1)",
        "command: functions.tools.tools.1.mcp: sh server (/bin/sh)",
        f"command: workflow: ./agent.sh '${{MODE}}' 'a b' ({project}/agent.sh)",
        "variable: MODE in workflow.command.1",
        "variable: AGENT_TOKEN in workflow.env.TOKEN",
        "variable: AGENT_TOKEN in functions.remote.headers.Authorization, sent to http://127.0.0.1:9/run",
        "host: http://127.0.0.1:9/run (functions.remote)",
        "host: https://mcp.example/mcp (functions.tools.tools.2.mcp)",
        "host: http://127.0.0.1:8/agent (finetuning.run_configuration)",
    ]
    assert "canary" not in str(reach.as_dict())
