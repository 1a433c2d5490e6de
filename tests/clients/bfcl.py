"""The real checker of bfcl-eval, run where it is installed: it accepts its own answers, and no call makes it fail."""

import asyncio
import random
import sys

from reinforge.dialects.text_tools import read_calls
from reinforge.environments.bfcl import CHECKED, NO_CALL, BfclConfig, FunctionCalls
from reinforge.types.environment import Reply, ToolUse

REFUSED = 18
"""Rows whose answer leaves out a required parameter or names an unknown one, so that the package refuses it itself."""
ODD = (None, True, 0, -1.5, "", "x", [], [1, "a", None], [[]], [{"a": 1}], {}, {"a": [1]}, {"a": {"b": None}})


async def main() -> None:
    source = FunctionCalls(BfclConfig.model_validate({"_type": "bfcl", "name": "+".join((*CHECKED, *NO_CALL))}))
    items, generator, refused = source.load(), random.Random(0), []
    for item in items:
        environment = source.create()
        observation = await environment.reset(item, 0)
        uses = read_calls(item.expected_output_obj or "", observation.tools)
        result = await environment.step(Reply("", uses))
        refused += [] if result.info["solved"] else [item.id]
        for use in uses:
            odd = ToolUse("1", use.name, {key: generator.choice(ODD) for key in use.arguments})
            assert 0 <= (await environment.step(Reply("", [odd]))).info["partial"] <= 1
    assert len(refused) <= REFUSED, refused
    sys.stdout.write(f"  ok: bfcl accepts the answers of {len(items) - len(refused)} of {len(items)} rows\n")


asyncio.run(main())
