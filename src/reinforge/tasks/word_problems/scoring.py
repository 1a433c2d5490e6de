"""The training rewards: most of one for the right number, some for the form of the reply.

A pretrained model first writes sentences, and hardly any of them ends with the right number, so a reward for the right
number alone has little to learn from.
"""

from __future__ import annotations

import re

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


def score_number(output: str, expected: str) -> float:
    """Returns 0.7 for the right number at the end of the reply, and 0.3 for a number alone.

    Example, expected "17": "17" -> 1.0; "18" -> 0.3; "The calculator says 17." -> 0.7; "Seventeen" -> 0.0.
    """
    reply = output.strip()
    return 0.7 * is_right(reply, expected) + 0.3 * reply.isdecimal()


def is_right(reply: str, expected: str) -> bool:
    """True if the last number of the reply is the expected one."""
    return find_last_number(reply) == float(expected)
