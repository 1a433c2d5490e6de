"""Entries of `llms` that answer requests by more than their name, and calls that are answered but not trained."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from reinforge.config.loader import load_config
from reinforge.config.schema import CallMatch, LLMConfig
from reinforge.dialects import anthropic, openai_chat, responses
from reinforge.rollout.http.routes import AUXILIARY_CALLS, LLMRoutes, holds
from reinforge.rollout.isolation.isolated_agent import open_isolated
from reinforge.rollout.workflow import bind_workflow
from reinforge.trainer.builders.group import find_policy_entries
from reinforge.trainer.setup.compatibility import require_policy_llm
from tests.doubles import PolicyModel, ScriptedPolicy
from tests.episodes import collect, make_evaluation, make_runner

REQUESTS = Path(__file__).parents[2] / "data" / "requests"
WORK = [{"role": "user", "content": "2 + 3?"}]
TITLE = {"messages": [{"role": "system", "content": "You are a title generator.\nShort."}, *WORK]}


def read(program, number=0):
    dialect = {"claude_code": anthropic, "codex": responses}.get(program, openai_chat)
    return dialect.read_request(json.loads((REQUESTS / f"{program}.json").read_text())[number])


def read_chat(model="gpt", **body):
    return openai_chat.read_request({"model": model, "messages": WORK, **body})


@pytest.mark.parametrize(
    ("match", "call", "expected"),
    [
        ({"model": "claude-haiku-*"}, read_chat("Claude-Haiku-4-5"), True),
        ({"model": "claude-haiku-*"}, read_chat("claude-opus-4-8"), False),
        ({"tools": False}, read_chat(), True),
        ({"tools": True}, read_chat(), False),
        ({"tools": False}, read("codex"), False),
        ({"tools": False, "model": "claude-*"}, read_chat(), False),  # all that is set must hold
        ({"system": "title generator"}, read_chat(**TITLE), True),
        ({"system": "Short"}, read_chat(**TITLE), False),  # its second line
        ({"system": "2 + 3"}, read_chat(**TITLE), False),
        ({"prompt": "2 + 3"}, read_chat(**TITLE), True),
        ({"properties": ["title"]}, read("claude_code"), True),
        ({"properties": ["title", "branch"]}, read("claude_code"), False),
        ({"program": "opencode"}, read_chat(**TITLE), True),
        ({"program": "claude_code"}, read("claude_code"), True),
        ({"program": "claude_code"}, read("claude_code", 1), False),
        ({"program": "claude_code"}, read("claude_code", 2), False),
        *[({"program": program}, read(program), False) for program in ("codex", "opencode", "qwen_code")],
    ],
)
def test_a_match_holds_if_all_that_it_says_is_true(match, call, expected):
    assert holds(CallMatch(**match), call) is expected
    routes = LLMRoutes.load(json.loads(json.dumps(LLMRoutes({"other": [CallMatch(**match)]}).dump())))
    assert routes.find(call) == ("other" if expected else None)


def test_each_program_of_a_match_has_its_calls():
    schema = CallMatch.model_json_schema()["properties"]["program"]["anyOf"][0]
    assert schema["enum"] == list(AUXILIARY_CALLS)


def test_a_match_says_something():
    with pytest.raises(ValidationError, match="set at least one of its fields"):
        LLMConfig(match={})


def work_and_title(item, llm, context):
    client = context.openai()
    answer = client.chat.completions.create(model="gpt-4o", messages=WORK)
    client.chat.completions.create(model="gpt-4o", **TITLE)
    return answer.choices[0].message.content


ENTRIES = {"agent": LLMConfig(), "titles": LLMConfig(train=False, match={"program": "opencode"})}


def run_two(workflow, entries=ENTRIES, **others):
    policy = ScriptedPolicy(lambda request: "Sums" if len(request.messages) > 1 else "5")
    llms = {name: CountingModel(policy) for name in entries} | others
    return make_runner(workflow, llms=llms, entries=entries)


@pytest.mark.parametrize("llm", ["agent", None])
async def test_an_entry_answers_what_it_matches_whatever_model_is_named(llm):
    runner = run_two(bind_workflow(work_and_title, llm))
    (record,) = await collect(make_evaluation(runner))
    assert runner.main_llm == "agent"
    assert [call.llm for call in record.calls] == (["agent", "titles"] if llm else [])  # no default is named


CONFIG = """
llms: {agent: {_type: policy}, titles: {_type: policy, train: false, match: {program: opencode}}}
workflow: {_type: chat, llm: agent}
"""


def test_an_entry_that_is_not_trained_is_no_policy_of_the_builder(tmp_path):
    (tmp_path / "run.yml").write_text(CONFIG)
    config = load_config(tmp_path / "run.yml").config
    assert find_policy_entries(SimpleNamespace(config=config)) == {"agent": None}
    config.llms["agent"].train = False
    assert "nothing would be trained" in require_policy_llm(config)[0].message


async def test_an_agent_in_a_worker_reaches_the_same_entries(tmp_path):
    (tmp_path / "agents.py").write_text(f"WORK, TITLE = {WORK!r}, {TITLE!r}\n" + AGENT)
    async with open_isolated("agents:agent", tmp_path, "agent", share_environment_seed=True) as workflow:
        (record,) = await collect(make_evaluation(run_two(workflow)))
    assert [call.llm for call in record.calls] == ["agent", "titles"], record.reason
    assert record.item.output_obj == [{"input_tokens": 1}, 404]


AGENT = """
def agent(item, llm, context):
    client = context.openai()
    client.chat.completions.create(model="gpt-4o", messages=WORK)
    client.chat.completions.create(model="gpt-4o", **TITLE)
    http = context.http_client()
    counted = http.post("http://any/v1/messages/count_tokens", json={"model": "agent", "messages": WORK})
    embedded = http.post("http://any/v1/embeddings", json={"model": "agent", "input": "a"})
    return [counted.json(), embedded.status_code]
"""


class CountingModel(PolicyModel):
    async def count_prompt(self, request):
        return len(request.messages)


async def test_what_a_program_calls_beside_its_work_is_not_trained():
    class Program:
        known_program = "opencode"

        def __call__(self, item, llm, context):
            return work_and_title(item, llm, context)

    (record,) = await collect(make_evaluation(run_two(bind_workflow(Program()), {"agent": LLMConfig()})))
    assert [call.llm for call in record.calls] == ["agent", "auxiliary"]


async def test_a_misspelled_entry_is_not_the_default():
    def agent(item, llm, context):
        client = context.openai(max_retries=0)
        for name in ("gpt-4o", "judgee"):
            client.chat.completions.create(model=name, messages=WORK)

    for llm, called in (("agent", ["agent"]), (None, [])):
        workflow = bind_workflow(agent, llm)
        judge = {"judge": PolicyModel(ScriptedPolicy())}
        judge["judge"].is_policy = False
        (record,) = await collect(make_evaluation(run_two(workflow, {"agent": LLMConfig()}, **judge)))
        assert [call.llm for call in record.calls] == called
        assert "does not exist" in record.reason
