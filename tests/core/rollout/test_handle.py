"""The model handle takes what OpenAI's client takes: idioms of its users, and each argument honored or refused."""

import copy
import json
from dataclasses import replace

import pytest
from pydantic import BaseModel

from reinforge.errors import InvalidCall
from reinforge.rollout.capture import AsyncLLM, BlockingLLM, Capture
from reinforge.rollout.isolation.threads import run_in_daemon_thread
from reinforge.types.request import Grammar, ModelReply, SamplingParams, TokenLogprob, TokenLogprobs

ASKED = [{"role": "user", "content": "go"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOKENS = TokenLogprobs((1, 2), (7, 8), (-0.5, -0.25), texts=("4", "2"))


def says(content, **fields):
    return {"role": "assistant", "content": content, **fields}


class Replies:
    model_name = "m"

    def __init__(self, *messages, is_policy=True, finish_reason=None):
        self.messages, self.requests, self.is_policy = list(messages) or [says("42")], [], is_policy
        self.finish_reason = finish_reason

    async def sample(self, request):
        self.requests.append(request)
        message = self.messages.pop(0) if len(self.messages) > 1 else self.messages[0]
        reason = self.finish_reason or ("tool_calls" if message.get("tool_calls") else "stop")
        return ModelReply(copy.deepcopy(message), reason, TOKENS, 2, 2)


def handle(*messages, sampling=None, **settings):
    model, capture = Replies(*messages, **settings), Capture(seed=1)
    return AsyncLLM("agent", model, capture, sampling), capture, model


async def request_of(*, sampling=None, is_policy=False, **arguments):
    llm, _, model = handle(sampling=sampling, is_policy=is_policy)
    await llm.chat.completions.create(messages=ASKED, **arguments)
    return model.requests[0]


# Idioms


async def tools_loop(llm):
    messages = [*ASKED]
    while True:
        message = (await llm.chat.completions.create(model="gpt-4o", messages=messages, tools=[ADD])).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = str(json.loads(call.function.arguments)["a"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def dumped_messages(llm):
    message = (await llm.chat.completions.create(messages=ASKED, tools=[ADD])).choices[0].message
    history = [*ASKED, message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": "c1", "content": "1"}]
    return (await llm.chat.completions.create(messages=history, tools=[ADD])).choices[0].message.content


async def streaming_loop(llm):
    text = ""
    async for chunk in await llm.chat.completions.create(messages=ASKED, stream=True):
        text += chunk.choices[0].delta.content or ""
    return text


async def streamed_usage(llm):
    stream = await llm.chat.completions.create(messages=ASKED, stream=True, stream_options={"include_usage": True})
    used = [chunk.usage for chunk in [chunk async for chunk in stream] if chunk.usage]
    return [each.total_tokens for each in used]


async def streamed_tool_call(llm):
    async with await llm.chat.completions.create(messages=ASKED, tools=[ADD], stream=True) as stream:
        calls: dict[int, dict] = {}
        async for chunk in stream:
            for part in chunk.choices[0].delta.tool_calls or []:
                call = calls.setdefault(part.index, {"name": "", "arguments": ""})
                call["name"] += part.function.name or ""
                call["arguments"] += part.function.arguments or ""
    return calls


async def streamed_logprobs(llm):
    stream = await llm.chat.completions.create(messages=ASKED, stream=True, logprobs=True)
    found = [chunk.choices[0].logprobs async for chunk in stream]
    return [each.content[0].logprob for each in found if each]


async def closed_stream(llm):
    stream = await llm.chat.completions.create(messages=ASKED, stream=True)
    first = await anext(stream)
    await stream.close()
    return first.choices[0].delta.role, [chunk async for chunk in stream]


async def several_choices(llm):
    return [choice.message.content for choice in (await llm.chat.completions.create(messages=ASKED, n=2)).choices]


async def json_answer(llm):
    reply = await llm.chat.completions.create(messages=ASKED, response_format={"type": "json_object"})
    return json.loads(reply.choices[0].message.content)


class Answer(BaseModel):
    answer: int


async def parsed_answer(llm):
    message = (await llm.chat.completions.parse(messages=ASKED, response_format=Answer)).choices[0].message
    assert "parsed" not in message, "it is not sent back with the message"
    return message.parsed


async def parsed_call(llm):
    message = (await llm.chat.completions.parse(messages=ASKED, tools=[ADD], response_format=Answer)).choices[0].message
    return message.parsed, message.tool_calls[0].function.name


async def sentinels(llm):
    kind = type("NotGiven", (), {"__module__": "openai._types", "__bool__": lambda self: False})
    absent = kind()
    arguments = dict.fromkeys(("tools", "temperature", "response_format", "stop", "n", "seed", "stream"), absent)
    return (await llm.chat.completions.create(messages=ASKED, **arguments, extra_body={"top_k": absent})).model


async def content_blocks(llm):
    blocks = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2"}]
    await llm.chat.completions.create(messages=[{"role": "user", "content": blocks}])
    return llm.model.requests[-1].messages


async def reasoning(llm):
    message = (await llm.chat.completions.create(messages=ASKED)).choices[0].message
    await llm.chat.completions.create(messages=[*ASKED, message, *ASKED])
    return message.reasoning_content, llm.model.requests[-1].messages[1]


async def token_ids(llm):
    reply = await llm.chat.completions.create(messages=ASKED, extra_body={"return_token_ids": True})
    return reply.prompt_token_ids, reply.choices[0].token_ids


JSON = says('{"answer": 42}')
IDIOMS = [
    (tools_loop, (CALLS, says("1")), "1"),
    (dumped_messages, (CALLS, says("1")), "1"),
    (streaming_loop, (), "42"),
    (streamed_usage, (), [4]),
    (streamed_tool_call, (CALLS,), {0: {"name": "add", "arguments": '{"a": 1}'}}),
    (streamed_logprobs, (), [-0.5, -0.25]),
    (closed_stream, (), ("assistant", [])),
    (several_choices, (says("1"), says("2")), ["1", "2"]),
    (json_answer, (JSON,), {"answer": 42}),
    (parsed_answer, (JSON,), Answer(answer=42)),
    (parsed_call, (CALLS,), (None, "add")),
    (sentinels, (), "m"),
    (content_blocks, (), [{"role": "user", "content": "2 + 2"}]),
    (reasoning, (says("4", reasoning_content="2 + 2"),), ("2 + 2", says("4", reasoning_content="2 + 2"))),
    (token_ids, (), ([1, 2], [7, 8])),
]


@pytest.mark.parametrize(("idiom", "replies", "expected"), IDIOMS, ids=[row[0].__name__ for row in IDIOMS])
async def test_an_idiom_of_openais_client(idiom, replies, expected):
    llm, capture, model = handle(*replies)
    assert await idiom(llm) == expected
    assert len(capture.calls) == (1 if idiom is several_choices else len(model.requests)), "each call is recorded once"


async def test_a_plain_workflow_streams_and_parses_too():
    import asyncio

    model, capture = Replies(JSON), Capture(seed=1)
    llm = BlockingLLM("agent", model, capture, None, asyncio.get_running_loop())

    def work():
        with llm.chat.completions.create(messages=ASKED, stream=True) as stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        closed = llm.chat.completions.create(messages=ASKED, stream=True)
        closed.close()
        return text, list(closed), llm.chat.completions.parse(messages=ASKED, response_format=Answer)

    text, rest, parsed = await run_in_daemon_thread(work, "agent")
    assert (text, rest, parsed.choices[0].message.parsed) == ('{"answer": 42}', [], Answer(answer=42))
    assert len(capture.calls) == 3


async def test_what_is_recorded_is_what_was_streamed_also_if_the_agent_stops_reading():
    llm, capture, _ = handle(says("42"))
    async with await llm.chat.completions.create(messages=ASKED, stream=True) as stream:
        async for _ in stream:
            break
    (call,) = capture.calls
    assert (call.reply.tokens, call.reply.message["content"]) == (TOKENS, "42")


@pytest.mark.parametrize("attribute", ["with_raw_response", "with_streaming_response", "stream", "list"])
async def test_what_the_handle_lacks_names_the_client_that_has_it(attribute):
    llm, _, _ = handle()
    with pytest.raises(AttributeError, match=rf"create and parse, but no attribute '{attribute}'; context\.openai\(\)"):
        getattr(llm.chat.completions, attribute)
    with pytest.raises(AttributeError, match=r"no attribute 'responses'; context\.openai\(\) and context\.async_"):
        _ = llm.responses
    assert not hasattr(llm, "beta")


async def test_json_that_was_cut_off_is_the_policys_failure_and_a_judges_own():
    for is_policy in (True, False):
        llm, capture, _ = handle(says('{"answer": 4'), is_policy=is_policy, finish_reason="length")
        with pytest.raises(ValueError, match="not the JSON of a Answer, since it was cut off at its maximum length"):
            await llm.chat.completions.parse(messages=ASKED, response_format=Answer)
        assert (capture.bad_call is not None) == is_policy


# Arguments

IGNORED = {
    "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "user": "u", "metadata": {"a": "b"},
    "store": False, "parallel_tool_calls": True, "service_tier": "auto", "prediction": {"type": "content"},
    "safety_identifier": "s", "prompt_cache_key": "k", "prompt_cache_retention": "24h", "modalities": ["text"],
    "logprobs": True, "top_logprobs": 0, "stream_options": {"include_usage": True}, "timeout": 5,
    "extra_headers": {"x": "y"}, "extra_query": {"x": "y"}, "audio": None, "functions": [],
    "function_call": "auto", "tools": [], "model": "gpt-4o", "response_format": {"type": "text"}, "n": 1,
}  # fmt: skip
NEUTRAL_EXTRA = {"repetition_penalty": 1.0, "top_k": -1, "ignore_eos": False, "min_tokens": 0, "best_of": 1}


@pytest.mark.parametrize(("name", "value"), IGNORED.items())
@pytest.mark.parametrize("is_policy", [True, False])
async def test_an_argument_that_changes_nothing_is_ignored(name, value, is_policy):
    assert await request_of(is_policy=is_policy, **{name: value}) == await request_of(is_policy=is_policy)


@pytest.mark.parametrize("choice", ["auto", "none", None])
async def test_a_tool_choice_without_tools_that_asks_for_none_is_ignored(choice):
    assert await request_of(tool_choice=choice) == await request_of()


@pytest.mark.parametrize("item", NEUTRAL_EXTRA.items(), ids=list(NEUTRAL_EXTRA))
async def test_so_is_a_neutral_field_of_extra_body(item):
    assert await request_of(extra_body=dict([item])) == await request_of()


NO_THINKING = {"enable_thinking": False, "thinking": False}
HONORED = [
    ({"frequency_penalty": 0.5, "presence_penalty": -1}, "sampling.frequency_penalty", 0.5),
    ({"frequency_penalty": 0.5, "presence_penalty": -1}, "sampling.presence_penalty", -1),
    ({"logit_bias": {"11": -100, "9": 0, 5: 1.5}}, "sampling.logit_bias", ((5, 1.5), (11, -100))),
    ({"max_completion_tokens": 7, "max_tokens": 9}, "sampling.max_tokens", 7),
    ({"stop": "\n"}, "sampling.stop", ("\n",)),
    ({"stop": ["a", "b"], "n": 1}, "sampling.stop", ("a", "b")),
    ({"tools": [ADD], "tool_choice": "none"}, "tool_choice", "none"),
    ({"tools": [ADD], "tool_choice": "required"}, "tool_choice", "required"),
    ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice", "add"),
    ({"tools": [ADD]}, "tool_choice", "auto"),
    ({"logprobs": True, "top_logprobs": 20}, "num_top_logprobs", 20),
    ({"tools": [ADD], "parallel_tool_calls": False}, "parallel_tool_calls", False),
    ({"reasoning_effort": "low"}, "template_kwargs", {"reasoning_effort": "low"}),
    ({"reasoning_effort": "none"}, "template_kwargs", {"reasoning_effort": "none", **NO_THINKING}),
    ({"reasoning": {"effort": "low"}}, "template_kwargs", {"reasoning_effort": "low"}),
    ({"reasoning": {"enabled": False}}, "template_kwargs", NO_THINKING),
    ({"thinking": {"type": "disabled"}}, "template_kwargs", NO_THINKING),
    ({"thinking": {"type": "adaptive"}}, "template_kwargs", {}),
    ({"extra_body": {"enable_thinking": False}}, "template_kwargs", NO_THINKING),
    ({"extra_body": {"chat_template_kwargs": {"thinking": False}}}, "template_kwargs", NO_THINKING),
    ({"response_format": {"type": "json_object"}}, "grammar", Grammar("json_schema", '{"type":"object"}')),
    ({"extra_body": {"guided_json": {"type": "array"}}}, "grammar", Grammar("json_schema", '{"type":"array"}')),
    ({"extra_body": {"structured_outputs": {"regex": "a+"}}}, "grammar", Grammar("regex", "a+")),
    ({"extra_body": {"guided_choice": ["1+1", "no"]}}, "grammar", Grammar("regex", r"(1\+1|no)")),
    ({"extra_body": {"guided_grammar": 'start: "a"'}}, "grammar", Grammar("lark", 'start: "a"')),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "path", "expected"), HONORED)
@pytest.mark.parametrize("is_policy", [True, False])
async def test_an_argument_that_changes_what_is_sampled_reaches_the_sampler(arguments, path, expected, is_policy):
    found = await request_of(is_policy=is_policy, sampling=SamplingParams(), **arguments)
    for name in path.split("."):
        found = getattr(found, name)
    assert found == expected


@pytest.mark.parametrize("strict", [True, False, None])
async def test_a_json_schema_is_enforced_strict_or_not_in_the_order_of_its_properties(strict):
    schema = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}}
    inner = {"name": "reply", "schema": schema, "strict": strict}
    found = await request_of(response_format={"type": "json_schema", "json_schema": inner})
    assert found.grammar == Grammar("json_schema", json.dumps(schema, separators=(",", ":")))


async def test_a_forced_call_needs_no_format_for_the_text_and_a_free_one_keeps_it():
    settings = {"tools": [ADD], "response_format": {"type": "json_object"}}
    assert (await request_of(**settings)).grammar is not None
    assert (await request_of(**settings, tool_choice="required")).grammar is None


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_allowed_tools_are_the_only_ones_offered(mode):
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "now"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    found = await request_of(tools=[ADD, NOW], tool_choice=choice)
    assert (found.tools, found.tool_choice) == ([NOW], mode)


async def test_tools_may_be_objects_of_pydantic():
    class Tool(BaseModel):
        type: str
        function: dict

    assert (await request_of(tools=[Tool(**ADD)])).tools == [ADD]


async def test_a_prompt_without_a_template_is_recorded_as_a_message():
    llm, _, model = handle()
    await llm.chat.completions.create(prompt="2 + 2 =", max_tokens=3)
    await llm.chat.completions.create(prompt=[5, 6])
    assert [(asked.prompt, asked.messages[0]["content"]) for asked in model.requests] == [
        ("2 + 2 =", "2 + 2 ="), ((5, 6), "(a prompt of 2 token ids)"),
    ]  # fmt: skip


def block(kind, **fields):
    return [*ASKED, {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": kind, **fields}]}]


REFUSED = [
    ({"audio": {"voice": "alloy"}}, "audio", r"audio \(the model writes text only\)"),
    ({"modalities": ["text", "audio"]}, "modalities", 'pass \\["text"\\]'),
    ({"web_search_options": {}}, "web_search_options", "give it a search function in `tools`"),
    ({"functions": [{"name": "f"}]}, "functions", "replaced it with `tools` and `tool_choice`"),
    ({"function_call": {"name": "f"}}, "function_call", "replaced it with `tools`"),
    ({"moderation": {"model": "x"}}, "moderation", "not moderated"),
    ({"extra_body": {"repetition_penalty": 1.1}}, "extra_body.repetition_penalty", "use frequency_penalty"),
    ({"extra_body": {"top_kk": 1}}, "extra_body.top_kk", r'did you mean "top_k"\?.*; extra_body may have'),
    ({"extra_body": [1]}, "extra_body", "must be a dict, found list"),
    ({"extra_body": {"stream": True}}, "extra_body.stream", r"create\(..., stream=True\)"),
    ({"n": 0}, "n", "between 1 and 128, found 0"),
    ({"n": 129}, "n", "between 1 and 128, found 129"),
    ({"stop": 3}, "stop", "a string or a list of strings, found int"),
    ({"logit_bias": {"the": 1}}, "logit_bias", "must map token ids to numbers, found 'the': 1"),
    ({"logit_bias": [1]}, "logit_bias", "must map token ids to numbers, found list"),
    ({"tool_choice": "required"}, "tool_choice", "'required', but the call has no `tools`"),
    ({"tools": [ADD], "tool_choice": "any"}, "tool_choice", "must be auto, none, required, .*found 'any'"),
    ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "ad"}}}, "tool_choice",
     "the tool 'ad', did you mean \"add\"\\?; `tools` has add"),
    ({"tools": [ADD], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x"}}}, "tool_choice",
     "allowed_tools must be"),
    ({"tools": "add"}, "tools", "a list of function definitions, found str"),
    ({"tools": [ADD, {"type": "web_search"}]}, "tools[1]", "a tool of the type 'web_search'; expected"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "must be a name, found None"),
    ({"tools": [{"type": "function", "function": {"name": "none"}}]}, "tools[0].function.name", "value of tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "objekt"}}}]},
     "tools[0].function.parameters", "not a usable JSON schema: at type: 'objekt'"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": {1, 2}}}}]}, "tools",
     "must be plain data"),
    ({"response_format": {"type": "xml"}}, "response_format", "json_object.*found {'type': 'xml'}"),
    ({"response_format": "json"}, "response_format", "found 'json'"),
    ({"response_format": Answer}, "response_format", r"is the class Answer: use chat\.completions\.parse"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", '"schema": ...}, found None'),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}},
     "response_format.json_schema.schema", "not a usable JSON schema: at type: 5"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "http://x/y"}}}},
     "response_format.json_schema.schema", "points to another document"),
    ({"extra_body": {"guided_json": 2}}, "extra_body.guided_json", "must be a JSON schema, found 2"),
    ({"extra_body": {"guided_choice": "yes"}}, "extra_body.guided_choice", "a list of strings, found 'yes'"),
    ({"extra_body": {"structured_outputs": {"xml": 1}}}, "extra_body.structured_outputs", "one of json, regex"),
    ({"response_format": {"type": "text"}, "extra_body": {"guided_regex": "a"}}, "extra_body.guided_regex",
     "cannot be combined with response_format"),
    ({"extra_body": {"chat_template_kwargs": {"tools": []}}}, "extra_body.chat_template_kwargs", "must not have tools"),
    ({"stream_options": 3}, "stream_options", "must be a dict"),
    ({"prompt": "a"}, "prompt", "cannot be combined with messages"),
    ({"messages": "hello"}, "messages", "found str"),
    ({"messages": []}, "messages", "found none"),
    ({"messages": ["hello"]}, "messages[0]", "is a str; expected"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "is None; expected system, user"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "is a int; expected a string"),
    ({"messages": [{"role": "tool", "content": None}]}, "messages[0].content", "is null; expected a string"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing; expected a string"),
    ({"messages": [{"role": "function", "content": "3"}]}, "messages[0]", 'the role "tool"'),
    ({"messages": block("image_url", image_url={"url": "x"})}, "messages[1].content[1]",
     "of the type 'image_url', which is an image, but the model in this process reads text only"),
    ({"messages": block("input_audio")}, "messages[1].content[1]", "which is audio"),
    ({"messages": block("file")}, "messages[1].content[1]", "which is a file"),
    ({"messages": block("video_url")}, "messages[1].content[1]", "which is a video"),
    ({"messages": block("hologram")}, "messages[1].content[1]", "'hologram', which is not text"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "param", "message"), REFUSED)
