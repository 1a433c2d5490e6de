"""The training rewards: most of one for the right number, some for the form of the reply.

A pretrained model first writes sentences, and hardly any of them ends with the right number, so a reward for the right
number alone has little to learn from.
"""

from __future__ import annotations

import re
from collections import Counter

from reinforge.evaluation.evaluators.numeric import find_last_number
from reinforge.types.evaluation import EvalInputItem


def score_calculation(item: EvalInputItem) -> float:
    """Returns 0.7 for the right number at the end of the reply, and up to 0.3 for using the problem's numbers.

    The form is the share of the parts of a calculation that the reply begins with.

    Example, a problem with 12 and 5 whose answer is 17: "12 + 5 = 17" -> 1.0; "12 - 5 = 7" -> 0.3; "There are 17." ->
    0.7; "12 apples" -> 0.05; "3 + 4 = 7" -> 0.0.
    """
    reply, position, num_matched = str(item.output_obj).strip(), 0, 0
    number = "|".join(re.findall(r"\d+", item.input_obj))
    parts = (rf"({number})\b", r" [-+*/x]", rf" ({number})\b", r" =", r" \d+", r"$")
    for part in parts:
        found = re.compile(part).match(reply, position)
        if found is None:
            break
        position, num_matched = found.end(), num_matched + 1
    return 0.7 * is_right(reply, item.expected_output_obj) + 0.3 * num_matched / len(parts)


def score_tool_use(item: EvalInputItem) -> float:
    """Returns 0.7 for the right number at the end, up to 0.15 for the call, and up to 0.15 for using its result.

    A call counts by the share of the problem's numbers that it has. A reply that begins with the result counts half,
    and the result alone counts in full.

    Example, a problem with 12 and 5 whose answer is 17: "12 + 5 = 17" and then "17" -> 1.0; "12 - 5 = 7" and "7" ->
    0.3; "12 + 5 = 17" and "17 apples" -> 0.925; "12 + 3 = 15" and "4" -> 0.075; "2 + 3 = 5" and "4" -> 0.0.
    """
    calculation, _, said = str(item.output_obj).partition("\n")
    expression, _, result = calculation.rpartition(" = ")
    numbers, used = Counter(re.findall(r"\d+", item.input_obj)), Counter(re.findall(r"\d+", expression))
    share, said = (numbers & used).total() / numbers.total(), said.strip()
    begins = re.match(rf"{re.escape(result)}(?!\.?\d)", said) is not None
    form = share / 2 + begins / 4 + (said == result) / 4
    return 0.7 * is_right(said, item.expected_output_obj) + 0.3 * form


def is_right(reply: str, expected: str) -> bool:
    return find_last_number(reply) == float(expected)
