"""The agent, as one function for each way to work: it asks the model once, or lets it use a calculator first.

user       Ana has 12 apples and buys 5 more. How many apples does Ana have now?
assistant  [calculate(expression="12 + 5")]
tool       17
assistant  17
"""

from __future__ import annotations

import json
import re
from typing import Any

from reinforge.rollout.workflow import PolicyFailure

ANSWER = "You write a calculation and nothing else, for example: 3 + 4 = 7"
CALCULATE = "You call the calculator, then you answer with its result and nothing else."

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Returns the result of a calculation with two numbers.",  # an example would be copied
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "pattern": r"^\d{1,4} [-+*/] \d{1,4}$"}},
            "required": ["expression"],
        },
    },
}


def calculate(expression: str) -> str:
    """Returns the result of a calculation with two whole numbers, such as "17" for "12 + 5"."""
    match = re.fullmatch(r"(\d{1,4}) ([-+*/]) (\d{1,4})", expression)
    if match is None:
        return "not a calculation"
    left, operator, right = int(match[1]), match[2], int(match[3])
    if operator == "/":
        return f"{left / right:g}" if right else "not a number"
    return str({"+": left + right, "-": left - right, "*": left * right}[operator])


def build_messages(problem: str, system: str = ANSWER) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": f"{problem}\n\nThe calculation:"}]


async def answer(item: Any, llm: Any, context: Any) -> str:
    """Asks the model once; the last number of its reply is the answer."""
    messages = build_messages(item.input_obj, context.text("system", ANSWER))
    reply = await llm.chat.completions.create(messages=messages, max_tokens=16)
    return str(reply.choices[0].message.content)


async def calculate_and_answer(item: Any, llm: Any, context: Any) -> str:
    """Has the model call the calculator in its first turn and answer in its second one.

    The result is the calculation and, in the last line, the answer, such as "12 + 5 = 17" and "17"; the reward reads
    both.

    Raises:
        PolicyFailure: The call is cut off, or the answer has no number.
    """
    system = {"role": "system", "content": context.text("system", CALCULATE)}
    messages = [system, {"role": "user", "content": item.input_obj}]
    tools = {"tools": [CALCULATOR]}
    reply = await llm.chat.completions.create(messages=messages, **tools, tool_choice="required", max_tokens=48)
    message = reply.choices[0].message
    if not message.tool_calls:
        raise PolicyFailure("the call is incomplete", output=message.content)
    call = message.tool_calls[0]
    expression = json.loads(call.function.arguments)["expression"]
    result = calculate(expression)
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    reply = await llm.chat.completions.create(messages=messages, **tools, max_tokens=16)
    said = str(reply.choices[0].message.content)
    if not re.search(r"\d", said):  # or else the calculator's number would count as the answer
        raise PolicyFailure("the answer has no number", output=said)
    return f"{expression} = {result}\n{said}"
