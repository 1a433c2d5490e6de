"""Confidence signals of a reply, and the choice among them."""

import math

import pytest

from reinforge.routing.signals import SignalRow, choose_signal, choose_thresholds, compute_auroc, measure_confidence
from reinforge.types.request import ModelReply, TokenLogprob, TokenLogprobs


def reply(content="yes", logprobs=(-0.1, -0.5), tops=(), **message):
    tokens = TokenLogprobs((1,), tuple(range(len(logprobs))), tuple(logprobs), top_logprobs=tops)
    return ModelReply({"role": "assistant", "content": content, **message}, "stop", tokens)


def test_the_signals_of_a_reply():
    found = measure_confidence(reply(), samples=["yes", "Yes ", "no"], evaluator=0.7)
    assert found == {
        "mean_logprob": pytest.approx(-0.3),
        "min_logprob": -0.5,
        "agreement": pytest.approx(2 / 3),
        "evaluator": 0.7,
    }


def test_entropy_counts_the_rest_as_one_token():
    """p = 0.5, 0.25 and 0.25 left: 0.5 log 2 + 0.5 log 4 = 1.04 nats; p = 1: none."""
    two, sure = [math.log(0.5), math.log(0.25)], [0.0]
    tops = tuple(tuple(TokenLogprob("", value) for value in values) for values in (two, sure))
    assert measure_confidence(reply(tops=tops))["entropy"] == pytest.approx(-1.5 * math.log(2) / 2)


def test_replies_without_sampled_tokens_have_no_log_probs():
    assert measure_confidence(reply(logprobs=(math.nan,))) == {}
    assert measure_confidence(reply(logprobs=())) == {}


def test_agreement_compares_json_and_tool_calls_by_what_they_mean():
    assert measure_confidence(reply('{"a": 1, "b": 2}', ()), samples=['{"b":2,"a":1}', "a"]) == {"agreement": 0.5}
    call = {"function": {"name": "search", "arguments": "{}"}}
    assert measure_confidence(reply(None, (), tool_calls=[call]), samples=['[["search", "{}"]]']) == {"agreement": 1}
    asked = [{"role": "assistant", "content": "I search", "tool_calls": [call]}]
    said = [{"role": "assistant", "content": "I search"}]
    assert measure_confidence(reply(None, (), tool_calls=[call]), samples=[asked, said]) == {"agreement": 0.5}


def test_the_area_under_the_roc_curve():
    assert compute_auroc([0.9, 0.4, 0.4, 0.1], [True, True, False, False]) == (1 + 1 + 0.5 + 1) / 4
    assert compute_auroc([0.1, 0.9], [True, False]) == 0
    assert compute_auroc([0.1, 0.9], [True, True]) == 0.5, "nothing to tell apart"


def test_the_signal_that_separates_best_is_chosen():
    rows = [
        SignalRow(
            {"mean_logprob": -n, "min_logprob": -(n % 3), "agreement": 1.0, **({"entropy": 0.0} if n else {})}, n < 5
        )
        for n in range(10)
    ]
    found = choose_signal(rows)
    assert found.name == "mean_logprob"
    assert found.auroc == {"mean_logprob": 1.0, "min_logprob": pytest.approx(0.56), "agreement": 0.5}
    assert found.thresholds == tuple(float(-n) for n in range(10))
    with pytest.raises(ValueError, match="no confidence signal is known in every row"):
        choose_signal([*rows, SignalRow({}, True)])
    with pytest.raises(ValueError, match="no confidence signal"):
        choose_signal([])


def test_thresholds_are_quantiles():
    assert choose_thresholds(range(101), 5) == (100, 75, 50, 25, 0)
    assert choose_thresholds([1, 1, 0]) == (1, 0)
