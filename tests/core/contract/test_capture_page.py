"""The snippets of docs/capture.md run as they are printed.

Those of frameworks run in `make clients`, each where its framework is installed; here it is only checked that they do.
"""

import json
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

import reinforge
from reinforge.config.loader import load_config
from reinforge.dialects import anthropic
from reinforge.rollout.http.routes import LLMRoutes
from reinforge.rollout.models.policy_llm import PolicyLLM
from reinforge.rollout.workflow import bind_workflow
from reinforge.tasks.shop.starter import CHAT_TEMPLATE
from tests.capture_page import PAGE, load_snippet, read_snippets
from tests.clients.__main__ import ENVIRONMENTS
from tests.doubles import ScriptedPolicy, examples
from tests.episodes import make_runner, run_items
from tests.outside_agents import NODE_AGENT, open_workflow

HERE = {"first", "openai_sdk", "current"}
"""Snippets that need the `openai` package alone."""
TEXT = PAGE.read_text(encoding="utf-8")


class Clerk(ScriptedPolicy):
    chat_template = CHAT_TEMPLATE

    def __init__(self):
        super().__init__(self.write)

    @staticmethod
    def write(request):
        results = [message["content"] for message in request.messages if message["role"] == "tool"]
        names = [tool["function"]["name"] for tool in request.tools or ()]
        arguments = {"lookup": {"item": "lamp"}, "calculate": {"expression": "3*24"}}
        if len(results) < len(names):
            name = names[len(results)]
            return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments[name]})}</tool_call>"
        return results[-1] if results else "hello"


async def run_episode(workflow):
    (record,) = await run_items(make_runner(workflow, llms={"agent": PolicyLLM(Clerk)}), examples(1))
    assert (record.outcome, record.reason) == ("ok", None)
    return record


async def test_the_first_block_calls_both_tools(tmp_path):
    module = load_snippet("first", tmp_path)
    record = await run_episode(bind_workflow(module.agent))
    assert [call.reply.finish_reason for call in record.calls] == ["tool_calls", "tool_calls", "stop"]
    assert record.item.output_obj == "72"
    rows = list(module.build_rows())
    assert len({row["id"] for row in rows}) == len(rows) == 256
    assert {row["answer"] for row in rows if "lamp" in row["question"]} == {str(24 * n) for n in range(2, 10)}


@pytest.mark.slow
def test_the_first_block_trains_its_model(tmp_path, monkeypatch, capsys):
    """The whole program of the page but for the number of epochs."""
    monkeypatch.chdir(tmp_path)
    text = read_snippets()["first"]
    assert "epochs=6" in text
    exec(text.replace("epochs=6", "epochs=1"), {"__name__": "__main__"})
    assert re.search(r"right answers: \d+% before, \d+% after; the model is in ", capsys.readouterr().out)


@pytest.mark.parametrize(("name", "answer"), [("openai_sdk", "The lamp costs 24 coins."), ("current", "hello")])
async def test_a_snippet_of_the_openai_package_runs(tmp_path, name, answer):
    record = await run_episode(bind_workflow(load_snippet(name, tmp_path).agent))
    assert record.item.output_obj == answer


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
async def test_the_snippet_of_a_program_runs(tmp_path):
    (tmp_path / "agent.mjs").write_text(NODE_AGENT)
    async with open_workflow(tmp_path, yaml.safe_load(read_snippets("yaml")["command"])["workflow"]) as workflow:
        record = await run_episode(workflow)
    assert json.loads(record.item.output_obj) == {"answer": "hello"}


class Service(BaseHTTPRequestHandler):
    """A deployed agent that echoes what it was sent."""

    def do_POST(self):
        task = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps({"answer": {"text": [task["question"], task["model"]["name"], sorted(task["model"])]}})
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *arguments):
        pass


async def test_the_snippet_of_a_service_runs(tmp_path):
    settings = yaml.safe_load(read_snippets("yaml")["http"])["workflow"]
    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        settings["url"] = settings["url"].replace(":9000", f":{server.server_port}")
        async with open_workflow(tmp_path, settings) as workflow:
            record = await run_episode(workflow)
        server.shutdown()
        thread.join()
    assert record.item.output_obj == ["question 0", "agent", ["api_key", "base_url", "name"]]


async def test_the_snippet_of_the_loop_with_tools_runs(tmp_path):
    (tmp_path / "my_tools.py").write_text('def lookup(item: str) -> str:\n    """Looks up."""\n    return item * 2\n')
    async with open_workflow(tmp_path, yaml.safe_load(read_snippets("yaml")["tool_agent"])["workflow"]) as workflow:
        record = await run_episode(workflow)
    assert record.item.output_obj == "lamplamp"


def test_the_snippet_of_entries_routes_a_title(tmp_path):
    (tmp_path / "run.yml").write_text(read_snippets("yaml")["entries"])
    llms = load_config(tmp_path / "run.yml").config.llms
    title = json.loads((Path(__file__).parents[2] / "data" / "requests" / "claude_code.json").read_text())[0]
    assert (
        LLMRoutes(matches={name: llm.match for name, llm in llms.items()}).find(anthropic.read_request(title))
        == "titles"
    )
    assert [name for name, llm in llms.items() if llm.train] == ["agent"]


def test_every_snippet_runs_somewhere():
    elsewhere = {check.removeprefix("page:") for env in ENVIRONMENTS for check in env.checks if check[:5] == "page:"}
    assert set(read_snippets()) == HERE | elsewhere
    assert set(read_snippets("yaml")) == {"command", "http", "tool_agent", "entries"}
    assert TEXT.count("<!-- snippet: ") == TEXT.count("\n```python\n") + TEXT.count("\n```yaml\n"), (
        "none without a name"
    )


def test_the_messages_of_the_page_are_those_of_the_package():
    """Each message under "If something does not work" is found in the source, apart from what stands for a value."""
    section = TEXT.split("## If something does not work")[1]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    messages = [text for cell in cells for text in re.findall(r"``(.*?)``|`([^`]+)`", cell)]
    assert len(messages) >= 10
    source = "".join(path.read_text(encoding="utf-8") for path in Path(reinforge.__file__).parent.rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)
    for message in map("".join, messages):
        for part in re.split(r"\.\.\.|'gpt-4o'|\bN\b|\b\d+\b|tool_error", message):
            assert part.strip(" ():") in source, f"{part!r} of {message!r} is in no message of the package"
