"""OpenAI's and Anthropic's own clients chat with a served model."""

import itertools

import pytest

from reinforge.errors import ChatTemplateError, EngineError, StorageError
from tests.doubles import ScriptedPolicy
from tests.serving.serving import async_anthropic, async_openai, http, says, serve

MODEL = "tiny"


@pytest.fixture
async def app(engine):
    async with serve({MODEL: engine.policy}) as running:
        yield running


async def test_a_chat_with_choices_and_logprobs(app):
    async with async_openai(app) as client:
        reply = await client.chat.completions.create(
            model=MODEL, messages=says("2 + 2?"), n=3, max_tokens=5, seed=7, logprobs=True, top_logprobs=2
        )
    assert reply.id.startswith("chatcmpl-")
    assert reply.model == MODEL
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    for choice in reply.choices:
        tokens = choice.logprobs.content
        assert 1 <= len(tokens) <= 5
        assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in tokens)
    assert reply.usage.completion_tokens == sum(len(choice.logprobs.content) for choice in reply.choices)


async def test_token_ids_and_the_version_come_back(app, engine):
    async with async_openai(app) as client:
        reply = await client.chat.completions.create(
            model=MODEL, messages=says("hi"), max_tokens=4, logprobs=True, extra_body={"return_token_ids": True}
        )
    (choice,) = reply.choices
    prompt, token_ids = reply.prompt_token_ids, choice.token_ids
    assert engine.tokenizer.decode(prompt) == "<|user|>hi<|end|><|assistant|>"
    assert reply.model_version == choice.model_version == engine.policy.version
    scores = (await engine.policy.score([[*prompt, *token_ids]]))[0][len(prompt) :]
    assert [token.logprob for token in choice.logprobs.content] == pytest.approx(scores.tolist(), abs=1e-4)


async def test_a_stream_is_the_reply_of_the_same_seed(app):
    ask = {"model": MODEL, "messages": says("hello"), "max_tokens": 24, "seed": 3, "logprobs": True}
    async with async_openai(app) as client:
        whole = await client.chat.completions.create(**ask, extra_body={"return_token_ids": True})
        options = {"include_usage": True}
        stream = await client.chat.completions.create(
            **ask, stream=True, stream_options=options, extra_body={"return_token_ids": True}
        )
        chunks = [chunk async for chunk in stream]
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    (choice,) = whole.choices
    assert "".join(part.delta.content or "" for part in choices) == choice.message.content
    assert [token for part in choices for token in getattr(part, "token_ids", ())] == choice.token_ids
    sent = [token.logprob for part in choices if part.logprobs for token in part.logprobs.content]
    assert sent == pytest.approx([token.logprob for token in choice.logprobs.content], abs=1e-5)
    assert choices[-1].finish_reason == choice.finish_reason
    assert chunks[-1].usage == whole.usage
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids


async def test_several_choices_are_streamed_side_by_side(app):
    ask = {"model": MODEL, "messages": says("hello"), "max_tokens": 12, "seed": 3, "n": 3}
    async with async_openai(app) as client:
        whole = await client.chat.completions.create(**ask)
        texts = {0: "", 1: "", 2: ""}
        async for chunk in await client.chat.completions.create(**ask, stream=True):
            for part in chunk.choices:
                texts[part.index] += part.delta.content or ""
    assert list(texts.values()) == [choice.message.content for choice in whole.choices]


@pytest.mark.parametrize("prompts", [["play at row", "the quick brown"], [[40, 41, 42], [50, 51]]])
async def test_a_text_completion_of_several_prompts_has_the_choices_of_each_after_the_other(app, prompts):
    ask = {"model": MODEL, "max_tokens": 6, "seed": 1, "n": 2, "logprobs": 1}
    async with async_openai(app) as client:
        alone = [await client.completions.create(**ask, prompt=prompt) for prompt in prompts]
        whole = await client.completions.create(**ask, prompt=prompts)
        texts = dict.fromkeys(range(4), "")
        async for chunk in await client.completions.create(**ask, prompt=prompts, stream=True):
            for part in chunk.choices:
                texts[part.index] += part.text
    assert whole.id.startswith("cmpl-")
    assert sum(len(choice.logprobs.tokens) for choice in whole.choices) == whole.usage.completion_tokens
    wanted = [choice.text for each in alone for choice in each.choices]
    assert [choice.text for choice in whole.choices] == list(texts.values()) == wanted
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.usage.total_tokens == sum(each.usage.total_tokens for each in alone)


