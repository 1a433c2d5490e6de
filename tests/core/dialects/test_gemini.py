"""Gemini's API."""

import pytest

from reinforge.dialects import gemini
from reinforge.dialects.chat_call import BadRequest, ReplyHead
from reinforge.rollout.handle.arguments import read_arguments
from reinforge.rollout.handle.tool_arguments import read_tools
from reinforge.types.request import ReplyDelta
from tests.replies import ADD, CALLING, REPLIES, SCHEMA, assistant, completes, read_events, user

ASK = {"role": "user", "parts": [{"text": "2 + 2?"}]}
TOOLS = [{"functionDeclarations": [{"name": "add", "description": "Adds.", "parametersJsonSchema": SCHEMA}]}]


def read(*, config=None, omits_content=False, **body):
    body = {"model": "m", "contents": [ASK], **({"generationConfig": config} if config else {}), **body}
    return gemini.read_request(body, omits_content=omits_content)


def test_what_a_request_asks_for():
    thinking = {"thinkingBudget": 1024, "includeThoughts": True, "odd": 1}
    config = {
        "temperature": 0.5, "topP": 0.9, "topK": 5, "maxOutputTokens": 9, "stopSequences": ["\n"], "seed": 3,
        "candidateCount": 2, "presencePenalty": 0.1, "frequencyPenalty": 0.2, "thinkingConfig": thinking,
    }  # fmt: skip
    call = read(config=config, systemInstruction={"parts": [{"text": "Be brief."}]}, safetySettings=[{"category": "x"}])
    assert call.arguments == {
        "messages": [{"role": "system", "content": "Be brief."}, user("2 + 2?")],
        "temperature": 0.5, "top_p": 0.9, "max_tokens": 9, "stop": ["\n"], "seed": 3, "n": 2,
        "presence_penalty": 0.1, "frequency_penalty": 0.2,
        "extra_body": {"top_k": 5, "chat_template_kwargs": {"enable_thinking": True}},
    }  # fmt: skip
    assert (call.model, call.stream) == ("m", False)
    assert call.ignored == ("safetySettings", "generationConfig.thinkingConfig.odd")


def test_names_in_snake_case_are_read_too():
    call = read(system_instruction="Be brief.", generation_config={"max_output_tokens": 9}, tools=[
        {"function_declarations": [{"name": "add", "parameters": {"type": "OBJECT", "properties": {"a_b": {}}}}]},
    ])  # fmt: skip
    assert (call.arguments["messages"][0]["content"], call.arguments["max_tokens"]) == ("Be brief.", 9)
    parameters = call.arguments["tools"][0]["function"]["parameters"]
    assert (parameters, call.ignored) == ({"type": "object", "properties": {"a_b": {}}}, ())


def test_a_budget_of_thoughts_is_a_wish():
    for given, extra in [
        ({"thinkingBudget": 0}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"thinkingBudget": -1, "thinkingLevel": "HIGH"}, {"reasoning_effort": "high"}),
        ({"includeThoughts": False}, None),
    ]:
        assert read(config={"thinkingConfig": given}).arguments.get("extra_body") == extra


def test_parts_of_a_reply_are_one_message_and_responses_are_tool_messages():
    parts = gemini.write_answer(CALLING, read())["candidates"][0]["content"]["parts"]
    response = {"name": "add", "id": "call-7-0", "response": {"output": "4"}}
    results = {"role": "user", "parts": [{"functionResponse": response}, {"text": "Go on."}]}
    assert read(contents=[ASK, {"role": "model", "parts": parts}, results]).arguments["messages"] == [
        user("2 + 2?"),
        {**assistant("Let me add."), "reasoning_content": "Hm, two.", "tool_calls": [ADD]},
        {"role": "tool", "tool_call_id": "call-7-0", "content": "4"},
        user("Go on."),
    ]


def test_responses_without_ids_answer_the_calls_of_their_function_in_order():
    calls = [{"functionCall": {"name": name, "args": {}}} for name in ("add", "ask", "add")]
    names = ("add", "add", "ask", "other")
    parts = [{"functionResponse": {"name": each, "response": {"sum": n}}} for n, each in enumerate(names)]
    turns = [ASK, {"role": "model", "parts": calls}, {"role": "user", "parts": parts}]
    _, reply, *results = read(contents=turns).arguments["messages"]
    first, asked, second = (call["id"] for call in reply["tool_calls"])
    assert [result["tool_call_id"] for result in results] == [first, second, asked, "other"]
    assert results[1]["content"] == '{"sum": 1}'


CUT = {"content": None, "tool_calls": [{**ADD, "function": {"name": "add", "arguments": '{"a": '}}]}


@pytest.mark.parametrize("message", [*REPLIES, CUT])
def test_a_reply_that_is_sent_back_is_the_message_that_was_sampled(message):
    content = gemini.write_answer(completes(**message), read())["candidates"][0]["content"]
    (_, reply) = read(contents=[ASK, content]).arguments["messages"]
    assert {name: value for name, value in reply.items() if value and name != "role"} == {
        name: value for name, value in message.items() if value
    }


