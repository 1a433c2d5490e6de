"""Your own task in thirty lines: teach a small model to answer with the larger of two digits.

python examples/own_task.py [MODEL]      MODEL: a folder or hub id; default: the bundled tic-tac-toe model
"""

import sys

import reinforge

MODEL = sys.argv[1] if len(sys.argv) > 1 else "bundled:tic_tac_toe"
ROWS = [{"id": f"{a}{b}", "question": f"{a} {b}", "answer": str(max(a, b))} for a in range(1, 10) for b in range(1, 10)]


async def agent(item, llm, context):
    """Asks the model once and returns its reply."""
    reply = await llm.chat.completions.create(messages=[{"role": "user", "content": item.input_obj}], max_tokens=2)
    return reply.choices[0].message.content


def reward(output, expected):
    """Returns 1.0 for the right digit, else 0.0."""
    return float(output.strip() == expected)


if __name__ == "__main__":
    settings = {"policy": {"batch": {"steps_per_job": 4}}}
    summary = reinforge.finetune(agent, ROWS, reward, MODEL, epochs=30, num_generations=16, settings=settings)
    print("\n".join(summary.closing_lines(color=sys.stdout.isatty())))
