"""Tools as text, for models whose chat template has none."""

from types import SimpleNamespace
from typing import Any

import pytest

from reinforge.dialects.text_tools import read_calls, write_tools
from reinforge.environments.agent import EnvironmentPlayer, EnvironmentWorkflowConfig
from reinforge.types.environment import Observation, Reply, StepResult

PROPERTIES = {
    "numbers": {"type": "array", "items": {"type": "number"}, "description": "What is added."},
    "mode": {"enum": ["exact", "fast"]},
    "limits": {"properties": {"low": {"type": "integer"}}, "required": ["low"]},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["numbers"]}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds numbers.", "parameters": PARAMETERS}}
SIGNATURE = 'add(numbers: [number], mode?: "exact" | "fast", limits?: {low: integer})    Adds numbers.'


def test_the_model_is_shown_examples_and_signatures():
    observation = Observation([{"role": "system", "content": "s"}, {"role": "user", "content": "1 + 2?"}], [TOOL])
    system, *examples, user = write_tools(observation, "{tools}\n{task}")
    assert [each["role"] for each in examples] == ["user", "assistant"] * 2
    assert system == {"role": "system", "content": "s"}
    assert user == {"role": "user", "content": f"{SIGNATURE}\n    numbers: What is added.\n1 + 2?"}


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("add(numbers=[1, 2.5])", [{"numbers": [1, 2.5]}]),
        ("I call `add(numbers=[1])`, and add(mode='fast').", [{"numbers": [1]}, {"mode": "fast"}]),
        ('```json\n[{"name": "add", "arguments": {"numbers": [1]}}]\n```', [{"numbers": [1]}]),
        ("def add(numbers, mode):\n    return add(numbers=[1])", [{"numbers": [1]}]),
        ('{"name": "add", "description": "add(numbers=1)"}', [{"numbers": 1}]),
        ("add([1, 2], 'fast')", [{"numbers": [1, 2], "mode": "fast"}]),
        ("add(numbers: [1], mode: 'fast')", [{"numbers": [1], "mode": "fast"}]),
        ("add([1], numbers=[2])", []),
        ("readd(numbers=1) math.add(numbers=1) other(a=1)", []),
        ('add(numbers=[1, {"name": "add", "arguments"', []),
        ("{" * 5000, []),
    ],
)
def test_calls_are_read_from_any_text(text, arguments):
    calls = read_calls(text, [TOOL])
    assert [call.arguments for call in calls] == arguments
    assert all(call.name == "add" for call in calls)


class Recorder:
    """An environment of one step, and a model that calls its tool as text."""

    def __init__(self) -> None:
        self.sent: dict[str, Any] = {}
        self.chat = SimpleNamespace(completions=self)

    async def reset(self) -> Observation:
        return Observation([{"role": "user", "content": "1 + 2?"}], [TOOL])

    async def step(self, reply: Any) -> StepResult:
        self.reply = reply
        return StepResult(done=True)

    async def create(self, **arguments: Any) -> Any:
        self.sent = arguments
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content="add(numbers=[1, 2])"))])


TOOLS = "{{ tools }} <tool_call> {{ tool_calls }}"


@pytest.mark.parametrize(
    ("setting", "template", "as_text"),
    [("auto", "plain", True), ("auto", TOOLS, False), ("auto", None, False), ("text", TOOLS, True)],
)
async def test_the_chat_template_decides_how_the_policy_gets_tools(setting, template, as_text):
    config = EnvironmentWorkflowConfig.model_validate({"_type": "environment", "tool_calls": setting})
    recorder: Any = Recorder()
    ended = SimpleNamespace(reply=SimpleNamespace(failure=None))
    context: Any = SimpleNamespace(environment=recorder, calls=[ended], text=lambda name, default: default)
    policy: Any = SimpleNamespace(chat_template=template)
    await EnvironmentPlayer(config, lambda: policy)(None, recorder, context)
    assert ("tools" in recorder.sent) is not as_text
    assert ("add(numbers: [number]" in recorder.sent["messages"][-1]["content"]) is as_text
    assert isinstance(recorder.reply, Reply) is as_text
    if as_text:
        assert recorder.reply.tool_calls[0].arguments == {"numbers": [1, 2]}