async def test_more_prompts_than_replies_are_allowed_are_refused(app):
    async with http(app) as client:
        for prompts in (["a"] * 129, ["a"] * 65):
            body = {"model": MODEL, "prompt": prompts, "n": 2}
            response = await client.post("/v1/completions", json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


async def test_responses(app):
    ask = {"model": MODEL, "input": "hello", "max_output_tokens": 8}
    async with async_openai(app) as client:
        whole = await client.responses.create(**ask)
        events = [event async for event in await client.responses.create(**ask, stream=True)]
    kinds, last = [event.type for event in events], events[-1]
    assert whole.output[0].type == last.response.output[0].type == "message"
    assert kinds[0] == "response.created"
    assert last.type == f"response.{last.response.status}"
    assert kinds.count("response.output_text.done") == kinds.count("response.output_item.done") == 1
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == last.response.output_text


async def test_messages_of_anthropic(app):
    ask = {"model": MODEL, "messages": says("hello"), "max_tokens": 8}
    async with async_anthropic(app) as client:
        whole = await client.messages.create(**ask)
        async with client.messages.stream(**ask) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            streamed = await stream.get_final_message()
    assert whole.type == "message"
    assert whole.usage.output_tokens <= 8
    assert "".join(block.text for block in streamed.content) == text
    assert streamed.stop_reason in ("end_turn", "max_tokens")


async def test_tokens_are_counted_for_anthropics_clients_before_a_reply(app):
    ask = {"model": MODEL, "messages": says("hello"), "system": "Be brief."}
    async with async_anthropic(app) as client:
        counted = await client.messages.count_tokens(**ask)
        whole = await client.messages.create(**ask, max_tokens=1)
    assert counted.input_tokens == whole.usage.input_tokens > 0


async def test_the_models_are_listed(app):
    async with async_openai(app) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).owned_by == "reinforge"
    async with async_anthropic(app) as client:
        [model] = [model async for model in client.models.list()]
    assert type(model).model_validate(model.model_dump()).display_name == MODEL  # the client does not validate itself


async def test_no_message_to_a_client_has_a_path_of_the_server(tmp_path):
    """And only what is not the client's fault is a 5xx."""
    path = tmp_path / "base" / "config.json"
    errors = {
        "template": (ChatTemplateError(f"{path} builds too much"), 400),
        "engine": (EngineError(f"{path} is broken"), 500),
        "storage": (StorageError(f"no {path}"), 500),
    }
    policy = ScriptedPolicy(lambda request: errors[request.messages[-1]["content"]][0])
    async with serve({MODEL: policy}) as app, http(app) as client:
        for api, stream, name in itertools.product(("chat/completions", "messages"), (False, True), errors):
            body = {"model": MODEL, "messages": says(name), "max_tokens": 8, "stream": stream}
            response = await client.post(f"/v1/{api}", json=body)
            message = response.json()["error"]["message"]
            found = (response.status_code, "/" in message, "config.json" in message)
            assert found == (errors[name][1], False, True), message


async def test_what_the_chat_template_cannot_render_is_the_clients_fault(app, engine, monkeypatch):
    monkeypatch.setattr(engine.policy.renderer.tokenizer, "chat_template", "{{ messages[-1]['content'] * 400 }}")
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    async with http(app) as client:
        for fields, named in (({"tools": tools}, "ignores tools"), ({"messages": says("x" * 50_000)}, "template")):
            body = {"model": MODEL, "messages": says("x"), **fields}
            response = await client.post("/v1/chat/completions", json=body)
            message = response.json()["error"]["message"]
            assert (response.status_code, named in message, "/" in message) == (400, True, False), message


async def test_what_no_model_here_can_do_is_refused_by_name(app):
    import openai

    async with async_openai(app) as client:
        with pytest.raises(openai.NotFoundError, match="have no embeddings"):
            await client.embeddings.create(model=MODEL, input="x")
        with pytest.raises(openai.NotFoundError, match='did you mean "tiny"'):
            await client.chat.completions.create(model="tyny", messages=says("x"))
    async with http(app) as client:
        error = (await client.post("/v1/chat/completions", json={"model": "other", "messages": says("x")})).json()
    assert error["error"]["code"] == "model_not_found"
    assert error["error"]["type"] == "invalid_request_error"