async def test_what_cannot_be_honored_is_refused_by_name_before_anything_is_sampled(arguments, param, message):
    llm, capture, model = handle()
    with pytest.raises(InvalidCall, match=message) as caught:
        await llm.chat.completions.create(**{"messages": ASKED, **arguments})
    assert caught.value.param == param
    assert param.partition("[")[0] in str(caught.value)
    assert (model.requests, capture.calls, capture.num_started) == ([], [], 0)


async def test_all_unsupported_arguments_are_named_at_once():
    llm, _, _ = handle()
    with pytest.raises(InvalidCall, match=r"support: audio \(.*\), beam, web_search_options \("):
        await llm.chat.completions.create(messages=ASKED, audio={"voice": "x"}, beam=2, web_search_options={})


@pytest.mark.parametrize("depth", [70, 5000])
async def test_a_schema_nested_too_deeply_is_refused(depth):
    schema: dict = {}
    for _ in range(depth):
        schema = {"items": schema}
    with pytest.raises(InvalidCall, match=r"nested (\d+ levels deep|too deeply)"):
        await request_of(extra_body={"guided_json": schema})


class Naming(Replies):
    async def sample(self, request):
        reply = await super().sample(request)
        tops = (("4", -0.5), ("5", -1.0), ("6", -4.0)), (("2", -0.25), ("é", -2.0), ("3", float("-inf")))
        count = request.num_top_logprobs
        named = tuple(tuple(TokenLogprob(*each) for each in top[:count]) for top in tops)
        return replace(reply, tokens=replace(TOKENS, top_logprobs=named))


