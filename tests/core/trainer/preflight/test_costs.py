"""Tokens and money of models that somebody else serves."""

import pytest

from reinforge.rollout.models.openai_client import ModelUsage
from reinforge.trainer.preflight.costs import (
    TokenPrice,
    copy_usage,
    measure_usage,
    predict_costs,
    predict_training_cost,
)
from reinforge.types.episode import EpisodeKey, EpisodeRecord, ModelCall
from reinforge.types.request import ModelReply, ModelRequest
from tests.doubles import PolicyModel, ScriptedPolicy, examples


class Judge:
    is_policy, model_name = False, "judge"

    def __init__(self):
        self.usage = ModelUsage(2, 100, 10)


def record(llm, prompt, completion):
    reply = ModelReply({"role": "assistant", "content": "x"}, "stop", None, prompt, completion)
    call = ModelCall("c", llm, "m", ModelRequest([]), reply, (), 0.0, 1.0)
    return EpisodeRecord(EpisodeKey("collect", 0, "0"), examples(1)[0], calls=[call])


def test_calls_of_judges_count_and_those_before_do_not():
    llms = {"agent": PolicyModel(ScriptedPolicy()), "judge": Judge()}
    before = copy_usage(llms)
    llms["judge"].usage.num_calls += 3
    llms["judge"].usage.num_prompt_tokens += 300
    llms["judge"].usage.num_completion_tokens += 30
    used = measure_usage(llms, before, [record("agent", 7, 3), record("agent", 5, 1)])
    assert used == {"agent": ModelUsage(2, 12, 4), "judge": ModelUsage(3, 300, 30)}


def test_a_run_costs_what_its_share_of_the_sample_costs():
    usage = {"judge": ModelUsage(80, 2000, 400), "other": ModelUsage(8, 100, 10)}
    judge, other = predict_costs(usage, 80, 8000, {"judge": TokenPrice(0.5, 2.0)})
    assert (judge.calls, judge.prompt_tokens, judge.completion_tokens) == (8000, 200_000, 40_000)
    assert judge.cost == pytest.approx(0.2 * 0.5 + 0.04 * 2.0)
    assert other.cost is None, "no price is guessed"
    assert predict_training_cost(100, 20_000, 3.0).cost == pytest.approx(2 * 3.0)
    assert predict_training_cost(100, 20_000, None).cost is None
