"""Whole runs of agents that are programs, services, or the plain loop with tools."""

import json
import sys

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from reinforge.errors import ConfigError
from reinforge.trainer.evaluate import EvaluationRun
from reinforge.types.evaluation import EvaluationRunConfig
from tests.core.rollout.test_http_workflow import call_model
from tests.journal_rows import read_rows
from tests.loop_thread import serve_in_thread
from tests.outside_agents import PYTHON_AGENT
from tests.project import call


def smoke(project, workflow, *flags):
    """Runs one epoch with one optimizer step; returns the trained turns."""
    project.set("workflow", workflow).set("finetuning.limits.episode_timeout_s", 60)
    project.finetune("--smoke", *flags, code=0)
    folder = project.folder / "runs" / "r-smoke"
    summary = json.loads((folder / "summary.json").read_text())
    assert [version["num_updates"] for version in summary["policy_versions"]] == [0, 1]
    assert set(summary["episodes"]) == {"ok"}
    assert summary["tokens"]["trained"] > 0
    rows = read_rows(folder, "SELECT phase, data FROM episodes")
    calls = [(phase, call) for phase, data in rows for call in json.loads(data)["calls"]]
    versions = {call["policy_version"] for phase, call in calls if phase in ("validate", "confirm_tuned")}
    assert 1 in versions, "the agent called the trained weights"
    return folder


@pytest.mark.slow
def test_a_python_program_is_trained(project):
    project.write("agent.py", PYTHON_AGENT + "print(json.dumps(ask(sys.stdin.read(), max_tokens=4)))")
    folder = smoke(project, {"_type": "command", "command": [sys.executable, "agent.py"], "output": "last_line_json"})
    assert yaml.safe_load((folder / "config.yml").read_text())["workflow"]["command"] == [sys.executable, "agent.py"]


@pytest.fixture
def deployed():
    async def handle(request):
        task = await request.json()
        return web.json_response({"result": {"text": await call_model(task, task["input"], max_tokens=4)}})

    app = web.Application()
    app.router.add_post("/run", handle)
    with serve_in_thread(TestServer(app)) as server:
        yield str(server.make_url("/run"))


@pytest.mark.slow
def test_a_deployed_agent_is_trained_in_the_place_of_the_configured_one(project, deployed):
    configured = {"_type": "python", "function": "nowhere:agent", "llm": "agent"}
    flags = ["--endpoint", deployed, "--result_json_path", "$.result.text", "--endpoint-timeout", "45"]
    folder = smoke(project, configured, *flags)
    config = yaml.safe_load((folder / "config.yml").read_text())
    assert config["workflow"]["_type"] == "http"
    assert (config["workflow"]["url"], config["workflow"]["llm"]) == (deployed, "agent")
    assert config["workflow"]["result_json_path"] == "$.result.text"
    assert config["finetuning"]["limits"]["episode_timeout_s"] == 45


async def test_a_deployed_agent_is_evaluated_outside_a_run(project, deployed):
    project.rows = project.rows[:3]
    project.set("workflow", {"_type": "python", "function": "nowhere:agent"}).write_files()
    flags = {"endpoint": deployed, "result_json_path": "$.result.text", "endpoint_timeout": 45}
    output = await EvaluationRun(EvaluationRunConfig(config_file="run.yml", **flags)).run_and_evaluate()
    assert [isinstance(item.output_obj, str) for item in output.eval_input.eval_input_items] == [True] * 3
    with pytest.raises(ConfigError, match="metadata service"):
        await EvaluationRun(EvaluationRunConfig(config_file="run.yml", endpoint="http://metadata/")).run_and_evaluate()


def test_a_deployed_agent_is_evaluated_from_the_command_line(project, deployed):
    project.rows = project.rows[:3]
    project.set("workflow", {"_type": "python", "function": "nowhere:agent"}).write_files()
    flags = ["--endpoint", deployed, "--result-json-path", "$.result.text", "--endpoint_timeout", "45"]
    result = call("eval", "run.yml", "--split", "all", "--json", *flags, code=0)
    assert json.loads(result.stdout)["outcomes"] == {"ok": 3}


