"""An agent's source, for messages."""

from functools import partial, wraps

import pytest

from reinforge.rollout.workflow import bind_workflow, refuse_coroutine


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
    assert bind_workflow(function).source == f"{name} (test_workflow.py:{code.co_firstlineno})"


async def answer():
    return "4"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (answer, r"agent \(test_workflow.py:\d+\) returned a coroutine: write `await` before the call of answer$"),
        (lambda: (letter for letter in "4"), "returned a generator: write `return` instead of `yield`"),
    ],
)
def test_an_output_that_is_not_one_is_refused(make, said):
    with pytest.raises(TypeError, match=said):
        refuse_coroutine(make(), bind_workflow(agent))


@pytest.mark.parametrize("output", ["4", None, 0, ["4"], answer])
def test_any_other_output_passes(output):
    assert refuse_coroutine(output, bind_workflow(agent)) is output
