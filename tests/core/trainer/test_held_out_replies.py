"""Validation by the log-probs of the replies that held-out rows bring."""

import numpy as np
import pytest

from reinforge.errors import BackendError
from reinforge.trainer.held_out_replies import HeldOutEvaluator, HeldOutReplies
from reinforge.types.evaluation import EvalInputItem
from reinforge.types.request import TokenLogprobs
from tests.doubles import ScriptedPolicy, ids_of


class Reader(ScriptedPolicy):
    """Finds each token of a reply as likely as its first letter says: log-prob -1 for a, -2 for b, ..."""

    async def encode(self, request, reply):
        ids = ids_of(reply["content"])
        return TokenLogprobs(ids_of("prompt"), ids, (0.0,) * len(ids), -1)

    async def score(self, token_ids):
        prompt = len(ids_of("prompt"))
        return [
            np.array([9.0] * prompt + [-float(id_ - ids_of("a")[0] + 1) for id_ in ids[prompt:]]) for ids in token_ids
        ]


def item(row):
    return EvalInputItem(id="1", input_obj="q", expected_output_obj=None, full_dataset_entry=row)


def conversation(*replies, **last):
    messages = [{"role": "user", "content": "q"}]
    for reply in replies:
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "more"}]
    return {"messages": messages[:-1]} | last


async def score(row, policy=None):
    workflow = HeldOutReplies(lambda: policy or Reader())
    found = item(row).copy_with_updates(output_obj=await workflow(item(row), None, None))
    return await HeldOutEvaluator().evaluate(found)


async def test_a_reply_scores_the_mean_log_prob_of_its_tokens():
    assert (await score(conversation("aab"))).score == pytest.approx(-4 / 3)
    assert (await score(conversation("a", "bb"))).score == pytest.approx(-5 / 3), "over the tokens of all replies"
    row = conversation("a", "bb")
    row["messages"][1]["weight"] = 0
    assert (await score(row)).score == pytest.approx(-2.0), "a reply that is only context does not count"


@pytest.mark.parametrize(("preferred", "other", "expected"), [("a", "b", 1.0), ("b", "aa", 0.0), ("ab", "ba", 0.5)])
async def test_of_a_pair_the_preferred_reply_should_be_the_more_likely_one(preferred, other, expected):
    row = {
        "input": {"messages": [{"role": "user", "content": "q"}]},
        "preferred_output": [{"role": "assistant", "content": preferred}],
        "non_preferred_output": [{"role": "assistant", "content": other}],
    }
    assert (await score(row)).score == expected


async def test_what_has_no_replies_has_no_score():
    with pytest.raises(BackendError, match="no replies to score"):
        await score({"question": "q", "answer": "a"})
    with pytest.raises(BackendError, match="serves no policy"):
        await HeldOutReplies(lambda: None)(item(conversation("a")), None, None)
    missing = await HeldOutEvaluator().evaluate(item(conversation("a")))
    assert missing.score is None
    assert "held_out_replies" in missing.error