def test_wrong_flags_never_evaluate_the_configured_agent_in_silence(project):
    project.write_files()
    for flags, message in (
        (["--endpoint", "ftp://agent"], "is not a URL"),
        (["--endpoint", "http://127.0.0.1:99999/run"], "Port out of range"),
        (["--endpoint", "http://metadata/"], "metadata service"),
        (["--endpoint", "http://127.0.0.1:9/run", "--result_json_path", "answer"], "is not a JSONPath"),
        (["--endpoint", "http://127.0.0.1:9/run", "--endpoint_timeout", "0"], "expected a number of seconds > 0"),
        (["--result_json_path", "$.answer"], "pass --endpoint URL too"),
    ):
        result = call("eval", "run.yml", *flags)
        assert (result.exit_code, message in result.output) == (2, True), (flags, result.output)


@pytest.mark.slow
def test_the_loop_with_tools_is_trained(project):
    smoke(project, {"_type": "tool_agent", "system": "Be brief.", "prompt": "{question}", "max_tokens": 4})


@pytest.mark.slow
def test_an_agent_that_never_calls_is_told(project, caplog):
    project.write("agent.py", "print('aaa')")
    project.set("workflow", {"_type": "command", "command": [sys.executable, "agent.py"]})
    result = project.finetune("--smoke", code=3)
    assert "agent.py has answered without calling the model" in caplog.text
    assert "episodes called the model" in result.output
    assert "OPENAI_BASE_URL" in result.output.partition("episodes called the model")[2]


@pytest.mark.slow
def test_the_template_of_coding_agents_is_trained_by_the_reward_of_its_tests(tmp_path, tiny_model_dir, monkeypatch):
    """A program stands for the coding agent: it breaks the repository or leaves it, as the model says."""
    monkeypatch.chdir(tmp_path)
    call("init", "--template", "coding_agent", code=0)
    code = "import glob\nif ask(sys.stdin.read(), max_tokens=4) < 'm':\n    os.remove(glob.glob('*.py')[0])"
    (tmp_path / "agent.py").write_text(PYTHON_AGENT + code)
    settings = yaml.safe_load((tmp_path / "run.yml").read_text())
    settings["workflow"] |= {"preset": None, "command": [sys.executable, "{project}/agent.py"]}
    command = settings["workflow"]["reward"]["command"]
    settings["workflow"]["reward"]["command"] = [sys.executable, *command[1:], "--disable-plugin-autoload"]
    settings["finetuning"] |= {"policy": {"model": str(tiny_model_dir)}, "num_epochs": 1, "device": "cpu"}
    settings["trajectory_builders"]["groups"]["num_generations"] = 4
    data = tmp_path / "data.jsonl"
    data.write_text("".join(data.read_text().splitlines(keepends=True)[3:]))  # each episode starts two programs
    (tmp_path / "run.yml").write_text(yaml.safe_dump(settings))
    call("finetune", "run.yml", "--run_name", "r", code=0)
    summary = json.loads((folder := tmp_path / ".reinforge/runs/r").joinpath("summary.json").read_text())
    assert set(summary["episodes"]) == {"ok"}, summary["episodes"]
    assert [version["num_updates"] for version in summary["policy_versions"]] == [0, 1]
    query = "SELECT data FROM episodes WHERE phase = 'collect'"
    episodes = [json.loads(data) for (data,) in read_rows(folder, query)]
    assert len({episode["reward"] for episode in episodes}) > 1
    for episode in episodes:
        (diff,) = [mark["data"]["workspace_diff"] for mark in episode["marks"] if "workspace_diff" in mark["data"]]
        assert not diff or episode["reward"] == 0.0, "a repository without its file passes no test"
