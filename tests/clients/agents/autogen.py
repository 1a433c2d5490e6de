"""AutoGen: one agent, as a program."""

import asyncio
import os
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelFamily, ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

from tests.clients.tools import lookup

INFO = ModelInfo(
    vision=False, function_calling=True, json_output=True, structured_output=True, family=ModelFamily.UNKNOWN
)


async def main(question, *, stream):
    client = OpenAIChatCompletionClient(model="agent", model_info=INFO)
    clerk = AssistantAgent("clerk", client, tools=[lookup], reflect_on_tool_use=True, model_client_stream=stream)
    result = await clerk.run(task=question)
    print(result.messages[-1].content)  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main(sys.stdin.read(), stream=os.environ["REINFORGE_EXAMPLE_ID"].endswith("streamed")))