async def test_the_most_likely_tokens_are_in_the_reply(caplog):
    llm = AsyncLLM("agent", Naming(), Capture(seed=1), None)
    reply = await llm.chat.completions.create(messages=ASKED, logprobs=True, top_logprobs=2)
    first, second = reply.choices[0].logprobs.content
    assert [(each.token, each.logprob) for each in first.top_logprobs] == [("4", -0.5), ("5", -1.0)]
    assert second.top_logprobs[1].token == "é"
    stream = await llm.chat.completions.create(messages=ASKED, logprobs=True, top_logprobs=3, stream=True)
    found = [chunk.choices[0].logprobs async for chunk in stream]
    streamed = [each.model_dump() for part in found if part is not None for each in part.content]
    assert streamed[0]["top_logprobs"][1] == {"token": "5", "bytes": [53], "logprob": -1.0}
    assert streamed[1]["top_logprobs"][1] == {"token": "é", "bytes": [195, 169], "logprob": -2.0}
    assert streamed[1]["top_logprobs"][2]["logprob"] == -9999.0, "JSON has no infinity"
    dumped = reply.model_dump()["choices"][0]["logprobs"]["content"]
    assert [each["top_logprobs"] for each in dumped] == [each["top_logprobs"][:2] for each in streamed]
    assert caplog.records == []


