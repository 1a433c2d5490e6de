"""Runs the snippet of docs/art.md with ART's published client; `make clients` runs it in the client's environment.

python art_service.py URL BASE_MODEL
"""

import asyncio
import re
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "art.md"
NUM_STEPS = 8


def read_snippet():
    """Returns what the page's Python block defines."""
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    defined = {}
    exec(compile(code, str(PAGE), "exec"), defined)
    return defined


async def main(url, base_model):
    rewards = await read_snippet()["train"](url, base_model, NUM_STEPS, learning_rate=0.03)
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.1, rewards
    shown = ", ".join(f"{reward:.2f}" for reward in rewards)
    sys.stdout.write(f"  ok: ART's client trains over the training service: rewards {shown}\n")


asyncio.run(main(*sys.argv[1:3]))
