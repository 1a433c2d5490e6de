"""Tool calls, reasoning and JSON come through every dialect, whole and in pieces, to the official clients."""

import json

import pytest

from reinforge.types.request import ModelReply, ReplyPiece, TokenLogprobs
from tests.doubles import ScriptedPolicy, ids_of
from tests.serving.serving import async_anthropic, async_openai, says, serve

TEMPLATE = "{% if tools %}<tool_call></tool_call>{% endif %}{{ '<think>' }}{{ '</think>' }}"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
TEXT = f"<think>I should add.</think>\n\nLet me add.\n{CALL}"
TOOL = {
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}


class Pieces(ScriptedPolicy):
    chat_template = TEMPLATE

    async def sample(self, request):
        return self.build(request)

    def build(self, request):
        self.requests.append(request)
        text = self.script(request)
        tokens = TokenLogprobs((1, 2), ids_of(text), (-0.5,) * len(ids_of(text)), texts=tuple(text))
        return ModelReply({"role": "assistant", "content": text}, "stop", tokens, 2, len(text))

    async def stream(self, request, markers=()):
        reply = self.build(request)
        text = reply.message["content"]
        for start in range(0, len(text), 3):
            part = text[start : start + 3]
            yield ReplyPiece(part, TokenLogprobs((1, 2), ids_of(part), (-0.5,) * len(part), texts=tuple(part)))
        yield reply


@pytest.fixture
async def app():
    async with serve({"m": Pieces(lambda request: TEXT)}) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_completions(app, stream):
    ask = {"model": "m", "messages": says("1 + 2?"), "tools": [{"type": "function", "function": TOOL}]}
    async with async_openai(app) as client:
        if stream:
            async with client.chat.completions.stream(**ask, logprobs=True) as events:
                completion = await events.get_final_completion()
        else:
            completion = await client.chat.completions.create(**ask, logprobs=True)
    (choice,) = completion.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me add."
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
    assert "".join(token.token for token in choice.logprobs.content) == TEXT


async def test_reasoning_is_sent_before_the_text(app):
    ask = {"model": "m", "messages": says("1 + 2?"), "stream": True}
    async with async_openai(app) as client:
        deltas = [chunk.choices[0].delta async for chunk in await client.chat.completions.create(**ask)]
    reasoning = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    contents = [delta.content or "" for delta in deltas]
    assert "".join(reasoning) == "I should add."
    assert len([text for text in reasoning if text]) > 3
    assert "".join(contents) == f"Let me add.\n{CALL}"  # without tools nothing is a call
    last = max(place for place, text in enumerate(reasoning) if text)
    assert all(not text for text in contents[:last])


@pytest.mark.parametrize("stream", [False, True])
async def test_messages(app, stream):
    tool = {"name": "add", "input_schema": TOOL["parameters"]}
    ask = {"model": "m", "messages": says("1 + 2?"), "max_tokens": 99, "tools": [tool]}
    async with async_anthropic(app) as client:
        if stream:
            async with client.messages.stream(**ask) as events:
                message = await events.get_final_message()
        else:
            message = await client.messages.create(**ask)
    thinking, text, call = message.content
    assert (thinking.thinking, text.text) == ("I should add.", "Let me add.")
    assert (call.name, call.input, message.stop_reason) == ("add", {"a": 1, "b": 2}, "tool_use")


@pytest.mark.parametrize("stream", [False, True])
async def test_responses(app, stream):
    ask = {"model": "m", "input": "1 + 2?", "tools": [{"type": "function", **TOOL}]}
    async with async_openai(app) as client:
        if stream:
            async with client.responses.stream(**ask) as events:
                response = await events.get_final_response()
        else:
            response = await client.responses.create(**ask)
    reasoning, message, call = response.output
    assert reasoning.content[0].text == "I should add."
    assert (message.content[0].text, response.output_text) == ("Let me add.", "Let me add.")
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1, "b": 2})


async def test_a_schema_is_enforced_while_the_reply_is_sampled(engine):
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    schema["additionalProperties"] = False
    wanted = {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema, "strict": True}}
    ask = {"model": "m", "messages": says("yes or no?"), "response_format": wanted, "max_tokens": 60}
    async with serve({"m": engine.policy}) as app, async_openai(app) as client:
        reply = await client.chat.completions.create(**ask)
        stream = await client.chat.completions.create(**ask, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    for written in (reply.choices[0].message.content, text):
        assert isinstance(json.loads(written)["yes"], bool)


async def test_a_template_cannot_reach_python(tiny_model_dir, tmp_path):
    import shutil

    from reinforge.errors import ConfigError, ReinforgeError
    from reinforge.serving.loading import ModelLoader
    from reinforge.serving.models import ServedModels
    from tests.serving.serving import http

    attacks = [
        "{{ cycler.__init__.__globals__.os.popen('touch OWNED').read() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for a in range(10000000) %}{% for b in range(10000000) %}x{% endfor %}{% endfor %}",
    ]
    for number, attack in enumerate(attacks):
        folder = tmp_path / f"model-{number}"
        shutil.copytree(tiny_model_dir, folder)
        (folder / "chat_template.jinja").write_text(attack + "{{ messages[0]['content'] }}")
        models = ServedModels()
        loader = ModelLoader(models)
        try:
            await loader.open(str(folder))
        except (ConfigError, ReinforgeError):
            continue  # refused before it is served
        policies = {"m": next(iter(models)).policy}
        async with serve(policies) as app, http(app) as client:
            body = {"model": "m", "messages": says("hi"), "max_tokens": 2}
            response = await client.post("/v1/chat/completions", json=body)
        await models.close()
        assert response.status_code in (400, 500)
    assert not list(tmp_path.rglob("OWNED"))