@pytest.mark.parametrize("number", [21, -1, True, 1.5, "3"])
async def test_a_number_of_likely_tokens_that_is_none_is_refused(number):
    with pytest.raises(InvalidCall, match=r"top_logprobs must be a whole number from 0 to 20, found ") as raised:
        await request_of(logprobs=True, top_logprobs=number)
    assert raised.value.param == "top_logprobs"


async def test_the_user_is_told_once_that_there_are_no_top_logprobs(caplog):
    llm, _, _ = handle()
    for _ in range(2):
        await llm.chat.completions.create(messages=ASKED, logprobs=True, top_logprobs=5)
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("the agent asks for top_logprobs, but m returns log-probs of the sampled tokens only")


class Endpoint(Replies):
    forwards_arguments = True


async def test_a_model_behind_an_endpoint_gets_the_arguments_as_they_are():
    model = Endpoint(is_policy=False)
    llm = AsyncLLM("judge", model, Capture(seed=1), None)
    image = block("image_url", image_url={"url": "x"})
    given = {"response_format": {"type": "json_object"}, "tool_choice": "any", "web_search_options": {}, "audio": None}
    stream = await llm.chat.completions.create(
        messages=image, stream=True, stream_options={"include_usage": True}, n=1, model="x", **given
    )
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]) == "42"
    del given["audio"]
    assert (model.requests[0].arguments, model.requests[0].messages) == (given, image)
    for arguments, named in (({"extra_body": {"messages": []}}, "extra_body.messages"), ({"prompt": "a"}, "prompt")):
        with pytest.raises(InvalidCall, match=named):
            await llm.chat.completions.create(messages=ASKED, **arguments)
