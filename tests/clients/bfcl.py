"""The real checker of bfcl-eval: it accepts its own answers, and whatever a policy writes costs no episode.

`python -m tests.clients.bfcl`, in an environment that has the package.
"""

import asyncio
import random
import sys
from typing import Any

from reinforge.environments.bfcl import CHECKED, NO_CALL, BfclConfig, FunctionCalls, to_tool_name
from reinforge.types.environment import Reply, ToolUse

REFUSED = 18
"""Rows in all whose first possible answer the package's own checker refuses: it names a parameter that does not exist,
leaves out a required one, or nests an object."""
ODD = (None, True, 0, -1.5, "", "x", [], [1, "a", None], [[]], [{"a": 1}], {}, {"a": [1]}, {"a": {"b": None}})


def choose(values: list[Any]) -> Any:
    """Returns the first value that an answer allows, as a model would write it."""
    value = next((each for each in values if each != ""), "")
    return resolve(value)


def resolve(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: choose(each) if isinstance(each, list) else each for key, each in value.items()}
    return [resolve(each) if isinstance(each, dict) else each for each in value] if isinstance(value, list) else value


def build_calls(answers: list[dict[str, Any]]) -> list[ToolUse]:
    return [
        ToolUse("1", to_tool_name(name), {key: choose(each) for key, each in values.items() if "" not in each})
        for answer in answers
        for name, values in answer.items()
    ]


async def main() -> None:
    source = FunctionCalls(BfclConfig.model_validate({"_type": "bfcl", "name": "+".join((*CHECKED, *NO_CALL))}))
    items, generator = source.load(), random.Random(0)
    refused = []
    for item in items:
        environment = source.create()
        observation = await environment.reset(item, 0)
        assert observation.messages[-1]["role"] == "user", item.id
        calls = build_calls(item.full_dataset_entry["answer"])
        result = await environment.step(Reply("", calls))
        if not result.info["solved"]:
            refused.append(f"{item.id}: {result.info['error'][:200]}")
        for call in calls:
            odd = {key: generator.choice(ODD) for key in call.arguments}
            assert 0 <= (await environment.step(Reply("", [ToolUse("1", call.name, odd)]))).info["partial"] <= 1
    sys.stdout.write("\n".join(refused) + "\n")
    assert len(refused) <= REFUSED, len(refused)
    sys.stdout.write(f"  ok: bfcl accepts the answers of {len(items) - len(refused)} of {len(items)} rows\n")


if __name__ == "__main__":
    asyncio.run(main())
