"""What it costs that a template writes an earlier reply with other tokens than were sampled."""

import pytest

from reinforge.rollout.history import count_repeated_tokens
from reinforge.types.episode import ModelCall
from reinforge.types.request import ModelReply, ModelRequest, SamplingParams, TokenLogprobs

ASK, SAID, MORE = ({"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c")))


def call(messages, prompt, reply, llm="agent"):
    tokens = TokenLogprobs(prompt, reply, (-0.5,) * len(reply))
    request = ModelRequest(list(messages), SamplingParams())
    return ModelCall("c", llm, "m", request, ModelReply(SAID, "stop", tokens, len(prompt), len(reply)), (), 0.0, 0.0)


FIRST = call([ASK], (1,), (2, 3))


@pytest.mark.parametrize(
    ("later", "expected"),
    [
        (call([ASK, SAID, MORE], (1, 7, 4), (5,)), 3),  # the reply is one token, 7, and begins a sample
        (call([ASK, SAID, MORE], (1, 2, 3, 4), (5,)), 0),  # the tokens continue
        (call([MORE], (4,), (5,)), 0),  # another conversation
        (call([ASK, MORE], (1, 4), (5,)), 0),  # a history that the agent rewrote
        (call([ASK, SAID, MORE], (1, 7, 4), (5,), "judge"), 0),  # of another entry
    ],
)
def test_a_text_that_continues_with_other_tokens_costs_the_turn_before_it(later, expected):
    assert count_repeated_tokens([FIRST, later]) == expected
