"""Agents that take their input alone and get their model before the episode."""

import asyncio
from functools import partial, wraps

import pytest
from pydantic import BaseModel

from reinforge.config.loader import build_config
from reinforge.errors import CaptureError, ConfigError
from reinforge.finetuning import (
    Context,
    FunctionInfo,
    FunctionRef,
    IntermediateStepPayload,
    LLMFrameworkEnum,
    LLMRef,
    WorkflowConfig,
    register_function,
)
from reinforge.registry import REGISTRY
from reinforge.rollout.episode import build_steps
from reinforge.rollout.runner import EpisodeRunner
from reinforge.rollout.workflow import bind_workflow, refuse_coroutine
from reinforge.trainer.setup.components import ComponentBuilder
from reinforge.types.episode import EpisodeKey
from tests.doubles import PolicyModel, ScriptedPolicy, examples


class AskConfig(WorkflowConfig, name="test_function_ask"):
    player_model: LLMRef
    helper: FunctionRef | None = None
    wrapper: str = "openai"


class HelperConfig(WorkflowConfig, name="test_function_helper"):
    llm: LLMRef


def message(text):
    return [{"role": "user", "content": text}]


@register_function(config_type=AskConfig, framework_wrappers=[LLMFrameworkEnum.OPENAI])
async def ask(config, builder):
    llm = await builder.get_llm(config.player_model, wrapper_type=config.wrapper)
    helper = await builder.get_function(config.helper) if config.helper else None

    async def answer(question: str) -> str:
        if helper is not None:
            question = await helper.ainvoke(question)
        first, second = await asyncio.gather(
            llm.chat.completions.create(messages=message(question)),
            llm.chat.completions.create(messages=message(f"{question}, again")),
        )
        return f"{first.choices[0].message.content} {second.choices[0].message.content}"

    yield FunctionInfo.from_fn(answer, description="Answers twice.")


@register_function(config_type=HelperConfig)
async def helper(config, builder):
    llm = await builder.get_llm(config.llm, wrapper_type="openai")

    def rephrase(question: str) -> str:
        assert Context.get().active_function.function_name == "rephrase"
        return llm.chat.completions.create_blocking(messages=message(f"rephrase {question}")).choices[0].message.content

    yield rephrase


def settings(**workflow):
    return {
        "llms": {"judge": {"_type": "policy"}, "agent": {"_type": "policy"}},
        "functions": {"rephrase": {"_type": "test_function_helper", "llm": "agent"}},
        "workflow": {"_type": "test_function_ask", "player_model": "agent", **workflow},
    }


async def run(config, num_examples=3):
    policy = ScriptedPolicy(lambda request: f"<{request.messages[-1]['content']}>")
    async with ComponentBuilder(build_config(config, registry=REGISTRY)) as builder:
        workflow = await builder.get_workflow()
        runner = EpisodeRunner.from_config(
            builder.config, workflow, {name: PolicyModel(policy) for name in builder.config.llms}
        )
        keys = [(EpisodeKey("collect", 0, item.id), item) for item in examples(num_examples)]
        records = await runner.run(keys, score, lambda record: None)
    return workflow, records


async def score(record):
    record.reward = 1.0


async def test_each_call_is_recorded_in_its_own_episode():
    workflow, records = await run(settings())
    assert workflow.llm == "agent", "the entry that the configuration names, of two that would fit"
    assert workflow.source.startswith("answer (test_functions.py:"), "messages name the user's function"
    assert [record.item.output_obj for record in records] == [f"<question {i}> <question {i}, again>" for i in range(3)]
    for index, record in enumerate(records):
        asked = {call.request.messages[0]["content"] for call in record.calls}
        assert asked == {f"question {index}", f"question {index}, again"}
        assert {call.llm for call in record.calls} == {"agent"}


async def test_a_function_of_a_function_has_its_own_scope():
    _, [record] = await run(settings(helper="rephrase"), num_examples=1)
    assert record.outcome == "ok", record.reason
    assert [call.functions for call in record.calls] == [("rephrase",), (), ()]
    names = [step.function_ancestry.function_name for step in build_steps(record) if step.event_type == "LLM_END"]
    assert names == ["rephrase", "<workflow>", "<workflow>"]


