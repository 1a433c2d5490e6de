"""The real checker of bfcl-eval, run where it is installed: it accepts its own answers, and no call makes it fail."""

import asyncio
import random
import sys
from typing import Any

from reinforge.environments.bfcl import CHECKED, NO_CALL, BfclConfig, FunctionCalls, to_tool_name
from reinforge.types.environment import Reply, ToolUse

REFUSED = 18
"""Rows whose answer leaves out a required parameter or names an unknown one, so that the package refuses it itself."""
ODD = (None, True, 0, -1.5, "", "x", [], [1, "a", None], [[]], [{"a": 1}], {}, {"a": [1]}, {"a": {"b": None}})


def choose(value: Any) -> Any:
    """Returns the call that an answer allows, with the first of the values that it lists."""
    if isinstance(value, dict):
        firsts = {
            key: next((one for one in each if one != ""), "") for key, each in value.items() if type(each) is list
        }
        return {**value, **{key: choose(first) for key, first in firsts.items()}}
    return [choose(each) if isinstance(each, dict) else each for each in value] if isinstance(value, list) else value


async def main() -> None:
    source = FunctionCalls(BfclConfig.model_validate({"_type": "bfcl", "name": "+".join((*CHECKED, *NO_CALL))}))
    items, generator, refused = source.load(), random.Random(0), []
    for item in items:
        environment = source.create()
        await environment.reset(item, 0)
        uses = [
            ToolUse("1", to_tool_name(name), choose({key: each for key, each in values.items() if "" not in each}))
            for answer in item.expected_output_obj
            for name, values in answer.items()
        ]
        result = await environment.step(Reply("", uses))
        refused += [] if result.info["solved"] else [item.id]
        for use in uses:
            odd = ToolUse("1", use.name, {key: generator.choice(ODD) for key in use.arguments})
            assert 0 <= (await environment.step(Reply("", [odd]))).info["partial"] <= 1
    assert len(refused) <= REFUSED, refused
    sys.stdout.write(f"  ok: bfcl accepts the answers of {len(items) - len(refused)} of {len(items)} rows\n")


asyncio.run(main())
