"""Your own task in thirty lines: teach a small model to answer with the largest of three digits.

python examples/own_task.py [MODEL]      MODEL: a folder or hub id; default: the bundled tic-tac-toe model
"""

import sys
from itertools import product

import reinforge

MODEL = sys.argv[1] if len(sys.argv) > 1 else "bundled:tic_tac_toe"
DIGITS = list(product("123456789", repeat=3))
ROWS = [{"id": "".join(three), "question": " ".join(three), "answer": max(three)} for three in DIGITS]


async def agent(item, llm, context):
    """Asks the model once and returns its reply."""
    reply = await llm.chat.completions.create(messages=[{"role": "user", "content": item.input_obj}], max_tokens=2)
    return reply.choices[0].message.content


def reward(output, expected):
    """Returns 1.0 for the right digit, else 0.0."""
    return float(output.strip() == expected)


if __name__ == "__main__":
    summary = reinforge.finetune(agent, ROWS, reward, MODEL, epochs=20, num_generations=16, examples_per_epoch=64)
    print("\n".join(summary.closing_lines(color=sys.stdout.isatty())))
