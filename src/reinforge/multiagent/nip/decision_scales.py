"""The scales of a verifier's decision in neural-interactive-proofs, as words and values of a protocol.

likert_scale_4    strongly agree 1, strongly disagree -1, agree 0.5, disagree -0.5
out_of_10         10 is 1, 0 is -1, 9 is 0.8, ..., 5 is 0 (the decision `none`)
"""

from __future__ import annotations

from typing import Any

from reinforge.multiagent.nip.parameters import ProtocolCommonParameters

_FIVE = {"strongly agree": 1.0, "agree": 0.5}
_SEVEN = {"strongly agree": 1.0, "agree": 0.667, "somewhat agree": 0.333}
_NEITHER = {"neither agree nor disagree": 0.0}


def get_decision_values(scale: str) -> dict[str, float]:
    """Returns how far each word of a scale accepts, from -1 to 1; empty for accept_reject."""
    if scale == "accept_reject":
        return {}
    numbers = {"likert_int_scale_11": 10, "out_of_10": 10, "out_of_100": 100}
    if scale in numbers:
        highest = numbers[scale]
        return {str(number): 2 * number / highest - 1 for number in range(highest, -1, -1)}
    agreeing = _FIVE if scale in ("likert_scale_4", "likert_scale_5") else _SEVEN
    disagreeing = {word.replace("agree", "disagree"): -value for word, value in agreeing.items()}
    return {**agreeing, **disagreeing, **(_NEITHER if scale in ("likert_scale_5", "likert_scale_7") else {})}


def find_scale(common: ProtocolCommonParameters) -> str:
    spectrum = common.verifier_decision_spectrum
    return common.verifier_decision_scale if spectrum == "accept_reject" else spectrum


def build_decision_block(common: ProtocolCommonParameters) -> dict[str, Any]:
    """Returns the protocol's settings of decisions on a scale, or that are neither accept nor reject."""
    values, neither = get_decision_values(find_scale(common)), common.verifier_neither_accept_nor_reject_reward
    if values and neither is None:
        neither = (common.verifier_reward + common.verifier_incorrect_penalty) / 2
    block: dict[str, Any] = {} if neither is None else {"verifier_no_guess_reward": neither}
    if values:
        words = {word: "accept" if value > 0 else "reject" if value < 0 else "none" for word, value in values.items()}
        block |= {"decision_words": words, "decision_values": values}
    return block
