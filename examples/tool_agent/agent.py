"""A shop's clerk with two tools, written with the OpenAI SDK alone: it would work with any model behind any URL."""

import json
import re

PRICES = {
    **{"lamp": 24, "chair": 35, "table": 89, "clock": 17, "kettle": 32, "basket": 12, "mirror": 46, "blanket": 28},
    **{"candle": 5, "vase": 19, "shelf": 63, "stool": 21, "curtain": 38, "pillow": 14, "teapot": 27, "ladder": 54},
}
SYSTEM = "You are a clerk. Look prices up, calculate, then answer with the number only."


def lookup(item: str) -> str:
    """Returns the price of one article."""
    return str(PRICES.get(item, "no such article"))


def calculate(expression: str) -> str:
    """Returns the value of an expression of two whole numbers, such as 3*24."""
    match = re.fullmatch(r"(\d{1,4})([-+*])(\d{1,4})", expression.replace(" ", ""))
    if match is None:
        return "not an expression"
    left, operator, right = int(match[1]), match[2], int(match[3])
    return str(left + right if operator == "+" else left - right if operator == "-" else left * right)


def describe(function, parameter):
    """Returns a tool as the API wants it."""
    schema = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    fields = {"name": function.__name__, "description": function.__doc__, "parameters": schema}
    return {"type": "function", "function": fields}


TOOLS = [describe(lookup, "item"), describe(calculate, "expression")]
FUNCTIONS = {"lookup": lookup, "calculate": calculate}


def use_tool(call):
    """Returns the message with a tool's result; a wrong call gets its error as the result."""
    try:
        result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        result = f"error: {error}"
    return {"role": "tool", "tool_call_id": call.id, "content": result}


async def answer(question, client, model="clerk"):
    """Returns the answer of a clerk who may use tools three times."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    for _ in range(4):
        reply = await client.chat.completions.create(model=model, messages=messages, tools=TOOLS, max_tokens=40)
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        messages += [use_tool(call) for call in message.tool_calls]
    return "no answer after three uses of tools"


async def agent(item, llm, context):
    """Runs one episode: what the training changes is the client."""
    return await answer(item.input_obj, context.async_openai())
