"""A LangChain agent in the form of NeMo Agent Toolkit's example."""

import importlib.util
import subprocess
import sys

import pytest

from reinforge.errors import ConfigError
from reinforge.finetuning import FunctionInfo, LLMFrameworkEnum, LLMRef, WorkflowConfig, register_function
from reinforge.rollout.functions import build_client
from reinforge.rollout.handle.completion import build_completion
from reinforge.types.episode import ModelCall
from reinforge.types.request import ModelReply, ModelRequest, TokenLogprobs
from tests.scripted_run import ScriptedRun


def test_without_langchain_it_says_what_to_install(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "langchain_core" else real(name))
    with pytest.raises(ConfigError, match="LangChain is not installed") as caught:
        build_client("agent", LLMFrameworkEnum.LANGCHAIN)
    assert 'pip install langchain-core, or use wrapper_type="openai"' in str(caught.value)


@pytest.mark.slow
def test_langchain_is_imported_on_request_only():
    code = (
        "import sys, reinforge.finetuning, reinforge.rollout.langchain_client; print('langchain_core' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


class ChainConfig(WorkflowConfig, name="test_langchain_chain"):
    """A chain that blocks inside an `async def`, as in the toolkit's example."""

    player_model: LLMRef


@register_function(config_type=ChainConfig, framework_wrappers=[LLMFrameworkEnum.LANGCHAIN])
async def chain(config, builder):
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import ChatPromptTemplate

    model = await builder.get_llm(config.player_model, wrapper_type=LLMFrameworkEnum.LANGCHAIN)
    prompt = ChatPromptTemplate.from_messages([("system", "You play {symbol}."), ("human", "{board}")])
    player = prompt.partial(symbol="X") | model | StrOutputParser()

    async def play(board: str) -> str:
        first = player.invoke({"board": board})
        return await player.ainvoke({"board": first})

    yield FunctionInfo.from_fn(play, description="Two moves.")


@pytest.mark.slow
async def test_a_chain_is_captured_and_trained(tmp_path):
    run = ScriptedRun(tmp_path, count=10)
    run.settings["finetuning"]["num_epochs"] = 1
    run.settings["workflow"] = {"_type": "test_langchain_chain", "player_model": "agent"}
    await run.run()
    assert len(run.adapter.jobs) == 1
    trajectory = run.adapter.jobs[0].trajectories[0][0]
    roles = [str(item.role) for item in trajectory.episode]
    assert roles == ["system", "user", "assistant"] * 2, "each move has a prompt of its own"
    first, second = trajectory.turns
    assert trajectory.episode[4].content == first.content, "the second move is asked with the first one's text"
    assert trajectory.episode[0].content == "You play X."
    assert first.is_trained
    assert second.is_trained


def add(a: int) -> int:
    """Adds one."""
    return a + 1


def make_call(arguments, id_="c1"):
    return {"id": id_, "type": "function", "function": {"name": "add", "arguments": arguments}}


def make_client(*calls, **message):
    from reinforge.rollout.langchain_client import build_chat_model

    asked = []

    def create(messages, **arguments):
        asked.append((messages, arguments))
        reply = {"role": "assistant", "content": None, "tool_calls": list(calls), **message}
        sampled = ModelReply(reply, "tool_calls", TokenLogprobs((1,), (2,), (-0.1,)), 1, 1)
        return build_completion(ModelCall("call-0", "agent", "m", ModelRequest(messages), sampled, (), 0.0, 1.0))

    return build_chat_model("agent", create), asked


@pytest.mark.slow
def test_tools_go_and_come_back_in_openais_form():
    from langchain_core.messages import ToolMessage

    wanted = make_call('{"a": 1}')
    client, asked = make_client(wanted)
    model = client.bind_tools([add])
    reply = model.invoke("go")
    assert reply.tool_calls == [{"name": "add", "args": {"a": 1}, "id": "c1", "type": "tool_call"}]
    assert reply.response_metadata["logprobs"].token_ids == (2,)
    model.invoke([reply, ToolMessage("2", tool_call_id="c1")])
    assert asked[0][1]["tools"][0]["function"]["name"] == "add"
    assistant, result = asked[1][0]
    assert assistant["tool_calls"] == [wanted]
    assert (result["role"], result["tool_call_id"], result["content"]) == ("tool", "c1", "2")


def test_the_reasoning_of_a_reply_goes_back_with_it():
    client, asked = make_client(make_call('{"a": 1}'), reasoning_content="one more")
    client.invoke([client.invoke("go")])
    assert asked[1][0][0]["reasoning_content"] == "one more"


def test_a_call_that_the_agent_changes_is_sent_as_changed():
    client, asked = make_client(make_call('{"a":1}'), make_call('{"a":2}', "c2"))
    reply = client.invoke("go")
    reply.tool_calls = [{**reply.tool_calls[0], "args": {"a": 7}}]
    client.invoke([reply])
    [sent] = asked[1][0]
    assert sent["tool_calls"] == [make_call('{"a": 7}')], "the second one was removed"


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", "3"])
def test_arguments_that_are_no_json_object_are_the_models_failure_and_not_the_clients(arguments):
    wanted = make_call(arguments)
    client, asked = make_client(wanted)
    reply = client.invoke("go")
    assert reply.tool_calls == []
    assert [(call["name"], call["args"], call["id"]) for call in reply.invalid_tool_calls] == [("add", arguments, "c1")]
    client.invoke([reply])
    assert asked[1][0][0]["tool_calls"] == [wanted]


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("any", "required"), (True, "required"), (False, "none"), ("auto", "auto"), ("required", "required"),
        ("add", {"type": "function", "function": {"name": "add"}}),
        ({"type": "function", "function": {"name": "add"}}, {"type": "function", "function": {"name": "add"}}),
    ],
)  # fmt: skip
def test_the_choice_of_a_tool_in_langchains_words(given, sent):
    client, asked = make_client(make_call("{}"))
    client.bind_tools([add], tool_choice=given).invoke("go")
    assert asked[0][1]["tool_choice"] == sent


def test_structured_output_is_a_forced_call():
    from pydantic import BaseModel

    class Add(BaseModel):
        """A sum."""

        a: int

    wanted = {"id": "c1", "type": "function", "function": {"name": "Add", "arguments": '{"a": 3}'}}
    client, asked = make_client(wanted)
    assert client.with_structured_output(Add).invoke("go") == Add(a=3)
    arguments = asked[0][1]
    assert arguments["tool_choice"] == "required"
    assert set(arguments) == {"tools", "tool_choice"}, "nothing else, since the call would refuse it"
