"""Texts that an agent marks with `context.text`, which `prompts` replaces."""

import reinforge
from reinforge.config.loader import build_config
from reinforge.rollout.isolation.isolated_agent import open_isolated
from reinforge.rollout.workflows.outside_agent import OutsideWorkflow
from reinforge.rollout.workflows.tool_agent import ToolAgent, ToolAgentConfig
from tests.core.e2e.test_reporting import LearningRun
from tests.doubles import ScriptedPolicy, examples
from tests.episodes import make_runner, run_items

AGENT = """
import reinforge

def agent(item, llm, context):
    return [context.text("system", "Be brief."), reinforge.current_text("hint", "")]
"""


def agent(item, llm, context):
    return [context.text("system", "Be brief."), reinforge.current_text("hint", "")]


async def outputs(runner):
    return [record.item.output_obj for record in await run_items(runner, examples(1))]


async def test_a_text_is_the_agents_own_unless_prompts_replace_it():
    runner = make_runner(agent)
    assert await outputs(runner) == [["Be brief.", ""]]
    runner.prompts = {"hint": "Think."}
    assert await outputs(runner) == [["Be brief.", "Think."]]
    assert runner.texts == {"system": "Be brief.", "hint": ""}


async def test_an_agent_in_a_process_has_the_same_texts(tmp_path):
    (tmp_path / "agents.py").write_text(AGENT)
    async with open_isolated("agents:agent", tmp_path, None, share_environment_seed=True) as workflow:
        runner = make_runner(workflow)
        runner.prompts = {"hint": "Think."}
        assert await outputs(runner) == [["Be brief.", "Think."]]
        assert runner.texts == {"system": "Be brief.", "hint": ""}


async def test_the_system_prompt_of_the_agent_with_tools_is_such_a_text(tmp_path):
    agent = ToolAgent(ToolAgentConfig(system="Be brief."), [], [], tmp_path)
    runner = make_runner(OutsideWorkflow(agent, None, True, True, name="tools"), policy := ScriptedPolicy())
    await outputs(runner)
    runner.prompts = {"system": "Think."}
    await outputs(runner)
    runner.prompts = {"system": ""}
    await outputs(runner)
    systems = [[m["content"] for m in request.messages if m["role"] == "system"] for request in policy.requests]
    assert systems == [["Be brief."], ["Think."], []]


def test_the_section_is_read_and_may_be_empty():
    assert build_config({"prompts": {"system": "Hi."}}).config.prompts == {"system": "Hi."}
    assert build_config({"prompts": None}).config.prompts == {}


async def test_a_prompt_that_the_agent_never_asks_for_is_reported_once():
    runner, notes = make_runner(agent), []
    runner.prompts = {"sytem": "Hi.", "hint": "Think."}
    runner.note_unused_prompts(notes.append)
    assert notes == []  # nothing has run
    await outputs(runner)
    runner.note_unused_prompts(notes.append)
    assert notes == ['warning: the agent never asked for the text sytem of prompts, did you mean "system"?']


async def test_a_run_reports_them_at_its_end(tmp_path):
    run = LearningRun(tmp_path)
    run.settings["prompts"] = {"system": "Be brief."}
    await run.run()
    told = [note for note in run.progress.notes if "of prompts" in note]
    assert told == ["warning: the agent never asked for the text system of prompts; it asks for none"]