async def test_a_framework_without_a_client_is_refused_by_name():
    with pytest.raises(ConfigError) as caught:
        await run(settings(wrapper="crewai"))
    assert 'get_llm("agent", wrapper_type="crewai"): there is no crewai client for a model here' in str(caught.value)
    assert 'use wrapper_type="openai" (OpenAI\'s chat.completions.create)' in str(caught.value)


async def test_get_llm_without_a_framework_is_the_model():
    async with ComponentBuilder(build_config(settings(), registry=REGISTRY)) as builder:
        with pytest.raises(ConfigError, match='no entry "other"'):
            await builder.get_llm("other", wrapper_type="openai")
        assert (await builder.get_llm("agent")).is_policy
        assert builder.get_max_concurrency() == builder.config.eval.general.max_concurrency


def test_outside_an_episode_the_context_says_so():
    with pytest.raises(CaptureError, match="work inside an episode only"):
        Context.get()


class Board(BaseModel):
    fields: str


async def test_inputs_get_the_functions_types():
    def describe(board: Board):
        return board.fields

    def join(left, right):
        return left + right

    assert FunctionInfo(describe)._call({"fields": "x.o"}) == "x.o"
    assert FunctionInfo(join)._call({"left": "a", "right": "b"}) == "ab"

    async def stream(text):
        yield text

    with pytest.raises(ConfigError, match=r"stream streams its output; write a function that returns it"):
        FunctionInfo.from_fn(stream)


class MarkConfig(WorkflowConfig, name="test_function_mark"):
    """Pushes steps of its own."""


@register_function(config_type=MarkConfig)
async def mark(config, builder):
    def work(question: str) -> str:
        steps = Context.get().intermediate_step_manager
        with Context.get().push_active_function("search", input_data=question) as scope:
            for event in ("CUSTOM_START", "LLM_END", "CUSTOM_END"):
                steps.push_intermediate_step(
                    IntermediateStepPayload(event_type=event, name="candidate", metadata={"score": 0.5})
                )
            scope.set_output("done")
        return scope.output

    yield FunctionInfo.from_fn(work)


async def test_pushed_steps_are_steps_of_the_episode():
    """An end is recorded as it was pushed; starts are not, nor model calls, which the run records itself."""
    _, [record] = await run({"llms": {"agent": {"_type": "policy"}}, "workflow": {"_type": "test_function_mark"}}, 1)
    assert (record.outcome, record.item.output_obj) == ("ok", "done")
    [step] = build_steps(record)
    assert (step.event_type, step.name, step.metadata) == ("CUSTOM_END", "candidate", {"score": 0.5})
    assert step.function_ancestry.function_name == "search"


async def agent(item, llm, context):
    pass


class Agent:
    async def __call__(self, item, llm, context):
        pass


def decorate(function):
    @wraps(function)
    async def call(*arguments):
        return await function(*arguments)

    return call


@pytest.mark.parametrize(
    ("function", "name", "code"),
    [
        (agent, "agent", agent.__code__),
        (partial(agent), "agent", agent.__code__),
        (decorate(agent), "agent", agent.__code__),
        (Agent, "Agent", Agent.__call__.__code__),
        (Agent().__call__, "Agent.__call__", Agent.__call__.__code__),
    ],
)
def test_a_message_names_the_agent_with_its_file_and_line(function, name, code):
    assert bind_workflow(function).source == f"{name} (test_functions.py:{code.co_firstlineno})"


async def answer():
    return "4"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (answer, r"agent \(test_functions.py:\d+\) returned a coroutine: write `await` before the call of answer$"),
        (lambda: (letter for letter in "4"), "returned a generator: write `return` instead of `yield`"),
    ],
)
def test_an_output_that_is_not_one_is_refused(make, said):
    with pytest.raises(TypeError, match=said):
        refuse_coroutine(make(), bind_workflow(agent))


@pytest.mark.parametrize("output", ["4", None, 0, ["4"], answer])
def test_any_other_output_passes(output):
    assert refuse_coroutine(output, bind_workflow(agent)) is output
