"""OpenAI's text completions."""

import pytest
from openai.types import Completion

from reinforge.dialects import completions
from reinforge.dialects.chat_call import BadRequest
from tests.replies import completes, read_events


def read(**body):
    return completions.read_request({"model": "m", "prompt": "2 + 2 =", **body})


def test_a_prompt_becomes_a_call_without_messages_and_with_the_default_limit_of_openai():
    call = read(top_k=5, stop="\n", n=2, seed=3)
    assert call.model == "m"
    assert not call.stream
    assert call.arguments == {
        "prompt": "2 + 2 =", "max_tokens": 16, "n": 2, "stop": ["\n"], "seed": 3, "extra_body": {"top_k": 5},
    }  # fmt: skip


@pytest.mark.parametrize("prompt", ["a", ["a"]])
def test_one_prompt_may_stand_in_a_list(prompt):
    assert read(prompt=prompt).arguments["prompt"] == "a"


@pytest.mark.parametrize("prompt", [[1, 2], [[1, 2]]])
def test_a_prompt_may_be_token_ids(prompt):
    assert read(prompt=prompt).arguments["prompt"] == [1, 2]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"prompt": ["a", "b"]}, "2 prompts in one call"),
        ({"prompt": [1, -1]}, "token ids"),
        ({"prompt": []}, "token ids"),
        ({"prompt": [True]}, "token ids"),
        ({"prompt": None}, "required"),
        ({"max_tokens": 0}, "at least 1"),
        ({"top_p": 10**400}, "top_p: expected a number, found a huge number"),
        ({"top_p": float("nan")}, "top_p: expected a number, found NaN"),
        ({"temperature": True}, "temperature: expected a number, found true"),
    ],
)
def test_what_cannot_be_honored_is_refused_by_name(body, named):
    with pytest.raises(BadRequest, match=named):
        read(**body)


def test_neutral_values_of_refused_fields_ask_for_nothing():
    assert read(max_tokens=10**400).arguments["max_tokens"] == 10**400, "a limit of the model's, which `create` knows"
    assert read(echo=False, suffix=None, best_of=1).arguments == read().arguments


def test_the_answer_is_a_text_completion_with_the_older_form_of_log_probs():
    answer = completions.write_answer(completes(), read(logprobs=1, return_token_ids=True))
    (choice,) = answer["choices"]
    assert choice["text"] == "Let me add."
    assert choice["finish_reason"] == "stop"
    assert choice["prompt_token_ids"] == [5, 6, 7]
    assert choice["token_ids"] == [1, 2]
    assert choice["logprobs"] == {
        "tokens": ["Let me ", "add."],
        "token_logprobs": [-0.5, -0.25],
        "top_logprobs": [{}, {}],
        "text_offset": [0, 7],
    }
    parsed = Completion.model_validate(answer, strict=True)
    assert parsed.usage.total_tokens == 5
    assert parsed.choices[0].logprobs.text_offset == [0, 7]


def test_a_stream_joins_to_the_text_and_ends_with_its_reason_and_its_usage():
    call = read(stream=True, stream_options={"include_usage": True})
    *chunks, usage, done = read_events(completions.open_events(call).finish(completes(reason="length")))
    assert call.stream
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Let me add."
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "length"]
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 5
    Completion.model_validate(chunks[-1])
