"""Each family's calls and reasoning: parsed from what its template writes, and written back as they were."""

import json
from dataclasses import replace

import pytest

from reinforge.dialects.tool_calls import detect_tool_format, parse_reply, prepare_request
from reinforge.engine.prompts.chat_template import PromptRenderer
from reinforge.types.request import ModelReply, ModelRequest, SamplingParams
from tests.families import SPECS, DialogueMaker, TemplateTokenizer
from tests.fault.sizes import scaled

COUNTS = [15, pytest.param(scaled(10_000), marks=pytest.mark.fault)]


def render(renderer, request, messages, *, prompt):
    prepared = prepare_request(replace(request, messages=messages), renderer.chat_template)
    return renderer._render_text(prepared, prepared.messages, add_generation_prompt=prompt)


def calls_of(message):
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls") or ()]


def check_dialogue(renderer, spec, seed):
    """Compares each reply of a dialogue with what is parsed of it; returns the number of calls."""
    tools, messages = DialogueMaker(spec, seed).make_dialogue()
    request = ModelRequest([], SamplingParams(seed=seed), tools)
    count = 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(renderer, request, messages[:index], prompt=True)
        whole = render(renderer, request, messages[: index + 1], prompt=False)
        assert whole.startswith(prompt)
        raw = whole[len(prompt) :]
        raw = raw[: raw.rindex(spec.end)] if spec.end in raw else raw[: raw.rindex("<|call|>")]
        reply = ModelReply({"role": "assistant", "content": raw}, "stop", None, raw_text=raw)
        parsed = parse_reply(reply, replace(request, messages=messages[:index]), spec.text)
        assert parsed.failure is None
        assert json.dumps(calls_of(parsed.message)) == json.dumps(calls_of(message))
        assert (parsed.message["content"] or "").strip() == (message["content"] or "")
        assert parsed.message.get("reasoning_content") == message.get("reasoning_content")
        assert (parsed.finish_reason == "tool_calls") == bool(message.get("tool_calls"))
        ids = [call["id"] for call in parsed.message.get("tool_calls") or ()]
        assert len({*ids}) == len(ids)
        render(renderer, request, [*messages[:index], parsed.message], prompt=False)  # the ids are accepted
        for call, original in zip(parsed.message.get("tool_calls") or (), message.get("tool_calls") or (), strict=True):
            call["id"] = original["id"]
        assert render(renderer, request, [*messages[:index], parsed.message], prompt=False) == whole
        count += len(ids)
    return count


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", SPECS)
def test_random_dialogues_are_parsed_and_written_back_as_they_were(name, count):
    spec = SPECS[name]
    renderer = PromptRenderer(TemplateTokenizer(spec.text))
    num_calls = sum(check_dialogue(renderer, spec, seed) for seed in range(count))
    assert num_calls > count * 0.5


@pytest.mark.parametrize("name", SPECS)
def test_the_template_identifies_the_family(name):
    assert detect_tool_format(SPECS[name].text) is SPECS[name].tool_format
