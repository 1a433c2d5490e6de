"""An agent with two tools trains end to end: tool calls are parsed, and tool results keep their role and id."""

import json

import numpy as np
import pytest

import reinforge
from reinforge.config.policy import BatchConfig, OptimizerConfig, PolicyConfig
from reinforge.errors import EvaluationError
from reinforge.rollout.capture import Capture
from reinforge.runs.progress import SilentProgress
from reinforge.types.sample import LossSpec, TrainingSample
from tests.doubles import ScriptedPolicy
from tests.journal_rows import read_rows
from tests.models import make_tiny_model
from tests.scripted_run import ScriptedRun

HERMES = (
    "{% if tools %}<|tools|>{% for t in tools %}{{ t.function.name }} {% endfor %}as <tool_call>{% endif %}"
    "{% for m in messages %}<|{{ m.role if m.role != 'tool' else 'user' }}|>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
    "<tool_call>{{ {'name': f.name, 'arguments': f.arguments} | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("left", "right")]


def format_call(name):
    return f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'


@pytest.fixture(scope="module")
def tool_user(tmp_path_factory):
    from reinforge.engine import Engine

    folder = make_tiny_model(tmp_path_factory.mktemp("tools") / "model", max_position_embeddings=512)
    (folder / "chat_template.jinja").write_text(HERMES)
    config = PolicyConfig(
        model=str(folder), optimizer=OptimizerConfig(learning_rate=3e-3), batch=BatchConfig(batch_size=4)
    )
    engine = Engine.load(config, seed=0, device="cpu")
    prompt = [{"role": "user", "content": "go"}]
    samples = []
    for name in ("left", "right"):
        tool_call = {"id": "c", "type": "function", "function": {"name": name, "arguments": "{}"}}
        history = [
            *prompt,
            {"role": "assistant", "content": None, "tool_calls": [tool_call]},
            {"role": "tool", "tool_call_id": "c", "content": name},
        ]
        samples += [build_sample(engine, prompt, format_call(name)), build_sample(engine, history, "done")]
    engine.begin_job()
    engine.update(samples * 80, LossSpec("cross_entropy"), progress_start=0, progress_end=1)
    engine.end_job()
    engine.save(folder.with_name("primed"), 0)
    engine.close()
    return folder.with_name("primed")


def build_sample(engine, messages, reply):
    from reinforge.types.request import ModelRequest

    prompt = engine.policy.renderer.render(ModelRequest(messages, tools=TOOLS))
    ids = np.array([*prompt, *engine.tokenizer.encode(reply + "<|end|>", add_special_tokens=False)])
    mask = np.arange(len(ids)) >= len(prompt)
    zeros, count = np.zeros(len(ids), np.float32), len(ids)
    return TrainingSample(
        ids, mask, zeros, np.ones(count, np.float32), np.zeros(count, np.int64), np.zeros(count, np.int64),
        advantages=mask.astype(np.float32),
    )  # fmt: skip


async def agent(item, llm, context):
    messages = [{"role": "user", "content": "go"}]
    reply = await llm.chat.completions.create(messages=messages, tools=TOOLS, max_tokens=80)
    message = reply.choices[0].message
    if not message.tool_calls:
        raise reinforge.PolicyFailure(f"no tool call in {message.content!r}")
    call = message.tool_calls[0]
    messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": call["function"]["name"]}]
    final = await llm.chat.completions.create(messages=messages, tools=TOOLS, max_tokens=8)
    return {"tool": call["function"]["name"], "reply": final.choices[0].message.content}


def went_left(output, expected):
    return float(output is not None and output["tool"] == "left")


@pytest.mark.slow
def test_an_agent_with_two_tools_learns_which_one_to_call(tool_user, tmp_path):
    settings = {"seed": 1, "policy": {"optimizer": {"learning_rate": 2e-3}, "batch": {"steps_per_job": 2}}}
    numbers = {"epochs": 8, "num_generations": 8, "examples_per_epoch": 16, "settings": settings}
    rows = [{"id": str(i), "question": f"go {i}", "answer": ""} for i in range(96)]
    summary = reinforge.finetune(
        agent, rows, went_left, tool_user, **numbers, output_dir=tmp_path, run_name="tools", progress=SilentProgress()
    )
    assert summary.confirm_tuned.mean - summary.confirm_base.mean > 0.2
    assert summary.promoted
    episode = read_first_episode(summary.folder)
    first, second = episode["calls"]
    assert first["finish_reason"] == "tool_calls"
    tool_call = first["reply"]["tool_calls"][0]
    result = second["messages"][2]
    assert (result["role"], result["tool_call_id"]) == ("tool", tool_call["id"])
    assert first["tools"] == TOOLS
    assert second["prompt_token_ids"][: len(first["prompt_token_ids"])] == first["prompt_token_ids"]


def read_first_episode(folder):
    query = "SELECT data FROM episodes WHERE phase = 'collect' AND outcome = 'ok' ORDER BY key LIMIT 1"
    return json.loads(read_rows(folder, query)[0][0])


DEEP, DIGITS = "[" * 2000 + "]" * 2000, "7" * 5000
BAD_ARGUMENTS = [
    f'{{"a": {DEEP}}}', f'{{"a": {DIGITS}}}', '{"a": 1e400}', '{"a": NaN}', '{"a": 1, "a": 2}', r'{"a": "\ud800"}',
    '{"a": ', "[1]", json.dumps({"a": "x" * (1 << 14)}),
]  # fmt: skip


class ToolPolicy(ScriptedPolicy):
    chat_template = HERMES


def write_calls(request):
    """Returns a good call in half of the replies, and each of the bad ones in the others."""
    number = request.sampling.seed % (2 * len(BAD_ARGUMENTS))
    arguments = BAD_ARGUMENTS[number] if number < len(BAD_ARGUMENTS) else '{"a": 1}'
    return f'<tool_call>{{"name": "left", "arguments": {arguments}}}</tool_call>'


async def careless_agent(item, llm, context):
    reply = await llm.chat.completions.create(messages=[{"role": "user", "content": "go"}], tools=TOOLS)
    call = reply.choices[0].message.tool_calls[0]
    return str(json.loads(call.function.arguments)["a"])


async def run_careless_agent(folder):
    run = ScriptedRun(folder, workflow=careless_agent, reward=lambda output, expected: float(output == "1"))
    run.adapter.server = ToolPolicy(write_calls)
    run.settings["eval"]["general"]["dataset"]["rows"] = [{"id": i, "question": f"q{i}"} for i in range(16)]
    await run.run()
    rows = read_rows(folder / "r", "SELECT outcome, data FROM episodes")
    return [(outcome, json.loads(data)["reason"]) for outcome, data in rows]


async def test_a_policy_hides_no_bad_answer_behind_a_tool_call_that_cannot_be_parsed(tmp_path, set_limit):
    set_limit("reply_chars", 1 << 14)
    episodes = await run_careless_agent(tmp_path)
    assert {outcome for outcome, _ in episodes} == {"ok", "policy_error"}
    reasons = " ".join(str(reason) for outcome, reason in episodes if outcome == "policy_error")
    for expected in (
        "nested deeper than 64 levels", "a number of 5000 digits", "1e400 is too large", "NaN is not", "is there twice",
        "a lone surrogate (U+D800)", "Expecting value", "are not an object", "the limit is 16384",
    ):  # fmt: skip
        assert expected in reasons
    assert "the agent then failed: TypeError" in reasons


@pytest.mark.slow
async def test_without_that_check_the_bad_answers_are_missing_from_every_figure(tmp_path, monkeypatch):
    """Mutation check: the agent's own exception is all that is known."""
    monkeypatch.setattr(Capture, "bad_call", property(lambda capture: None, lambda capture, reason: None))
    with pytest.raises(EvaluationError, match="tool_error"):
        await run_careless_agent(tmp_path)