def test_a_schema_of_the_apis_own_kind_is_a_json_schema():
    items = {"type": "ARRAY", "items": {"type": "STRING"}, "minItems": "1", "nullable": True}
    own = {
        "type": "OBJECT",
        "properties": {"type": items, "b": {"anyOf": [{"type": "NUMBER"}]}},
        "propertyOrdering": [],
    }
    read_items = {"type": ["array", "null"], "items": {"type": "string"}, "minItems": 1}
    schema = {"type": "object", "properties": {"type": read_items, "b": {"anyOf": [{"type": "number"}]}}}
    tools = [{"functionDeclarations": [{"name": "add", "parameters": own}]}, {"googleSearch": {}}]
    call = read(tools=tools, config={"responseMimeType": "application/json", "responseSchema": own})
    assert call.arguments["tools"] == [{"type": "function", "function": {"name": "add", "parameters": schema}}]
    assert call.arguments["response_format"]["json_schema"]["schema"] == schema
    assert call.dropped == ("googleSearch",)


def test_formats_of_a_reply():
    assert read(config={"responseMimeType": "application/json"}).arguments["response_format"] == {"type": "json_object"}
    config = {"responseMimeType": "text/x.enum", "responseSchema": {"enum": ["a"]}, "topK": 3}
    assert read(config=config).arguments["extra_body"] == {"guided_choice": ["a"], "top_k": 3}


def test_which_functions_may_be_called():
    tools = [*TOOLS, {"functionDeclarations": [{"name": "ask"}]}]
    for choice, mode, offered in [
        ({"mode": "VALIDATED"}, "auto", ["add", "ask"]),
        ({"mode": "ANY", "allowedFunctionNames": ["ask"]}, "required", ["ask"]),
        ({"mode": "NONE", "allowedFunctionNames": ["ask"]}, "none", ["add", "ask"]),
    ]:
        call = read(tools=tools, toolConfig={"functionCallingConfig": choice})
        found, read_mode = read_tools(read_arguments(call.arguments))
        assert ([tool["function"]["name"] for tool in found], read_mode) == (offered, mode)


REFUSED = [
    ({"contents": []}, "contents: expected at least one content"),
    ({"contents": [{"role": "assistant", "parts": []}]}, r"contents\[0\].role: expected one of function, model, user"),
    ({"cachedContent": "cachedContents/a"}, "cachedContent: nothing is cached"),
    ({"config": {"responseModalities": ["TEXT", "IMAGE"]}}, "generationConfig.responseModalities: the model writes"),
    ({"config": {"responseMimeType": "text/csv"}}, 'expected text/plain, .* found "text/csv"'),
    ({"config": {"topK": "5"}}, 'generationConfig.topK: expected a whole number, found "5"'),
    ({"tools": [{"functionDeclarations": [{}]}]}, r"tools\[0\].functionDeclarations\[0\].name: this field is required"),
]


@pytest.mark.parametrize(("body", "message"), REFUSED)
def test_what_is_refused_names_the_field(body, message):
    with pytest.raises(BadRequest, match=message):
        read(**body)


def test_images_are_refused_or_become_a_note_and_other_parts_stay_as_one():
    image = {"inlineData": {"mimeType": "image/png", "data": "AA=="}}
    parts = [{"text": "See "}, image, {"fileData": {"mimeType": "text/csv"}}, {"executableCode": {"code": "1"}}, {}]
    with pytest.raises(BadRequest, match=r'contents\[0\].parts\[1\].inlineData.mimeType: "image"'):
        read(contents=[{"parts": parts}])
    call = read(contents=[{"parts": parts}], omits_content=True)
    texts = [part["text"] for part in call.arguments["messages"][0]["content"]]
    assert texts == ["See ", "[image omitted]", "[file omitted]", "[executableCode]", ""]
    assert call.ignored == ("contents[].parts[].executableCode",)


def test_an_answer_and_its_events_say_the_same():
    answer = gemini.write_answer(CALLING, read())
    assert answer["usageMetadata"] == {"promptTokenCount": 3, "candidatesTokenCount": 2, "totalTokenCount": 5}
    (candidate,) = answer["candidates"]
    assert (candidate["finishReason"], answer["modelVersion"]) == ("STOP", "tiny")
    for deltas in ([], [ReplyDelta(reasoning="Hm, "), ReplyDelta(reasoning="two."), ReplyDelta(content="Let")]):
        events = gemini.open_events(read(), ReplyHead("call-7", "tiny", 0))
        written = read_events([*map(events.write, deltas), *events.finish(CALLING)])
        texts = {True: "", False: ""}
        for event in written[:-1]:
            (part,) = event["candidates"][0]["content"]["parts"]
            texts[part.get("thought", False)] += part["text"]
        assert texts == {True: "Hm, two.", False: "Let me add."}
        last = written[-1]["candidates"][0]
        assert last["content"]["parts"] == candidate["content"]["parts"][2:]
        assert (last["finishReason"], written[-1]["usageMetadata"]) == ("STOP", answer["usageMetadata"])
    cut = gemini.write_answer(completes("", reason="length"), read())["candidates"][0]
    assert (cut["content"]["parts"], cut["finishReason"]) == ([{"text": ""}], "MAX_TOKENS")
