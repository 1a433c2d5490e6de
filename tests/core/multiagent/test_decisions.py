"""A decision is read where it is written as one, and nowhere else."""

import pytest

from reinforge.multiagent.decisions import read_decision
from reinforge.multiagent.dialogue import DECISIONS

WORDS = {word: word for word in DECISIONS}


@pytest.mark.parametrize("text", [
    "accept", " Accept. ", "ACCEPT!", "**accept**", "**Accept.**", "`accept`", '"accept"', "I accept.", "- accept",
    "Decision: accept", "decision:accept", "**Decision:** accept", "Decision: **accept**", "My decision is: accept.",
    "Final decision: I accept", "The verdict is accept.", "Answer: accept, since cell 3 is red",
    "Cell 3 is red.\nDecision: accept", "accept\nThe prover showed cell 3.", "Decision: accept.\nDecision: accept",
    "reject\nDecision: accept",
])  # fmt: skip
def test_accepts(text):
    assert read_decision(text, WORDS) == "accept"


@pytest.mark.parametrize("text", [
    "", "Why?", "I do not accept", "I don't accept.", "Should I accept?", "Accept?", "accept or reject",
    "Decision: accept or reject?", "Decision: accept, or none", "Decision: not accept", "Decision: I do not accept",
    "Decision: accept?", "accept\nreject", "Decision: accept\nDecision: reject", "You accept too much.",
    "The decision to accept it is hard.", "acceptance", "Decision: acceptable", "prover: accept",
    "Answer: none of them is red", "Options:\n- accept\n- reject", "unacceptable", "accept/reject",
])  # fmt: skip
def test_decides_nothing(text):
    assert read_decision(text, WORDS) is None


@pytest.mark.parametrize(
    ("text", "decision"), [("Reject.", "reject"), ("none", "none"), ("Decision: none.", "none"), ("I reject", "reject")]
)
def test_the_other_decisions(text, decision):
    assert read_decision(text, WORDS) == decision


def test_a_protocol_may_have_other_words():
    words = {"not guilty": "reject", "guilty": "accept", "hung": "none"}
    assert read_decision("Verdict: not guilty.", words) == "reject"
    assert read_decision("Guilty!", words) == "accept"
    assert read_decision("Decision: hung", words) == "none"
    assert read_decision("accept", words) is None
