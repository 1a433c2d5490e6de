"""Entries of `llms` that answer requests by more than their name, and calls that are answered but not trained."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from reinforge.config.dump import dump_config
from reinforge.config.loader import build_config, load_config
from reinforge.config.schema import LLMConfig
from reinforge.dialects import anthropic, gemini, openai_chat, responses
from reinforge.rollout.http.routes import LLMRoutes
from reinforge.rollout.isolation.isolated_agent import open_isolated
from reinforge.rollout.workflow import bind_workflow
from reinforge.trainer.builders.group import GroupTrajectoryBuilder, GroupTrajectoryBuilderConfig, find_policy_entries
from tests.doubles import PolicyModel, ScriptedPolicy
from tests.episodes import collect, make_evaluation, make_runner

REQUESTS = Path(__file__).parents[2] / "data" / "requests"
WORK = [{"role": "user", "content": "2 + 3?"}]
TITLE = {"messages": [{"role": "system", "content": "You are a title generator.\nShort."}, *WORK]}


def read(program, number=0):
    dialect = {"claude_code": anthropic, "codex": responses, "gemini_cli": gemini}.get(program, openai_chat)
    return dialect.read_request(json.loads((REQUESTS / f"{program}.json").read_text())[number])


def read_chat(model="gpt", **body):
    return openai_chat.read_request({"model": model, "messages": WORK, **body})


@pytest.mark.parametrize(
    ("match", "call", "holds"),
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
        *[({"program": "claude_code"}, read("claude_code", number), False) for number in (1, 2)],
        *[({"program": program}, read(program), False) for program in ("codex", "gemini_cli", "opencode", "qwen_code")],
    ],
)
def test_a_match_holds_if_all_that_it_says_is_true(match, call, holds):
    assert LLMRoutes(matches={"other": [match]}).find(call) == ("other" if holds else None)


class CountingModel(PolicyModel):
    async def count_prompt(self, request):
        return len(request.messages)


def run(workflow, entries, **others):
    llms = {name: CountingModel(ScriptedPolicy()) for name in entries} | others
    return collect(make_evaluation(make_runner(workflow, llms=llms, entries=entries)))


AGENT = (
    f"WORK, TITLE = {WORK!r}, {TITLE!r}\n"
    + """
def agent(item, llm, context):
    client, http = context.openai(), context.http_client()
    client.chat.completions.create(model="gpt-4o", messages=WORK)
    client.chat.completions.create(model="gpt-4o", **TITLE)
    counted = http.post("http://any/v1/messages/count_tokens", json={"model": "agent", "messages": WORK})
    embedded = http.post("http://any/v1/embeddings", json={"model": "agent", "input": "a"})
    return [counted.json(), embedded.status_code]
"""
)
ENTRIES = {"agent": LLMConfig(), "titles": LLMConfig(train=False, match={"program": "opencode"})}


@pytest.mark.slow
async def test_an_entry_answers_what_it_matches_also_for_an_agent_in_a_worker(tmp_path):
    (tmp_path / "agents.py").write_text(AGENT)
    async with open_isolated("agents:agent", tmp_path, "agent", share_environment_seed=True) as isolated:
        exec(AGENT, namespace := {})
        for workflow in (isolated, bind_workflow(namespace["agent"], "agent")):
            (record,) = await run(workflow, ENTRIES)
            assert [call.llm for call in record.calls] == ["agent", "titles"], record.reason
            assert record.item.output_obj == [{"input_tokens": 1}, 404]


@pytest.mark.parametrize(("llm", "called"), [("agent", ["agent"]), (None, [])])
async def test_a_misspelled_entry_is_not_the_default(llm, called):
    def agent(item, llm, context):
        for name in ("gpt-4o", "titels"):
            context.openai(max_retries=0).chat.completions.create(model=name, messages=WORK)

    (record,) = await run(bind_workflow(agent, llm), ENTRIES)  # without a name, the entry that is trained
    assert ([call.llm for call in record.calls], "does not exist" in record.reason) == (called, True)


CONFIG = """
llms: {agent: {_type: policy}, titles: {_type: policy, train: false, match: {program: opencode}}}
workflow: {_type: chat, llm: agent}
"""


def test_an_entry_that_is_not_trained_is_no_policy_of_the_builder(tmp_path):
    (tmp_path / "run.yml").write_text(CONFIG)
    config = load_config(tmp_path / "run.yml").config
    assert find_policy_entries(SimpleNamespace(config=config)) == {"agent": None}
    config.llms["agent"].train = False
    assert find_policy_entries(SimpleNamespace(config=config)) == {}
    builder = GroupTrajectoryBuilder(GroupTrajectoryBuilderConfig())
    assert "leave `train: false` out" in builder._validate_target(config)[0].fix


PRESET = {"llms": {"agent": {"_type": "policy"}}, "workflow": {"_type": "command", "preset": "claude_code"}}
POLICY, JUDGE = {"_type": "policy"}, {"_type": "openai", "model_name": "m"}


@pytest.mark.parametrize(
    ("llms", "workflow", "added"),
    [
        ({}, {}, ["claude_code_auxiliary"]),
        ({"other": POLICY}, {"llm": "other"}, ["claude_code_auxiliary"]),
        ({"titles": {**POLICY, "train": False, "match": {"program": "claude_code"}}}, {}, []),
        ({"judge": JUDGE}, {"llm": "judge"}, []),
        ({}, {"preset": "aider"}, []),
    ],
)
def test_a_preset_brings_the_entry_that_answers_what_its_program_asks_beside_its_work(tmp_path, llms, workflow, added):
    loaded = build_config({"llms": PRESET["llms"] | llms, "workflow": PRESET["workflow"] | workflow})
    assert [name for name in loaded.config.llms if name not in {"agent", *llms}] == added
    (tmp_path / "run.yml").write_text(dump_config(loaded))
    resolved = load_config(tmp_path / "run.yml").config
    assert (resolved.llms, resolved.workflow) == (loaded.config.llms, loaded.config.workflow)
    for name in added:
        assert (resolved.llms[name].static_type, resolved.llms[name].train) == ("policy", False)
        assert resolved.workflow.llm == workflow.get("llm", "agent")
